"""What fp8 does to videos of the tiny pair, whose weights are trained: the same videos in full precision and in fp8.

    python -m benchmarks.precision_study --folder FOLDER --device cpu --prompts 24

Prompts and the noise of each block are the same. Full precision is float32 on a CPU, which does fp8's arithmetic, and
bf16 on a GPU. Writes FOLDER/precision_study.json and prints the table for docs/evidence.md.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specar_core.backbones.pair import Pair
from specar_core.policies import parse
from training.evaluate import Stage, by_block
from training.scores import measure

from .paired import interval, said, table
from .study import Chunk, Scores, chunks, finish, joined, study_options, team


@functools.lru_cache(maxsize=1)
def lowered(chunk: Chunk) -> Pair:
    return Stage(chunk.models, chunk.device, chunk.prompts, precision="fp8").pair


def apart(found: Tensor, expected: Tensor) -> np.ndarray:
    """Relative error of each video's latents [B, ...]."""
    found, expected = found.flatten(1).double(), expected.flatten(1).double()
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).cpu().numpy()


@torch.inference_mode()
def play(task: tuple[Chunk, str, int]) -> Scores:
    """Of each block [P, H]: agreement in both precisions, and how far the latents are apart."""
    chunk, schedule, blocks = task
    stage, scenes = chunk.stage(), chunk.scenes
    prompts, policy = stage.encode([scene.caption for scene in scenes]), parse(schedule, blocks)[0]
    full, low = (list(stage.results(policy, lambda block: prompts, pair)) for pair in (stage.pair, lowered(chunk)))
    found = {"apart": np.stack([apart(b.latents, a.latents) for a, b in zip(full, low, strict=True)], axis=1)}
    for name, results in (("full", full), ("fp8", low)):
        clips = torch.cat([result.frames for result in results], dim=2)
        measured = [measure(clip, scene.description) for clip, scene in zip(clips, scenes, strict=True)]
        found[name] = np.array([by_block(each["agreement"]) for each in measured])
    return found


def analyse(found: Scores) -> dict[str, Any]:
    full, low = (np.nanmean(found[name], axis=1) for name in ("full", "fp8"))
    return {
        "full": interval(full),
        "fp8": interval(low),
        "fp8_minus_full": interval(low - full),
        "latents_apart_by_block": np.median(found["apart"], axis=0).round(4).tolist(),
    }


def markdown(told: dict[str, Any]) -> str:
    head = ("schedule", "full", "fp8", "fp8 - full", "latents apart: first block", "middle", "last")
    rows = []
    for schedule, of in told.items():
        by = of["latents_apart_by_block"]
        scores = [said(of[name]) for name in ("full", "fp8", "fp8_minus_full")]
        rows.append([schedule, *scores, *(f"{by[block]:.2f}" for block in (0, len(by) // 2, -1))])
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options(__doc__, prompts=64)
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--schedules", nargs="+", default=["target-only", "max-run:5", "draft-only"])
    parser.add_argument("--chunk", type=int, default=8, help="prompts in one rollout")
    options = parser.parse_args(arguments)
    started, parts = time.perf_counter(), chunks(options, options.chunk)
    tasks = [(part, schedule, options.blocks) for part in parts for schedule in options.schedules]
    with team(options.workers) as run:
        results = dict(zip(tasks, run(play, tasks), strict=True))
    by_part = [{schedule: results[part, schedule, options.blocks] for schedule in options.schedules} for part in parts]
    told = {schedule: analyse(scores) for schedule, scores in joined(by_part).items()}
    finish("precision_study", options, time.perf_counter() - started, {"schedules": told}, markdown(told))


if __name__ == "__main__":
    main()
