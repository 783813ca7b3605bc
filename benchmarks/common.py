"""What every benchmark needs: pairs of full size with random weights, the machine in words, medians of device times,
and whole videos with the seconds of their stages."""

import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specar_core.backbones.pair import Pair
from specar_core.job import Job
from specar_core.machine import Machine
from specar_core.models import rowwise
from specar_core.models.attention import choose
from specar_core.models.compiled import compile_blocks
from specar_core.models.helios import FLOAT32_PARAMETERS
from specar_core.models.low_precision import Fp8Linear, lower
from specar_core.models.vae import WanVAE
from specar_core.noise import noise
from specar_core.rollout import rollout
from specar_core.video import VideoWriter, to_rgb8


def random_network(network: nn.Module, dtype: torch.dtype, device: torch.device, fp8: bool = False) -> Any:
    """A network that was built on the meta device, with weights that keep activations at an ordinary scale: no weights
    are available, speed needs none. The same numbers for every precision."""
    if fp8:
        lower(network)
    generator = torch.Generator(device).manual_seed(0)
    for name, value in list(network.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        layer = network.get_submodule(owner)
        full = torch.empty(value.shape, dtype=torch.bfloat16, device=device)
        if value.dim() == 1 or "gamma" in name:
            full.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            full.normal_(0, value[0].numel() ** -0.5, generator=generator)
        if isinstance(layer, Fp8Linear) and leaf == "weight":
            layer.load(full)
        else:
            kept = not set(FLOAT32_PARAMETERS).isdisjoint(name.split("."))
            setattr(layer, leaf, nn.Parameter(full.to(torch.float32 if kept else dtype), requires_grad=False))
    return network.eval()


def build(job: Job, where: Machine) -> Pair:
    backbone, fp8 = job.backbone, where.precision == "fp8"
    if where.device.type == "cuda":
        torch.cuda.empty_cache()
    choice = choose(where.device, where.dtype, where.attention)
    networks: dict[Any, Any] = {
        role: random_network(backbone.outline(role), where.dtype, where.device, fp8) for role in job.roles
    }
    for network in networks.values():
        network.attend = choice.attend
        if where.device.type == "cuda":
            network.join()
        if where.compile:
            compile_blocks(network)
    with torch.device("meta"):
        vae = WanVAE(backbone.vae_config)
    half = torch.float16 if where.device.type == "cuda" else torch.float32
    return backbone.pair(networks, random_network(vae, half, where.device).arrange(), job, choice.name)


@contextmanager
def plain_torch() -> Iterator[None]:
    """The models without their kernels."""
    before = rowwise.kernels
    rowwise.kernels = lambda *layers: None  # type: ignore[assignment]
    try:
        yield
    finally:
        rowwise.kernels = before


def machine(device: str = "cuda") -> dict[str, Any]:
    command = " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv[1:])
    told = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "command": command}
    if device == "cpu" or not torch.cuda.is_available():
        return {"card": "CPU", **told}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **told,
    }


def result_path(folder: Path, name: str, card: str, precision: str, compiled: bool) -> Path:
    """A file for each card, precision and way."""
    words = card.removeprefix("NVIDIA ").lower().split()
    return folder / f"{'-'.join([name, *words, precision, *(['compiled'] if compiled else [])])}.json"


