"""Schedules that are settled while the video is made: routers, which judge drafts, and a time budget.

A router lets the drafter generate a block and keeps it if it is good enough; otherwise the target generates the block
again from the same noise. That is SDVG (Hu & Zhang, arXiv:2604.17397): a draft is as good as its worst frame. Two
things differ from the paper and change no video: no draft is made where it cannot be kept, and the target's context is
built when the target is asked.

What may happen is a frozen value (`Routed`, `Budgeted`), part of a job. `begin` makes it the policy of one run, which
answers the two questions of a rollout, and remembers what it decided and why.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

from .schedule import Role, Schedule

if TYPE_CHECKING:  # it takes more than a second to import
    from torch import Tensor

Score = Callable[[int, "Tensor"], "Tensor"]
FEW = 5  # scores, with fewer of which a quantile is taken from what is expected of them


@dataclass(frozen=True)
class Open(Schedule):
    """`targets` are certain; of the other blocks every one may become a target block.

    max_run: no draft run becomes longer; None without that promise.
    """

    max_run: int | None = None

    @property
    def draft_runs(self) -> tuple[int, ...]:
        return ()  # nobody knows yet

    @property
    def max_draft_run(self) -> int:
        """The longest that may come out."""
        longest = Schedule(self.blocks, self.targets).max_draft_run
        return longest if self.max_run is None else min(self.max_run, longest)

    @property
    def strip(self) -> str:
        return super().strip.replace("d", "?")

    @property
    def least(self) -> Schedule:
        """With as few target blocks as can come out."""
        kept = self.targets if self.max_run is None else tuple(range(0, self.blocks, self.max_run + 1))
        return Schedule(self.blocks, kept, self.policy)

    def forced(self, decided: Sequence["Decision"]) -> "Decision | None":
        """The target for the block behind these, where there is no choice."""
        if len(decided) in self.targets:
            return Decision("target", "certain")
        if self.max_run is not None and run_before(decided) >= self.max_run:
            return Decision("target", f"after a draft run of {self.max_run}")
        return None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "planned": False}

    def settled(self, roles: Sequence[Role]) -> dict[str, Any]:
        """`to_dict` of what came out, as far as it did."""
        targets = tuple(block for block, role in enumerate(roles) if role == "target")
        return {**Schedule(len(roles), targets, self.policy).to_dict(), "blocks": self.blocks, "planned": False}


@dataclass
class Decision:
    """Which role generated a block and why; of a router, the score of the draft and what it had to reach."""

    role: Role
    reason: str
    score: float | None = None
    threshold: float | None = None
    score_seconds: float = 0.0

    def told(self) -> dict[str, Any]:
        """What the report says of it."""
        told: dict[str, Any] = {"reason": self.reason}
        if self.threshold is not None:  # NaN and infinity are no JSON
            told |= {"score": _finite(self.score), "threshold": _finite(self.threshold)}
            told["score_seconds"] = round(self.score_seconds, 4)
        return told

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> "Decision":
        """The decision that a report tells of."""
        names = ("role", "reason", "score", "threshold", "score_seconds")
        return cls(**{name: block[name] for name in names if name in block})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Routed(Open):
    """A router. A draft is kept if its worst frame reaches a threshold: `tau`, or else the quantile that is expected to
    keep a `share` of the drafts.

    mean: the mean of its frames counts instead; pool: scores of earlier videos' drafts, with which the quantile begins.
    """

    tau: float | None = None
    share: float = 0.0
    mean: bool = False
    pool: tuple[float, ...] = ()

    def begin(self, score: Score, prior: tuple[float, float], told: Sequence[Mapping[str, Any]] = ()) -> "Router":
        """score(b, frames): a score for each frame of the draft of block b; prior: the mean and the spread that are
        expected of scores; told: what the report of an unfinished run says of its blocks."""
        return Router(self, score, prior, [Decision.of(block) for block in told])


class Router:
    """The policy of one run."""

    def __init__(self, rule: Routed, score: Score, prior: tuple[float, float], decided: list[Decision]) -> None:
        self.rule, self.score, self.prior = rule, score, prior
        self.blocks = rule.blocks
        self.decisions = decided
        self._earlier = len(decided)

    def role(self, block: int) -> Role:
        if block == len(self.decisions):
            self.decisions.append(self.rule.forced(self.decisions) or Decision("drafter", "to be judged"))
        return self.decisions[block].role

    def accepts(self, block: int, frames: "Tensor") -> bool:
        """Whether the draft, decoded to frames [B, 3, N, H, W], is kept. A score that is not finite rejects it."""
        if block < self._earlier:
            return True
        started = time.perf_counter()
        scores = self.score(block, frames)
        score = (scores.mean() if self.rule.mean else scores.min()).item()
        threshold = self.threshold()  # before the new score joins those it is taken from
        kept = math.isfinite(score) and score >= threshold
        self.decisions[block] = Decision(
            "drafter" if kept else "target",
            "accepted" if kept else "rejected",
            score,
            threshold,
            time.perf_counter() - started,
        )
        return kept

    def threshold(self) -> float:
        if self.rule.tau is not None:
            return self.rule.tau
        scores = (decision.score for decision in self.decisions)
        seen = [score for score in scores if score is not None and math.isfinite(score)]
        return quantile([*self.rule.pool, *seen], 1 - self.rule.share, self.prior)

    def told(self, block: int) -> dict[str, Any]:
        return self.decisions[block].told()


def run_before(decisions: Sequence[Decision]) -> int:
    """Length of the draft run that these blocks end with."""
    return next((run for run, before in enumerate(reversed(decisions)) if before.role == "target"), len(decisions))


def quantile(scores: Sequence[float], at: float, prior: tuple[float, float]) -> float:
    """With linear interpolation; of a normal distribution while there are too few scores."""
    if at <= 0:
        return -math.inf
    if at >= 1:
        return math.inf
    if len(scores) < FEW:
        return NormalDist(*prior).inv_cdf(at)
    ranked, place = sorted(scores), at * (len(scores) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


def accept_share(share: float, blocks: int, forced: int, cap: float = 1.0) -> float:
    """The share of the drafts to keep so that of all blocks `share` are drafter blocks, though `forced` are not."""
    return min(cap, share * blocks / max(1, blocks - forced))


@dataclass(frozen=True)
class Budgeted(Open):
    """As many target blocks as `seconds` allow for all blocks, measured on the first ones, evenly spread over the rest.

    max_run is kept to even if that takes longer. What loading takes does not count.
    """

    seconds: float = 0.0

    def begin(self, told: Sequence[Mapping[str, Any]] = (), clock: Callable[[], float] = time.perf_counter) -> "Pacer":
        """told: what the report of an unfinished run says of its blocks."""
        return Pacer(self, clock, [Decision.of(block) for block in told], [block["seconds"] for block in told])


@dataclass
class Pacer:
    """The policy of one run."""

    rule: Budgeted
    clock: Callable[[], float]
    decisions: list[Decision]
    seconds: list[float]  # of each block so far, until the next one begins
    _began: float | None = field(default=None, init=False)

    @property
    def blocks(self) -> int:
        return self.rule.blocks

    def role(self, block: int) -> Role:
        if block == len(self.decisions):
            now = self.clock()
            if self._began is not None:
                self.seconds.append(now - self._began)
            self._began = now
            self.decisions.append(self.rule.forced(self.decisions) or self._decide(block))
        return self.decisions[block].role

    def _decide(self, block: int) -> Decision:
        target, draft = self._typical("target"), self._typical("drafter")
        if target is None or draft is None:
            return Decision("drafter", "to be measured")
        left, rest = self.rule.seconds - sum(self.seconds), self.blocks - block
        spare = left - rest * draft
        affordable = 0 if spare <= 0 else rest if target <= draft else int(spare / (target - draft))
        last = block - run_before(self.decisions) - 1  # the last target block
        due = last + (self.blocks - last) // (affordable + 1)
        said = f"{left:.1f} s are left for {rest} blocks, {min(affordable, rest)} of them by the target"
        return Decision("target" if affordable and block >= due else "drafter", said)

    def _typical(self, role: Role) -> float | None:
        """Seconds of a block. The first of each role takes longer than the others."""
        seconds = [s for s, before in zip(self.seconds, self.decisions, strict=True) if before.role == role]
        return median(seconds[1:] or seconds) if seconds else None

    def accepts(self, block: int, frames: "Tensor") -> bool:
        return True

    def told(self, block: int) -> dict[str, Any]:
        return self.decisions[block].told()
