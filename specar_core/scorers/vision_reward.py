"""VisionReward (arXiv:2412.21059) on finished videos.

It sees one frame a second and at most 24 of them, so of a longer video only the beginning: the last 24 seconds are
scored as well, and named as such. Its score is a vote around zero (-0.2165 to 0.2165): ratios of it mean nothing.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import UsageError
from ..metrics import Json
from ..score import Video, aligned, read_video
from ..video import VideoWriter
from .outside import Outside

VISION_REWARD = Outside(
    "VisionReward",
    "SPECAR_VISION_REWARD",
    "a model of 25 GB",
    "VisionReward/venv",
    "-r VisionReward/requirements.txt 'numpy<2'",
    before="git clone https://github.com/THUDM/VisionReward && ",
)
SECONDS = 24  # of a video that it sees


def vision_reward(paths: Sequence[Path]) -> Json:
    """Scores of each video. SpecarError, with what to install, if VisionReward does not run; UsageError for a video
    whose report does not tell its prompt."""
    videos = [read_video(path) for path in paths]
    for video in videos:
        if not video.report["prompts"]:
            raise UsageError(f"VisionReward judges by the prompt, and {video.path} does not tell its own")
    clips: list[Json] = []
    with VISION_REWARD.open() as ask, tempfile.TemporaryDirectory() as folder:
        for video in videos:
            prompt = " ".join(cue["text"] for cue in video.report["prompts"])
            parts = {"first": video.path.absolute(), "last": _tail(video, Path(folder, f"{len(clips)}.mp4"))}
            scores = {
                part: None if path is None else ask(video=str(path), prompt=prompt) for part, path in parts.items()
            }
            clips.append({"video": video.path.name, **scores})
    return {"source": f"VisionReward-Video; first and last {SECONDS} s", "clips": clips}


def table(told: Json) -> str:
    lines = [["video", f"first {SECONDS} s", f"last {SECONDS} s"]]
    for clip in told["clips"]:
        scores = ("-" if clip[part] is None else f"{clip[part]:+.4f}" for part in ("first", "last"))
        lines.append([clip["video"], *scores])
    note = "a vote around zero, from -0.2165 to 0.2165: differences have a meaning, ratios have none"
    return "\n".join([*aligned(lines), note])


def _tail(video: Video, to: Path) -> Path | None:
    """The last seconds as a video of their own, if it is longer than what is seen."""
    count = SECONDS * video.report["fps"]
    if video.layout.frames <= count:
        return None
    with VideoWriter(to, video.report["fps"], *video.size, blocks_per_segment=count) as writer:
        for index, frame in enumerate(video.frames("cutting", lambda *_: None)):
            if index >= video.layout.frames - count:
                writer.add_block(torch.from_numpy(np.ascontiguousarray(frame))[None])
        writer.finish({})
    return to
