"""Schedules by name: `spread:7`, `first`, `front:3`, `back:3`, `random:7@SEED`, `stride:5`, `list:0,5,10`, ...

Each name is one way to answer "which role generates this block". Numbers are exact integers; what cannot be done as
asked is either refused (UsageError) or done with a notice that says what no longer holds.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from .errors import UsageError
from .routers import Budgeted, Open, Routed, accept_share
from .schedule import Schedule, spread

SPECS = (
    "spread:K, first, front:K, back:K, random:K@SEED, keyed:K, stride:S, list:0,5,10, max-run:R, "
    "target-only, draft-only, and settled while it runs: sdvg:TAU, sdvg-mean:TAU, sdvg-quantile:K or :SHARE%, "
    "time-budget:SECONDS (@R keeps draft runs to R)"
)
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
    if isinstance(targets, Open):
        return replace(targets, policy=spec.strip()), notices
    if blocks and not targets:
        notices.append("no target block: the drafter generates everything, and no limit on draft runs holds")
    elif blocks and targets[0] != 0:
        notices.append(f"block 0 is a drafter block (first target block: {targets[0]}): the spread bound does not hold")
    return Schedule(blocks, tuple(targets), spec.strip()), notices


def whole(text: str, what: str, least: int = 0) -> int:
    """A whole number in plain digits; anything else is refused by name rather than rounded or guessed at."""
    if not re.fullmatch("[+-]?[0-9]{1,18}", text.strip()):
        raise UsageError(f"{what} must be a whole number, not '{text}'")
    if (value := int(text)) < least:
        raise UsageError(f"{what} must be at least {least}, not {value}")
    return value


def _budget(text: str, blocks: int, notices: Notices) -> int:
    k = whole(text, "the number of target blocks")
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
    seed = whole(seed_text or "0", "the seed of a random schedule")

    def order(block: int) -> bytes:
        return hashlib.sha256(f"specar:random:{seed}:{block}".encode()).digest()

    return sorted([0, *sorted(range(1, blocks), key=order)[: k - 1]]) if k else []


def _keyed(argument: str, blocks: int, notices: Notices) -> list[int]:
    """Block 0, the marks, and the rest where they make the longest draft run as short as it can be."""
    budget, _, marks_text = argument.partition("@")
    k = _budget(budget, blocks, notices)
    marks = _list(marks_text, blocks, notices) if marks_text else []
    if not marks:
        notices.append("no prompt begins after block 0: keyed is spread here")
    starts = sorted({0, *marks}) if blocks else []
    if len(starts) > k:
        raise UsageError(f"keyed:{k} is too few: block 0 and the changes of prompt take keyed:{len(starts)}")
    lengths = [end - start for start, end in zip(starts, [*starts[1:], blocks], strict=True)]
    counts = [1] * len(starts)
    for _ in range(k - len(starts)):
        gaps = [(-(-length // count), Fraction(length, count)) for length, count in zip(lengths, counts, strict=True)]
        counts[gaps.index(max(gaps))] += 1
    segments = zip(starts, lengths, counts, strict=True)
    return [start + i * length // count for start, length, count in segments for i in range(count)]


def _stride(argument: str, blocks: int, notices: Notices) -> list[int]:
    return list(range(0, blocks, whole(argument, "the stride", least=1)))


def _max_run(argument: str, blocks: int, notices: Notices) -> list[int]:
    """The cheapest even schedule whose draft runs are no longer than R: k = ceil(H / (R+1))."""
    run = whole(argument, "the longest draft run")
    return list(spread(blocks, -(-blocks // (run + 1))).targets)


def _list(argument: str, blocks: int, notices: Notices) -> list[int]:
    given = [whole(item, "a target block") for item in argument.split(",")]
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


def _sdvg(argument: str, blocks: int, notices: Notices) -> Routed:
    tau, max_run = _with_run(argument)
    notices += _open_notices(max_run)
    return Routed(blocks, _certain(blocks), max_run=max_run, tau=_number(tau, "the least score"))


def _sdvg_mean(argument: str, blocks: int, notices: Notices) -> Open:
    return replace(_sdvg(argument, blocks, notices), mean=True)


def _sdvg_quantile(argument: str, blocks: int, notices: Notices) -> Open:
    """K target blocks on average over many videos, or SHARE% drafter blocks; arXiv:2604.17397 caps what it keeps."""
    wanted, max_run = _with_run(argument)
    if wanted.endswith("%"):
        share, cap = _number(wanted[:-1], "the share of drafter blocks") / 100, 0.95
        if not 0 <= share <= 1:
            raise UsageError(f"the share of drafter blocks must be from 0% to 100%, not {wanted}")
    else:
        share, cap = 1 - whole(wanted, "the number of target blocks", least=1) / max(1, blocks), 1.0
    kept = accept_share(max(0.0, share), blocks, 1, cap)
    notices += _open_notices(max_run)
    return Routed(blocks, _certain(blocks), max_run=max_run, share=kept)


def _time_budget(argument: str, blocks: int, notices: Notices) -> Open:
    seconds, max_run = _with_run(argument)
    if not 0 < (budget := _number(seconds, "the time budget")) < math.inf:
        raise UsageError(f"the time budget must be a number of seconds above 0, not {seconds}")
    notices.append(f"target blocks as {budget:g} s allow, loading not counted: measured and planned while it runs")
    if max_run is not None:
        notices.append(f"draft runs are kept to {max_run} even if that takes longer than {budget:g} s")
    return Budgeted(blocks, _certain(blocks), max_run=max_run, seconds=budget)


def _open_notices(max_run: int | None) -> Notices:
    judged = "every draft is judged: how many blocks the target generates, and how long it takes, is open"
    return [judged] if max_run is not None else [judged, "no limit on draft runs holds"]


def _certain(blocks: int) -> tuple[int, ...]:
    return (0,) if blocks else ()


def _with_run(argument: str) -> tuple[str, int | None]:
    value, at, run = argument.partition("@")
    return value, whole(run, "the longest draft run") if at else None


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"{what} must be a number, not '{text}'")
    return value


# name: (does it take a value, where it puts the target blocks)
_POLICIES: dict[str, tuple[bool, Callable[[str, int, Notices], list[int] | Open]]] = {
    "spread": (True, _spread),
    "first": (False, _first),
    "front": (True, _front),
    "back": (True, _back),
    "random": (True, _random),
    "keyed": (True, _keyed),
    "stride": (True, _stride),
    "list": (True, _list),
    "max-run": (True, _max_run),
    "target-only": (False, _target_only),
    "draft-only": (False, _draft_only),
    "sdvg": (True, _sdvg),
    "sdvg-mean": (True, _sdvg_mean),
    "sdvg-quantile": (True, _sdvg_quantile),
    "time-budget": (True, _time_budget),
}
