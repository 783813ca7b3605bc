"""VBench (arXiv:2311.17982) on finished videos: its six dimensions for any video.

What six numbers "Quality-6" are and how they are averaged is not published; these are the dimensions that VBench
offers for videos of any prompt, with its own bounds and weights (scripts/constant.py, scripts/cal_final_score.py of
https://github.com/Vchitect/VBench).
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import SpecarError
from ..metrics import Json
from ..score import aligned
from .outside import Outside

VBENCH = Outside(
    "VBench",
    "SPECAR_VBENCH",
    "1.7 GB of models",
    "vbench",
    "vbench==0.1.5 pyiqa==0.1.10 torch==2.5.1 torchvision==0.20.1 'setuptools<81'",
)
# By dimension: the bounds between which it is normalised, and its weight.
DIMENSIONS = {
    "subject_consistency": (0.1462, 1.0, 1.0),
    "background_consistency": (0.2615, 1.0, 1.0),
    "motion_smoothness": (0.706, 0.9975, 1.0),
    "dynamic_degree": (0.0, 1.0, 0.5),
    "aesthetic_quality": (0.0, 1.0, 1.0),
    "imaging_quality": (0.0, 1.0, 1.0),
}


def vbench(videos: Sequence[Path]) -> Json:
    """Scores of each video and their means. SpecarError, with what to install, if VBench does not run."""
    with VBENCH.open() as ask, tempfile.TemporaryDirectory() as folder:
        copies, results = Path(folder, "videos"), Path(folder, "results")
        copies.mkdir()
        for number, video in enumerate(videos):  # two videos may have the same name
            shutil.copyfile(video, copies / f"{number}.mp4")
        told = ask(videos=str(copies), results=str(results), dimensions=list(DIMENSIONS))
    return parse(told, [video.name for video in videos])


def parse(told: dict[str, Any], names: Sequence[str]) -> Json:
    """VBench's results, {dimension: [mean, [{"video_path", "video_results"}, ...]]}, of videos called 0.mp4, 1.mp4 ...

    A dynamic degree is true or false; imaging quality is of 100 for a video, though of 1 in the mean.
    """
    values: list[dict[str, float]] = [{} for _ in names]
    for dimension in DIMENSIONS:
        try:
            found = {Path(result["video_path"]).stem: result["video_results"] for result in told[dimension][1]}
            for number in range(len(names)):
                scale = 100 if dimension == "imaging_quality" else 1
                values[number][dimension] = float(found[str(number)]) / scale
        except (KeyError, TypeError, ValueError, IndexError):
            raise SpecarError(f"VBench told nothing of {dimension} for one of {len(names)} videos") from None
    clips = [{"video": name, **averaged(scores)} for name, scores in zip(names, values, strict=True)]
    mean = averaged({name: fmean(scores[name] for scores in values) for name in DIMENSIONS})
    return {"source": "VBench 0.1.5, custom input, whole clips", "n": len(names), "clips": clips, "mean": mean}


def averaged(scores: dict[str, float]) -> dict[str, float]:
    """With Q6w, the mean by VBench's weights, and Q6m, the plain mean, of the normalised dimensions."""
    normal = {name: (scores[name] - low) / (high - low) for name, (low, high, _) in DIMENSIONS.items()}
    weights = {name: weight for name, (_, _, weight) in DIMENSIONS.items()}
    weighted = sum(weights[name] * value for name, value in normal.items()) / sum(weights.values())
    return {**scores, "Q6w": weighted, "Q6m": fmean(normal.values())}


def table(told: Json) -> str:
    names = [*DIMENSIONS, "Q6w", "Q6m"]
    clips = [*told["clips"], {"video": "mean", **told["mean"]}]
    lines = [["video", *names], *([clip["video"], *(f"{clip[name]:.4f}" for name in names)] for clip in clips)]
    note = f"{told['source']}, n = {told['n']}; a still clip scores well on all but dynamic_degree"
    return "\n".join([*aligned(lines), note])
