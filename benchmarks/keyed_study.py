"""A target block at each change of the prompt against even spread, on the tiny pair, scored against ground truth.

    python -m benchmarks.keyed_study --folder FOLDER --prompts 64
    python -m benchmarks.keyed_study --folder FOLDER --device cpu --prompts 4 --chunk 2 --k 3 --workers 2

A video begins with a held-out caption and goes on, at the blocks of `--changes`, with captions of other colours, shapes
and motion before the same background; at some of them `spread` has a target block anyway. Prompts and the noise of each
block are the same for all schedules, so differences are paired by prompt. Each frame is scored by training/scores.py
against the caption of its time. Writes FOLDER/keyed_study.json and prints the tables for docs/evidence.md.
"""

import random
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specar_core.policies import parse
from training.captions import Description
from training.evaluate import by_block
from training.scores import measure
from training.shapes import sample_scene

from .paired import interval, said, table
from .study import Chunk, Scores, chunks, finish, joined, study_options, team

SHOWN = ("agreement", "colour", "shape", "motion", "background")
SINCE = 4  # blocks since a change that are told of one by one


@dataclass(frozen=True)
class Task:
    """Some of the prompts, with changes at blocks `3,8`."""

    chunk: Chunk
    changes: str
    blocks: int
    ks: tuple[int, ...]

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(map(int, self.changes.split(",")))

    @property
    def schedules(self) -> dict[str, str]:
        ks = [k for k in self.ks if k > len(self.marks)]  # block 0 and the changes take a target block each
        placements = (("keyed", f"@{self.changes}"), ("spread", ""))
        return {"target-only": "target-only"} | {f"{by}:{k}": f"{by}:{k}{at}" for k in ks for by, at in placements}


def another(before: Description, seed: int) -> Description:
    """A scene before the same background, with as many figures of the same sizes; all else is another."""
    chance = random.Random(seed)
    while True:
        after = sample_scene(chance).description
        pairs = list(zip(before.figures, after.figures, strict=False))
        differs = all(old.colour != new.colour and old.shape != new.shape for old, new in pairs)
        if differs and len(before.figures) == len(after.figures) and before.motion != after.motion:
            figures = tuple(replace(new, size=old.size) for old, new in pairs)
            return replace(after, figures=figures, pattern=before.pattern, tint=before.tint)


@torch.inference_mode()
def play(task: Task) -> dict[str, Scores]:
    stage, shots = task.chunk.stage(), [[scene.description for scene in task.chunk.scenes]]
    for _ in task.marks:
        shots.append([another(before, task.chunk.first + i) for i, before in enumerate(shots[-1])])
    prompts = [stage.encode([description.caption() for description in shot]) for shot in shots]
    played = {}
    for name, spec in task.schedules.items():
        blocks = stage.play(parse(spec, task.blocks)[0], lambda block: prompts[bisect_right(task.marks, block)])
        videos = zip(zip(*blocks, strict=True), *shots, strict=True)  # the blocks and the descriptions of each
        scored = [scores(video, task.marks, described) for video, *described in videos]
        played[name] = told({score: np.array([one[score] for one in scored]) for score in SHOWN}, task.marks)
    return played


def scores(blocks: Sequence[Tensor], marks: Sequence[int], shots: Sequence[Description]) -> dict[str, list[float]]:
    """The mean of each score over each block [3, N, H, W], against the caption of its time."""
    spans = zip(pairwise((0, *marks, len(blocks))), shots, strict=True)
    frames = [measure(torch.cat(blocks[first:end], dim=1), shot) for (first, end), shot in spans]
    return {name: by_block(torch.cat([part[name] for part in frames])) for name in SHOWN}


def told(scores: Mapping[str, np.ndarray], changes: Sequence[int]) -> Scores:
    """From the scores [P, H] of each block: agreement by parts of the video, all others from the first change on."""
    agreement, blocks = scores["agreement"], scores["agreement"].shape[1]
    shots = list(pairwise((*changes, blocks)))
    since = {f"+{i}": [first + i for first, end in shots if first + i < end] for i in range(SINCE)}
    parts = {"whole video": slice(None), "after": slice(changes[0], None), **since}
    parts |= {f"block {block}": [block] for block in range(blocks)}
    found = {name: np.nanmean(agreement[:, where], axis=1) for name, where in parts.items() if where}
    return found | {name: np.nanmean(scores[name][:, changes[0] :], axis=1) for name in SHOWN[1:]}


def analyse(played: Mapping[str, Mapping[str, Scores]], ks: Sequence[int]) -> dict[str, Any]:
    """By changes: each schedule, and keyed minus spread at each k; the latter over all changes, too."""
    rows: dict[str, dict[str, Scores]] = {"all": {}}
    for changes, found in played.items():
        placed = {str(k): (found[f"keyed:{k}"], found[f"spread:{k}"]) for k in ks if f"keyed:{k}" in found}
        rows[changes] = {k: {name: keyed[name] - even[name] for name in keyed} for k, (keyed, even) in placed.items()}
    for k in map(str, ks):
        cases = [by_k[k] for by_k in rows.values() if k in by_k]
        names = dict.fromkeys(name for case in cases for name in case)
        rows["all"][k] = {name: np.mean([case[name] for case in cases if name in case], axis=0) for name in names}
    return {
        what: {
            changes: {row: {name: interval(values) for name, values in scores.items()} for row, scores in by.items()}
            for changes, by in told.items()
        }
        for what, told in (("keyed_minus_spread", rows), ("levels", played))
    }


def markdown(found: Mapping[str, Any]) -> str:
    columns = ("whole video", "after", *(f"+{i}" for i in range(SINCE)), "background")
    tables = ["Agreement with the caption of each time, and of the background; +0 is the block of a change."]
    for head, rows in (("keyed - spread, k", found["keyed_minus_spread"]), ("schedule", found["levels"])):
        cells = [
            [changes, name, *(said(row[column]) if column in row else "-" for column in columns)]
            for changes, by_name in rows.items()
            for name, row in by_name.items()
        ]
        tables.append(table(("changes at", head, *columns), cells))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options(__doc__, prompts=64)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--changes", nargs="+", default=["4", "5", "6", "7", "3,8"], help="blocks from 2 on")
    parser.add_argument("--k", type=int, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--chunk", type=int, default=16, help="prompts in one rollout")
    options = parser.parse_args(arguments)
    started, parts = time.perf_counter(), chunks(options, options.chunk)
    tasks = [Task(part, changes, options.blocks, tuple(options.k)) for changes in options.changes for part in parts]
    with team(options.workers) as run:
        results = list(run(play, tasks))
    played = {
        changes: joined(results[first : first + len(parts)])
        for changes, first in zip(options.changes, range(0, len(results), len(parts)), strict=True)
    }
    found = {"blocks": options.blocks, **analyse(played, options.k)}
    finish("keyed_study", options, time.perf_counter() - started, found, markdown(found))


if __name__ == "__main__":
    main()
