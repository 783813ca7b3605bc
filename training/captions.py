"""The grammar of the captions: what a clip shows, said in many ways, and read back from any of them."""

import random
from dataclasses import dataclass
from itertools import groupby

from specar_core.captions import WORDS, Figure, read

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
    figures, scene = read(caption)
    speed = scene.get("speed", "")
    missing = {"motion", "pattern", "tint"} - scene.keys() | (set() if figures else {"figures"})
    missing |= {"speed"} if not speed and scene.get("motion") != "still" else set()
    if missing:
        raise ValueError(f"Not a caption of this grammar: {caption!r} lacks {', '.join(sorted(missing))}.")
    return Description(figures, scene["motion"], speed, scene["pattern"], scene["tint"])
