"""Routers against fixed schedules on the tiny pair: quality at equal target count and at equal time.

    python -m benchmarks.policies --folder FOLDER --prompts 128
    python -m benchmarks.policies --folder FOLDER --device cpu --prompts 4 --blocks 6 --k 2

Prompts and the noise of each block are the same for all policies, so differences are paired by prompt; scores are
those of training/scores.py. Thresholds are set on other prompts and frozen. `agreement` routers judge by the package's
scorer, the `truth` router by the very score that the study is about: no scorer can serve it better. Seconds are those
of single videos, from the median of each kind of block. Writes FOLDER/policies.json and a plot, and prints the table
for docs/evidence.md. What routers cost at full size is told by benchmarks/policy_times.py.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specar_core.backbones.pair import OnStep
from specar_core.backbones.session import SessionContext, SessionPair, SessionRun
from specar_core.device import paced
from specar_core.noise import Draw
from specar_core.policies import parse
from specar_core.rollout import rollout
from specar_core.routers import Routed, Router, quantile
from specar_core.schedule import Role, Schedule
from specar_core.scorers import SCORERS
from specar_core.scorers.agreement import agreement
from training.evaluate import Stage, by_block
from training.scores import measure
from training.shapes import HEIGHT, WIDTH, Scene
from training.vae import HELD_OUT

from .paired import interval, said, table
from .study import Chunk, Scores, chunks, finish, joined, study_options, team

STITCH = 3  # of 4 steps
STITCHED = {"target": "target, stitched", "rejected": "rejected, stitched"}
CALIBRATION = HELD_OUT + 500_000  # seeds of the prompts on which thresholds are set
Judge = Callable[[Scene, Tensor], Tensor]  # frames [1, 3, N, H, W] in [-1, 1] to scores [N]
JUDGES: Mapping[str, Judge] = {
    "agreement": lambda scene, frames: agreement(scene.caption, (frames[0] + 1) / 2),
    "truth": lambda scene, frames: measure(frames[0], scene.description)["agreement"],
}


@dataclass(frozen=True)
class RowByRow(SessionPair):
    """Lets a router decide for each video of a batch: rows of a batch share nothing but the schedule."""

    routers: Sequence[Router] = ()

    @contextmanager
    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> Iterator["RowRun"]:
        yield RowRun(self, height, width, batch, paced(self.device, on_step))


class RowRun(SessionRun):
    """The model that a block comes from is each row's own."""

    pair: RowByRow

    def generate(self, role: Role, context: SessionContext, prompt: Tensor, draw: Draw) -> Tensor:
        routers = self.pair.routers
        roles = [router.role(context.blocks) for router in routers]
        if set(roles) == {"target"}:
            return super().generate("target", context, prompt, draw)
        draft = super().generate("drafter", context, prompt, draw)
        frames, _ = self.commit(context, draft, prompt)
        kept = [
            role == "drafter" and router.accepts(context.blocks, frames[row : row + 1])
            for row, (role, router) in enumerate(zip(roles, routers, strict=True))
        ]
        if all(kept):
            return draft
        mask = torch.tensor(kept, device=draft.device).view(-1, 1, 1, 1, 1)
        return torch.where(mask, draft, super().generate("target", context, prompt, draw))


