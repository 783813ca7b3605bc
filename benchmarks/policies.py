"""Routers against fixed schedules on the tiny pair: quality at equal target count and at equal time.

    python -m benchmarks.policies --folder FOLDER --prompts 128
    python -m benchmarks.policies --folder FOLDER --device cpu --prompts 4 --blocks 6 --k 2 --workers 1

Prompts and the noise of each block are the same for all policies, so differences are paired by prompt; scores are
those of training/scores.py. Thresholds are set on other prompts and frozen. `agreement` routers judge by the package's
scorer, the `truth` router by the very score that the study is about: no scorer can serve it better. Seconds are those
of single videos, from the median of each kind of block. Writes FOLDER/policies.json and a plot, and prints the table
for docs/evidence.md. What routers cost at full size is told by benchmarks/policy_times.py.
"""

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, starmap
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specar_core.backbones.base import Context, Draw, Machine, OnStep, Pair, Run
from specar_core.backbones.tiny import FOLDER, TINY
from specar_core.job import resolve
from specar_core.noise import noise
from specar_core.policies import parse
from specar_core.rollout import rollout
from specar_core.routers import Routed, Router, quantile
from specar_core.schedule import Role, Schedule
from specar_core.scorers import SCORERS, Agreement
from training.evaluate import shipped
from training.scores import measure
from training.shapes import HEIGHT, WIDTH, Scene, sample_scene
from training.vae import HELD_OUT

from .common import machine
from .paired import interval, said, table
from .schedule_study import by_block

STITCH = 3  # of 4 steps
STITCHED = {"target": "target, stitched", "rejected": "rejected, stitched"}
CALIBRATION = HELD_OUT + 500_000  # seeds of the prompts on which thresholds are set
Judge = Callable[[Scene, Tensor], Tensor]  # frames [1, 3, N, H, W] in [-1, 1] to scores [N]
JUDGES: Mapping[str, Judge] = {
    "agreement": lambda scene, frames: Agreement().score(scene.caption, (frames[0] + 1) / 2),
    "truth": lambda scene, frames: measure(frames[0], scene.description)["agreement"],
}


@dataclass(frozen=True)
class RowByRow:
    """A pair that lets a router decide for each video of a batch: rows of a batch share nothing but the schedule."""

    pair: Pair
    routers: Sequence[Router]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)

    @contextmanager
    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> Iterator["RowRun"]:
        with self.pair.lease(height, width, batch, on_step) as run:
            yield RowRun(run, self.routers)


class RowRun:
    def __init__(self, run: Run, routers: Sequence[Router]) -> None:
        self.run, self.routers = run, routers
        self.begin, self.commit, self.restore = run.begin, run.commit, run.restore

    def generate(self, role: Role, context: Context, prompt: Tensor, draw: Draw) -> Tensor:
        roles = [router.role(context.blocks) for router in self.routers]
        if set(roles) == {"target"}:
            return self.run.generate("target", context, prompt, draw)
        draft = self.run.generate("drafter", context, prompt, draw)
        frames, _ = self.run.commit(context, draft, prompt)
        kept = [
            role == "drafter" and router.accepts(context.blocks, frames[row : row + 1])
            for row, (role, router) in enumerate(zip(roles, self.routers, strict=True))
        ]
        if all(kept):
            return draft
        mask = torch.tensor(kept, device=draft.device).view(-1, 1, 1, 1, 1)
        return torch.where(mask, draft, self.run.generate("target", context, prompt, draw))


