"""Why a job cannot run on this machine, with the numbers and the smallest change that would help."""

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .job import Job
from .machine import Machine, card, free_bytes, host_memory
from .plan import Plan, plan, readable
from .policies import parse
from .scorers import unjudged

GPU_MARGIN = 1 << 30  # what torch's allocator holds without using it, and the workspaces of libraries
CHANGES = ("--blocks", "--width", "--schedule")


def refusal(planned: Plan, machine: Machine, folder: Path, changes: Collection[str] = CHANGES) -> str | None:
    """Why the job cannot run here, with the numbers and the smallest change that would help; None if it can.

    folder: where the video is kept while it is made; what an unfinished run left there need not fit once more. changes:
    the options that the user has to change it.
    """
    if reason := unjudged(planned.job):
        return reason
    present = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    there = {"host memory": host_memory(), "disk space": free_bytes(folder) + present}
    if machine.device.type == "cuda":
        if machine.precision == "bf16" and torch.cuda.get_device_capability(machine.device) < (8, 0):
            return f"{card(machine.device)} has no bf16 (that takes compute capability 8.0): use --precision fp32"
        there["GPU memory"], total = torch.cuda.mem_get_info(machine.device)
        missing = shortages(planned, {**there, "GPU memory": total})
        if not missing and (missing := shortages(planned, there)):
            held = readable(total - there["GPU memory"])
            return f"{'; '.join(missing)}: other programs hold {held} of the GPU, close some"
    missing = shortages(planned, there)
    return f"{'; '.join(missing)}. {smallest_change(planned.job, machine, there, changes)}." if missing else None


def shortages(planned: Plan, there: Mapping[str, int]) -> list[str]:
    needs = {
        "GPU memory": planned.gpu_bytes + GPU_MARGIN,
        "host memory": planned.host_bytes,
        "disk space": planned.disk_bytes,
    }
    return [
        f"not enough {what}: about {readable(needs[what])} needed, {readable(size)} there"
        for what, size in there.items()
        if needs[what] > size
    ]


def smallest_change(job: Job, machine: Machine, there: Mapping[str, int], options: Collection[str] = CHANGES) -> str:
    """What to try. For the disk, fewer blocks; for memory the first of a smaller size, the drafter alone, and both."""

    def fits(change: tuple[str, Job]) -> bool:
        return not shortages(plan(change[1], machine), there)

    alone = replace(job, schedule=parse("draft-only", job.blocks)[0])
    sizes = [(f"--schedule draft-only {text}", change) for text, change in smaller(alone)]
    ways: list[Sequence[tuple[str, Job]]] = [list(smaller(job)), [("--schedule draft-only", alone)], sizes]
    if not shortages(plan(job, machine), {**there, "disk space": sys.maxsize}):
        lengths = range(job.blocks - 1, 0, -1)
        first = bisect_left(lengths, True, key=lambda blocks: fits(shorter(job, blocks)))
        ways = [[shorter(job, blocks)] for blocks in lengths[first : first + 1]]
    for changes in ways:  # each falls from the smallest change to the largest
        if changes and changes[0][0].split()[0] not in options:
            continue
        if (first := bisect_left(changes, True, key=fits)) < len(changes):
            return f"It fits with {changes[first][0]}"
    return "Nothing smaller fits: more memory or another disk is needed" if options else "Make room for it"


def shorter(job: Job, blocks: int) -> tuple[str, Job]:
    targets = tuple(block for block in job.schedule.targets if block < blocks)
    return f"--blocks {blocks}", replace(job, schedule=replace(job.schedule, blocks=blocks, targets=targets))


def smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """The same shape at down to half the width."""
    step = job.backbone.geometry.size_multiple
    for width in range(job.width - step, max(job.width // 2, step) - 1, -step):
        height = max(step, round(job.height * width / job.width / step) * step)
        yield f"--width {width} --height {height}", replace(job, width=width, height=height)
