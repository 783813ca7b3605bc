"""The report on a finished video that needs no download: hand-overs, drift, run position, flicker, likeness, health.

Everything is computed from what `measures` found on the frames and from which model generated which block. A boundary
is named by the roles on its two sides: DD, DT, TD or TT; DT and TD are hand-overs, the others the models' own seams.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .measures import MEASURES, Layout, Track, Values

KINDS = ("DD", "DT", "TD", "TT")
STATIC = 0.25  # of 255: a scene that changes less between frames is static, and its seams are measured against this
VISIBLE = 1.5  # a seam index above this is listed
FROZEN = 0.1  # of 255
BLANK = 1.0  # standard deviation of a frame's luma
PULSE = 10.0  # periodic flicker above this is flagged
ENDS = 0.15  # of the frames: the first and the last that drift compares (as HeliosBench does)
RESAMPLES, SEED = 10_000, 0  # of the bootstrap
RECOVERABLE = 0.01  # of the measure's mean: a run that strayed less from the reference has nothing to recover
Json = dict[str, Any]


def seams(track: Track, layout: Layout) -> list[Json]:
    """For each boundary, the difference across it against the usual one in the two blocks beside it: 1 means that no
    step is to be seen."""
    letters = [role[0].upper() for role in layout.roles]
    found = []
    for block in layout.boundaries:
        inside = np.concatenate([track.differences[layout.inside(beside)] for beside in (block - 1, block)])
        usual = float(np.median(inside)) if len(inside) else 0.0
        step = float(track.differences[layout.starts[block] - 1])
        kind = letters[block - 1] + letters[block]
        found.append({"block": block, "kind": kind, "seam": step / max(STATIC, usual), "static": usual < STATIC})
    return found


def by_kind(boundaries: Sequence[Json]) -> Json:
    """Seams of each kind of boundary, and `excess`: hand-overs against the drafter's own seams."""
    kinds: Json = {}
    for kind in KINDS:
        of_kind = [boundary for boundary in boundaries if boundary["kind"] == kind]
        values = [boundary["seam"] for boundary in of_kind]
        kinds[kind] = {
            "n": len(values),
            "median": _median(values),
            "p90": float(np.percentile(values, 90)) if values else None,
            "max": max(values, default=None),
            "static": sum(boundary["static"] for boundary in of_kind),
            "visible": [boundary["block"] for boundary in of_kind if boundary["seam"] > VISIBLE],
        }
    hand_overs = _median([boundary["seam"] for boundary in boundaries if boundary["kind"] in ("DT", "TD")])
    own = kinds["DD"]["median"]
    return {"excess": hand_overs / own if hand_overs is not None and own else None, "kinds": kinds}


def drift(track: Track, layout: Layout) -> Json:
    """Of each measure, the last 15 % of the frames against the first, and the slope of the blocks' means, per block:
    of each shot, and their means."""
    means = track.block_means(layout)
    shots: list[Json] = []
    for blocks in layout.shots:
        start, end = layout.starts[blocks.start], layout.starts[blocks.stop]
        ends = max(1, int(ENDS * (end - start)))
        measures = {}
        for name, values in track.measures.items():
            signed = float(values[end - ends : end].mean() - values[start : start + ends].mean())
            slope = _slope(means[name][blocks.start : blocks.stop])
            measures[name] = {"drift": abs(signed), "signed": signed, "slope": slope}
        shots.append({"start": start, "frames": ends, "measures": measures})

    def mean(name: str, what: str) -> float | None:
        values = [shot["measures"][name][what] for shot in shots]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    together = {name: {what: mean(name, what) for what in ("drift", "signed", "slope")} for name in track.measures}
    return {"measures": together, "shots": shots}


def flicker(track: Track, layout: Layout, periods: Mapping[str, int]) -> Json:
    """Flicker as VBench defines it (1 is still), jitter of the mean luma, and pulses at periods, in frames."""
    luma = track.measures["luma"]
    boundaries = track.differences[[layout.starts[block] - 1 for block in layout.boundaries]]
    pulses = {name: _pulse(luma, period) for name, period in periods.items()}
    return {
        "flicker": _still(track.differences),
        "of_blocks": _of_blocks(track, layout),
        "at_boundaries": _still(boundaries),
        "luma_jitter": float(np.abs(np.diff(luma, 2)).mean()) if layout.frames > 2 else None,
        "pulses": {
            name: {"period": periods[name], "power": power, "flagged": power is not None and power > PULSE}
            for name, power in pulses.items()
        },
    }


def health(track: Track, layout: Layout, reference: Track | None = None) -> Json:
    """`problems` is empty for a video that is worth measuring."""
    allowed = reference.measures["contrast"] if reference else np.full(layout.frames, np.inf)
    blank = np.flatnonzero((track.measures["contrast"] < BLANK) & (allowed >= BLANK)).tolist()
    frozen = track.differences < FROZEN
    likeness = [_peak(track.likeness[layout.of_block(block)]) for block in layout.blocks]
    problems = []
    if blank:
        problems.append(f"{len(blank)} of {layout.frames} frames are blank, the first is frame {blank[0]}")
    return {
        "problems": problems,
        "blank_frames": blank,
        "frozen_share": float(frozen.mean()) if len(frozen) else 0.0,
        "longest_frozen": _longest(frozen),
        "clipped_share": [float(track.clipped[layout.of_block(block)].mean()) for block in layout.blocks],
        "likeness_to_start": likeness,
        "most_like_start": max((value for value in likeness if value is not None), default=None),
    }


