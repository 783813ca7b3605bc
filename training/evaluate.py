"""The gates, `python -m training.evaluate`: held-out prompts through the real rollout, scored block by block.

Writes FOLDER/scores.json (a mean for every block and each measurement) and FOLDER/sheet.png (ten clips).
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specar_core.backbones.base import Machine
from specar_core.backbones.tiny import FOLDER, TINY
from specar_core.job import resolve
from specar_core.noise import noise
from specar_core.rollout import rollout

from .loop import save_scores
from .scores import AGREEMENTS, measure
from .shapes import HEIGHT, WIDTH, Scene, sample_scene
from .sheet import save_sheet
from .vae import HELD_OUT

SCHEDULES = ("target-only", "max-run:5", "draft-only")
MEASURED = ("agreement", *AGREEMENTS, "outline", "sharpness", "jerk", "behind")


def shipped(folder: Path) -> dict[str, Path]:
    """The files of a pair in `folder`, by what they are."""
    return {what: folder / path.name for what, path in TINY.shipped.items()}


def generate(
    prompts: Sequence[str], schedule: str, blocks: int, paths: Mapping[str, Path], machine: Machine, seed: int = 0
) -> Tensor:
    """Clips [B, 3, T, H, W] of a batch of prompts."""
    job, _ = resolve(TINY, blocks=blocks, schedule=schedule)
    told = TINY.load_text_encoder(paths["text encoder"], machine, lambda *_: None).encode(prompts)
    pair = TINY.load_pair(paths, job, machine, lambda *_: None)
    shape = TINY.geometry.latent_shape(WIDTH, HEIGHT, len(prompts))
    draw = cache(lambda block, index: noise(seed, block, index, shape))
    results = rollout(pair, job.schedule, lambda block: told, draw, height=HEIGHT, width=WIDTH, batch=len(prompts))
    return torch.cat([result.frames for result in results], dim=2)


def block_scores(clips: Tensor, scenes: Sequence[Scene]) -> dict[str, list[float]]:
    """A mean for each block of every measurement; the few frames without a value do not count."""
    later = TINY.geometry.later_frames
    first = TINY.geometry.frames(1)
    measured = [measure(clip, scene.description) for clip, scene in zip(clips, scenes, strict=True)]
    scores = {}
    for name in MEASURED:
        frames = torch.stack([each[name].float() for each in measured])
        blocks = [frames[:, :first], *frames[:, first:].split(later, dim=1)]
        scores[name] = [round(block.nanmean().item(), 4) for block in blocks]
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    machine = Machine(device, "bf16" if device.type == "cuda" else "fp32")

    scenes = [sample_scene(HELD_OUT + number) for number in range(options.prompts)]
    prompts = [scene.caption for scene in scenes]
    scores, clips = {}, {}
    for schedule in SCHEDULES:
        frames = generate(prompts, schedule, options.blocks, shipped(options.models), machine)
        scores[schedule] = block_scores(frames, scenes)
        clips[schedule] = frames[:10].cpu()
    save_scores(options.folder / "scores.json", scores)
    save_sheet(options.folder / "sheet.png", prompts[:10], clips)


if __name__ == "__main__":
    main()
