"""What the studies on the tiny pair have in common: options, prompts in chunks, workers, and where results go."""

import argparse
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specar_core.backbones.tiny import FOLDER
from training.evaluate import Stage
from training.shapes import Scene, sample_scene
from training.vae import HELD_OUT

from .common import machine, write

Scores = dict[str, np.ndarray]  # by what is measured, a row for each prompt


@dataclass(frozen=True)
class Chunk:
    """Some of the prompts, which are played together: seeds of their scenes from `first` on, and that of the noise."""

    first: int
    prompts: int
    seed: int
    models: Path
    device: str

    @property
    def scenes(self) -> list[Scene]:
        return [sample_scene(self.first + number) for number in range(self.prompts)]

    @functools.lru_cache(maxsize=1)  # noqa: B019 (a chunk is a value; its noise takes longer to draw than to use)
    def stage(self) -> Stage:
        return Stage(self.models, self.device, self.prompts, self.seed)


def chunks(
    options: argparse.Namespace, size: int, prompts: int | None = None, first: int = HELD_OUT, seed: int = 0
) -> list[Chunk]:
    """All prompts, or as many as given; each chunk's noise has another seed, from `seed` on."""
    count = options.prompts if prompts is None else prompts
    return [
        Chunk(first + begin, min(size, count - begin), seed + begin, options.models, options.device)
        for begin in range(0, count, size)
    ]


def study_options(described: str, prompts: int) -> argparse.ArgumentParser:
    """With the options of every study; described: its module's docstring."""
    parser = argparse.ArgumentParser(description=described.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--workers", type=int, default=1, help="processes; one is best on a GPU")
    parser.add_argument("--device", default="cuda")
    return parser


@contextmanager
def team(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map` by several processes. On a GPU they wait for one another more than they gain."""
    if workers == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield pool.imap


def joined(parts: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    """The scores of each schedule, of all chunks of the prompts."""
    return {
        schedule: {name: np.concatenate([part[schedule][name] for part in parts]) for name in scores}
        for schedule, scores in parts[0].items()
    }


def finish(name: str, options: argparse.Namespace, seconds: float, found: Mapping[str, Any], tables: str) -> None:
    """Writes FOLDER/NAME.json, and prints the tables."""
    settings = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    told = {"machine": machine(options.device), "settings": settings, "seconds": round(seconds, 1), **found}
    write(told, options.folder / f"{name}.json")
    print(f"{tables}\n\n{told['seconds']} s")
