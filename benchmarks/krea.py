"""Krea Realtime 14B + Self-Forcing 1.3B at full size with random weights, on one GPU.

    python -m benchmarks.krea --out benchmarks/results/krea.json

Times single forwards, then whole rollouts of 36 blocks at 832x480 with k = 1, 2, 7 and 36 target blocks, frames encoded
to mp4 as they leave. Weights are random: times, memory and the number of frames are those of the real ones.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from specar_core.backbones.causal_wan import GEOMETRY, STEPS, times
from specar_core.backbones.session import SessionPair
from specar_core.models.attention import choose
from specar_core.models.compiled import compile_blocks
from specar_core.models.vae import WanVAE
from specar_core.models.wan import WAN_1_3B, WAN_14B, CausalWan, KeyValueCache
from specar_core.noise import noise
from specar_core.rollout import rollout
from specar_core.schedule import spread
from specar_core.video import VideoWriter, to_rgb8

from .common import Stages, machine, milliseconds, random_network

WIDTH, HEIGHT = 832, 480


def build(attention: str, compiled: bool) -> SessionPair:
    device = torch.device("cuda")
    choice = choose(device, torch.bfloat16, attention)
    models = {
        role: random_network(lambda config=config: CausalWan(config, attend=choice.attend), torch.bfloat16)
        for role, config in (("target", WAN_14B), ("drafter", WAN_1_3B))
    }
    if compiled:
        for model in models.values():
            compile_blocks(model)
    vae = random_network(WanVAE, torch.float16).arrange()
    steps = {role: times(steps) for role, steps in STEPS.items()}
    return SessionPair(models, vae, GEOMETRY, steps, attention=choice.name)


@torch.inference_mode()
def calls(pair: SessionPair) -> dict[str, float]:
    """Milliseconds of each kind of call a block is made of."""
    block = torch.randn(GEOMETRY.latent_shape(WIDTH, HEIGHT), device="cuda")
    result = {f"{role} {name}": ms for role, model in pair.models.items() for name, ms in forwards(model, block)}
    _, state = pair.vae.decode(block)

    def decode_block():
        after = state
        for latent in block.split(1, dim=2):
            _, after = pair.vae.decode(latent, after)

    result["vae decode, one block"] = milliseconds(decode_block)
    frame = torch.rand(1, 3, 1, HEIGHT, WIDTH, device="cuda")
    result["vae encode, one frame"] = milliseconds(lambda: pair.vae.encode(frame))
    return {name: round(value, 2) for name, value in result.items()}


def forwards(model: CausalWan, block: torch.Tensor) -> list[tuple[str, float]]:
    prompt = torch.randn(1, 512, 4096, device="cuda")
    text, cache = model.encode_text(prompt), KeyValueCache(model, 1, 6, block.shape[-1] * block.shape[-2] // 4)
    both = torch.cat([block, block], dim=2)
    clean, noisy = torch.zeros(1, 3, device="cuda"), torch.full((1, 3), 937.5, device="cuda")

    def context_pass():
        cache.clear()
        model(block, clean, text, cache, 0, wanted=0)

    def first_step():
        cache.clear()
        model(both, torch.cat([clean, noisy], dim=1), text, cache, 0, group=3, wanted=3)

    return [
        ("context pass", milliseconds(context_pass)),
        ("first step with context pass", milliseconds(first_step)),
        ("step", milliseconds(lambda: model(block, noisy, text, cache, 3))),
        ("text keys", milliseconds(lambda: model.encode_text(prompt))),
    ]


def video(pair: SessionPair, k: int, blocks: int, folder: Path) -> dict:
    """One whole video: seconds by stage, forwards by role, peak memory."""
    shape = GEOMETRY.latent_shape(WIDTH, HEIGHT)
    prompt = torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    stages, forwards, seconds = Stages(), {"target": 0, "drafter": 0}, {"target": [], "drafter": []}
    started, first_frames = time.perf_counter(), None
    with VideoWriter(folder / f"k{k}.mp4", GEOMETRY.fps, WIDTH, HEIGHT) as writer:
        for result in rollout(
            pair,
            spread(blocks, k),
            lambda block: prompt,
            lambda block, draw: noise(0, block, draw, shape),
            height=HEIGHT,
            width=WIDTH,
            on_step=stages,
        ):
            writer.add_block(to_rgb8(result.frames)[0])
            stages.mark("copy")
            first_frames = first_frames or time.perf_counter() - started
            forwards[result.role] += result.forwards
            seconds[result.role].append(result.seconds)
        rolled = time.perf_counter() - started
        writer.finish({})
    total = time.perf_counter() - started
    return {
        "k": k,
        "blocks": blocks,
        "frames": GEOMETRY.frames(blocks),
        "seconds": round(total, 3),
        "rollout_seconds": round(rolled, 3),
        "encode_after_rollout_seconds": round(total - rolled, 3),
        "first_frames_seconds": round(first_frames, 3),
        "device_seconds": stages.seconds(),
        "forwards": forwards,
        "median_block_seconds": {r: round(statistics.median(s), 4) for r, s in seconds.items() if s},
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 7, 36])
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    pair = build(options.attention, options.compile)
    report = {"machine": machine(), "pair": pair.describe(), "compile": options.compile, "videos": []}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        video(pair, 1, 3, Path(folder))
        report["warm_up_seconds"] = round(time.perf_counter() - started, 1)
    report["milliseconds"] = calls(pair)
    print(json.dumps(report, indent=1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for k in options.k:
            report["videos"].append(video(pair, k, options.blocks, Path(folder)))
            print(json.dumps(report["videos"][-1]), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