def milliseconds(work: Callable[[], Any], repeats: int = 7, warmup: int = 2) -> float:
    """Median device time of one call."""
    for _ in range(warmup):
        work()
    return round(statistics.median(timed(work) for _ in range(repeats)), 2)


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds of one call by the GPU's clock, or by ours where there is no GPU."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def launching(work: Callable[[], Any]) -> float:
    """Milliseconds until one call has handed all its work to the device: what bounds it where that has little to do."""
    synchronize()
    started = time.perf_counter()
    work()
    return round(1000 * (time.perf_counter() - started), 2)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def random_prompt(job: Job, device: torch.device) -> Tensor:
    """Embeddings of a job's texts, the same numbers for every precision."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(job.backbone.texts(job)), *job.backbone.text_shape, generator=generator).to(device)


def video(pair: Pair, job: Job, latents: list[Tensor] | None = None) -> dict[str, Any]:
    """One whole video as an mp4: seconds by block, forwards by role, peak memory. `latents` collects the blocks'."""
    shape = pair.geometry.latent_shape(job.width, job.height)
    networks: dict[Any, Any] = pair.models  # type: ignore[attr-defined]
    prompt = random_prompt(job, pair.device).to(next(iter(networks.values())).dtype)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds: dict[str, list[float]] = {role: [] for role in job.roles}
    moving = itertools.cycle(scene(job))
    forwards, decoding, first = dict.fromkeys(job.roles, 0), [], None
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with VideoWriter(Path(folder) / "out.mp4", pair.geometry.fps, job.width, job.height) as writer:
            for result in rollout(
                pair,
                job.schedule,
                lambda block: prompt,
                lambda block, draw: noise(0, block, draw, shape),
                height=job.height,
                width=job.width,
            ):
                shown = to_rgb8(result.frames)[0]
                writer.add_block(next(moving)[: len(shown)])
                first = first or time.perf_counter() - started
                seconds[result.role].append(round(result.seconds, 4))
                forwards[result.role] += result.forwards
                decoding.append(result.decode_seconds)
                if latents is not None:
                    latents.append(result.latents.cpu())
            rolled = time.perf_counter() - started
            writer.finish({})
        total = time.perf_counter() - started
    return {
        "k": len(job.schedule.targets),
        "blocks": job.blocks,
        "frames": job.frames,
        "width": job.width,
        "height": job.height,
        "steps": job.steps,
        "seconds": round(total, 3),
        "rollout_seconds": round(rolled, 3),
        "first_frames_seconds": round(first or 0.0, 3),
        "forwards": forwards,
        "first_block_seconds": round(next(iter(seconds.values()))[0], 4),
        "median_block_seconds": {role: round(statistics.median(found), 4) for role, found in seconds.items()},
        "median_decode_seconds": round(statistics.median(decoding), 4),
        **memory(),
    }


def scene(job: Job) -> list[Tensor]:
    """Frames [T, H, W, 3] of a moving scene for 40 blocks: what random weights decode to is noise, which takes an
    encoder several times longer than any video."""
    width, height, generator = job.width + 512, job.height, torch.Generator().manual_seed(0)
    layers = (
        F.interpolate(
            torch.rand(1, 3, height // size, width // size, generator=generator), (height, width), mode="bicubic"
        )
        for size in (64, 16, 4)
    )
    picture = sum(layer * weight for layer, weight in zip(layers, (0.6, 0.3, 0.1), strict=True))
    levels = (255 * picture).clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0)
    frames = job.geometry.later_frames
    return [
        torch.stack([levels[:, shift : shift + job.width] for shift in range(first, first + frames)])
        for first in range(0, 480, 12)
    ]


def memory() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {"peak_gpu_bytes": 0}
    return {
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "reserved_gpu_bytes": torch.cuda.max_memory_reserved(),
    }


def derived(measured: dict[str, Any], k: int) -> dict[str, Any]:
    """The rollout with k target blocks, from the medians of measured blocks and what lay between them."""
    seconds, blocks = measured["median_block_seconds"], measured["blocks"]

    def total(targets: int) -> float:
        return targets * seconds["target"] + (blocks - targets) * seconds["drafter"]

    beside = measured["rollout_seconds"] - total(measured["k"])
    end = measured["seconds"] - measured["rollout_seconds"]
    return {"k": k, "blocks": blocks, "seconds": round(total(k) + beside + end, 1), "derived": True}


def write(report: Any, path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(compact(report) + "\n")


def compact(value: Any, indent: str = "") -> str:
    """JSON in which a list or an object that holds no other takes one line."""
    parts = list(value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ())
    if not any(isinstance(part, (dict, list, tuple)) for part in parts):
        return json.dumps(value)
    names = [json.dumps(str(name)) + ": " for name in value] if isinstance(value, dict) else [""] * len(parts)
    lines = [f"\n{indent} {name}{compact(part, indent + ' ')}" for name, part in zip(names, parts, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{','.join(lines)}\n{indent}{last}"
