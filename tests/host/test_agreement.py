"""The nodes compute what the library computes, and the library what ComfyUI's own sampler computes."""

import json
from dataclasses import replace

import pytest
import torch
from graphs import PROMPT, node, tiny, with_latents
from safetensors.torch import load_file, save_file
from test_running import frames, latents

from specar_core.backbones.session import Rolling, SessionPair
from specar_core.backbones.tiny import TINY
from specar_core.generate import Listener, generate
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.models.vae import MEAN, STD
from specar_core.models.wan import sdpa
from specar_core.rollout import rollout
from specar_core.tensor_files import open_checkpoint

MACHINE = Machine(torch.device("cpu"), "fp32", "sdpa")


def quiet(what, done, total):
    """Loading takes no time here."""


def normalised(samples):
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (MEAN, STD))
    return (samples - mean) / std


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    "precision, policy, tolerance",
    [("fp32", "target-only", 1e-4), ("fp8", "target-only", 0.02), ("fp8-target", "first", 0.02)],
)
def test_the_sampler_agrees_with_the_library(host, fresh, tmp_path, precision, policy, tolerance):
    run = fresh.run(with_latents(tiny(seed=21, policy=policy, blocks=3, precision=precision)))
    job, _ = resolve(TINY, prompt=PROMPT, seed=21, blocks=3, width=64, height=48, schedule=policy)
    path, results = tmp_path / "library.mp4", []
    generate(job, replace(MACHINE, precision=precision), TINY.shipped, path, listener=Listener(block=results.append))
    expected = torch.cat([result.latents for result in results], dim=2)
    assert difference(normalised(latents(host, run)), expected) < tolerance
    if precision != "fp32":
        return
    levels = frames(host.output(run.outputs["save"])).astype(int) - frames(path)
    assert abs(levels).max() <= 4  # the same video, but for roundings on the way into its encoder


def test_the_library_agrees_with_comfyuis_own_sampler(host, fresh):
    """SamplerARVideo keeps the keys and values of the whole clip; so does a rolling cache that never fills."""
    blocks, seed = 3, 22
    config, target = TINY.configs["target"], TINY.shipped["target"]
    causal = host.base / "models" / "diffusion_models" / "tiny-causal.safetensors"
    told = {"causal_ar": True, **{name: getattr(config, name) for name in ("text_dim", "num_heads", "freq_dim")}}
    save_file(load_file(target), causal, metadata={"config": json.dumps({"transformer": told})})
    ours = tiny()
    graph = {
        "loader": ours["loader"],
        "text": ours["text"],
        "model": node("UNETLoader", unet_name=causal.name, weight_dtype="default"),
        "empty": node("EmptyARVideoLatent", width=64, height=48, length=12 * blocks - 3, batch_size=1),
        "kind": node("SamplerARVideo", num_frame_per_block=3),
        "sigmas": node("BasicScheduler", model=["model", 0], scheduler="simple", steps=4, denoise=1.0),
        "noise": node("RandomNoise", noise_seed=seed),
        "guider": node("BasicGuider", model=["model", 0], conditioning=["text", 0]),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["kind", 0],
            sigmas=["sigmas", 0],
            latent_image=["empty", 0],
        ),
    }
    run = fresh.run(with_latents(graph))
    assert run.end == "execution_success", run.error

    job, _ = resolve(TINY, blocks=blocks, schedule="target-only")
    network = TINY.load_network("target", target, MACHINE, sdpa, quiet)
    vae = TINY.load_vae(open_checkpoint(TINY.shipped["vae"]), MACHINE, quiet)
    session = TINY.pair({"target": network}, vae, job, "sdpa")
    rolling = {"target": Rolling(window=3 * blocks)}
    pair = SessionPair({"target": network}, vae, TINY.geometry, session.steps, rolling=rolling)
    prompt = TINY.load_text_encoder(TINY.shipped["text encoder"], MACHINE, quiet).encode([PROMPT])
    whole = torch.randn(1, 16, 3 * blocks, 6, 8, generator=torch.Generator().manual_seed(seed))

    def noise(block, draw):
        """As ComfyUI draws it: the clip's at once, and anew for every later step of a block."""
        if draw == 0:
            return whole[:, :, 3 * block : 3 * block + 3]
        generator = torch.Generator().manual_seed(seed + 1000 * block + draw - 1)
        return torch.randn(1, 16, 3, 6, 8, generator=generator)

    results = rollout(pair, job.schedule, lambda block: prompt, noise, height=48, width=64)
    expected = torch.cat([result.latents for result in results], dim=2)
    assert difference(normalised(latents(host, run)), expected) < 1e-3
