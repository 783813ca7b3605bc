"""How far a run is, in words and in steps, and how long it will still take.

Drafter and target blocks cost different amounts, so both are learnt from the blocks so far.
"""

import time
from bisect import bisect_left

from .backbones.pair import Step
from .job import Job
from .rollout import BlockResult
from .schedule import Role


class Forecast:
    """`done` of `job.work` steps are done."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0
        self._learnt: dict[Role, tuple[int, float]] = {"target": (0, 0.0), "drafter": (0, 0.0)}  # blocks, their seconds
        self._started: float | None = None  # when the first step was done: loading is not counted
        self._first = 0  # and in which block: a resumed run begins in the middle

    def step(self, block: int, step: Step) -> str:
        """Counts a step, and tells where the run is: "block 7 of 20, target, step 3 of 4, 6.1 fps, 48 s left"."""
        job = self.job
        now = time.perf_counter()
        if self._started is None:
            self._started, self._first = now, block
            self.done = job.work * block // job.blocks
        self.done = min(self.done + 1, job.work)
        what = "decoding" if step.kind == "decode" else f"{step.role}, step {step.index} of {step.count}"
        parts = [f"block {block + 1} of {job.blocks}", what]
        if block > self._first:
            frames = job.geometry.frames(block) - job.geometry.frames(self._first)
            parts.append(f"{frames / (now - self._started):.1f} fps")
        if (left := self.left(block)) is not None:
            parts.append(f"{left:.0f} s left")
        return ", ".join(parts)

    def learn(self, result: BlockResult) -> None:
        blocks, seconds = self._learnt[result.role]
        self._learnt[result.role] = blocks + 1, seconds + result.seconds
        if self.job.is_open:  # what this block did not need is no work any more
            self.done = self.job.work * (result.index + 1) // self.job.blocks

    def left(self, block: int) -> float | None:
        """Seconds from the beginning of a block to the end; None while a role that is still to come never ran."""
        if self.job.is_open:
            blocks, seconds = (sum(learnt) for learnt in zip(*self._learnt.values(), strict=True))
            return (self.job.blocks - block) * seconds / blocks if blocks else None
        targets = self.job.schedule.targets
        coming = len(targets) - bisect_left(targets, block)
        left: dict[Role, int] = {"target": coming, "drafter": self.job.blocks - block - coming}
        means = {role: seconds / blocks for role, (blocks, seconds) in self._learnt.items() if blocks}
        if any(blocks and role not in means for role, blocks in left.items()):
            return None
        return sum(blocks * means[role] for role, blocks in left.items() if blocks)
