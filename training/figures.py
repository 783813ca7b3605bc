"""Find the figures of a clip and fit shapes to them.

Figures are brighter than every background and each keeps to its lane (`shapes`), so the figure of a lane is the
largest bright component there: there is no tracker that could lose it. Opposite edges of the frame touch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specar_core.captions import OUTLINES, unit_area

from .captions import Description
from .shapes import coverage, lane

# A pixel is background or figure where its brightest channel is below or above these; in between is a rim.
# Backgrounds end at 0.54, colours begin at 0.84.
DARK, BRIGHT = 0.55, 0.8
ANGLES = 48  # of each template, over one turn of the shape onto itself
GRID = 32  # samples along a template


@dataclass(frozen=True)
class Found:
    """The figure of each of N lanes in each of T frames."""

    masks: Tensor  # [N, T, H, W] in [0, 1], zero where there is none
    components: Tensor  # [N, T], how many figures there are in the lane
    area: Tensor  # [N, T], pixels
    centres: Tensor  # [N, T, 2], x and y in pixels
    colours: Tensor  # [N, T, 3] in [-1, 1]

    @property
    def present(self) -> Tensor:
        return self.components > 0


def find(clip: Tensor, promised: Description) -> Found:
    height, width = clip.shape[-2:]
    soft = ((brightness(clip) - DARK) / (BRIGHT - DARK)).clamp(0, 1)
    lanes = torch.zeros(len(promised.figures), 1, height, width, device=clip.device)
    for slot, one in enumerate(lanes):
        left, top, wide, high = (round(edge * height) for edge in lane(promised, slot, width / height))
        one[:, top : top + high, left : left + wide] = 1
    # Less than a quarter of what is promised is debris, not a figure.
    least = due_areas(promised, height, clip.device) / 4
    component, components = _largest_components((soft * lanes) > 0.5, least)
    masks = soft * widened(component.float())  # the soft rim belongs to the figure
    area = masks.sum((2, 3))
    centres = torch.stack([_centre(masks.sum(2), width), _centre(masks.sum(3), height)], dim=-1)
    core = 1 - widened(1 - masks) + 1e-3 * masks  # all of the rim is left out where there is a core
    colours = torch.einsum("nthw,cthw->ntc", core, clip) / core.sum((2, 3)).clamp_min(1e-6)[..., None]
    return Found(masks, components, area, centres, colours)


def fit_shapes(found: Found, promised: Description) -> tuple[Tensor, Tensor, Tensor]:
    """Whether the promised shape fits best, how well it fits, and at which angle (in radians): [N, T] each.

    A figure is compared with every shape at every angle, all scaled to its area and moved to its centre.
    """
    device, (height, width) = found.masks.device, found.masks.shape[2:]
    side = torch.linspace(-1, 1, GRID, device=device)  # in units of the square root of the area
    names = list(OUTLINES)
    sectors = torch.tensor([2 * math.pi / OUTLINES[name][0] for name in names], device=device)
    templates = torch.stack(
        [_templates(name, math.sqrt(unit_area(name)), side) for name in names]
    )  # [shapes, angles, GRID * GRID]

    pad = height // 2
    wide = F.pad(found.masks, (pad, pad, pad, pad), mode="circular").flatten(0, 1)[:, None]
    scale = found.area.clamp_min(1).sqrt()[..., None]
    x = (found.centres[..., :1] + side * scale + pad) * (2 / (width + 2 * pad)) - 1
    y = (found.centres[..., 1:] + side * scale + pad) * (2 / (height + 2 * pad)) - 1
    where = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., None]), dim=-1).flatten(0, 1)
    seen = F.grid_sample(wide, where, align_corners=False).flatten(1)  # [N T, GRID * GRID]

    shared = torch.einsum("fp,sap->fsa", seen, templates)
    overlap = shared / (seen.square().sum(1)[:, None, None] + templates.square().sum(2) - shared)
    overlap, angle = overlap.view(*found.area.shape, len(names), ANGLES).max(3)  # [N, T, shapes]
    right = [names.index(figure.shape) for figure in promised.figures]
    fits = torch.stack([overlap[slot].argmax(1) == index for slot, index in enumerate(right)])
    outline = torch.stack([overlap[slot, :, index] for slot, index in enumerate(right)])
    angles = torch.stack([angle[slot, :, index] * (sectors[index] / ANGLES) for slot, index in enumerate(right)])
    return fits, outline, angles


def _templates(shape: str, scale: float, side: Tensor) -> Tensor:
    """[ANGLES, GRID * GRID], with an area of 1 where `side` is in those units."""
    outline = [torch.tensor(float(value), device=side.device) for value in OUTLINES[shape]]
    angle = torch.arange(ANGLES, device=side.device)[:, None, None] * (2 * math.pi / OUTLINES[shape][0] / ANGLES)
    samples = torch.tensor((GRID - 1) / 2 / scale, device=side.device)  # in a radius
    return coverage(outline, side * scale, side[:, None] * scale, angle, samples).flatten(1)


def brightness(clip: Tensor) -> Tensor:
    return (clip.amax(0) + 1) / 2


def widened(masks: Tensor) -> Tensor:
    """One pixel wider on every side; the frame's opposite edges touch, as they do for figures that drift out."""
    for axis in (-1, -2):
        masks = masks.maximum(masks.roll(1, axis)).maximum(masks.roll(-1, axis))
    return masks


def _largest_components(bright: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The largest component of each [N, T, H, W] mask, and the number [N, T] of those of `least` [N, 1] pixels or more.

    Labels spread to their neighbours until every component carries its largest one.
    """
    pixels = bright[0, 0].numel()
    labels = bright * torch.arange(1, pixels + 1, device=bright.device).view(bright.shape[2:]).float()
    before = None
    while before is None or not torch.equal(labels, before):
        before = labels
        for _ in range(4):
            labels = widened(labels) * bright
    flat = labels.long().flatten(2)
    areas = torch.zeros(*flat.shape[:2], pixels + 1, device=bright.device)
    areas.scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.float32))
    areas[..., 0] = 0  # everything dark
    enough = areas >= least[..., None].clamp_min(1)
    largest = (areas * enough).argmax(2)
    component = (flat == largest[..., None]) & (largest > 0)[..., None]
    return component.view_as(bright), enough.sum(2)


def _centre(profile: Tensor, size: int) -> Tensor:
    """Centre of mass of profiles [N, T, size] on a ring: roughly by angle, then exactly by offsets from there."""
    position = torch.arange(size, device=profile.device) + 0.5
    turn = position * (2 * math.pi / size)
    rough = torch.atan2(profile @ turn.sin(), profile @ turn.cos()) * (size / (2 * math.pi))
    offset = round_the_ring(position - rough[..., None], size)
    return torch.remainder(rough + (profile * offset).sum(-1) / profile.sum(-1).clamp_min(1e-6), size)


def round_the_ring(difference: Tensor, size: float | Tensor) -> Tensor:
    """The shorter way round."""
    return torch.remainder(difference + size / 2, size) - size / 2


def due_areas(promised: Description, height: int, device: torch.device) -> Tensor:
    areas = [figure.area * height**2 for figure in promised.figures]
    return torch.tensor(areas, device=device)[:, None]  # [N, 1]
