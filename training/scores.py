"""What a finished clip shows, measured against what its caption promises.

Everything is measured per frame, so that a study may average over any block.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specar_core.captions import COLOURS, OUTLINES

from .captions import Description
from .figures import brightness, due_areas, find, fit_shapes, round_the_ring, widened
from .shapes import FPS, SPEED, backdrop, bounce_rates, orbit_radius, slack

AGREEMENTS = ("count", "colour", "shape", "size", "motion", "background")
STEP = 4  # frames over which motion is measured


def measure(clip: Tensor, promised: Description, fps: float = FPS) -> dict[str, Tensor]:
    """Per-frame measurements [T] of a clip [3, T, H, W] in [-1, 1], at least 2 * STEP + 1 frames long.

    In [0, 1], 1 being as promised; a figure that is not there scores 0:

    * count: 1 where there are as many figures as promised
    * colour: distance of the figures' mean colour from the promised one; 0 where it is as far as the next colour
    * shape: share of figures whose best-fitting shape is the promised one
    * outline: overlap (intersection over union) with the promised shape, its size and angle fitted
    * size: promised and measured area, the smaller over the larger
    * motion: share of figures that move as promised over the next STEP frames, within half of the way due
    * background: distance from the promised background; 0 where the mean error is 15 % of the range
    * agreement: the mean of count, colour, shape, size, motion, background

    Others (colours and areas are NaN where no figure is):

    * sharpness: steepness of the figures' edges, contrasts a pixel; 2/3 for a perfect edge
    * jerk: third difference of the figures' centres, pixels a frame cubed
    * behind: difference of the background from what it was in the first 15 % of the clip, 8-bit levels
    * luma of the frame; red, green, blue of the figures: 8-bit levels
    * area: of the figures, relative to the promise
    """
    height, width = clip.shape[-2:]
    found = find(clip, promised)
    present = found.present
    due = due_areas(promised, height, clip.device)
    colours = _nan_where(~present, found.colours)
    red, green, blue = (colours.nanmean(0).T + 1) * 127.5
    areas = _nan_where(~present, found.area / due)
    shape, outline, angles = fit_shapes(found, promised)
    moves = _moves_as_promised(found.centres, angles, promised, (height, width), fps)
    frames = {
        "count": (found.components.sum(0) == len(promised.figures)).float(),
        "colour": (_colour_agreement(found.colours, promised) * present).mean(0),
        "shape": (shape & present).float().mean(0),
        "size": torch.minimum(found.area / due, due / found.area.clamp_min(1)).mean(0),
        "motion": (moves & present).float().mean(0),
        "background": _background_agreement(clip, found.masks, promised),
        "outline": (outline * present).mean(0),
        "sharpness": _sharpness(clip, found.masks),
        "jerk": _jerk(_nan_where(~present, found.centres), (height, width)),
        "behind": _background_change(clip, found.masks),
        "luma": (_luma(clip).mean((1, 2)) + 1) * 127.5,
        "red": red,
        "green": green,
        "blue": blue,
        "area": areas.nanmean(0),
    }
    frames["agreement"] = torch.stack([frames[name] for name in AGREEMENTS]).mean(0)
    return frames


def summarise(frames: dict[str, Tensor]) -> dict[str, float]:
    """Means over the clip, and what only the whole clip shows:

    * size_kept: exp(-standard deviation of the log area), 1 if the figures keep their size
    * colour_drift: change of the figures' colour from the first to the last 15 %, 8-bit levels
    * flicker: mean absolute second difference of the luma, 8-bit levels
    """
    names = (*AGREEMENTS, "agreement", "outline", "sharpness", "jerk", "behind")
    colour = torch.stack([frames[name] for name in ("red", "green", "blue")])
    ends = _ends(colour.shape[1])
    change = colour[:, -ends:].nanmean(1) - colour[:, :ends].nanmean(1)
    sizes = frames["area"].log()
    spread = (sizes - sizes.nanmean()).square().nanmean().sqrt()
    return {
        **{name: frames[name].nanmean().item() for name in names},
        "size_kept": math.exp(-spread.item()),
        "colour_drift": change.abs().mean().item(),
        "flicker": frames["luma"].diff(n=2).abs().mean().item(),
    }


def _luma(clip: Tensor) -> Tensor:
    return 0.2126 * clip[0] + 0.7152 * clip[1] + 0.0722 * clip[2]


def _nan_where(absent: Tensor, values: Tensor) -> Tensor:
    absent = absent.view(*absent.shape, *(1,) * (values.dim() - absent.dim()))
    return values.masked_fill(absent, math.nan)


def _ends(frames: int) -> int:
    return max(1, int(0.15 * frames))


def _colour_agreement(colours: Tensor, promised: Description) -> Tensor:
    """[N, T] from [N, T, 3]."""
    table = {name: torch.tensor(rgb, device=colours.device) / 127.5 - 1 for name, rgb in COLOURS.items()}
    agreement = []
    for seen, figure in zip(colours, promised.figures, strict=True):
        right = table[figure.colour]
        nearest = min((right - other).norm() for name, other in table.items() if name != figure.colour)
        agreement.append((1 - (seen - right).norm(dim=-1) / nearest).clamp_min(0))
    return torch.stack(agreement)


def _moves_as_promised(
    centres: Tensor, angles: Tensor, promised: Description, size: tuple[int, int], fps: float
) -> Tensor:
    """[N, T] booleans; the last frames, which have no next STEP, repeat the last one that has."""
    height, width = size
    slots = range(len(promised.figures))
    ring = torch.tensor([width, height], device=centres.device)
    way = _over_steps(round_the_ring(centres.diff(dim=1), ring))
    seconds = STEP / fps
    step = SPEED[promised.speed] * height * seconds  # pixels due
    turns = SPEED[promised.speed] * seconds  # of a rotation or an orbit due
    in_place = way.norm(dim=-1) < 0.5 * SPEED["slow"] * height * seconds
    match promised.motion:
        case "still":
            right = in_place
        case "rotating":
            sectors = [2 * math.pi / OUTLINES[figure.shape][0] for figure in promised.figures]
            sector = torch.tensor(sectors, device=angles.device)[:, None]
            spin = _over_steps(round_the_ring(angles.diff(dim=1), sector)[..., None])[..., 0] / (2 * math.pi)
            right = in_place & ((spin - turns).abs() < 0.5 * turns)
        case "bouncing":
            ways = torch.tensor([slack(promised, slot, width / height) for slot in slots])
            rates = torch.tensor([bounce_rates(promised, slot, width / height) for slot in slots])
            due = (4 * ways * rates).to(way)[:, None] * height * seconds
            right = (way.abs() - due).norm(dim=-1) < 0.5 * due.norm(dim=-1)
        case "circling":
            radii = torch.tensor([orbit_radius(promised, slot, width / height) for slot in slots])
            due = 2 * math.sin(math.pi * turns) * radii.to(way)[:, None] * height  # the chord
            right = (way.norm(dim=-1) - due).abs() < 0.5 * due
            now, later = way[:, :-STEP], way[:, STEP:]
            clockwise = now[..., 0] * later[..., 1] > now[..., 1] * later[..., 0]
            right = right[:, :-STEP] & clockwise
        case direction:
            heading = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[direction]
            right = (way - step * torch.tensor(heading, device=way.device)).norm(dim=-1) < 0.5 * step
    return torch.cat([right, right[:, -1:].expand(-1, centres.shape[1] - right.shape[1])], dim=1)


def _over_steps(differences: Tensor) -> Tensor:
    """Sums [N, T - STEP, C] over STEP frames from the differences [N, T - 1, C] between frames."""
    return differences.unfold(1, STEP, 1).sum(-1)


def _jerk(centres: Tensor, size: tuple[int, int]) -> Tensor:
    ring = torch.tensor([size[1], size[0]], device=centres.device)
    jerk = round_the_ring(centres.diff(dim=1), ring).diff(n=2, dim=1).norm(dim=-1).nanmean(0)
    return F.pad(jerk, (0, 3), value=math.nan)


def _mean_where(weights: Tensor, values: Tensor) -> Tensor:
    """[T] from [T, H, W]."""
    return (values * weights).sum((1, 2)) / weights.sum((1, 2)).clamp_min(1)


def _behind(masks: Tensor) -> Tensor:
    """[T, H, W]: 1 where the background is seen, two pixels off every figure."""
    return 1 - widened(widened((masks > 0).float())).amax(0)


def _background_agreement(clip: Tensor, masks: Tensor, promised: Description) -> Tensor:
    height, width = clip.shape[-2:]
    ideal, behind = backdrop([promised], height, width, clip.device)[0, :, None], _behind(masks)
    error = _mean_where(behind, (clip - ideal).abs().mean(0)) / 2
    return (1 - error / 0.15).clamp_min(0) * behind.amax((1, 2))


def _background_change(clip: Tensor, masks: Tensor) -> Tensor:
    behind, ends = _behind(masks), _ends(clip.shape[1])
    known = behind[:ends].sum(0)
    first = (clip[:, :ends] * behind[:ends]).sum(1) / known.clamp_min(1)
    return _mean_where(behind * (known > 0), (clip - first[:, None]).abs().mean(0)) * 127.5


def _sharpness(clip: Tensor, masks: Tensor) -> Tensor:
    """Mean gradient around the figures, weighted by itself, over the contrast: 1 / width of the edges."""
    bright, inside = brightness(clip), masks.amax(0)
    near = widened(widened(inside))
    around = widened(near) - near
    contrast = _mean_where(inside, bright) - _mean_where(around, bright)
    gradient = torch.hypot(bright.diff(dim=2)[:, :-1], bright.diff(dim=1)[:, :, :-1])
    gradient = gradient * (near[:, :-1, :-1] > 0)
    steepness = gradient.square().sum((1, 2)) / gradient.sum((1, 2)).clamp_min(1e-6)
    return steepness / contrast.clamp_min(0.05)
