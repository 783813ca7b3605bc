"""Latents to frames outside a rollout."""

import pytest
import torch
from models import KREA_GEOMETRY, golden_vae

from specar_core.backbones.helios_pair import GEOMETRY as HELIOS_GEOMETRY
from specar_core.decode import decode
from specar_core.geometry import decoded_frames
from specar_core.identity import identify
from specar_core.tensor_files import in_memory
from specar_core.weights import load_into

VAE = golden_vae()
LATENTS = torch.randn(1, 16, 9, 4, 6, generator=torch.Generator().manual_seed(3))


def whole(latents):
    return VAE.decode(latents)[0].clamp(-1, 1)


def joined(*arguments):
    return torch.cat(list(decode(VAE, *arguments)), dim=2)


@torch.inference_mode()
@pytest.mark.parametrize("clip", [1, 2, 3, 4, 9, 20])
def test_every_clip_is_a_stream_of_its_own(clip):
    clips = torch.cat([whole(part) for part in LATENTS.split(clip, dim=2)], dim=2)
    assert torch.allclose(joined(LATENTS, clip), clips, atol=1e-4)
    assert clips.shape[2] == decoded_frames(9, clip)


@torch.inference_mode()
@pytest.mark.parametrize("dropped", [0, 1, 3, 5, 6])
def test_dropped_frames_are_the_first(dropped):
    assert torch.equal(joined(LATENTS, 9, dropped), joined(LATENTS, 9)[:, :, dropped:])
    assert all(frames.shape[2] for frames in decode(VAE, LATENTS, 9, dropped))


@pytest.mark.parametrize("geometry", [KREA_GEOMETRY, HELIOS_GEOMETRY])
@pytest.mark.parametrize("blocks", [1, 2, 7, 36])
def test_the_frames_of_a_video_are_those_of_its_latents(geometry, blocks):
    latent_frames = blocks * geometry.latent_frames
    decoded = decoded_frames(latent_frames, geometry.clip(blocks))
    assert decoded - geometry.dropped == geometry.frames(blocks)


def test_tensors_in_memory_load_like_a_file():
    state = golden_vae().state_dict()
    checkpoint = in_memory(state, "what a host has")
    assert identify(checkpoint).kind == "wan-vae" and checkpoint.bytes == checkpoint.declared
    with torch.device("meta"):
        vae = type(VAE)(VAE.config)
    load_into(vae, checkpoint, dtype=torch.float32)
    assert all(torch.equal(value, state[name]) for name, value in vae.state_dict().items())
