"""Helios-Base 14B + Helios-Distilled 14B at full size with random weights, on one GPU of 80 GB or more.

    python -m benchmarks.helios --out benchmarks/results      (under two minutes on an H200)
    python -m benchmarks.helios --smoke                       (a tiny pair, on any machine: does it run?)

Times single forwards at the three resolutions, then a short rollout at 640x384 with k = 1 and a few of the target's 50
steps, which all take the same time, frames encoded to mp4 as they leave. The times of 22 blocks are sums of measured
steps and blocks. Weights are random: times, memory and the number of frames are those of the real ones.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specar_core.backbones.helios import HELIOS
from specar_core.backbones.helios_pair import HeliosPair
from specar_core.job import Job, resolve
from specar_core.machine import Machine
from specar_core.models.helios import HeliosConfig
from specar_core.models.vae import VaeConfig

from .common import build, derived, machine, milliseconds, result_path, video, write

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
DERIVED = (1, 2, 4)


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
    return result


def scaled(measured: dict[str, Any], whole: Job) -> dict[str, Any]:
    """The measured video as if it had all of the target's steps and the usual number of blocks."""
    decode, block, blocks = measured["median_decode_seconds"], measured["median_block_seconds"], measured["blocks"]
    steps = sum(whole.steps["target"]) / measured["forwards"]["target"]
    beside = measured["rollout_seconds"] - block["target"] - (blocks - 1) * block["drafter"]
    end = measured["seconds"] - measured["rollout_seconds"]
    target = decode + steps * (block["target"] - decode)
    rollout = target + (whole.blocks - 1) * block["drafter"] + beside * whole.blocks / blocks
    return {
        **measured,
        "k": 1,
        "blocks": whole.blocks,
        "median_block_seconds": {"target": target, "drafter": block["drafter"]},
        "rollout_seconds": rollout,
        "seconds": rollout + end,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true", help="with torch.compile in place of the kernels")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--target-steps", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny pair, on the CPU if there is no GPU")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = Machine(device, options.precision, options.attention, options.compile)
    backbone, blocks = (SMOKE, 3) if options.smoke else (HELIOS, options.blocks)
    job, _ = resolve(backbone, blocks=blocks, k=1, steps={"target": [options.target_steps]})
    pair = build(job, where)
    told = machine()
    report = {
        "machine": told,
        "pair": pair.describe(),
        "precision": options.precision,
        "compile": options.compile,
        "planned_gpu_bytes": job.backbone.needs(job, where).rollout,
        "milliseconds": calls(pair, job),
    }
    print(json.dumps(report, indent=1), flush=True)
    path = options.out and result_path(options.out, "helios", told["card"], options.precision, options.compile)
    write(report, path)
    video(pair, resolve(backbone, blocks=2, k=1, steps={"target": [1]})[0])  # warm
    measured = video(pair, job)
    whole, _ = resolve(backbone)
    report["videos"] = [measured, *(derived(scaled(measured, whole), k) for k in (*DERIVED, whole.blocks))]
    print(json.dumps(report["videos"], indent=1))
    write(report, path)


if __name__ == "__main__":
    main()
