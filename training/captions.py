"""The grammar of the captions: what a clip shows, said in many ways, and read back from any of them.

Every meaning has words of its own (`WORDS`), so reading a caption is a look-up word by word: unknown words
and word order do not matter, except that a figure's number, size and colour stand before its shape.
"""

import random
import re
from dataclasses import dataclass
from itertools import groupby
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

DRIFTING = ("drifting ", "moving ", "sliding ")
VERBS = {"still": ("standing ", "staying "), **dict.fromkeys(("left", "right", "up", "down"), DRIFTING)}
PREPOSITIONS = ("on", "over", "against", "in front of")
BACKGROUNDS = ("background", "backdrop")
SENTENCES = (
    "{figures} {motion}{speed} {place}",
    "{motion}{speed}, {figures} {place}",
    "{place}, {figures} {motion}{speed}",
    "a video of {figures} {motion}{speed} {place}",
)


@dataclass(frozen=True)
class Figure:
    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Description:
    """All that a caption promises. Figures are named from left to right, or top to bottom if they drift
    sideways; they share one motion. `speed` is empty when they stand still."""

    figures: tuple[Figure, ...]
    motion: str
    speed: str
    pattern: str
    tint: str

    def caption(self, wording: int = 0) -> str:
        """One of the ways to say it, chosen by `wording`; 0 is the plainest."""
        choose = random.Random(wording).choice if wording else lambda options: options[0]

        def say(kind: str, meaning: str | int) -> str:
            return choose(WORDS[kind][meaning])

        figures = []
        for figure, group in groupby(self.figures):
            number = len(list(group))
            words = [say("number", number), say("size", figure.size), say("colour", figure.colour)]
            figures.append(" ".join(words + [say("shape", figure.shape) + "s" * (number > 1)]))
        place = (choose(PREPOSITIONS), "a", say("pattern", self.pattern), say("tint", self.tint), choose(BACKGROUNDS))
        return choose(SENTENCES).format(
            figures=" and ".join(figures),
            motion=choose(VERBS.get(self.motion, ("",))) + say("motion", self.motion),
            speed=" " + say("speed", self.speed) if self.speed else "",
            place=" ".join(place),
        )


def parse(caption: str) -> Description:
    """Read a caption back.

    Raises:
        ValueError: something that every caption says is missing.
    """
    figures: list[Figure] = []
    scene: dict[str, Any] = {"speed": ""}
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
    missing = {"motion", "pattern", "tint"} - scene.keys() | (set() if figures else {"figures"})
    missing |= {"speed"} if not scene["speed"] and scene.get("motion") != "still" else set()
    if missing:
        raise ValueError(f"Not a caption of this grammar: {caption!r} lacks {', '.join(sorted(missing))}.")
    return Description(tuple(figures), scene["motion"], scene["speed"], scene["pattern"], scene["tint"])
