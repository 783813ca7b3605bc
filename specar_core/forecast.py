"""How far a run is, in words and in steps, and how long it will still take.

Drafter and target blocks cost different amounts, so both are learnt from the blocks so far.
"""

import time

from .backbones.base import Step
from .job import Job
from .rollout import BlockResult


class Forecast:
    """`done` of `job.work` steps are done."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0
        self._seconds: dict[str, list[float]] = {"target": [], "drafter": []}
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
        what = "decoding" if step.kind == "decode" else f"{job.schedule.role(block)}, step {step.index} of {step.count}"
        parts = [f"block {block + 1} of {job.blocks}", what]
        if block > self._first:
            geometry = job.backbone.geometry
            frames = geometry.frames(block, job.keep_first_frames) - geometry.frames(self._first, job.keep_first_frames)
            parts.append(f"{frames / (now - self._started):.1f} fps")
        if (left := self.left(block)) is not None:
            parts.append(f"{left:.0f} s left")
        return ", ".join(parts)

    def learn(self, result: BlockResult) -> None:
        self._seconds[result.role].append(result.seconds)

    def left(self, block: int) -> float | None:
        """Seconds from the beginning of a block to the end; None while a role that is still to come never ran."""
        means = {role: sum(times) / len(times) for role, times in self._seconds.items() if times}
        rest = [self.job.schedule.role(b) for b in range(block, self.job.blocks)]
        return sum(means[role] for role in rest) if all(role in means for role in rest) else None
