from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specar_core.backbones.causal_wan import GEOMETRY as KREA
from specar_core.backbones.helios_pair import GEOMETRY as HELIOS
from specar_core.errors import UsageError


def test_published_counts():
    assert (KREA.frames(36), replace(KREA, dropped=0).frames(36)) == (426, 429)
    assert (KREA.first_frames, KREA.later_frames, HELIOS.first_frames, HELIOS.later_frames) == (9, 12, 33, 33)
    assert KREA.seconds(36) == 26.625
    assert [KREA.frames(blocks) for blocks in range(4)] == [0, 6, 18, 30]
    assert (HELIOS.frames(22), HELIOS.frames(44)) == (726, 1452)


@given(st.sampled_from([KREA, HELIOS]), st.integers(1, 100_000), st.booleans())
def test_fewest_blocks_that_hold_the_frames_R18(geometry, frames, keep):
    geometry = replace(geometry, dropped=0) if keep else geometry
    blocks = geometry.blocks_for_frames(frames)
    assert geometry.frames(blocks) >= frames
    assert blocks == 1 or geometry.frames(blocks - 1) < frames


@given(st.sampled_from([KREA, HELIOS]), st.integers(1, 5000))
def test_a_videos_own_length_gives_its_blocks(geometry, blocks):
    assert geometry.blocks_for_seconds(geometry.seconds(blocks)) == blocks


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_lengths_that_are_none(seconds):
    with pytest.raises(UsageError, match="more than 0 seconds"):
        KREA.blocks_for_seconds(seconds)


def test_no_frames():
    with pytest.raises(UsageError, match="not 0"):
        KREA.blocks_for_frames(0)


@pytest.mark.parametrize(
    "size, words",
    [
        ((833, 480), "width 833 is not a multiple of 16; use 832 or 848"),
        ((832, 1080), "height 1080 is not a multiple of 16; use 1072 or 1088"),
        ((832, 8), "height 8 is too small; the least is 16"),
        ((-16, 480), "too small"),
    ],
)
def test_sizes_that_do_not_fit_R89(size, words):
    with pytest.raises(UsageError, match=words):
        KREA.check_size(*size)


def test_latent_shape():
    KREA.check_size(832, 480)
    assert KREA.latent_shape(832, 480, batch=2) == (2, 16, 3, 60, 104)