class Study:
    """What all policies share."""

    def __init__(self, stage: Stage, scenes: Sequence[Scene]) -> None:
        self.stage, self.scenes = stage, scenes
        self.prompts = stage.encode([scene.caption for scene in scenes])

    def routers(self, rule: Routed, judge: str) -> list[Router]:
        def score(scene: Scene) -> Callable[[int, Tensor], Tensor]:
            return lambda block, frames: JUDGES[judge](scene, frames)

        return [rule.begin(score(scene), SCORERS["agreement"].prior) for scene in self.scenes]

    @torch.inference_mode()
    def play(self, schedule: Schedule, judge: str = "agreement", stitched: int = 0) -> dict[str, Any]:
        """Scores [P, H], and how each block of each video came about."""
        pair, policy = replace(self.stage.pair, stitched=stitched), schedule
        routers: list[Router] = []
        if isinstance(schedule, Routed):
            routers = self.routers(schedule, judge)
            pair, policy = RowByRow(**vars(pair), routers=routers), parse("target-only", schedule.blocks)[0]
        videos = self.stage.play(policy, lambda block: self.prompts, pair)
        clips = zip(torch.cat(videos, dim=2), self.scenes, strict=True)
        scores = [by_block(measure(clip, scene.description)["agreement"]) for clip, scene in clips]
        if routers:
            kinds = [[kind(decision.role, decision.reason) for decision in router.decisions] for router in routers]
        else:
            kinds = [[kind(schedule.role(block)) for block in range(schedule.blocks)]] * len(self.scenes)
        if stitched:
            kinds = [[video[0], *(STITCHED.get(one, one) for one in video[1:])] for video in kinds]
        return {"scores": np.array(scores), "kinds": kinds, "routers": routers}

    def seconds(self, videos: int, blocks: int) -> dict[str, float]:
        """Median seconds of each kind of block, one video at a time."""
        found: dict[str, list[float]] = defaultdict(list)
        for video, stitched in product(range(videos), (0, STITCH)):
            prompt, scene = self.prompts[video : video + 1], self.scenes[video]

            def judged(block: int, frames: Tensor, scene: Scene = scene) -> Tensor:
                return JUDGES["agreement"](scene, frames) + (10.0 if block % 2 else -10.0)

            routed = Routed(blocks, (0,), tau=5.0).begin(judged, (0.0, 1.0))
            for policy in (parse("stride:2", blocks)[0], routed):
                for result in rollout(
                    replace(self.stage.pair, stitched=stitched),
                    policy,
                    lambda block, prompt=prompt: prompt,
                    lambda block, index: self.stage.noise(block, index)[:1],
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


def study(chunk: Chunk) -> Study:
    return Study(chunk.stage(), chunk.scenes)


def draft_scores(chunk: Chunk, blocks: int) -> dict[str, list[float]]:
    """What drafts score by each judge."""
    played, found = study(chunk), {}
    for judge in JUDGES:
        routers = played.play(Routed(blocks, (0,), tau=-np.inf), judge)["routers"]
        found[judge] = [d.score for router in routers for d in router.decisions if d.score is not None]
    return found


def play_all(chunk: Chunk, blocks: int, ks: Sequence[int], pools: Mapping[str, Sequence[float]]) -> dict[str, Scores]:
    """Every policy: scores [P, H], and how each block of each video came about, [P, H] words."""
    stage = study(chunk)
    named = [*ALWAYS, *(f"spread:{k}" for k in range(1, blocks + 1))]
    policies = {name: (parse(name, blocks)[0], "agreement", 0) for name in named}
    for k in ks:
        for name in AT_K:
            judge = name.partition(", ")[2]
            policies[f"{name} at k={k}"] = rule(name, k, blocks, pools.get(judge, ()))
    played = {name: stage.play(*policy) for name, policy in policies.items()}
    return {name: {"scores": one["scores"], "kinds": np.array(one["kinds"])} for name, one in played.items()}


def analyse(played: Mapping[str, Scores], blocks: int, ks: Sequence[int], costs: Mapping[str, float]) -> dict[str, Any]:
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
            came_to = max(1, round(row["targets"]["mean"]))  # which a router knows only in the end
            took = row["seconds"]["mean"]
            in_time = [k for k in range(1, blocks + 1) if rows[f"spread:{k}"]["seconds"]["mean"] <= took]
            row["spread_minus_this"] = {
                "equal count": spread_minus(came_to, name),
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
                f"{said(count)} (k={count['k']})" if count else "",
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
    parser = study_options(__doc__, prompts=128)
    parser.add_argument("--calibration", type=int, default=32, help="other prompts, for thresholds")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--k", type=int, nargs="*", default=[2, 3, 6])
    parser.add_argument("--timed", type=int, default=3, help="videos that are made one at a time, for the seconds")
    options = parser.parse_args(arguments)
    started, blocks = time.perf_counter(), options.blocks

    studied = chunks(options, -(-options.prompts // options.workers))
    others = chunks(
        options, -(-options.calibration // options.workers), options.calibration, CALIBRATION, seed=options.prompts
    )
    costs = study(studied[0]).seconds(min(options.timed, studied[0].prompts), blocks)
    with team(options.workers) as run:
        drafts = list(run(partial(draft_scores, blocks=blocks), others))
        pools = {judge: [score for found in drafts for score in found[judge]] for judge in JUDGES}
        played = joined(list(run(partial(play_all, blocks=blocks, ks=options.k, pools=pools), studied)))
    found = {"blocks": blocks, **analyse(played, blocks, options.k, costs)}
    finish("policies", options, time.perf_counter() - started, found, markdown(blocks, found))
    plot(blocks, found, options.folder / "policies.png")


if __name__ == "__main__":
    main()
