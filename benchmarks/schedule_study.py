"""Where target blocks do most good: every placement at every useful k, on the tiny pair, scored against ground truth.

    python -m benchmarks.schedule_study --folder FOLDER --prompts 128
    python -m benchmarks.schedule_study --folder FOLDER --device cpu --prompts 4 --blocks 12

Prompts and the noise of each block are the same for all schedules, so differences are paired by prompt. Writes
FOLDER/schedule_study.json and plots, and prints the tables for docs/evidence.md. `--seconds` ends it earlier, with as
many prompts as all schedules were made for. Scores are those of training/scores.py, 1 being as promised.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specar_core.policies import parse
from training.evaluate import by_block, generate
from training.scores import measure, summarise

from .paired import interval, said, share, table
from .study import Chunk, Scores, chunks, finish, joined, study_options, team

PLACEMENTS = ("front", "back", "random")  # beside spread
SHOWN = ("agreement", "count", "colour", "shape", "size", "motion", "background", "sharpness", "jerk")
PER_CLIP = ("size_kept", "colour_drift", "flicker")
LATE = 0.25  # the last part of a video, where drift shows


@dataclass(frozen=True)
class Task:
    """One schedule for one chunk of the prompts."""

    chunk: Chunk
    blocks: int
    schedule: str


def useful(blocks: int) -> list[int]:
    """The smallest k for each longest draft run that is possible."""
    return sorted({-(-blocks // (run + 1)) for run in range(blocks)})


def schedules(blocks: int, seeds: int) -> list[str]:
    middle = [k for k in useful(blocks) if 1 < k < blocks]
    placed = [f"{name}:{k}" for k in middle for name in ("spread", "front", "back")]
    chance = [f"random:{k}@{seed}" for k in middle for seed in range(seeds)]
    return ["target-only", "draft-only", "first", *placed, *chance]


@torch.inference_mode()
def play(task: Task) -> Scores:
    """Of each clip [P], and of each block [P, H]."""
    scenes = task.chunk.scenes
    found: dict[str, list[Any]] = defaultdict(list)
    clips = generate(task.chunk.stage(), [scene.caption for scene in scenes], task.schedule, task.blocks)
    for clip, scene in zip(clips, scenes, strict=True):
        frames = measure(clip, scene.description)
        for name, value in summarise(frames).items():
            found[name].append(value)
        for name in SHOWN:
            found[f"{name} by block"].append(by_block(frames[name]))
    return {name: np.array(values, dtype=float) for name, values in found.items()}


def by_length(tasks: Sequence[Task], results: Iterable[Scores]) -> dict[int, dict[str, Scores]]:
    """By length and schedule, of the chunks of prompts that all schedules of that length were made for."""
    asked = Counter((task.blocks, task.chunk) for task in tasks)
    done: dict[int, dict[Chunk, dict[str, Scores]]] = defaultdict(lambda: defaultdict(dict))
    for task, scores in zip(tasks, results, strict=False):
        done[task.blocks][task.chunk][task.schedule] = scores
    whole = {
        blocks: [part for chunk, part in parts.items() if len(part) == asked[blocks, chunk]]
        for blocks, parts in done.items()
    }
    return {blocks: joined(parts) for blocks, parts in whole.items() if parts}


def analyse(found: dict[str, Scores], blocks: int) -> dict[str, Any]:
    """What the scores of one length say."""
    late = min(blocks - 1, math.ceil((1 - LATE) * blocks))
    for scores in found.values():
        scores["late"] = np.nanmean(scores["agreement by block"][:, late:], axis=1)
    middle = sorted({int(name.split(":")[1]) for name in found if name.startswith("spread:")})
    chance = {k: [found[name] for name in found if name.startswith(f"random:{k}@")] for k in middle}
    placed = {(k, name): found[f"{name}:{k}"] for k in middle for name in ("spread", "front", "back")}
    placed |= {
        (k, "random"): {name: np.nanmean([one[name] for one in chance[k]], axis=0) for name in ("agreement", "late")}
        for k in middle
    }
    target, draft = found["target-only"], found["draft-only"]
    names = ("agreement", "late")
    return {
        "prompts": len(target["agreement"]),
        "schedules": {
            name: {
                "targets": list(placed_at.targets),
                "max_draft_run": placed_at.max_draft_run,
                "scores": {score: interval(scores[score]) for score in (*names, *SHOWN[1:], *PER_CLIP)},
                "minus_target_only": {score: interval(scores[score] - target[score]) for score in names},
                "minus_draft_only": {score: interval(scores[score] - draft[score]) for score in names},
                "by_block": np.nanmean(scores["agreement by block"], axis=0).round(4).tolist(),
                "per_prompt": scores["agreement"].round(4).tolist(),
            }
            for name, scores in found.items()
            for placed_at in [parse(name, blocks)[0]]
        },
        "spread_minus": {
            str(k): {
                other: {score: interval(placed[k, "spread"][score] - placed[k, other][score]) for score in names}
                for other in PLACEMENTS
            }
            | {"first": {score: interval(placed[k, "spread"][score] - found["first"][score]) for score in names}}
            for k in middle
        },
        "run_position": run_position(found, blocks),
        "recovery": recovery(found, blocks) if f"spread:{2}" in found else None,
        "drift": {
            name: interval(np.nanmean(by[:, :late], axis=1) - np.nanmean(by[:, late:], axis=1))
            for name in ("target-only", "draft-only", "first")
            for by in [found[name]["agreement by block"]]
        },
    }


def run_position(found: dict[str, Scores], blocks: int) -> dict[str, Any]:
    """The score against blocks since the last target block, over all schedules in which target blocks are spread:
    minus that of the last target block, and minus that of the same block of target-only."""
    since: dict[int, list[np.ndarray]] = defaultdict(list)
    lost: dict[int, list[np.ndarray]] = defaultdict(list)
    reference = found["target-only"]["agreement by block"]
    for name, scores in found.items():
        if name != "first" and not name.startswith("spread:"):
            continue
        by, last = scores["agreement by block"], 0
        targets = set(parse(name, blocks)[0].targets)
        for block in range(blocks):
            last = block if block in targets else last
            since[block - last].append(by[:, block] - by[:, last])
            lost[block - last].append(by[:, block] - reference[:, block])
    return {
        "minus_last_target": {str(run): interval(np.nanmean(rows, axis=0)) for run, rows in sorted(since.items())},
        "minus_target_only": {str(run): interval(np.nanmean(rows, axis=0)) for run, rows in sorted(lost.items())},
    }


def recovery(found: dict[str, Scores], blocks: int) -> dict[str, Any]:
    """What one target block in the middle brings back of what `first` lost to target-only, by blocks since it."""
    middle = blocks // 2
    target, first, twice = (found[name]["agreement by block"] for name in ("target-only", "first", "spread:2"))
    offsets = range(blocks - middle)
    return {
        "block": middle,
        "lost": [interval(target[:, middle + i] - first[:, middle + i]) for i in offsets],
        "regained": [interval(twice[:, middle + i] - first[:, middle + i]) for i in offsets],
        "share": [share(twice[:, middle + i] - first[:, middle + i], target[:, middle + i] - first[:, middle + i])
                  for i in offsets],
    }  # fmt: skip


def markdown(studies: dict[str, Any]) -> str:
    parts = []
    for blocks, study in studies.items():
        parts.append(f"H = {blocks}, {study['prompts']} prompts, agreement with the caption (1 = as promised)")
        rows = []
        for name, told in study["schedules"].items():
            if name.partition(":")[0] not in PLACEMENTS:
                scores = told["scores"]
                columns = [said(scores[key]) for key in ("agreement", "late")]
                drift = said(scores["colour_drift"], 1)
                rows.append([name, len(told["targets"]), told["max_draft_run"], *columns, drift])
        parts.append(table(("schedule", "k", "longest run", "whole video", "last quarter", "colour drift"), rows))
        others = (*PLACEMENTS, "first")
        for score, where in (("agreement", "whole video"), ("late", "last quarter")):
            rows = [
                [k, *(said(against[other][score]) for other in others)] for k, against in study["spread_minus"].items()
            ]
            parts.append(table((f"k, {where}", *(f"spread - {other}" for other in others)), rows))
        curve = study["run_position"]
        rows = [
            [run, said(curve["minus_last_target"][run]), said(curve["minus_target_only"][run])]
            for run in curve["minus_last_target"]
            if int(run) in {0, 1, 2, 3, 5, 8, 11, 17, 23, 35}
        ]
        parts.append(table(("blocks since the target", "minus the target block", "minus target-only"), rows))
        if rec := study["recovery"]:
            rows = [
                [i, said(rec["lost"][i]), said(rec["regained"][i]), said(rec["share"][i], 2)]
                for i in range(len(rec["lost"]))
                if i in (0, 1, 2, 5, 11, 17)
            ]
            parts.append(f"One target block at block {rec['block']}:")
            parts.append(table(("blocks after it", "`first` had lost", "regained", "share"), rows))
    return "\n\n".join(parts)


def plot(studies: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for blocks, study in studies.items():
        figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
        against_k, against_block, against_run, after = axes.flat
        for placement in ("spread", *PLACEMENTS):
            rows = defaultdict(list)
            for name, told in study["schedules"].items():
                if name.startswith(placement + ":"):
                    rows[len(told["targets"])].append(told["scores"]["agreement"])
            ks = sorted(rows)
            centre, low, high = (
                [np.mean([row[key] for row in rows[k]]) for k in ks] for key in ("mean", "low", "high")
            )
            against_k.plot(ks, centre, "o-", label=placement)
            against_k.fill_between(ks, low, high, alpha=0.12)
        for name in ("target-only", "first", "draft-only"):
            told = study["schedules"][name]
            against_k.axhline(told["scores"]["agreement"]["mean"], linestyle="--", color="grey", linewidth=0.8)
            against_k.annotate(name, (1, told["scores"]["agreement"]["mean"]), fontsize=8)
            against_block.plot(told["by_block"], label=name)
        if "spread:2" in study["schedules"]:
            against_block.plot(study["schedules"]["spread:2"]["by_block"], label="spread:2")
        against_k.set(xlabel="target blocks", ylabel="agreement", title=f"H = {blocks}, {study['prompts']} prompts")
        against_block.set(xlabel="block", ylabel="agreement", title="over the video")
        for label, curve in study["run_position"].items():
            _band(against_run, [int(run) for run in curve], list(curve.values()), label.replace("_", " "))
        against_run.set(xlabel="blocks since the last target block", ylabel="agreement", title="run position")
        if rec := study["recovery"]:
            _band(after, range(len(rec["lost"])), rec["lost"], "lost by `first`")
            _band(after, range(len(rec["lost"])), rec["regained"], "regained")
            after.set(
                xlabel=f"blocks after a target block at {rec['block']}", title="what one target block brings back"
            )
        for axis in axes.flat:
            axis.legend(fontsize=8) if axis.has_data() else axis.set_visible(False)
        figure.tight_layout()
        figure.savefig(folder / f"schedule_study_{blocks}.png", dpi=110)
        pyplot.close(figure)


def _band(axis: Any, places: Sequence[int], found: Sequence[dict[str, Any]], label: str) -> None:
    kept = [(place, one) for place, one in zip(places, found, strict=True) if one["mean"] is not None]
    xs = [place for place, _ in kept]
    axis.plot(xs, [one["mean"] for _, one in kept], label=label)
    axis.fill_between(xs, [one["low"] for _, one in kept], [one["high"] for _, one in kept], alpha=0.2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options(__doc__, prompts=128)
    parser.add_argument("--blocks", type=int, nargs="*", default=[12, 36])
    parser.add_argument("--seeds", type=int, default=3, help="random placements at each k")
    parser.add_argument("--chunk", type=int, default=32, help="prompts in one rollout")
    parser.add_argument("--seconds", type=float, help="after which results no longer count")
    options = parser.parse_args(arguments)
    started, seconds = time.perf_counter(), math.inf if options.seconds is None else options.seconds

    tasks = [
        Task(replace(chunk, seed=index), blocks, schedule)
        for index, chunk in enumerate(chunks(options, options.chunk))
        for blocks in options.blocks
        for schedule in schedules(blocks, options.seeds)
    ]
    with team(options.workers) as run:
        in_time = takewhile(lambda _: time.perf_counter() - started < seconds, run(play, tasks))
        found = by_length(tasks, in_time)
    studies = {str(blocks): analyse(scores, blocks) for blocks, scores in found.items()}
    finish("schedule_study", options, time.perf_counter() - started, {"studies": studies}, markdown(studies))
    plot(studies, options.folder)


if __name__ == "__main__":
    main()
