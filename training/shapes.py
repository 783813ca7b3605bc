"""Procedural clips: coloured shapes that move over simple backgrounds, made on the fly on any device.

Lengths are in frame heights and times in seconds, so a scene looks alike at every size. Where a figure is
at a time is a closed formula: no state, no last frame, and a clip may start anywhere. Each figure keeps to
its own lane, so figures never cover each other: rows if they drift sideways, else columns. What drifts out
at one edge comes in at the opposite one. With speed and size fixed by the caption, only the phases are left
to chance, and twelve frames of context tell how a clip goes on.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specar_core.captions import COLOURS, OUTLINES, RADIUS, REACH, TINTS, WORDS, Figure

from .captions import Description

FPS = 16.0
HEIGHT, WIDTH = 64, 96
SPEED = {"": 0.0, "slow": 0.2, "fast": 0.5}  # heights a second, or turns a second
CELL = 0.25  # of a checkerboard, or a stripe's width


@dataclass(frozen=True)
class Scene:
    """A description and what it leaves open: three phases in [0, 1) a figure (x, y, angle) and the wording."""

    description: Description
    phases: tuple[tuple[float, float, float], ...]
    wording: int = 0

    @property
    def caption(self) -> str:
        return self.description.caption(self.wording)


def sample_scene(seed: int | random.Random) -> Scene:
    chance = random.Random(seed) if isinstance(seed, int) else seed
    motion, pattern, tint = (chance.choice(list(WORDS[kind])) for kind in ("motion", "pattern", "tint"))
    speed = "" if motion == "still" else chance.choice(("slow", "fast"))
    number = chance.choice((1, 1, 2, 2, 3))
    # A turning circle looks like a still one; three large figures do not fit into three rows.
    shapes = [shape for shape, outline in OUTLINES.items() if motion != "rotating" or outline[0] < 48]
    sizes = list(RADIUS)[: 1 if number == 3 else 2]
    colours = chance.sample(list(COLOURS), number)
    figures = [Figure(chance.choice(sizes), colour, chance.choice(shapes)) for colour in colours]
    if chance.random() < 0.4:
        figures = figures[:1] * number
    phases = tuple((chance.random(), chance.random(), chance.random()) for _ in range(number))
    return Scene(Description(tuple(figures), motion, speed, pattern, tint), phases, chance.randrange(2**32))


def render(
    scenes: Sequence[Scene],
    first_frame: int,
    frames: int,
    height: int = HEIGHT,
    width: int = WIDTH,
    device: torch.device | str = "cpu",
    fps: float = FPS,
) -> Tensor:
    """`frames` frames of each scene, from `first_frame` on: [B, 3, T, H, W] in [-1, 1], edges anti-aliased."""
    seconds = torch.arange(first_frame, first_frame + frames, device=device, dtype=torch.float64) / fps
    image = backdrop([scene.description for scene in scenes], height, width, device)[:, :, None]
    image = image.expand(-1, -1, frames, -1, -1)
    y = (torch.arange(height, device=device) + 0.5)[:, None] / height
    x = (torch.arange(width, device=device) + 0.5) / height
    aspect = width / height
    for slot in range(max(len(scene.phases) for scene in scenes)):
        shown = [slot < len(scene.phases) for scene in scenes]
        # A scene with fewer figures repeats its first one, with no weight.
        slots = [slot if slot < len(scene.phases) else 0 for scene in scenes]
        figures = [scene.description.figures[i] for scene, i in zip(scenes, slots, strict=True)]
        paths = torch.tensor(
            [_path(scene, i, aspect) for scene, i in zip(scenes, slots, strict=True)],
            device=device, dtype=torch.float64,
        )  # fmt: skip
        left, top, angle = (place[..., None, None] for place in _place(paths, seconds))  # [B, T, 1, 1]
        radius = _column([RADIUS[figure.size] for figure in figures], device)
        outline = _columns([OUTLINES[figure.shape] for figure in figures], device)
        colour = torch.tensor([COLOURS[figure.colour] for figure in figures], device=device) / 127.5 - 1
        right_of = torch.remainder(x - left + aspect / 2, aspect) - aspect / 2
        below = torch.remainder(y - top + 0.5, 1) - 0.5
        cover = coverage(outline, right_of / radius, below / radius, angle, radius * height)
        cover = (cover * _column(shown, device))[:, None]  # [B, 1, T, H, W]
        image = image + cover * (colour[:, :, None, None, None] - image)
    return image


def backdrop(
    descriptions: Sequence[Description], height: int, width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """What lies behind the figures: [B, 3, H, W] in [-1, 1]."""
    y = ((torch.arange(height, device=device) + 0.5) / height)[:, None].expand(height, width)
    x = ((torch.arange(width, device=device) + 0.5) / height).expand(height, width)
    column, row = (x / CELL).floor(), (y / CELL).floor()
    shades = {
        "plain": torch.ones_like(x),
        "gradient": 1.4 - 0.8 * y,
        "checkered": 0.7 + 0.6 * ((column + row) % 2),
        "striped": 0.7 + 0.6 * (column % 2),
    }
    shade = torch.stack([shades[description.pattern] for description in descriptions])[:, None]
    tint = torch.tensor([TINTS[description.tint] for description in descriptions], device=device)
    return shade * tint[:, :, None, None] / 127.5 - 1


def coverage(outline: Sequence[Tensor], x: Tensor, y: Tensor, angle: Tensor, pixels: Tensor) -> Tensor:
    """How much of each pixel a shape covers, in [0, 1]. `x` (right) and `y` (down) are in radii from its centre,
    `angle` is clockwise in radians, and a radius is `pixels` pixels. One formula serves all shapes: folded about
    its axes of symmetry, an outline is one straight line from a point to the next valley."""
    points, point, valley, hole, first = outline
    distance = torch.hypot(x, y)
    sector = 2 * math.pi / points
    turn = torch.remainder(torch.atan2(x, -y) - angle - first, sector)
    turn = torch.minimum(turn, sector - turn)
    valley_x, valley_y = valley * torch.cos(sector / 2), valley * torch.sin(sector / 2)
    length = torch.hypot(point - valley_x, valley_y)
    along, across = distance * torch.cos(turn), distance * torch.sin(turn)
    outside = ((along - point) * valley_y + across * (point - valley_x)) / length
    return (0.5 - torch.maximum(outside, hole - distance) * pixels).clamp(0, 1)


def lane(description: Description, slot: int, aspect: float) -> tuple[float, float, float, float]:
    """Left, top, width and height of the lane of one figure, in frame heights."""
    number = len(description.figures)
    if description.motion in ("left", "right"):
        return 0.0, slot / number, aspect, 1 / number
    return slot * aspect / number, 0.0, aspect / number, 1.0


def slack(description: Description, slot: int, aspect: float) -> tuple[float, float]:
    """How far the centre of a figure may be from the centre of its lane, sideways and up or down."""
    _, _, width, height = lane(description, slot, aspect)
    reach = REACH * RADIUS[description.figures[slot].size]
    return max(0.0, width / 2 - reach), max(0.0, height / 2 - reach)


def bounce_rates(description: Description, slot: int, aspect: float) -> tuple[float, float]:
    """Ways to and fro a second, sideways and up or down: not in step, so the round is never quite the same."""
    rate = SPEED[description.speed] / (4 * max(slack(description, slot, aspect)))
    return 0.8 * rate, rate


def orbit_radius(description: Description, slot: int, aspect: float) -> float:
    return min(*slack(description, slot, aspect), 0.25)


def _path(scene: Scene, slot: int, aspect: float) -> list[float]:
    """Coefficients of a figure's way, which is a sum (`_place`) of which each motion uses its part:
    start x, y; velocity x, y; bounce amplitude x, y; rate x, y; phase x, y;
    orbit radius, turns a second, phase; spin in turns a second, angle at the start in turns."""
    description, (phase_x, phase_y, phase) = scene.description, scene.phases[slot]
    left, top, width, height = lane(description, slot, aspect)
    wide, high = slack(description, slot, aspect)
    middle_x, middle_y = left + width / 2, top + height / 2
    start = [middle_x + (2 * phase_x - 1) * wide, middle_y + (2 * phase_y - 1) * high]
    velocity, bounce, orbit, spin = [0.0, 0.0], [0.0] * 6, [0.0] * 3, [0.0, 0.0]
    speed = SPEED[description.speed]
    match description.motion:
        case "left" | "right":
            start[0] = phase_x * aspect
            velocity[0] = speed if description.motion == "right" else -speed
        case "up" | "down":
            start[1] = phase_y
            velocity[1] = speed if description.motion == "down" else -speed
        case "bouncing":
            start = [middle_x, middle_y]
            bounce = [wide, high, *bounce_rates(description, slot, aspect), phase_x, phase_y]
        case "circling":
            start = [middle_x, middle_y]
            orbit = [orbit_radius(description, slot, aspect), speed, phase]
        case "rotating":
            spin = [speed, phase]
    return [*start, *velocity, *bounce, *orbit, *spin]


def _place(paths: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and angle at each time, [B, T] each, from the coefficients of `_path`. In float64, for clips of hours."""
    (x, y, speed_x, speed_y, wide, high, rate_x, rate_y, phase_x, phase_y,
     radius, turns, phase, spin, angle) = paths.T[:, :, None]  # fmt: skip
    orbit = 2 * math.pi * (phase + turns * seconds)
    x = x + speed_x * seconds + wide * _zigzag(phase_x + rate_x * seconds) + radius * torch.cos(orbit)
    y = y + speed_y * seconds + high * _zigzag(phase_y + rate_y * seconds) + radius * torch.sin(orbit)
    return x.float(), y.float(), (2 * math.pi * torch.remainder(angle + spin * seconds, 1)).float()


def _zigzag(turns: Tensor) -> Tensor:
    return 1 - 4 * (torch.remainder(turns, 1) - 0.5).abs()


def _column(values: Sequence[float], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None, None]  # [B, 1, 1, 1]


def _columns(rows: Sequence[Sequence[float]], device: torch.device | str) -> list[Tensor]:
    return [_column(values, device) for values in zip(*rows, strict=True)]
