"""Prompts over time: written in seconds, snapped to blocks, asked for block by block.

    0s: a fox in snow
    4.5s fade 1s: the fox runs
    9s cut: night

A prompt begins with the block whose beginning is nearest. A fade goes to it over some blocks, in equal steps between
the text embeddings; it is complete in the first block after them. A cut begins a new clip: the block sees nothing of
those before it. Cut and fade in one line, or a cut inside a fade: the cut wins.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError
from .geometry import Geometry

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
# What follows the colon at once is not two digits: 1:30 would be read as "30" at 1 s.
_LINE = re.compile(rf"({_NUMBER})\s*s?((?:\s+(?:cut|fade\s+{_NUMBER}\s*s?))*)\s*:(?!\d\d\b)\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Shot:
    """One line of a timeline; `seconds` and `fade` are as they were written."""

    seconds: float
    text: str
    fade: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Cue:
    """A prompt from `block` on. fade: blocks on the way to it; cut: the block begins a new clip."""

    block: int
    text: str
    fade: int = 0
    cut: bool = False

    def to_dict(self) -> dict[str, Any]:
        extra = {name: value for name in ("fade", "cut") if (value := getattr(self, name))}
        return {"block": self.block, "text": self.text, **extra}


def prompt_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a text with prompts, and their numbers: empty ones and those that begin with # are passed over."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def parse(text: str) -> list[Shot]:
    """The lines of a timeline. UsageError names the one that is none."""
    shots: list[Shot] = []
    for number, line in prompt_lines(text):
        found = _LINE.fullmatch(line)
        if not found:
            raise UsageError(
                f"line {number} of the timeline is not `TIME: TEXT`, `TIME fade TIME: TEXT` or `TIME cut: TEXT` "
                f"with times in seconds: '{line[:60]}'"
            )
        how = found[2].lower()
        fade = re.search(rf"fade\s+({_NUMBER})", how)
        shots.append(Shot(float(found[1]), found[3], float(fade[1]) if fade else 0.0, "cut" in how))
        if len(shots) > 1 and shots[-2].seconds >= shots[-1].seconds:
            raise UsageError(f"line {number} of the timeline is not after the one above: {shots[-1].seconds:g} s")
    if not shots or shots[0].seconds:
        raise UsageError("a timeline begins with a prompt at 0s, as in `0s: a fox in snow`")
    return shots


def snap(shots: Sequence[Shot], geometry: Geometry) -> tuple[list[Cue], list[str]]:
    """Each shot at the block whose beginning is nearest, and what the user should know about it."""
    cues: list[Cue] = []
    notices = []
    for shot in shots:
        block = nearest_block(shot.seconds, replace(geometry, cuts=cuts(cues)))
        fade = max(1, round(shot.fade * geometry.fps / geometry.later_frames)) if shot.fade else 0
        if not cues and (shot.cut or fade):
            notices.append("the first prompt has nothing to cut or to fade from")
            fade, shot = 0, replace(shot, cut=False)
        if cues and cues[-1].block == block:
            notices.append(f"two prompts begin with block {block}: '{cues[-1].text}' is not shown")
            shot = replace(shot, cut=shot.cut or cues[-1].cut)
            cues.pop()
        if shot.cut and fade:
            notices.append(f"the prompt at {shot.seconds:g} s is a cut: its fade is ignored")
            fade = 0
        if shot.cut and cues and cues[-1].fade and cues[-1].block + cues[-1].fade >= block:
            notices.append(f"the cut at {shot.seconds:g} s ends the fade to '{cues[-1].text}' early")
        cues.append(Cue(block, shot.text, fade if block else 0, shot.cut and block > 0))
    return cues, notices


def nearest_block(seconds: float, geometry: Geometry) -> int:
    """The block whose beginning in the video is nearest, the earlier of two."""
    frame = seconds * geometry.fps
    after = geometry.blocks_for_frames(max(1, math.ceil(frame)))
    return min((after - 1, after), key=lambda block: abs(geometry.frames(block) - frame))


def cuts(cues: Sequence[Cue]) -> tuple[int, ...]:
    """The blocks that begin a new clip."""
    return tuple(cue.block for cue in cues if cue.cut)


def within(cues: Sequence[Cue], geometry: Geometry, blocks: int) -> tuple[tuple[Cue, ...], list[str]]:
    """The prompts of a video of so many blocks, and what is past its end."""
    length = geometry.seconds(blocks)
    past = [
        f"the prompt '{cue.text}' is past the end ({length:.2f} s): not used" for cue in cues if cue.block >= blocks
    ]
    return tuple(cue for cue in cues if cue.block < blocks), past


def describe(cues: Sequence[Cue], geometry: Geometry) -> list[str]:
    """The snapped plan, a line a prompt."""
    lines = []
    for cue in cues:
        fade = f" fade over {cue.fade} block{'s' * (cue.fade > 1)}" if cue.fade else ""
        how = " cut" if cue.cut else fade
        lines.append(f"{geometry.seconds(cue.block):.2f}s, block {cue.block}{how}: {cue.text}")
    return lines


def texts(cues: Sequence[Cue]) -> list[str]:
    """What is to be encoded, each text once."""
    return list(dict.fromkeys(cue.text for cue in cues))


def mixture(cues: Sequence[Cue], block: int) -> dict[str, float]:
    """What a block shows: texts and their weights, which sum to 1."""
    mixed = {cues[0].text: 1.0}
    for cue in cues[1:]:
        if cue.block <= block:
            share = 1.0 if cue.cut else min(1.0, (block - cue.block + 1) / (cue.fade + 1))
            mixed = {text: weight * (1 - share) for text, weight in mixed.items()}
            mixed[cue.text] = mixed.get(cue.text, 0.0) + share
    return {text: weight for text, weight in mixed.items() if weight}


class BlockPrompts:
    """The text embeddings [B, L, D] of each block; the same tensor again as long as the prompt does not change, which
    is how a model knows that it need not compute its text keys again.

    embeddings: a row [L, D] for each of `texts(cues)`, and behind them rows that belong to every block.
    """

    def __init__(self, cues: Sequence[Cue], embeddings: Tensor) -> None:
        self._cues, self._embeddings = cues, embeddings
        self._rows = {text: row for row, text in enumerate(texts(cues))}
        self._last: tuple[dict[str, float], Tensor] = ({}, embeddings)

    def __call__(self, block: int) -> Tensor:
        mixed = mixture(self._cues, block)
        if mixed != self._last[0]:
            rows = [weight * self._embeddings[self._rows[text]].float() for text, weight in mixed.items()]
            shown = torch.stack(rows).sum(dim=0, keepdim=True).to(self._embeddings.dtype)
            self._last = mixed, torch.cat([shown, self._embeddings[len(self._rows) :]])
        return self._last[1]
