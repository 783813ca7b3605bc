"""Agreement of a frame with a caption of the tiny pair, in 0..1, by colours alone."""

import torch
from torch import Tensor

from ..captions import COLOURS, TINTS, read

FIGURE = 0.67  # figures are brighter in their brightest channel, backgrounds darker


def agreement(prompt: str, frames: Tensor) -> Tensor:
    """The mean of two: how far the areas of the figures' colours are the promised ones (intersection over union), and
    how near the mean colour of the rest is to the promised tint (0 from 15 % of the range on). Shapes, number and
    motion do not count: like any reward it sees a part of what a viewer sees.
    """
    figures, scene = read(prompt)
    height = frames.shape[2]
    is_figure = frames.amax(0) > FIGURE
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


def unreadable(prompt: str) -> str | None:
    """Why drafts cannot be judged by this caption."""
    figures, scene = read(prompt)
    if figures or "tint" in scene:
        return None
    return (
        f"drafts of '{prompt}' cannot be judged: name a figure's size, colour and shape, or the colour of the "
        f"background, as in `specar examples`"
    )
