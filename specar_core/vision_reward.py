"""VisionReward (arXiv:2412.21059) on finished videos, in a folder and an environment of its own.

It sees one frame a second and at most 24 of them, so of a longer video only the beginning: the last 24 seconds are
scored as well, and named as such. Its score is a vote around zero (-0.2165 to 0.2165): ratios of it mean nothing.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import SpecarError, UsageError
from .metrics import Json
from .score import Video, read_video
from .video import VideoWriter

VARIABLE = "SPECAR_VISION_REWARD"
INSTALL = (
    "git clone https://github.com/THUDM/VisionReward && python3.11 -m venv VisionReward/venv && "
    "VisionReward/venv/bin/pip install -r VisionReward/requirements.txt 'numpy<2' && "
    f"export {VARIABLE}=$PWD/VisionReward"
)
WORKER = Path(__file__).with_name("vision_reward_worker.py")
SECONDS = 24  # of a video that it sees


def vision_reward(paths: Sequence[Path]) -> Json:
    """Scores of each video. SpecarError, with what to install, if VisionReward does not run; UsageError for a video
    whose report does not tell its prompt."""
    if not (home := os.environ.get(VARIABLE)):
        raise SpecarError(f"VisionReward needs a folder of its own, and downloads a model of 25 GB. Once:\n{INSTALL}")
    videos = [read_video(path) for path in paths]
    for video in videos:
        if not video.report["prompts"]:
            raise UsageError(f"VisionReward judges by the prompt, and {video.path} does not tell its own")
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for number, video in enumerate(videos):
            prompt = " ".join(cue["text"] for cue in video.report["prompts"])
            parts = {"first": video.path.absolute(), **_tail(video, Path(folder, f"{number}.mp4"))}
            asked += [{"key": [number, part], "video": str(path), "prompt": prompt} for part, path in parts.items()]
        lines = _run(Path(home).absolute(), asked)
    scores = parse(lines, len(asked))
    clips: list[Json] = [{"video": video.path.name, "first": None, "last": None} for video in videos]
    for told in scores:
        number, part = told["key"]
        clips[number][part] = told["score"]
    return {"source": f"VisionReward-Video; first and last {SECONDS} s", "clips": clips}


def parse(lines: Sequence[str], expected: int) -> list[dict[str, Any]]:
    """The worker's answers among whatever else was printed."""
    found = []
    for line in lines:
        if line.startswith('{"key"'):
            found.append(json.loads(line))
    if len(found) != expected:
        raise SpecarError(f"VisionReward scored {len(found)} of {expected} videos; its own words are above")
    return found


def table(told: Json) -> str:
    lines = [f"{'video':40} first {SECONDS} s   last {SECONDS} s"]
    for clip in told["clips"]:
        scores = ("-" if clip[part] is None else f"{clip[part]:+.4f}" for part in ("first", "last"))
        lines.append(f"{clip['video']:40} " + "  ".join(f"{score:10}" for score in scores).rstrip())
    return "\n".join(
        [*lines, "a vote around zero, from -0.2165 to 0.2165: differences have a meaning, ratios have none"]
    )


def _tail(video: Video, to: Path) -> dict[str, Path]:
    """The last seconds as a video of their own, if it is longer than what is seen."""
    count = SECONDS * video.report["fps"]
    if video.layout.frames <= count:
        return {}
    with VideoWriter(to, video.report["fps"], *video.size, blocks_per_segment=count) as writer:
        for index, frame in enumerate(video.frames("cutting", lambda *_: None)):
            if index >= video.layout.frames - count:
                writer.add_block(torch.from_numpy(np.ascontiguousarray(frame))[None])
        writer.finish({})
    return {"last": to}


def _run(home: Path, asked: Sequence[dict[str, Any]]) -> list[str]:
    python = home / ("venv/Scripts/python.exe" if os.name == "nt" else "venv/bin/python")
    requests = "".join(json.dumps(request) + "\n" for request in asked)
    try:
        done = subprocess.run([python, WORKER], input=requests, stdout=subprocess.PIPE, text=True, check=True, cwd=home)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SpecarError(
            f"VisionReward failed ({error}); its own words are above. To install it: {INSTALL}"
        ) from error
    return done.stdout.splitlines()
