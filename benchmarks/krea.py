"""Krea Realtime 14B + Self-Forcing 1.3B at full size with random weights, on one GPU.

    python -m benchmarks.krea --out benchmarks/results      (bf16 and fp8, under seven minutes on an H200)
    python -m benchmarks.krea --smoke                       (the tiny pair, on any machine: does it run?)

A file for each precision: single calls, with what of the card's measured ceilings they reach; a video of 36 blocks at
832x480 with 7 target blocks, encoded to mp4 as it grows; other sizes, loading, errors against higher precision.
Videos with other numbers of target blocks are sums of measured blocks. Weights are random: times, memory and the number
of frames are those of the real ones.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specar_core.backbones import backbone
from specar_core.backbones.session import SessionPair
from specar_core.decode import decode_on
from specar_core.job import Job, resolve
from specar_core.machine import Machine
from specar_core.models import graphs
from specar_core.models.low_precision import product, quantised
from specar_core.models.vae import WanVAE
from specar_core.models.wan import WAN_14B, CausalWan, KeyValueCache
from specar_core.noise import noise
from specar_core.schedule import Role
from specar_core.tensor_files import open_checkpoint
from specar_core.weights import load_into

from .common import (
    build,
    derived,
    launching,
    machine,
    milliseconds,
    plain_torch,
    random_network,
    random_prompt,
    relative,
    result_path,
    video,
    write,
)

DERIVED = (1, 2, 18, 36)
OTHER_SIZES = ((1280, 720), (480, 832))


@torch.inference_mode()
def ceilings(device: torch.device) -> dict[str, float]:
    """Operations a second of matrix products at a real shape, 4680 rows from 5120 to 13824."""
    x, weight = (torch.randn(rows, 5120, device=device, dtype=torch.bfloat16) for rows in (4680, 13824))
    operations = 2 * 4680 * 5120 * 13824
    found = {"bf16": operations / milliseconds(lambda: x @ weight.t()) * 1000}
    rows, (values, scale) = quantised(x), quantised(weight)
    bias = torch.zeros(13824, device=device, dtype=torch.bfloat16)
    found["fp8"] = operations / milliseconds(lambda: product(rows, values, scale.squeeze(1), bias)) * 1000
    return found


def calls(pair: SessionPair, job: Job) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each kind of call that a block is made of, as a rollout makes it."""
    block = torch.randn(pair.geometry.latent_shape(job.width, job.height), device=pair.device)
    prompt = random_prompt(job, pair.device)
    for role, model in pair.models.items():
        yield from forwards(role, model, block, prompt)
    _, state = pair.vae.decode(block)
    yield "vae decode, one block", lambda: decode_on(pair.vae, block, state, at_once=pair.decoded_at_once)
    frame = torch.rand(1, 3, 1, job.height, job.width, device=pair.device)
    yield "vae encode, one frame", lambda: pair.vae.encode(frame)