class Study:
    """The pair, prompts and the noise that all policies share."""

    def __init__(self, models: Path, where: Machine, blocks: int, scenes: Sequence[Scene], seed: int) -> None:
        self.blocks, self.scenes, self.where = blocks, scenes, where
        paths = shipped(models)
        job, _ = resolve(TINY, blocks=blocks, schedule="sdvg:0")
        self.pair = TINY.load_pair(paths, job, where, lambda *_: None)
        encoder = TINY.load_text_encoder(paths["text encoder"], where, lambda *_: None)
        self.prompts = encoder.encode([scene.caption for scene in scenes])
        shape = TINY.geometry.latent_shape(WIDTH, HEIGHT, len(scenes))
        self.noise = cache(lambda block, index: noise(seed, block, index, shape))

    def routers(self, rule: Routed, judge: str) -> list[Router]:
        def score(scene: Scene) -> Callable[[int, Tensor], Tensor]:
            return lambda block, frames: JUDGES[judge](scene, frames)

        return [rule.begin(score(scene), SCORERS["agreement"].prior) for scene in self.scenes]

    @torch.inference_mode()
    def play(self, schedule: Schedule, judge: str = "agreement", stitched: int = 0) -> dict[str, Any]:
        """Scores [P, H], and how each block of each video came about."""
        pair: Any = replace(self.pair, stitched=stitched)
        routers = self.routers(schedule, judge) if isinstance(schedule, Routed) else []
        results = rollout(
            RowByRow(pair, routers) if routers else pair,
            Schedule(self.blocks, tuple(range(self.blocks))) if routers else schedule,
            lambda block: self.prompts,
            self.noise,
            height=HEIGHT,
            width=WIDTH,
            batch=len(self.scenes),
        )
        clips = torch.cat([result.frames for result in results], dim=2)
        scores = [
            by_block(measure(clip, scene.description)["agreement"], self.blocks)
            for clip, scene in zip(clips, self.scenes, strict=True)
        ]
        if routers:
            kinds = [[kind(decision.role, decision.reason) for decision in router.decisions] for router in routers]
        else:
            kinds = [[kind(schedule.role(block)) for block in range(self.blocks)]] * len(self.scenes)
        if stitched:
            kinds = [[video[0], *(STITCHED.get(one, one) for one in video[1:])] for video in kinds]
        return {"scores": np.array(scores), "kinds": kinds, "routers": routers}

    def seconds(self, videos: int) -> dict[str, float]:
        """Median seconds of each kind of block, one video at a time."""
        found: dict[str, list[float]] = defaultdict(list)
        for video, stitched in product(range(videos), (0, STITCH)):
            prompt, scene = self.prompts[video : video + 1], self.scenes[video]

            def judged(block: int, frames: Tensor, scene: Scene = scene) -> Tensor:
                return JUDGES["agreement"](scene, frames) + (10.0 if block % 2 else -10.0)

            routed = Routed(self.blocks, (0,), tau=5.0).begin(judged, (0.0, 1.0))
            for policy in (Schedule(self.blocks, tuple(range(0, self.blocks, 2))), routed):
                for result in rollout(
                    replace(self.pair, stitched=stitched),
                    policy,
                    lambda block, prompt=prompt: prompt,
                    lambda block, index: self.noise(block, index)[:1],
                    height=HEIGHT,
                    width=WIDTH,
                ):
                    if result.index:
                        told = kind(result.role, policy.told(result.index).get("reason", ""))
                        found[STITCHED.get(told, told) if stitched else told].append(result.seconds)
        return {name: median(seconds) for name, seconds in found.items()}


def kind(role: Role, reason: str = "") -> str:
    """What a block's time depends on."""
    return reason if reason in ("accepted", "rejected") else "target" if role == "target" else "draft"


def rule(name: str, k: int, blocks: int, pool: Sequence[float]) -> tuple[Schedule, str, int]:
    """A policy that comes to k target blocks, the judge it asks, and how many steps of target blocks are stitched."""
    router, _, judge = name.partition(", ")
    even, _ = parse(f"spread:{k}", blocks)
    wanted, _ = parse(f"sdvg-quantile:{k}", blocks)
    assert isinstance(wanted, Routed)
    tau = quantile(pool, 1 - wanted.share, (0.0, 1.0))
    match router:
        case "sdvg":
            return replace(wanted, tau=tau), judge, 0
        case "quantile":
            return replace(wanted, pool=tuple(pool)), judge, 0
        case "guarded":
            return replace(wanted, tau=tau, max_run=2 * even.max_draft_run), judge, 0
        case "hybrid":
            return replace(wanted, tau=tau), judge, STITCH
        case "stitched spread":
            return even, "agreement", STITCH
    return parse(f"{router}:{k}{judge}", blocks)[0], "agreement", 0


