"""Measurements of made clips whose answer is known."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from clips import HEIGHT, LATER, WIDTH, frames, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from specar_core.backbones import backbone
from specar_core.errors import SpecarError
from specar_core.measures import LUMA, MEASURES, Layout, fidelity, measure, ssim
from specar_core.metrics import (
    by_kind,
    by_position,
    curve,
    drift,
    flicker,
    health,
    paired,
    recovery,
    seams,
)


def track_of(brightness, letters):
    return measure(frames(brightness), layout(letters))


def per_block(letters, values):
    spans = layout(letters)
    return [values[block] for block in spans.blocks for _ in range(spans.starts[block + 1] - spans.starts[block])]


def measured(picture):
    spans = layout("T", first=1)
    return {name: values[0] for name, values in measure([picture], spans).measures.items()}


def flat(*colour):
    return np.full((HEIGHT, WIDTH, 3), colour, np.uint8)


# ------------------------------------------------------------------------------------------------ of one frame


def test_measures_of_plain_pictures():
    grey = measured(flat(100, 100, 100))
    assert grey.pop("luma") == pytest.approx(100)
    assert {name: grey.pop(name) for name in ("red", "green", "blue")} == dict.fromkeys(("red", "green", "blue"), 100)
    assert all(value == pytest.approx(0, abs=1e-4) for value in grey.values())
    red = measured(flat(200, 0, 0))
    assert red["luma"] == pytest.approx(0.2126 * 200)
    assert red["saturation"] == 1
    assert red["colourfulness"] == pytest.approx(0.3 * np.hypot(200, 100))
    assert measured(flat(0, 0, 0))["saturation"] == 0


def test_sharpness_is_the_variance_of_the_laplacian():
    picture = flat(0, 0, 0)
    picture[20, 20] = 255
    responses = np.zeros((HEIGHT - 2) * (WIDTH - 2))
    responses[:5] = 255, 255, 255, 255, -4 * 255
    assert measured(picture)["sharpness"] == pytest.approx(responses.var(), rel=1e-5)


def test_motion_is_the_change_of_cells_of_4_by_4_pixels():
    still, half, within = flat(0, 0, 0), flat(0, 0, 0), flat(0, 0, 0)
    half[:, : WIDTH // 2] = 100
    within[::2] = 100  # half of each cell
    for picture in (half, within):
        track = measure([still, picture], layout("T", first=2))
        assert track.measures["motion"] == pytest.approx([50, 50])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_ssim_is_its_definition(seed):
    """On a picture of one window, by the formula in float64."""
    a, b = np.random.default_rng(seed).integers(0, 256, (2, 11, 11)).astype(float)
    distance = np.arange(11) - 5
    weights = np.exp(-(distance[:, None] ** 2 + distance**2) / (2 * 1.5**2))
    weights /= weights.sum()
    mean = lambda values: (weights * values).sum()  # noqa: E731
    variance_a, variance_b = mean((a - mean(a)) ** 2), mean((b - mean(b)) ** 2)
    covariance = mean((a - mean(a)) * (b - mean(b)))
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    expected = (2 * mean(a) * mean(b) + c1) * (2 * covariance + c2)
    expected /= (mean(a) ** 2 + mean(b) ** 2 + c1) * (variance_a + variance_b + c2)
    found = ssim(torch.tensor(a, dtype=torch.float32)[None], torch.tensor(b, dtype=torch.float32)[None])
    assert found.item() == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------------------------------------- of a whole clip


def test_a_still_clip_has_no_drift_no_flicker_and_no_seam():
    letters = "TddT"
    spans, track = layout(letters), track_of([0] * layout(letters).frames, letters)
    for told in drift(track, spans)["measures"].values():
        assert told == pytest.approx({"drift": 0, "signed": 0, "slope": 0}, abs=1e-9)
    told = flicker(track, spans, {"block": LATER})
    assert told["flicker"] == told["at_boundaries"] == 1 and told["luma_jitter"] == 0
    assert told["pulses"]["block"] == {"period": LATER, "power": None, "flagged": False}
    assert [seam["seam"] for seam in seams(track, spans)] == [0, 0, 0]
    assert by_kind(seams(track, spans))["kinds"]["TD"]["static"] == 1
    told = health(track, spans)
    assert told["frozen_share"] == 1 and told["longest_frozen"] == spans.frames - 1 and not told["problems"]


def test_a_steady_change_is_drift_and_no_seam():
    letters = "TdddTddd"
    spans = layout(letters)
    track = track_of(np.arange(spans.frames), letters)
    ends = int(0.15 * spans.frames)
    told = drift(track, spans)["measures"]
    assert told["luma"]["signed"] == pytest.approx(spans.frames - ends)
    assert told["contrast"]["drift"] == pytest.approx(0, abs=0.1)
    assert told["motion"]["drift"] == pytest.approx(0, abs=1e-4)
    assert all(seam["seam"] == pytest.approx(1) for seam in seams(track, spans))
    assert by_kind(seams(track, spans))["excess"] == pytest.approx(1)
    assert flicker(track, spans, {})["flicker"] == pytest.approx(254 / 255)


@pytest.mark.parametrize(("block", "kind"), [(1, "TD"), (2, "DD"), (4, "DT"), (5, "TT")])
def test_a_jump_at_a_boundary_is_the_seam_of_its_kind(block, kind):
    letters = "TdddTTdd"
    spans = layout(letters)
    brightness = np.arange(spans.frames) + 9 * (np.arange(spans.frames) >= spans.starts[block])
    found = seams(track_of(brightness, letters), spans)
    assert [seam["block"] for seam in found if seam["seam"] > 1.01] == [block]
    assert found[block - 1] == {"block": block, "kind": kind, "seam": pytest.approx(10), "static": False}
    kinds = by_kind(found)["kinds"]
    assert {name: told["visible"] for name, told in kinds.items() if told["visible"]} == {kind: [block]}
    assert kinds[kind]["max"] == pytest.approx(10)


def test_seams_at_hand_overs_are_in_excess_of_the_drafters_own():
    letters = "TddTddTdd"
    spans = layout(letters)
    jumps = sum(4.0 * (np.arange(spans.frames) >= spans.starts[block]) for block in (1, 3, 4, 6, 7))
    told = by_kind(seams(track_of(np.arange(spans.frames) + jumps, letters), spans))
    assert told["excess"] == pytest.approx(5)
    assert [told["kinds"][kind]["n"] for kind in ("DD", "DT", "TD", "TT")] == [3, 2, 3, 0]


def test_pulses_at_the_period_of_the_blocks_are_flagged_and_slow_ones_are_not():
    letters = "TdddddddT"
    spans = layout(letters)
    time = np.arange(spans.frames)
    noise = np.random.default_rng(0).normal(0, 0.5, spans.frames)
    for period, flagged in ((LATER, True), (60, False)):
        track = track_of(6 * np.sin(2 * np.pi * time / period) + noise, letters)
        assert flicker(track, spans, {"block": LATER})["pulses"]["block"]["flagged"] is flagged
    brightness = 5 * (time % 2)
    assert flicker(track_of(brightness, letters), spans, {})["luma_jitter"] == pytest.approx(10)


def test_a_clip_that_returns_to_its_start_is_like_it():
    letters = "Tddddddd"
    spans = layout(letters)
    away = frames([0] * spans.frames)
    for index in range(spans.starts[1], spans.starts[7]):
        away[index] = np.roll(away[index], 8, 1)  # half a period of the waves
    told = health(measure(away, spans), spans)
    assert told["likeness_to_start"][:6] == [None] * 6
    assert told["likeness_to_start"][6] < 0.5
    assert told["likeness_to_start"][7] == told["most_like_start"] == pytest.approx(1)


def test_blank_frames_are_a_problem_unless_the_reference_has_them():
    spans = layout("T")
    shown = [flat(9, 9, 9), *frames([0] * 4), flat(9, 9, 9)]
    track = measure(shown, spans)
    assert health(track, spans)["problems"] == ["2 of 6 frames are blank, the first is frame 0"]
    assert health(track, spans, track)["problems"] == []
    assert health(measure([flat(1, 99, 255)] * 6, spans), spans)["clipped_share"] == [1]


def test_a_cut_is_no_seam_and_begins_a_shot_of_its_own():
    spans = replace(layout("TdddTd"), cuts=(3,))
    brightness = np.arange(spans.frames) + 40 * (np.arange(spans.frames) >= spans.starts[3])
    track = measure(frames(brightness), spans)
    assert [seam["block"] for seam in seams(track, spans)] == [1, 2, 4, 5]
    assert flicker(track, spans, {})["at_boundaries"] == pytest.approx(254 / 255)
    told = drift(track, spans)
    first, second = ((spans.starts[3] - spans.starts[0]), (spans.starts[6] - spans.starts[3]))
    expected = [first - int(0.15 * first), second - int(0.15 * second)]
    assert [shot["measures"]["luma"]["signed"] for shot in told["shots"]] == pytest.approx(expected)
    assert told["measures"]["luma"]["signed"] == pytest.approx(sum(expected) / 2)
    assert spans.positions == (0, 1, 2, None, 0, 1)


@pytest.mark.parametrize("name", ["tiny", "helios"])
@pytest.mark.parametrize("extra", [{}, {"dropped": 0}, {"image": True, "dropped": 0}, {"cuts": (2, 4)}])
def test_blocks_begin_where_the_geometry_says(name, extra):
    geometry = replace(backbone(name).geometry, **extra)
    prompts = [{"block": 0, "text": "a"}, *({"block": block, "text": "b", "cut": True} for block in geometry.cuts)]
    blocks = [{"role": "target"}] * 6
    told = {"blocks": blocks, "frames": geometry.frames(6), "prompts": prompts}
    assert Layout.of(told, backbone(name).geometry).starts == tuple(geometry.frames(block) for block in range(7))


# -------------------------------------------------------------------------------------------------- run position


def test_the_curve_tells_how_a_run_goes_away_from_its_target():
    letters = "TdddTddT"
    track = track_of(per_block(letters, [0, 2, 4, 6, 30, 32, 34, 7]), letters)
    told = curve(by_position(track, layout(letters))["luma"])
    assert told["positions"] == [1, 2, 3] and told["n"] == [2, 2, 1]
    for name in ("mean", "absolute", "low", "high"):
        assert told[name] == pytest.approx([2, 4, 6], abs=0.01)
    assert told["slope"] == pytest.approx(2, abs=0.01)


def test_the_band_holds_the_runs_and_a_head_run_counts_for_nothing():
    letters = "ddTdTd"
    track = track_of(per_block(letters, [50, 60, 0, 10, 20, 40]), letters)
    told = curve(by_position(track, layout(letters))["luma"])
    assert told["n"] == [2] and told["mean"] == pytest.approx([15], abs=0.01)
    assert (told["low"][0], told["high"][0]) == pytest.approx((10, 20), abs=0.01)
    assert curve([])["slope"] is None


@pytest.mark.parametrize(("after", "recovered"), [(0, 1), (5, 0.5), (10, 0), (20, -1)])
def test_what_a_target_block_brings_back(after, recovered):
    letters = "TddT"
    reference = track_of(per_block(letters, [0, 0, 0, 0]), letters)
    track = track_of(per_block(letters, [0, 5, 10, after]), letters)
    told = recovery(track, reference, layout(letters))
    assert told["luma"] == pytest.approx(recovered, abs=0.01)
    assert told["contrast"] is None  # never astray


# --------------------------------------------------------------------------------------------------------- pairs


def test_psnr_and_ssim_of_each_block():
    letters = "TTdd"
    spans = layout(letters)
    reference, other = ([0, 0, 0, 0], [0, 0, 5, 20])
    shown, wanted = (frames(per_block(letters, values)) for values in (other, reference))
    psnr, likeness = fidelity(shown, wanted, spans)
    assert psnr[:2].tolist() == [np.inf, np.inf]
    assert psnr[2:] == pytest.approx([20 * np.log10(255 / 5), 20 * np.log10(255 / 20)])
    assert likeness[:2].tolist() == [1, 1] and 1 > likeness[2] > likeness[3]
    told = paired(psnr, likeness, measure(shown, spans), measure(wanted, spans), spans)
    assert told["psnr"][:2] == ["inf", "inf"] and told["identical_blocks"] == 2
    assert told["identical_before_first_draft"] is True
    assert told["drift_beyond_target_only"]["luma"] == pytest.approx(20, abs=0.01)
    early, _ = fidelity(frames(per_block(letters, [0, 1, 5, 20])), wanted, spans)
    assert paired(early, likeness, *[measure(wanted, spans)] * 2, spans)["identical_before_first_draft"] is False


def test_other_frames_than_the_report_says_are_refused():
    with pytest.raises(SpecarError, match="it has 5 frames, and its report says 6"):
        measure(frames([0] * 5), layout("T"))
    with pytest.raises(SpecarError, match="it has 7 frames, and its report says 6"):
        fidelity(frames([0] * 6), frames([0] * 7), layout("T"))


def test_memory_holds_two_frames():
    seen, most = [], 0

    def shown():
        nonlocal most
        for brightness in range(18):
            frame = frames([brightness])[0]
            seen.append(weakref.ref(frame))
            gc.collect()
            most = max(most, sum(ref() is not None for ref in seen))
            yield frame
            del frame

    measure(shown(), layout("Td"))
    assert most <= 2


def test_measures_are_the_ones_of_the_track():
    assert set(track_of([0] * 6, "T").measures) == set(MEASURES)
    assert LUMA.sum() == pytest.approx(1)
