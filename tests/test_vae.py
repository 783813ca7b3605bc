"""The streaming Wan VAE against recorded numbers of the original, and its stream property."""

import pytest
import torch
from conftest import assert_close, golden, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from specar_core.decode import decode_on
from specar_core.models.streaming import Enlarging, Spatial, StreamState
from specar_core.models.vae import VaeConfig, WanVAE


def load_vae():
    tensors, meta = golden("krea/sf_vae")
    state = weights(tensors)
    vae = WanVAE(VaeConfig.detect({name: tuple(value.shape) for name, value in state.items()}))
    vae.load_state_dict(state)
    assert vae.config == VaeConfig(meta["cfg"]["dim"], meta["cfg"]["num_res_blocks"], meta["cfg"]["z_dim"])
    return vae.eval().requires_grad_(False), tensors


VAE, T = load_vae()


def test_decode_whole():
    assert_close(VAE.decode(T["z"])[0], T["decode_whole"], 1e-4)


def test_decode_in_blocks_is_decode_whole():
    state, lengths, parts = StreamState(), [], []
    for block in T["z"].split(3, dim=2):
        frames, state = VAE.decode(block, state)
        parts.append(frames)
        lengths.append(frames.shape[2])
    assert lengths == T["decode_stream_block_lengths"].tolist()
    assert_close(torch.cat(parts, dim=2), T["decode_whole"], 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 3)])
def test_enlarging_is_a_convolution_of_repeated_pixels(size):
    layer = next(layer for layer in VAE.modules() if isinstance(layer, Enlarging))
    x = torch.randn(2, 3, *size, layer.weight.shape[1], generator=torch.Generator().manual_seed(0))
    large = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    expected = Spatial.forward(layer, large)
    assert_close(layer(x), expected, 1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("at_once", [2, 3, 8])
def test_latent_frames_that_are_decoded_together(at_once):
    done: list[int] = []
    frames, state = decode_on(VAE, T["z"], StreamState(), done.append, at_once)
    single, after = decode_on(VAE, T["z"], StreamState())
    assert [len(part) for part in (frames, single)] == [T["z"].shape[2]] * 2
    for ours, theirs in zip([*frames, *state.tails], [*single, *after.tails], strict=True):
        assert_close(ours, theirs, 1e-4)
    assert done == list(range(1, T["z"].shape[2] + 1))  # a progress bar counts latent frames


def test_encode():
    assert_close(VAE.encode(T["pixels_in"])[0], T["encode_9frames"], 1e-4)
    assert_close(VAE.encode(T["pixels_in"][:, :, :1])[0], T["encode_1frame"], 1e-4)


def test_stream_that_starts_with_zero_histories():
    """The variant of Self-Forcing's web demo: the first latent frame is up-sampled in time as well."""
    state = StreamState(started=True)
    for block, latents in enumerate(T["z"][:, :, :6].split(3, dim=2)):
        frames, state = VAE.decode(latents, state)
        assert_close(frames.clamp(-1, 1).transpose(1, 2), T[f"vb3_zero.block{block}"], 1e-4)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_any_chunks_decode_to_the_same_frames_R26(sizes):
    latents = torch.randn(1, 16, sum(sizes), 2, 3, generator=torch.Generator().manual_seed(1))
    whole, end = VAE.decode(latents)
    state, parts = StreamState(), []
    for part in latents.split(sizes, dim=2):
        frames, state = VAE.decode(part, state)
        parts.append(frames)
    assert_close(torch.cat(parts, dim=2), whole, 5e-5)
    again, _ = VAE.decode(latents[:, :, :1], state)
    assert_close(again, VAE.decode(latents[:, :, :1], end)[0], 5e-5)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 2), min_size=1, max_size=3))
def test_any_chunks_encode_to_the_same_latents(sizes):
    frames = torch.rand(1, 3, 1 + 4 * sum(sizes), 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1
    whole, _ = VAE.encode(frames)
    latents, state = VAE.encode(frames[:, :, :1])
    parts = [latents]
    for part in frames[:, :, 1:].split([4 * size for size in sizes], dim=2):
        latents, state = VAE.encode(part, state)
        parts.append(latents)
    assert torch.equal(torch.cat(parts, dim=2), whole)


def test_one_latent_frame_at_a_time_is_bit_identical_however_it_is_grouped():
    latents = torch.randn(1, 16, 7, 2, 3, generator=torch.Generator().manual_seed(3))

    def one_by_one(state, latents):
        parts = []
        for frame in latents.split(1, dim=2):
            frames, state = VAE.decode(frame, state)
            parts.append(frames)
        return torch.cat(parts, dim=2), state

    whole, _ = one_by_one(StreamState(), latents)
    head, state = one_by_one(StreamState(), latents[:, :, :4])
    tail, _ = one_by_one(state, latents[:, :, 4:])
    assert torch.equal(torch.cat([head, tail], dim=2), whole)


def test_stream_rebuilt_from_38_latent_frames_is_bit_identical():
    latents = torch.randn(1, 16, 44, 2, 2, generator=torch.Generator().manual_seed(4))
    full, rebuilt = StreamState(), StreamState(started=True)
    for i in range(43):
        _, full = VAE.decode(latents[:, :, i : i + 1], full)
        if i >= 43 - 38:
            _, rebuilt = VAE.decode(latents[:, :, i : i + 1], rebuilt)
    assert torch.equal(VAE.decode(latents[:, :, 43:], full)[0], VAE.decode(latents[:, :, 43:], rebuilt)[0])


def test_decoding_does_not_change_the_state_it_starts_from():
    _, state = VAE.decode(T["z"][:, :, :2])
    before = [tail.clone() for tail in state.tails if tail is not None]
    first, _ = VAE.decode(T["z"][:, :, 2:4], state)
    VAE.decode(T["z"][:, :, 5:7], state)
    assert torch.equal(VAE.decode(T["z"][:, :, 2:4], state)[0], first)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for t in state.tails if t is not None], strict=True))


def test_frames_that_are_no_whole_latent_frame_are_refused():
    with pytest.raises(ValueError, match="8 frames"):
        VAE.encode(T["pixels_in"][:, :, :8])
