"""Scores against rendered ground truth: a true clip scores near 1, and each fault lowers the score that names it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from specar_core.captions import Figure
from training.captions import Description
from training.scores import AGREEMENTS, measure, summarise
from training.shapes import Scene, render, sample_scene

FRAMES = 24
FIRST, SECOND = Figure("large", "red", "star"), Figure("small", "blue", "circle")
PROMISED = Description((FIRST, SECOND), "up", "fast", "checkered", "brown")
PHASES = ((0.3, 0.6, 0.0), (0.6, 0.2, 0.0))


def scores(clip, promised=PROMISED):
    return summarise(measure(clip, promised))


def clip_of(description=PROMISED, frames=FRAMES):
    return render([Scene(description, PHASES)], 0, frames)[0]


@pytest.fixture(scope="module")
def true():
    return scores(clip_of())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, 50_000))
def test_a_true_clip_is_what_its_caption_promises(seed, first):
    scene = sample_scene(seed)
    measured = summarise(measure(render([scene], first, FRAMES)[0], scene.description))
    assert measured["count"] == measured["shape"] == 1
    assert min(measured["colour"], measured["background"]) > 0.98
    assert min(measured["size"], measured["outline"]) > 0.86
    assert measured["motion"] > 0.7  # a figure that bounces within three frames is on its way back
    assert measured["agreement"] > 0.93
    assert measured["size_kept"] > 0.95
    assert measured["sharpness"] > 0.5
    assert measured["jerk"] < 1.5
    assert max(measured["behind"], measured["colour_drift"], measured["flicker"]) < 0.5


BROKEN_PROMISES = {
    "colour": {"figures": (replace(FIRST, colour="orange"), SECOND)},
    "shape": {"figures": (replace(FIRST, shape="triangle"), SECOND)},
    "size": {"figures": (FIRST, replace(SECOND, size="large"))},
    "motion": {"motion": "down"},
    "background": {"tint": "olive"},
}


@pytest.mark.parametrize("name", BROKEN_PROMISES)
def test_another_scene_than_promised_lowers_its_own_score_alone(name, true):
    measured = scores(clip_of(replace(PROMISED, **BROKEN_PROMISES[name])))
    assert measured[name] < 0.8
    assert measured["agreement"] < true["agreement"] - 0.04
    for other in set(AGREEMENTS) - {name}:
        assert measured[other] == pytest.approx(true[other], abs=0.03)


@pytest.mark.parametrize("change", [{"speed": "slow"}, {"motion": "still", "speed": ""}, {"motion": "circling"}])
def test_another_motion_is_not_the_promised_one(change):
    assert scores(clip_of(replace(PROMISED, **change)))["motion"] < 0.3


@pytest.mark.parametrize("pattern", ["plain", "gradient", "striped"])
def test_another_pattern_is_not_the_promised_one(pattern):
    assert scores(clip_of(replace(PROMISED, pattern=pattern)))["background"] < 0.8


def test_a_missing_figure_counts_as_missing_in_every_score_of_figures(true):
    clip = clip_of()
    clip[:, FRAMES // 2 :, :, 48:] = clip[:, :1, :1, 48:]  # the right half, where the circle was
    measured = scores(clip)
    assert measured["count"] == 0.5
    for name in ("colour", "shape", "size", "motion"):
        assert measured[name] < true[name] - 0.15


def test_an_additional_figure_is_not_promised():
    still = replace(PROMISED, motion="still", speed="")
    clip = clip_of(still)
    clip[:, FRAMES // 4 :, 50:62, 80:94] = 1.0
    assert scores(clip, still)["count"] == 0.25


def test_blur_lowers_sharpness(true):
    clip = clip_of()
    blurred = F.avg_pool2d(F.pad(clip, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    measured = scores(blurred)
    assert measured["sharpness"] < 0.6 * true["sharpness"]
    assert measured["outline"] < true["outline"]
    assert measured["count"] == 1


def test_a_slow_change_of_colour_is_drift_and_not_flicker(true):
    clip = clip_of()
    measured = scores((clip + torch.linspace(0, -0.3, FRAMES)[:, None, None]).clamp(-1, 1))
    assert measured["colour_drift"] > true["colour_drift"] + 10
    assert measured["behind"] > true["behind"] + 10
    assert measured["flicker"] < 1


def test_flicker_is_flicker_and_not_drift(true):
    clip = clip_of()
    measured = scores(clip + 0.05 * torch.tensor([1.0, -1.0]).repeat(FRAMES // 2)[:, None, None])
    assert measured["flicker"] > true["flicker"] + 10
    assert measured["colour_drift"] < true["colour_drift"] + 5


def test_a_trembling_clip_is_not_smooth(true):
    tremble = [0, 2, -1, 1, -2, 0, 1, -1] * (FRAMES // 8)
    clip = torch.stack([frame.roll(by, -1) for frame, by in zip(clip_of().unbind(1), tremble, strict=True)], dim=1)
    assert scores(clip)["jerk"] > true["jerk"] + 2


def test_a_frozen_clip_does_not_move_as_promised():
    measured = scores(clip_of()[:, :1].expand(-1, FRAMES, -1, -1))
    assert measured["motion"] == 0
    assert measured["jerk"] == 0


def test_figures_that_shrink_do_not_keep_their_size(true):
    big, small = (clip_of(replace(PROMISED, figures=(replace(FIRST, size=size),) * 2))
                  for size in ("large", "small"))  # fmt: skip
    clip = torch.cat([big[:, : FRAMES // 2], small[:, FRAMES // 2 :]], dim=1)
    assert scores(clip)["size_kept"] < true["size_kept"] - 0.1


@pytest.mark.parametrize("level", [-1.0, 0.0, 1.0])
def test_an_empty_clip_agrees_with_nothing_but_part_of_its_background(level):
    measured = scores(torch.full((3, 12, 64, 96), level))
    assert measured["agreement"] < 0.4
    assert measured["motion"] == measured["shape"] == 0


def test_every_measurement_is_per_frame():
    assert {len(values) for values in measure(clip_of(), PROMISED).values()} == {FRAMES}