def forwards(role: Role, model: CausalWan, block: Tensor, prompt: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    text = model.encode_text(prompt)
    cache = KeyValueCache(model, 1, 6, block.shape[-1] * block.shape[-2] // 4)
    forward: Callable[..., Any] = partial(model, cache=cache)
    if graphs.usable(model, cache):
        forward = graphs.Forwards(model, cache)
    both = torch.cat([block, block], dim=2)
    clean, noisy = (torch.full((1, 3), t, device=block.device) for t in (0.0, 937.5))

    def context_pass() -> None:
        cache.clear()
        forward(block, clean, text, first_frame=0, wanted=0)

    def first_step() -> None:
        cache.clear()
        forward(both, torch.cat([clean, noisy], dim=1), text, first_frame=0, group=3, wanted=3)

    yield f"{role} context pass", context_pass
    yield f"{role} first step with context pass", first_step
    yield f"{role} step", lambda: forward(block, noisy, text, first_frame=3)
    yield f"{role} text keys", lambda: model.encode_text(prompt)


@torch.inference_mode()
def counted(pair: SessionPair, job: Job) -> dict[str, int]:
    """Floating-point operations of each kind of call, as torch counts them: those of the models without their kernels,
    which it does not know, those of the VAE as it runs."""
    with torch.device("meta"):
        models, vae = {role: job.backbone.outline(role) for role in job.roles}, WanVAE(job.backbone.vae_config)
    plain = job.backbone.pair(models, vae, job, "sdpa")
    found = {}
    for (name, work), (_, plainly) in zip(calls(pair, job), calls(plain, job), strict=True):
        with FlopCounterMode(display=False) as counter:
            work() if name.startswith("vae") else plainly()
        found[name] = counter.get_total_flops()
    return found


@torch.inference_mode()
def measured(pair: SessionPair, job: Job, precision: str, best: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind of call on the device and until it is launched, its operations, and what share they
    reach of the `best` operations a second that the precision has; the VAE is never in fp8."""
    operations, found, launch = counted(pair, job), {}, {}
    for name, work in calls(pair, job):
        found[name], launch[name] = milliseconds(work), launching(work)
    reached = {}
    for name, ms in found.items():
        ceiling = best.get("bf16" if name.startswith("vae") else precision, 1e12)
        reached[name] = round(100 * operations[name] / (ms / 1000) / ceiling, 1)
    return {
        "milliseconds": found,
        "launch_milliseconds": launch,
        "operations": operations,
        "percent_of_ceiling": reached,
    }


@torch.inference_mode()
def one_block(pair: SessionPair, job: Job, role: Any) -> Tensor:
    """Latents of a block that stands behind three given latent frames."""
    shape = pair.geometry.latent_shape(job.width, job.height)
    prompt = random_prompt(job, pair.device)
    with pair.lease(job.height, job.width, 1, lambda step: None) as run:
        context = replace(run.begin(), blocks=1, latents=noise(1, 0, 0, shape).to(pair.device))
        return run.generate(role, context, prompt, lambda draw: noise(1, 1, draw, shape)).cpu()


def errors(job: Job, where: Machine, role: Any) -> dict[str, float]:
    """Relative errors of a block's latents: bf16, as it runs and by plain torch, and fp8, against float32 and bf16."""
    alone = replace(job, schedule=replace(job.schedule, targets=() if role == "drafter" else tuple(range(job.blocks))))
    found: dict[str, Tensor] = {}
    for precision in ("bf16", "fp8", "fp32"):
        pair = build(alone, replace(where, precision=precision, compile=False))
        found[precision] = one_block(pair, alone, role)
        if precision == "bf16":
            with plain_torch():
                found["plain"] = one_block(pair, alone, role)
        del pair
    return {
        f"{role}: bf16 against fp32": relative(found["bf16"], found["fp32"]),
        f"{role}: bf16 by plain torch against fp32": relative(found["plain"], found["fp32"]),
        f"{role}: fp8 against fp32": relative(found["fp8"], found["fp32"]),
        f"{role}: fp8 against bf16": relative(found["fp8"], found["bf16"]),
    }


def loading(device: torch.device, layers: int) -> float:
    """Gigabytes a second of a checkpoint in the page cache, 14B wide with fewer layers."""
    config = replace(WAN_14B, num_layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        with torch.device("meta"):
            network = CausalWan(config)
        state = random_network(network, torch.bfloat16, device).state_dict()
        save_file({name: value.cpu() for name, value in state.items()}, path)
        del state
        with torch.device("meta"):
            network = CausalWan(config)
        started = time.perf_counter()
        load_into(network, open_checkpoint(path), dtype=torch.bfloat16, device=device)
        torch.cuda.synchronize()
        return round(path.stat().st_size / (time.perf_counter() - started) / 1e9, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--precision", nargs="*", default=["bf16", "fp8"])
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true", help="with torch.compile in place of the kernels")
    parser.add_argument("--layers", type=int, default=8, help="layers of the checkpoint that is loaded")
    parser.add_argument("--smoke", action="store_true", help="the tiny pair, on the CPU if there is no GPU")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    pair_of = backbone("tiny" if options.smoke else "krea")
    blocks, k = (4, 2) if options.smoke else (options.blocks, options.k)
    job, _ = resolve(pair_of, blocks=blocks, k=k)
    told, best = machine(), ceilings(device) if on_gpu else {}
    latents: dict[str, list[Tensor]] = {}
    for precision in options.precision:
        where = Machine(device, precision, options.attention, options.compile)
        started = time.perf_counter()
        pair = build(job, where)
        report: dict[str, Any] = {
            "machine": told,
            "pair": pair.describe(),
            "precision": precision,
            "compile": options.compile,
            "ceilings": best,
            "planned_gpu_bytes": job.backbone.needs(job, where).rollout,
            "build_seconds": round(time.perf_counter() - started, 1),
        }
        path = options.out and result_path(options.out, pair_of.name, told["card"], precision, options.compile)

        def section(name: str, work: Callable[[], Any], report=report, path=path) -> None:
            started = time.perf_counter()
            report[name] = work()
            print(name, f"{time.perf_counter() - started:.1f} s", json.dumps(report[name]), flush=True)
            write(report, path)

        started = time.perf_counter()
        video(pair, resolve(pair_of, blocks=3, k=1)[0])
        report["warm_up_seconds"] = round(time.perf_counter() - started, 1)
        print(precision, pair.describe(), "warm after", report["warm_up_seconds"], "s", flush=True)
        for name, values in measured(pair, job, precision, best).items():
            section(name, partial(dict, values))
        latents[precision] = []
        whole = video(pair, job, latents[precision])
        section("videos", lambda whole=whole: [whole, *(derived(whole, k) for k in DERIVED)])
        if on_gpu and not options.compile:
            others = [resolve(pair_of, blocks=4, k=2, width=w, height=h)[0] for w, h in OTHER_SIZES]
            section("other_sizes", lambda pair=pair, others=others: [video(pair, other) for other in others])
        if precision == options.precision[-1]:
            del pair
            if {"bf16", "fp8"} <= latents.keys():
                both = zip(latents["fp8"], latents["bf16"], strict=True)
                section("fp8_against_bf16_by_block", lambda both=both: [round(relative(a, b), 4) for a, b in both])
            section("errors", lambda where=where: {**errors(job, where, "drafter"), **errors(job, where, "target")})
            if on_gpu:
                section("loading_gigabytes_a_second", lambda: loading(device, options.layers))


if __name__ == "__main__":
    main()
