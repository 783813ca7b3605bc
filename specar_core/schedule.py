"""Where the target blocks go, and what that guarantees.

A video of H blocks is generated one block after another. A schedule says, before generation starts, which k of them
the target generates; the drafter generates the rest. `spread` places them at floor(i*H/k): block 0 is a target block,
and no draft run is longer than ceil(H/k) - 1. No schedule with k targets that begins with a target block can promise
less: its k gaps sum to H, so one of them is at least ceil(H/k) blocks long, its target included.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Role = Literal["target", "drafter"]


class Policy(Protocol):
    """Answers, for one block after another, which model generates it and whether its draft is good enough."""

    @property
    def blocks(self) -> int: ...

    def role(self, block: int) -> Role: ...

    def accepts(self, block: int, frames: Any) -> bool:
        """Whether the draft, decoded to frames [B, 3, N, H, W] in [-1, 1], is kept; if not, the target generates the
        block. Block 0 has its dropped frames still."""
        ...

    def told(self, block: int) -> dict[str, Any]:
        """What the report says of a committed block beside its role."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Which of `blocks` blocks the target generates. `targets` is sorted and holds each block once."""

    blocks: int
    targets: tuple[int, ...]
    policy: str = "list"

    def __post_init__(self) -> None:
        if list(self.targets) != sorted(set(self.targets)):
            raise ValueError(f"target blocks {self.targets} are not sorted and unique")
        if self.targets and not (0 <= self.targets[0] and self.targets[-1] < self.blocks):
            raise ValueError(f"target blocks {self.targets} do not lie inside {self.blocks} blocks")

    def role(self, block: int) -> Role:
        place = bisect_left(self.targets, block)  # an hour of video has a thousand target blocks
        return "target" if place < len(self.targets) and self.targets[place] == block else "drafter"

    def accepts(self, block: int, frames: Any) -> bool:
        return True

    def told(self, block: int) -> dict[str, Any]:
        return {}

    @property
    def draft_runs(self) -> tuple[int, ...]:
        """Lengths of the runs of consecutive drafter blocks, in order."""
        edges = (-1, *self.targets, self.blocks)
        runs = (after - before - 1 for before, after in zip(edges, edges[1:], strict=False))
        return tuple(run for run in runs if run)

    @property
    def max_draft_run(self) -> int:
        return max(self.draft_runs, default=0)

    @property
    def strip(self) -> str:
        """A letter for each block: T for the target's, d for a draft."""
        return "".join("T" if self.role(block) == "target" else "d" for block in range(self.blocks))

    def to_dict(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "targets": list(self.targets),
            "draft_runs": list(self.draft_runs),
            "max_draft_run": self.max_draft_run,
            "policy": self.policy,
        }

    def settled(self, roles: Sequence[Role]) -> dict[str, Any]:
        """`to_dict`, when these are the roles of the blocks so far."""
        return self.to_dict()


def spread(blocks: int, k: int) -> Schedule:
    """k target blocks at even distances, block 0 included (0 <= k <= blocks)."""
    return Schedule(blocks, tuple(i * blocks // k for i in range(k)), f"spread:{k}")