ROUTERS = ("sdvg, agreement", "quantile, agreement", "guarded, agreement", "hybrid, agreement", "sdvg, truth")
AT_K = ("random, @0", "random, @1", "random, @2", "stitched spread", *ROUTERS)
ALWAYS = ("target-only", "draft-only", "first")
Played = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """Some of the prompts, the seed of their noise, and what all chunks have in common."""

    first: int
    prompts: int
    seed: int
    models: Path
    device: str
    blocks: int
    ks: tuple[int, ...]

    def study(self) -> Study:
        torch.set_num_threads(1)
        device = torch.device(self.device)
        where = Machine(device, "bf16" if device.type == "cuda" else "fp32")
        scenes = [sample_scene(self.first + number) for number in range(self.prompts)]
        return Study(self.models, where, self.blocks, scenes, self.seed)


def draft_scores(chunk: Chunk) -> dict[str, list[float]]:
    """What drafts score by each judge."""
    study, found = chunk.study(), {}
    for judge in JUDGES:
        routers = study.play(Routed(chunk.blocks, (0,), tau=-np.inf), judge)["routers"]
        found[judge] = [d.score for router in routers for d in router.decisions if d.score is not None]
    return found


def play_all(chunk: Chunk, pools: Mapping[str, Sequence[float]]) -> Played:
    """Every policy: scores [P, H], and how each block of each video came about."""
    study, blocks = chunk.study(), chunk.blocks
    named = [*ALWAYS, *(f"spread:{k}" for k in range(1, blocks + 1))]
    policies = {name: (parse(name, blocks)[0], "agreement", 0) for name in named}
    for k in chunk.ks:
        for name in AT_K:
            judge = name.partition(", ")[2]
            policies[f"{name} at k={k}"] = rule(name, k, blocks, pools.get(judge, ()))
    played = {name: study.play(*policy) for name, policy in policies.items()}
    return {name: {"scores": one["scores"], "kinds": one["kinds"]} for name, one in played.items()}


def analyse(played: Played, blocks: int, ks: Sequence[int], costs: Mapping[str, float]) -> dict[str, Any]:
    def video_seconds(kinds: Sequence[str]) -> float:
        return sum(costs[one] for one in kinds)

    rows = {}
    for name, one in played.items():
        counts = [sum(block not in ("draft", "accepted") for block in video) for video in one["kinds"]]
        rejected = np.array([[block.startswith("rejected") for block in video] for video in one["kinds"]])
        rows[name] = {
            "targets": {"mean": float(np.mean(counts)), "min": min(counts), "max": max(counts)},
            "histogram": np.bincount(counts, minlength=blocks + 1).tolist(),
            "rejected_by_block": rejected.mean(0).round(3).tolist(),
            "seconds": interval([video_seconds(kinds) for kinds in one["kinds"]]),
            "agreement": interval(np.nanmean(one["scores"], axis=1)),
            "per_prompt": np.nanmean(one["scores"], axis=1).round(4).tolist(),
        }

    def spread_minus(k: int, name: str) -> dict[str, Any]:
        difference = np.array(rows[f"spread:{k}"]["per_prompt"]) - np.array(rows[name]["per_prompt"])
        return {"k": k, **interval(difference)}

    for name, row in rows.items():
        if " at k=" in name:
            row["k"] = int(name.rpartition("=")[2])
            took = row["seconds"]["mean"]
            in_time = [k for k in range(1, blocks + 1) if rows[f"spread:{k}"]["seconds"]["mean"] <= took]
            row["spread_minus_this"] = {
                "equal count": spread_minus(row["k"], name),
                "equal time": spread_minus(max(in_time, default=1), name),
            }
    prompts = len(next(iter(played.values()))["kinds"])
    shown = {name: row for name, row in rows.items() if not name.startswith("spread:") or int(name[7:]) in ks}
    return {"prompts": prompts, "block_seconds": dict(costs), "policies": shown}


