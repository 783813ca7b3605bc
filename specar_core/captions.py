"""What the words of the tiny pair's captions mean, and what the things they name look like.

Every meaning has words of its own (`WORDS`), so reading a caption is a look-up word by word: unknown words
and word order do not matter, except that a figure's number, size and colour stand before its shape.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

WORDS: dict[str, dict[Any, tuple[str, ...]]] = {
    "number": {1: ("a", "one"), 2: ("two",), 3: ("three",)},
    "size": {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")},
    "colour": {
        "red": ("red",), "orange": ("orange",), "yellow": ("yellow",), "green": ("green",),
        "cyan": ("cyan", "turquoise"), "blue": ("blue",), "purple": ("purple", "violet"), "white": ("white",),
    },
    "shape": {
        "circle": ("circle", "disc", "ball"), "ring": ("ring", "hoop"), "square": ("square", "tile"),
        "triangle": ("triangle",), "star": ("star",),
    },
    "motion": {
        "still": ("still", "motionless"), "left": ("left", "leftwards"), "right": ("right", "rightwards"),
        "up": ("up", "upwards"), "down": ("down", "downwards"), "bouncing": ("bouncing", "rebounding"),
        "rotating": ("rotating", "spinning"), "circling": ("circling", "orbiting"),
    },
    "speed": {"slow": ("slowly", "gently"), "fast": ("fast", "quickly", "rapidly")},
    "pattern": {
        "plain": ("plain", "flat"), "gradient": ("gradient", "shaded"), "checkered": ("checkered", "chequered"),
        "striped": ("striped", "stripy"),
    },
    "tint": {"grey": ("grey", "gray"), "navy": ("navy",), "brown": ("brown",), "olive": ("olive",)},
}  # fmt: skip
MEANING = {
    word: (kind, meaning) for kind, meanings in WORDS.items() for meaning, words in meanings.items() for word in words
}

COLOURS = {
    "red": (230, 35, 35), "orange": (250, 135, 15), "yellow": (250, 230, 40), "green": (40, 215, 70),
    "cyan": (50, 220, 230), "blue": (45, 95, 250), "purple": (170, 50, 225), "white": (250, 250, 250),
}  # fmt: skip
# Every shade of a tint is darker than every colour: that alone tells figures from backgrounds.
TINTS = {"grey": (92, 92, 98), "navy": (28, 38, 90), "brown": (92, 58, 36), "olive": (70, 78, 30)}
RADIUS = {"small": 0.13, "large": 0.19}  # frame heights
REACH = 1.35  # the furthest point of any shape, in radii
# shape: (points, radius of the points, of the valleys between them, of the hole or -1, angle of the first point)
OUTLINES = {
    "circle": (48, 1.0, math.cos(math.pi / 48), -1.0, 0.0),
    "ring": (48, 1.05, 1.05 * math.cos(math.pi / 48), 0.5, 0.0),
    "square": (4, 0.9 * math.sqrt(2), 0.9, -1.0, math.pi / 4),
    "triangle": (3, REACH, REACH / 2, -1.0, 0.0),
    "star": (5, REACH, 0.6, -1.0, 0.0),
}


@dataclass(frozen=True)
class Figure:
    size: str
    colour: str
    shape: str

    @property
    def area(self) -> float:
        """In squares of the frame's height."""
        return unit_area(self.shape) * RADIUS[self.size] ** 2


def unit_area(shape: str) -> float:
    """Of a shape, in squares of its radius."""
    points, point, valley, hole, _ = OUTLINES[shape]
    return points * point * valley * math.sin(math.pi / points) - math.pi * max(hole, 0) ** 2


def read(caption: str) -> tuple[tuple[Figure, ...], dict[str, str]]:
    """The figures that a caption names, and its motion, speed, pattern and tint as far as it tells them."""
    figures: list[Figure] = []
    scene: dict[str, str] = {}
    pending: dict[str, Any] = {}
    for word in re.findall("[a-z]+", caption.lower()):
        kind, meaning = MEANING.get(word) or MEANING.get(word.removesuffix("s")) or ("", "")
        if kind == "shape" and {"size", "colour"} <= pending.keys():
            figures += [Figure(pending["size"], pending["colour"], meaning)] * pending.get("number", 1)
            pending = {}
        elif kind in ("number", "size", "colour"):
            pending[kind] = meaning
        elif kind:
            scene[kind] = meaning
    return tuple(figures), scene