def by_position(track: Track, layout: Layout) -> dict[str, list[tuple[int, int, float]]]:
    """Of each measure, and of seam and flicker, for every draft block behind a target: the number of its run, its
    position in the run, and how much it differs from that target."""
    seam = {boundary["block"]: boundary["seam"] for boundary in seams(track, layout)}
    values: dict[str, Sequence[float | None]] = {
        **{name: list(means) for name, means in track.block_means(layout).items()},
        "seam": [seam.get(block) for block in layout.blocks],
        "flicker": _of_blocks(track, layout),
    }
    found: dict[str, list[tuple[int, int, float]]] = {name: [] for name in values}
    run = -1
    for block, position in enumerate(layout.positions):
        run += position == 0
        for name, of_blocks in values.items():
            if position:
                here, there = of_blocks[block], of_blocks[block - position]
                if here is not None and there is not None:
                    found[name].append((run, position, here - there))
    return found


def curve(samples: Sequence[tuple[int, int, float]]) -> Json:
    """Mean difference to the last target at each run position, with a bootstrapped band of 95 %.

    samples: (unit, position, difference). Units are what is resampled: the runs of one video, or several videos.
    The slope is that of a line through 0, where the curve begins by its definition.
    """
    if not samples:
        return {"positions": [], "n": [], "mean": [], "absolute": [], "low": [], "high": [], "slope": None}
    units, positions, differences = (np.array(column) for column in zip(*samples, strict=True))
    names, unit = np.unique(units, return_inverse=True)
    shape = len(names), positions.max() + 1
    counts, sums, sizes = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(counts, (unit, positions), 1)
    np.add.at(sums, (unit, positions), differences)
    np.add.at(sizes, (unit, positions), np.abs(differences))
    there = np.flatnonzero(counts.sum(0))
    counts, sums, sizes = counts[:, there], sums[:, there], sizes[:, there]
    drawn = resampled(len(names))
    with np.errstate(invalid="ignore"):
        means = (drawn @ sums) / (drawn @ counts)
    low, high = np.nanpercentile(means, (2.5, 97.5), axis=0)
    return {
        "positions": there.tolist(),
        "n": counts.sum(0).astype(int).tolist(),
        "mean": (sums.sum(0) / counts.sum(0)).tolist(),
        "absolute": (sizes.sum(0) / counts.sum(0)).tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "slope": float((positions * differences).sum() / (positions**2).sum()),
    }


def resampled(units: int) -> np.ndarray:
    """How often each unit is in each resample of the bootstrap: [RESAMPLES, units]."""
    return np.random.default_rng(SEED).multinomial(units, np.full(units, 1 / units), RESAMPLES)


def recovery(track: Track, reference: Track, layout: Layout) -> dict[str, float | None]:
    """How much of what a draft run strayed from the target-only video comes back with the next target: 1 is all of it.

    Averaged over the runs that strayed at all.
    """
    means, wanted = track.block_means(layout), reference.block_means(layout)
    found = {}
    for name in MEASURES:
        astray = np.abs(means[name] - wanted[name])
        floor = RECOVERABLE * np.abs(wanted[name]).mean()
        shares = [
            1 - astray[block] / astray[block - 1]
            for block in layout.blocks[1:]
            if layout.roles[block - 1 : block + 1] == ("drafter", "target") and astray[block - 1] > floor
        ]
        found[name] = float(np.mean(shares)) if shares else None
    return found


def paired(psnr: Values, ssim: Values, track: Track, reference: Track, layout: Layout) -> Json:
    """Against the target-only video of the same prompt, seed and noise: likeness to one rollout, and no quality."""
    own, wanted = drift(track, layout)["measures"], drift(reference, layout)["measures"]
    first_draft = layout.roles.index("drafter") if "drafter" in layout.roles else len(layout.roles)
    return {
        "psnr": ["inf" if np.isinf(value) else float(value) for value in psnr],
        "ssim": ssim.tolist(),
        "identical_blocks": int(np.isinf(psnr).sum()),
        "identical_before_first_draft": bool(np.isinf(psnr[:first_draft]).all()),
        "drift_beyond_target_only": {name: own[name]["drift"] - wanted[name]["drift"] for name in own},
        "recovery": recovery(track, reference, layout),
    }


def _of_blocks(track: Track, layout: Layout) -> list[float | None]:
    return [_still(track.differences[layout.inside(block)]) for block in layout.blocks]


def _still(differences: Values) -> float | None:
    return float((255 - differences.mean()) / 255) if len(differences) else None


def _slope(values: Values) -> float | None:
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _peak(values: Values) -> float | None:
    return None if np.isnan(values).any() else float(values.max())


def _longest(flags: Any) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def _pulse(luma: Values, period: int) -> float | None:
    """Power at a period against the median power from half to twice the period; None for a video too short to tell."""
    frames = np.arange(len(luma))
    if len(luma) < 3 * period:
        return None
    flat = luma - np.polyval(np.polyfit(frames, luma, 1), frames)
    power, frequency = np.abs(np.fft.rfft(flat)) ** 2, np.fft.rfftfreq(len(luma))
    around = power[(frequency >= 0.5 / period) & (frequency <= 2 / period)]
    usual = np.median(around)
    return float(power[np.abs(frequency - 1 / period).argmin()] / usual) if usual > 1e-9 * len(luma) else None
