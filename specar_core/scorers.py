"""What a router judges drafts by: how well a single frame shows what the prompt says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .backbones.base import Machine
from .captions import COLOURS, TINTS, read
from .errors import SpecarError
from .image_reward import image_reward, unready
from .job import Job
from .routers import Budgeted, Routed
from .schedule import Policy
from .timeline import mixture, texts


class Scorer(Protocol):
    def score(self, prompt: str, frames: Tensor) -> Tensor:
        """Scores [N] of the frames [3, N, H, W] in 0..1 of one video; higher is better."""
        ...


@dataclass(frozen=True)
class Known:
    """A scorer by name.

    open: for one run; check(prompt): why it cannot judge by it, or not here; prior: the mean and the spread that are
    expected of its scores; device_bytes: what it takes on the device.
    """

    open: Callable[[torch.device], AbstractContextManager[Scorer]]
    check: Callable[[str], str | None]
    prior: tuple[float, float]
    device_bytes: int


class Agreement:
    """Agreement with a caption of the tiny pair, in 0..1, by colours alone.

    The mean of two: how far the areas of the figures' colours are the promised ones (intersection over union), and how
    near the mean colour of the rest is to the promised tint (0 from 15 % of the range on). Shapes, number and motion
    do not count: like any reward it sees a part of what a viewer sees.
    """

    FIGURE = 0.67  # figures are brighter in their brightest channel, backgrounds darker

    def score(self, prompt: str, frames: Tensor) -> Tensor:
        figures, scene = read(prompt)
        height = frames.shape[2]
        is_figure = frames.amax(0) > self.FIGURE
        parts = []
        if figures:
            palette = torch.tensor(list(COLOURS.values()), device=frames.device) / 255
            nearest = torch.cdist(frames.permute(1, 2, 3, 0).flatten(1, 2), palette).argmin(-1)
            counted = torch.nn.functional.one_hot(nearest, len(palette)) * is_figure.flatten(1)[..., None]
            seen = counted.sum(1) / height**2
            due = [sum(figure.area for figure in figures if figure.colour == colour) for colour in COLOURS]
            promised = torch.tensor(due, device=frames.device).expand_as(seen)
            parts.append(torch.minimum(seen, promised).sum(1) / torch.maximum(seen, promised).sum(1))
        if "tint" in scene:
            rest = (~is_figure).float()
            mean = (frames * rest).sum((2, 3)) / rest.sum((1, 2)).clamp_min(1)
            error = (mean.T - torch.tensor(TINTS[scene["tint"]], device=frames.device) / 255).abs().mean(1)
            parts.append((1 - error / 0.15).clamp_min(0))
        return torch.stack(parts).mean(0)


@contextmanager
def agreement(device: torch.device) -> Iterator[Scorer]:
    yield Agreement()


def unreadable(prompt: str) -> str | None:
    """Why drafts cannot be judged by this caption."""
    figures, scene = read(prompt)
    if figures or "tint" in scene:
        return None
    return (
        f"drafts of '{prompt}' cannot be judged: name a figure's size, colour and shape, or the colour of the "
        f"background, as in `specar examples`"
    )


SCORERS: Mapping[str, Known] = {
    "agreement": Known(agreement, unreadable, (0.7, 0.2), 0),
    # What arXiv:2604.17397 expects of its drafts; 1.8 GB of weights, and the work on a frame of 224x224.
    "image-reward": Known(image_reward, unready, (0.566414, 1.070617), 2_500_000_000),
}


def unjudged(job: Job) -> str | None:
    """Why the router of this job cannot judge drafts; None if it can, or if there is none."""
    if not isinstance(job.schedule, Routed):
        return None
    return next(filter(None, map(SCORERS[job.backbone.scorer].check, texts(job.cues))), None)


@contextmanager
def deciding(job: Job, machine: Machine, told: Sequence[Mapping[str, Any]]) -> Iterator[Policy]:
    """Who decides in one run of the job; told: what the report of an unfinished run says of its blocks."""
    schedule = job.schedule
    if isinstance(schedule, Routed):
        if reason := unjudged(job):
            raise SpecarError(reason)
        known = SCORERS[job.backbone.scorer]
        with known.open(machine.device) as scorer:

            def score(block: int, frames: Tensor) -> Tensor:
                weights = mixture(job.cues, block)
                return scorer.score(max(weights, key=weights.__getitem__), (frames[0].clamp(-1, 1) + 1) / 2)

            yield schedule.begin(score, known.prior, told)
    else:
        yield schedule.begin(told) if isinstance(schedule, Budgeted) else schedule
