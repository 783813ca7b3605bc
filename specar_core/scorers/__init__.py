"""What a router judges drafts by: how well a single frame shows what the prompt says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecarError
from ..job import Job
from ..machine import Machine
from ..routers import Budgeted, Routed
from ..schedule import Policy
from ..timeline import mixture, texts
from . import agreement, image_reward

# (prompt, frames [3, N, H, W] of one video in 0..1) to scores [N]; higher is better.
Scorer = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Known:
    """A scorer by name.

    open: for one run; missing(): why there is none here; unreadable(prompt): why it cannot judge by it; prior: the mean
    and the spread that are expected of its scores; device_bytes: what it takes on the device.
    """

    open: Callable[[torch.device], AbstractContextManager[Scorer]]
    missing: Callable[[], str | None]
    unreadable: Callable[[str], str | None]
    prior: tuple[float, float]
    device_bytes: int


SCORERS: Mapping[str, Known] = {
    "agreement": Known(lambda _: nullcontext(agreement.agreement), lambda: None, agreement.unreadable, (0.7, 0.2), 0),
    # What arXiv:2604.17397 expects of its drafts; 1.8 GB of weights, and the work on a frame of 224x224.
    "image-reward": Known(
        image_reward.image_reward,
        image_reward.IMAGE_REWARD.missing,
        image_reward.unreadable,
        (0.566414, 1.070617),
        2_500_000_000,
    ),
}


def scorer_of(job: Job) -> Known | None:
    """What the router of this job judges by; None if it has none."""
    return SCORERS[job.backbone.scorer] if isinstance(job.schedule, Routed) else None


def unjudged(job: Job) -> str | None:
    """Why the router of this job cannot judge drafts; None if it can, or if there is none."""
    if known := scorer_of(job):
        return next(filter(None, map(known.unreadable, texts(job.cues))), None) or known.missing()
    return None


@contextmanager
def deciding(job: Job, machine: Machine, told: Sequence[Mapping[str, Any]]) -> Iterator[Policy]:
    """Who decides in one run of the job; told: what the report of an unfinished run says of its blocks."""
    schedule = job.schedule
    if isinstance(schedule, Routed):
        if reason := unjudged(job):
            raise SpecarError(reason)
        known = SCORERS[job.backbone.scorer]
        with known.open(machine.device) as judge:

            def score(block: int, frames: Tensor) -> Tensor:
                weights = mixture(job.cues, block)
                return judge(max(weights, key=weights.__getitem__), (frames[0].clamp(-1, 1) + 1) / 2)

            yield schedule.begin(score, known.prior, told)
    else:
        yield schedule.begin(told) if isinstance(schedule, Budgeted) else schedule