def markdown(blocks: int, found: Mapping[str, Any]) -> str:
    costs = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in found["block_seconds"].items())
    rows = []
    for name, row in found["policies"].items():
        targets, against = row["targets"], row.get("spread_minus_this", {})
        count, in_time = against.get("equal count"), against.get("equal time")
        rows.append(
            (
                name,
                f"{targets['mean']:.1f} ({targets['min']}-{targets['max']})",
                f"{row['seconds']['mean']:.2f}",
                said(row["agreement"]),
                said(count) if count else "",
                f"{said(in_time)} (k={in_time['k']})" if in_time else "",
            )
        )
    head = ("policy", "target blocks", "seconds", "agreement", "spread - it, equal count", "spread - it, equal time")
    return f"H = {blocks}, {found['prompts']} prompts; a block takes: {costs}\n\n{table(head, rows)}"


def plot(blocks: int, found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 6))
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in found["policies"].items():
        groups.setdefault(name.partition(" at k=")[0].partition(", @")[0].partition(":")[0], []).append(row)
    for name, rows in groups.items():
        rows = sorted(rows, key=lambda row: row["seconds"]["mean"])
        xs, ys = ([row[key]["mean"] for row in rows] for key in ("seconds", "agreement"))
        errors = [[abs(row["agreement"][end] - row["agreement"]["mean"]) for row in rows] for end in ("low", "high")]
        axis.errorbar(xs, ys, errors, fmt="o-" if name == "spread" else "o", capsize=2, label=name)
    axis.set(xlabel="seconds a video", ylabel="agreement", title=f"H = {blocks}, {found['prompts']} prompts")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--calibration", type=int, default=32, help="other prompts, for thresholds")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--k", type=int, nargs="*", default=[2, 3, 6])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timed", type=int, default=3, help="videos that are made one at a time, for the seconds")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    started, chunks = time.perf_counter(), []
    for kind, first, count in (("study", HELD_OUT, options.prompts), ("calibration", CALIBRATION, options.calibration)):
        size = -(-count // options.workers)
        chunks.append(
            [
                Chunk(
                    first + begin, min(size, count - begin), begin + (kind == "calibration") * options.prompts,
                    options.models, options.device, options.blocks, tuple(options.k),
                )
                for begin in range(0, count, size)
            ]
        )  # fmt: skip
    costs = chunks[0][0].study().seconds(min(options.timed, chunks[0][0].prompts))
    # The tiny pair keeps a processor busy and a GPU idle: several share it.
    with multiprocessing.get_context("spawn").Pool(options.workers) if options.workers > 1 else nullcontext() as pool:
        run = pool.starmap if pool else starmap
        drafts = list(run(draft_scores, [(chunk,) for chunk in chunks[1]]))
        pools = {judge: [score for found in drafts for score in found[judge]] for judge in JUDGES}
        parts = list(run(play_all, [(chunk, pools) for chunk in chunks[0]]))
    played = {
        name: {
            "scores": np.concatenate([part[name]["scores"] for part in parts]),
            "kinds": [kinds for part in parts for kinds in part[name]["kinds"]],
        }
        for name in parts[0]
    }
    found = analyse(played, options.blocks, options.k, costs)
    told = {"machine": machine(), "blocks": options.blocks, "seconds": round(time.perf_counter() - started, 1), **found}
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "policies.json").write_text(json.dumps(told, indent=1) + "\n")
    plot(options.blocks, found, options.folder / "policies.png")
    print(markdown(options.blocks, found))


if __name__ == "__main__":
    main()
