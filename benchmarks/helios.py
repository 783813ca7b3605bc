"""Helios-Base 14B + Helios-Distilled 14B at full size with random weights, on one GPU of 80 GB or more.

    python -m benchmarks.helios --out benchmarks/results/helios.json      (under four minutes on an H200)
    python -m benchmarks.helios --smoke                                   (a tiny pair, on any machine: does it run?)

Times single forwards at the three resolutions, then a whole rollout of 22 blocks at 640x384 with k = 1, frames encoded
to mp4 as they leave. A target block takes as long wherever it stands, so the times for other k are sums of measured
blocks. Weights are random: times, memory and the number of frames are those of the real ones.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specar_core.backbones.base import Machine
from specar_core.backbones.helios import HELIOS
from specar_core.backbones.helios_pair import HeliosPair
from specar_core.job import Job, resolve
from specar_core.models.attention import choose
from specar_core.models.compiled import compile_blocks
from specar_core.models.helios import FLOAT32_PARAMETERS, HeliosConfig, HeliosTransformer
from specar_core.models.vae import VaeConfig, WanVAE
from specar_core.noise import noise
from specar_core.rollout import rollout
from specar_core.video import VideoWriter, to_rgb8

from .common import machine, milliseconds, random_network

TINY = HeliosConfig(
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=2,
    ffn_dim=96,
    text_dim=24,
    freq_dim=32,
    rope_dim=(8, 4, 4),
)
SMOKE = replace(HELIOS, config=TINY, vae_config=VaeConfig(dim=2, residual_blocks=1), width=64, height=64, blocks=3)
DERIVED = (2, 4)


def build(job: Job, where: Machine) -> HeliosPair:
    backbone, device = job.backbone, str(where.device)
    choice = choose(where.device, where.dtype, where.attention)

    def network() -> HeliosTransformer:
        return HeliosTransformer(backbone.config, attend=choice.attend)

    networks = {role: random_network(network, where.dtype, device, FLOAT32_PARAMETERS) for role in job.roles}
    if where.compile:
        for built in networks.values():
            compile_blocks(built)
    vae_type = torch.float16 if where.device.type == "cuda" else torch.float32
    vae = random_network(lambda: WanVAE(backbone.vae_config), vae_type, device).arrange()
    return backbone.pair(networks, vae, job, choice.name)


@torch.inference_mode()
def calls(pair: HeliosPair, job: Job) -> dict[str, float]:
    """Milliseconds of each kind of call a block is made of."""
    device = pair.device
    _, channels, frames, height, width = shape = pair.geometry.latent_shape(job.width, job.height)
    with pair.lease(job.height, job.width, 1, lambda step: None) as run:
        context = run.begin()
    prompt = torch.randn(2, *job.backbone.text_shape, device=device)
    drafter = pair.models["drafter"]
    result = {
        "history patches": milliseconds(lambda: drafter.encode_history(*context.parts())),
        "text keys, one prompt": milliseconds(lambda: drafter.encode_text(prompt[:1])),
    }
    for batch, which, model in ((1, "forward", drafter), (2, "forward with guidance", pair.models["target"])):
        text, history = model.encode_text(prompt[:batch]), model.encode_history(*context.parts())
        repeated = history._replace(tokens=history.tokens.repeat(batch, 1, 1))
        t = torch.full((batch,), 500.0, device=device)
        for level, factor in (("full", 1), ("half", 2), ("quarter", 4)):
            x = torch.randn(batch, channels, frames, height // factor, width // factor, device=device)
            result[f"{which}, {level}"] = milliseconds(lambda: model(x, t, repeated, text), repeats=5)  # noqa: B023
    chunk = torch.randn(shape, device=device)
    result["vae decode, one block"] = milliseconds(lambda: run.commit(context, chunk, prompt), repeats=5)
    return {name: round(value, 2) for name, value in result.items()}


def video(pair: HeliosPair, job: Job, path: Path) -> dict[str, Any]:
    """One whole video: seconds of every block and of its decoding, forwards by role, peak memory."""
    shape = pair.geometry.latent_shape(job.width, job.height)
    prompt = torch.randn(2, *job.backbone.text_shape, device=pair.device).to(pair.models["target"].dtype)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds: dict[str, list[float]] = {role: [] for role in job.roles}
    forwards, decoding = dict.fromkeys(job.roles, 0), []
    started = time.perf_counter()
    with VideoWriter(path, pair.geometry.fps, job.width, job.height) as writer:
        for result in rollout(
            pair,
            job.schedule,
            lambda block: prompt,
            lambda block, draw: noise(0, block, draw, shape),
            height=job.height,
            width=job.width,
        ):
            writer.add_block(to_rgb8(result.frames)[0])
            seconds[result.role].append(round(result.seconds, 4))
            forwards[result.role] += result.forwards
            decoding.append(result.decode_seconds)
        rolled = time.perf_counter() - started
        writer.finish({})
    total = time.perf_counter() - started
    return {
        "k": len(job.schedule.targets),
        "blocks": job.blocks,
        "frames": job.frames,
        "steps": job.steps,
        "seconds": round(total, 3),
        "rollout_seconds": round(rolled, 3),
        "forwards": forwards,
        "block_seconds": seconds,
        "median_block_seconds": {role: round(statistics.median(found), 4) for role, found in seconds.items()},
        "median_decode_seconds": round(statistics.median(decoding), 4),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def derived(measured: dict[str, Any], k: int) -> dict[str, Any]:
    """The rollout with k target blocks, from the medians of measured blocks."""
    seconds, drafts = measured["median_block_seconds"], measured["blocks"] - k
    return {"k": k, "rollout_seconds": round(k * seconds["target"] + drafts * seconds["drafter"], 1), "derived": True}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true", help="takes some minutes more")
    parser.add_argument("--smoke", action="store_true", help="a tiny pair, on the CPU if there is no GPU")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Machine(device, "bf16", options.attention, options.compile)
    steps = {"target": [3]} if options.smoke else None
    job, _ = resolve(SMOKE if options.smoke else HELIOS, k=1, steps=steps)
    pair = build(job, where)
    report = {
        "machine": machine(),
        "pair": pair.describe(),
        "compile": options.compile,
        "planned_gpu_bytes": job.backbone.needs(job, where).rollout,
    }
    report["milliseconds"] = calls(pair, job)
    print(json.dumps(report, indent=1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measured = video(pair, job, Path(folder) / "k1.mp4")
    report["videos"] = [measured, *(derived(measured, k) for k in (*DERIVED, job.blocks) if k <= job.blocks)]
    print(json.dumps(report["videos"], indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
