"""Sigmas and model times of the three Helios models (arXiv:2603.04379; huggingface/diffusers 0.42.1), in float64.

More tokens ask for more noise: the exponent mu of the shift grows with the number of noisy tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


def shift_exponent(tokens: int) -> float:
    """mu of the resolution-dependent shift."""
    return 0.5 + 0.65 * (tokens - 256) / 3840


def shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def base_sigmas(steps: int, tokens: int) -> list[float]:
    """steps + 1 sigmas, the last 0, as in the two below."""
    shift = math.exp(shift_exponent(tokens))
    return [shifted(0.999 * (1 - step / steps), shift) for step in range(steps)] + [0.0]


def mid_sigmas(steps: int, tokens: int) -> list[float]:
    """Those inside a level; tokens are those of the level below, as in the published pipelines."""
    shift = math.exp(shift_exponent(tokens))
    return [shifted(sigma, shift) for sigma in _level_sigmas(steps)] + [0.0]


def distilled_sigmas(steps: int, tokens: int) -> list[float]:
    """Those inside a level. Here the shift is the exponent itself (`time_shift_type` linear)."""
    shift = shift_exponent(tokens)
    return [shifted(sigma, shift) for sigma in _level_sigmas(steps + 1)[:-1]] + [0.0]


def _level_sigmas(count: int) -> list[float]:
    return torch.linspace(0.999, 0.000999, count, dtype=torch.float64).tolist()


@dataclass(frozen=True)
class Level:
    """One resolution. Inside it a sigma of its own runs from 1 (its start) to 0 (its end)."""

    first_time: float  # model time of sigma 1
    last_time: float  # and of sigma 0
    keep: float  # a level above the first starts from keep * (up-sampled end of the level below)
    renoise: float  # + renoise * block noise

    def times(self, sigmas: Sequence[float]) -> list[int]:
        """Truncated to whole numbers, as the published pipelines do."""
        return [int(self.last_time + sigma * (self.first_time - self.last_time)) for sigma in sigmas]


def _levels() -> tuple[Level, ...]:
    """Three levels that share the global sigmas 0.999 (1 - j/1000) in equal parts, but model time in proportion to the
    stretch of sigma that each covers after re-noising (Pyramid Flow, arXiv:2410.05954, with gamma = 1/3)."""
    bounds = [0.999 * (1 - cut / 1000) for cut in (0, 333, 666, 1000)]
    starts, ends = bounds[:-1], bounds[1:]
    keeps = [1 / (2 * start + 1 - start) for start in starts]  # 2 = sqrt(1 + 1/gamma)
    renoised = [1 - (1 - start) * keep for start, keep in zip(starts, keeps, strict=True)]
    stretches = [start - end for start, end in zip([starts[0], *renoised[1:]], ends, strict=True)]
    cuts = [min(int(1000 * part / sum(stretches)), 999) for part in accumulate(stretches, initial=0.0)]
    times = [999 * (1 - cut / 1000) for cut in cuts]
    return tuple(
        Level(first, first + 0.999 * (after - first), keep, math.sqrt(3) * keep * start)  # 3 = 1/gamma
        for first, after, keep, start in zip(times, times[1:], keeps, starts, strict=False)
    )


LEVELS = _levels()
