"""What fp8 does to videos of the tiny pair, whose weights are trained: the same videos in full precision and in others.

    python -m benchmarks.precision_study --folder FOLDER --device cpu --prompts 24 --workers 2

Prompts and the noise of each block are the same. Full precision is float32 on a CPU, which does fp8's arithmetic, and
bf16 on a GPU. Writes FOLDER/precision_study.json and prints the table for docs/evidence.md.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specar_core.policies import parse
from training.evaluate import Stage, by_block
from training.scores import measure

from .paired import interval, said, table
from .study import Chunk, Scores, chunks, finish, joined, study_options, team


@dataclass(frozen=True)
class Task:
    """One schedule for some of the prompts, in full precision first."""

    chunk: Chunk
    schedule: str
    blocks: int
    precisions: tuple[str, ...]


def apart(found: Tensor, expected: Tensor) -> np.ndarray:
    """Relative error of each video's latents [B, ...]."""
    found, expected = found.flatten(1).double(), expected.flatten(1).double()
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).cpu().numpy()


@torch.inference_mode()
def play(task: Task) -> dict[str, Scores]:
    """By precision, of each block [P, H]: agreement, and how far the latents are from those in full precision."""
    chunk, scenes = task.chunk, task.chunk.scenes
    stage, policy = chunk.stage(), parse(task.schedule, task.blocks)[0]
    prompts = stage.encode([scene.caption for scene in scenes])
    found: dict[str, Scores] = {}
    full: list[Tensor] = []
    for precision in ("full", *task.precisions):
        pair = stage.pair if precision == "full" else Stage(chunk.models, chunk.device, 1, precision=precision).pair
        results = list(stage.results(policy, lambda block: prompts, pair))
        full = full or [result.latents for result in results]
        clips = torch.cat([result.frames for result in results], dim=2)
        measured = [measure(clip, scene.description) for clip, scene in zip(clips, scenes, strict=True)]
        found[precision] = {
            "agreement": np.array([by_block(each["agreement"]) for each in measured]),
            "apart": np.stack([apart(one.latents, exact) for one, exact in zip(results, full, strict=True)], axis=1),
        }
    return found


def analyse(found: Mapping[str, Scores]) -> dict[str, Any]:
    means = {precision: np.nanmean(scores["agreement"], axis=1) for precision, scores in found.items()}
    return {
        precision: {
            "agreement": interval(means[precision]),
            "minus_full": interval(means[precision] - means["full"]),
            "latents_apart_by_block": np.median(scores["apart"], axis=0).round(4).tolist(),
        }
        for precision, scores in found.items()
    }


def markdown(told: Mapping[str, Any]) -> str:
    rows = []
    for schedule, by_precision in told.items():
        for precision, of in by_precision.items():
            by = of["latents_apart_by_block"]
            lengths = [f"{by[block]:.2f}" for block in (0, len(by) // 2, -1)]
            rows.append([schedule, precision, said(of["agreement"]), said(of["minus_full"]), *lengths])
    return table(("schedule", "precision", "agreement", "minus full", "latents apart: first", "middle", "last"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options(__doc__, prompts=64)
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--schedules", nargs="+", default=["target-only", "max-run:5", "draft-only"])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8-target", "fp8"])
    parser.add_argument("--chunk", type=int, default=8, help="prompts in one rollout")
    options = parser.parse_args(arguments)
    started, parts = time.perf_counter(), chunks(options, options.chunk)
    tasks = [
        Task(part, schedule, options.blocks, tuple(options.precisions))
        for schedule in options.schedules
        for part in parts
    ]
    with team(options.workers) as run:
        results = list(run(play, tasks))
    told = {
        schedule: analyse(
            joined([found for task, found in zip(tasks, results, strict=True) if task.schedule == schedule])
        )
        for schedule in options.schedules
    }
    finish("precision_study", options, time.perf_counter() - started, {"schedules": told}, markdown(told))


if __name__ == "__main__":
    main()
