"""The gates, `python -m training.evaluate`: held-out prompts through the real rollout, scored block by block.

Writes FOLDER/scores.json (a mean for every block and each measurement) and FOLDER/sheet.png (ten clips).
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specar_core.backbones.pair import Pair, Prompts
from specar_core.backbones.tiny import FOLDER, TINY
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.noise import noise
from specar_core.policies import parse
from specar_core.rollout import BlockResult, rollout
from specar_core.schedule import Policy

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


class Stage:
    """The pair in `models`, and a noise that is the same for all that is played here.

    batch: videos that are played together; device: of the CPU or a GPU; seed: of the noise; precision: by default
    float32 on a CPU and bf16 on a GPU.
    """

    def __init__(self, models: Path, device: str, batch: int, seed: int = 0, precision: str | None = None) -> None:
        precision = precision or ("fp32" if device == "cpu" else "bf16")
        paths, machine = shipped(models), Machine(torch.device(device), precision)
        self.pair: Any = TINY.load_pair(paths, resolve(TINY, k=1)[0], machine, lambda *_: None)
        self.encode = TINY.load_text_encoder(paths["text encoder"], machine, lambda *_: None).encode
        shape = TINY.geometry.latent_shape(WIDTH, HEIGHT, batch)
        self.noise = cache(lambda block, index: noise(seed, block, index, shape))
        self.batch = batch

    def results(self, policy: Policy, prompts: Prompts, pair: Pair | None = None) -> Iterator[BlockResult]:
        """Each block; pair: another one than its own."""
        return rollout(pair or self.pair, policy, prompts, self.noise, height=HEIGHT, width=WIDTH, batch=self.batch)

    def play(self, policy: Policy, prompts: Prompts, pair: Pair | None = None) -> list[Tensor]:
        """Frames [B, 3, N, H, W] in [-1, 1] of each block."""
        return [result.frames for result in self.results(policy, prompts, pair)]


def generate(stage: Stage, prompts: Sequence[str], schedule: str, blocks: int) -> Tensor:
    """Clips [B, 3, T, H, W] in [-1, 1] of a batch of prompts."""
    told = stage.encode(prompts)
    return torch.cat(stage.play(parse(schedule, blocks)[0], lambda block: told), dim=2)


def by_block(frames: Tensor) -> list[float]:
    """The mean over each block of what was measured in frames [..., T]; those without a value do not count."""
    first, later = TINY.geometry.frames(1), TINY.geometry.later_frames
    parts = [frames[..., :first], *frames[..., first:].split(later, dim=-1)]
    return torch.stack([part.float().nanmean() for part in parts]).tolist()


def block_scores(clips: Tensor, scenes: Sequence[Scene]) -> dict[str, list[float]]:
    """A mean for each block of every measurement."""
    measured = [measure(clip, scene.description) for clip, scene in zip(clips, scenes, strict=True)]
    means = {name: by_block(torch.stack([each[name].float() for each in measured])) for name in MEASURED}
    return {name: [round(mean, 4) for mean in blocks] for name, blocks in means.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)

    scenes = [sample_scene(HELD_OUT + number) for number in range(options.prompts)]
    prompts = [scene.caption for scene in scenes]
    scores, clips = {}, {}
    stage = Stage(options.models, options.device, len(prompts))
    for schedule in SCHEDULES:
        frames = generate(stage, prompts, schedule, options.blocks)
        scores[schedule] = block_scores(frames, scenes)
        clips[schedule] = frames[:10].cpu()
    save_scores(options.folder / "scores.json", scores)
    save_sheet(options.folder / "sheet.png", prompts[:10], clips)


if __name__ == "__main__":
    main()
