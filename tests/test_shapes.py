"""Procedural clips and their captions: deterministic, readable back, and clear enough to be recognised."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specar_core.captions import COLOURS, MEANING, WORDS, Figure
from training.captions import Description, parse
from training.figures import BRIGHT, DARK, brightness, due_areas
from training.shapes import HEIGHT, WIDTH, Scene, backdrop, render, sample_scene

seeds = st.integers(0, 2**32 - 1)


def scene(motion="right", speed="slow", shape="star", phases=((0.3, 0.5, 0.0),), size="large"):
    figures = (Figure(size, "red", shape),) * len(phases)
    return Scene(Description(figures, motion, speed, "plain", "grey"), phases)


@settings(deadline=None, derandomize=True)
@given(seeds, seeds)
def test_a_caption_in_any_wording_reads_back(seed, wording):
    description = sample_scene(seed).description
    assert parse(description.caption(wording)) == description


@settings(deadline=None, derandomize=True)
@given(seeds, st.randoms(use_true_random=False))
def test_unknown_words_do_not_change_what_a_caption_says(seed, chance):
    sampled = sample_scene(seed)
    words = sampled.caption.split()
    for _ in range(3):
        words.insert(chance.randrange(len(words) + 1), "zxqv")
    assert parse(" ".join(words)) == sampled.description


def test_every_word_has_one_meaning():
    assert len(MEANING) == sum(len(words) for meanings in WORDS.values() for words in meanings.values())


def test_captions_are_said_in_many_ways():
    description = sample_scene(3).description
    assert len({description.caption(wording) for wording in range(200)}) > 150
    assert scene().caption == "a large red star drifting right slowly on a plain grey background"


@pytest.mark.parametrize(
    ("caption", "lacking"),
    [
        ("a dog on a plain grey background, still", "figures"),
        ("a small red star drifting left on a plain grey background", "speed"),
        ("a small red star drifting left slowly on a plain background", "tint"),
    ],
)
def test_a_foreign_caption_is_refused_with_what_it_lacks(caption, lacking):
    with pytest.raises(ValueError, match=f"lacks {lacking}"):
        parse(caption)


@settings(deadline=None, derandomize=True)
@given(seeds)
def test_a_seed_gives_one_scene(seed):
    assert sample_scene(seed) == sample_scene(seed) == sample_scene(random.Random(seed))


def test_all_of_the_grammar_is_sampled():
    descriptions = [sample_scene(seed).description for seed in range(500)]
    assert {len(description.figures) for description in descriptions} == {1, 2, 3}
    for kind in ("motion", "pattern", "tint"):
        assert {getattr(description, kind) for description in descriptions} == set(WORDS[kind])
    for kind in ("size", "colour", "shape"):
        figures = [figure for description in descriptions for figure in description.figures]
        assert {getattr(figure, kind) for figure in figures} == set(WORDS[kind])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, st.integers(0, 5000))
def test_any_frame_can_be_rendered_by_itself_and_in_any_batch(seed, first):
    scenes = [sample_scene(seed + i) for i in range(3)]
    clips = render(scenes, first, 5, 32, 48)
    assert clips.shape == (3, 3, 5, 32, 48)
    assert clips.min() >= -1 and clips.max() <= 1
    for one, clip in zip(scenes, clips, strict=True):
        assert torch.equal(render([one], first + 3, 1, 32, 48)[0], clip[:, 3:4])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seeds, st.integers(0, 60_000))
def test_figures_have_their_size_and_never_cover_each_other(seed, first):
    sampled = sample_scene(seed)
    bright = ((brightness(render([sampled], first, 1)[0]) - DARK) / (BRIGHT - DARK)).clamp(0, 1).sum()
    due = due_areas(sampled.description, HEIGHT, bright.device).sum()
    assert bright.item() == pytest.approx(due.item(), rel=0.12)


def test_what_drifts_out_comes_in_on_the_other_side():
    seconds = WIDTH / HEIGHT / 0.2
    clip = render([scene()], 0, 1 + round(seconds * 16))
    assert torch.allclose(clip[:, :, 0], clip[:, :, -1], atol=1e-3)


@pytest.mark.parametrize("shape", ["square", "triangle", "star"])
def test_rotation_is_clockwise(shape):
    middle = scene("rotating", "fast", shape, phases=((0.5, 0.5, 0.1),))
    clip = render([middle], 0, 9, 64, 64)[0]
    assert torch.allclose(clip[:, 0].rot90(-1, (1, 2)), clip[:, 8], atol=1e-3)  # half a second is a quarter of a turn


def test_backgrounds_are_darker_and_figures_brighter_than_what_tells_them_apart():
    descriptions = [
        Description((), "still", "", pattern, tint) for pattern in WORDS["pattern"] for tint in WORDS["tint"]
    ]
    assert brightness(backdrop(descriptions, HEIGHT, WIDTH).transpose(0, 1)).max() < DARK
    assert all(max(colour) / 255 > BRIGHT for colour in COLOURS.values())
