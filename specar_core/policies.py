"""Schedules by name: `spread:7`, `first`, `front:3`, `back:3`, `random:7@SEED`, `stride:5`, `list:0,5,10`, ...

Each name is one way to answer "which role generates this block". Numbers are exact integers; what cannot be done as
asked is either refused (UsageError) or done with a notice that says what no longer holds.
"""

import hashlib
import re
from collections.abc import Callable

from .errors import UsageError
from .schedule import Schedule, spread

SPECS = "spread:K, first, front:K, back:K, random:K@SEED, stride:S, list:0,5,10, max-run:R, target-only, draft-only"
Notices = list[str]


def parse(spec: str, blocks: int) -> tuple[Schedule, Notices]:
    """The schedule that `spec` names for a video of `blocks` blocks, and what the user should know about it."""
    if blocks < 0:
        raise UsageError(f"a video cannot have {blocks} blocks")
    name, _, argument = spec.strip().partition(":")
    if name not in _POLICIES:
        raise UsageError(f"unknown schedule '{spec}'; known are {SPECS}")
    takes_argument, place = _POLICIES[name]
    if takes_argument != bool(argument):
        raise UsageError(
            f"schedule '{spec}' {'needs a value after the colon' if takes_argument else 'takes no value'}; "
            f"known are {SPECS}"
        )
    notices: Notices = []
    targets = place(argument, blocks, notices)
    if blocks and not targets:
        notices.append("no target block: the drafter generates everything, and no limit on draft runs holds")
    elif blocks and targets[0] != 0:
        notices.append(f"block 0 is a drafter block (first target block: {targets[0]}): the spread bound does not hold")
    return Schedule(blocks, tuple(targets), spec.strip()), notices


def _whole(text: str, what: str, least: int = 0) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        raise UsageError(f"{what} must be a whole number, not '{text}'")
    if (value := int(text)) < least:
        raise UsageError(f"{what} must be at least {least}, not {value}")
    return value


def _budget(text: str, blocks: int, notices: Notices) -> int:
    k = _whole(text, "the number of target blocks")
    if k > blocks:
        notices.append(f"{k} target blocks asked for, but the video has {blocks}: all of them are target blocks")
    return min(k, blocks)


def _spread(argument: str, blocks: int, notices: Notices) -> list[int]:
    return list(spread(blocks, _budget(argument, blocks, notices)).targets)


def _first(argument: str, blocks: int, notices: Notices) -> list[int]:
    return [0] if blocks else []


def _front(argument: str, blocks: int, notices: Notices) -> list[int]:
    return list(range(_budget(argument, blocks, notices)))


def _back(argument: str, blocks: int, notices: Notices) -> list[int]:
    """Block 0 and the last k-1: the negative control."""
    k = _budget(argument, blocks, notices)
    return [0, *range(blocks - k + 1, blocks)] if k else []


def _random(argument: str, blocks: int, notices: Notices) -> list[int]:
    """Block 0 and k-1 others. Ordering by a hash needs no generator, is equal on every machine, and a larger k only
    adds targets."""
    budget, _, seed_text = argument.partition("@")
    k = _budget(budget, blocks, notices)
    seed = _whole(seed_text or "0", "the seed of a random schedule")

    def order(block: int) -> bytes:
        return hashlib.sha256(f"specar:random:{seed}:{block}".encode()).digest()

    return sorted([0, *sorted(range(1, blocks), key=order)[: k - 1]]) if k else []


def _stride(argument: str, blocks: int, notices: Notices) -> list[int]:
    return list(range(0, blocks, _whole(argument, "the stride", least=1)))


def _max_run(argument: str, blocks: int, notices: Notices) -> list[int]:
    """The cheapest even schedule whose draft runs are no longer than R: k = ceil(H / (R+1))."""
    run = _whole(argument, "the longest draft run")
    return list(spread(blocks, -(-blocks // (run + 1))).targets)


def _list(argument: str, blocks: int, notices: Notices) -> list[int]:
    given = [_whole(item, "a target block") for item in argument.split(",")]
    if outside := [block for block in given if block >= blocks]:
        raise UsageError(f"block {outside[0]} lies outside the video: its {blocks} blocks are 0 to {blocks - 1}")
    targets = sorted(set(given))
    if targets != given:
        notices.append(f"target blocks sorted, each once: {','.join(map(str, targets))}")
    return targets


def _target_only(argument: str, blocks: int, notices: Notices) -> list[int]:
    return list(range(blocks))


def _draft_only(argument: str, blocks: int, notices: Notices) -> list[int]:
    return []


# name: (does it take a value, where it puts the target blocks)
_POLICIES: dict[str, tuple[bool, Callable[[str, int, Notices], list[int]]]] = {
    "spread": (True, _spread),
    "first": (False, _first),
    "front": (True, _front),
    "back": (True, _back),
    "random": (True, _random),
    "stride": (True, _stride),
    "list": (True, _list),
    "max-run": (True, _max_run),
    "target-only": (False, _target_only),
    "draft-only": (False, _draft_only),
}
