"""Paired statistics: the prompt is the unit, and prompts are what the bootstrap resamples."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specar_core.metrics import resampled


def interval(values: ArrayLike) -> dict[str, Any]:
    """The mean over prompts and its 95 % percentile interval. Prompts without a value do not count."""
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return {"mean": None, "low": None, "high": None, "n": 0}
    means = _drawn(len(values)) @ values
    low, high = np.percentile(means, (2.5, 97.5))
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "n": len(values)}


def share(part: ArrayLike, whole: ArrayLike) -> dict[str, Any]:
    """The ratio of two means over prompts, with its interval; None where the whole may be nothing."""
    pairs = np.stack([np.asarray(part, dtype=float), np.asarray(whole, dtype=float)])
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    if not pairs.shape[1] or interval(pairs[1])["low"] <= 0:
        return {"mean": None, "low": None, "high": None, "n": pairs.shape[1]}
    parts, wholes = pairs @ _drawn(pairs.shape[1]).T
    low, high = np.percentile(parts / wholes, (2.5, 97.5))
    mean = pairs[0].mean() / pairs[1].mean()
    return {"mean": float(mean), "low": float(low), "high": float(high), "n": pairs.shape[1]}


@cache
def _drawn(prompts: int) -> np.ndarray:
    """Weights [RESAMPLES, prompts] of the prompts in each resample."""
    return resampled(prompts) / prompts


def said(found: dict[str, Any], digits: int = 3) -> str:
    """`0.123 [0.100, 0.150]`"""
    if found["mean"] is None:
        return "-"
    mean, low, high = (f"{found[key]:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
