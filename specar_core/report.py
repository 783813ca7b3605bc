"""What ran, as data: one JSON object beside the video and inside it, enough to make the same video again."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from . import __version__
from .job import Job
from .machine import Machine, card
from .models.fused import no_triton
from .rollout import BlockResult
from .tensor_files import parts

SCHEMA = 1
SAMPLED = 64  # slices of a file that go into its digest
SLICE = 1 << 16


def quick_digest(path: Path) -> str:
    """SHA-256 over a file's size, its first mebibyte and 64 slices of it: tells models apart without reading 28 GB.

    Of a checkpoint in shards, over each of them.
    """
    digest = hashlib.sha256()
    for part in parts(path):
        size = part.stat().st_size
        digest.update(str(size).encode())
        with open(part, "rb") as file:
            digest.update(file.read(1 << 20))
            for index in range(SAMPLED):
                file.seek(index * max(0, size - SLICE) // SAMPLED)
                digest.update(file.read(SLICE))
    return f"sampled-sha256:{digest.hexdigest()}"


def describe_models(paths: Mapping[str, Path]) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "file": path.name if parts(path) == [path] else "/".join(path.absolute().parts[-3:]),
            "bytes": sum(part.stat().st_size for part in parts(path)),
            "digest": quick_digest(path),
        }
        for role, path in paths.items()
    ]


def changed_models(told: list[dict[str, Any]], paths: Mapping[str, Path]) -> list[str]:
    """What is not as it was: models of an earlier report whose file is another one now."""
    found = []
    for model in told:
        if model["file"] is None or model["role"] not in paths:
            continue
        if (digest := quick_digest(paths[model["role"]])) != model["digest"]:
            before, now = (text.rpartition(":")[2][:12] for text in (model["digest"], digest))
            found.append(f"the {model['role']} is not the file it was made with ({model['file']}, {before}, now {now})")
    return found


def identity(report: Mapping[str, Any]) -> list[Any]:
    """Everything that decides what a video shows, but for the machine, of which only the precision counts: two reports
    with equal ones tell of the same video."""
    names = ("backbone", "prompts", "conditioning", "seed", "width", "height", "sampling", "options")
    schedule = report["schedule"]
    if not schedule.get("planned", True):  # what came out is no part of what was asked for
        schedule = [schedule["policy"], schedule["blocks"]]
    return [
        *(report[name] for name in names),
        schedule,
        report["environment"]["precision"],
        [[model["role"], model["digest"]] for model in report["models"]],
    ]


class Record:
    """What happens in one run, from its beginning on; `report` tells it at any time, of an unfinished run too."""

    def __init__(self, job: Job, machine: Machine, *, conditioning: str | None = None) -> None:
        """conditioning: a digest of the prompt's embeddings, where they come from elsewhere and the text is unknown."""
        self.job, self.machine, self.conditioning = job, machine, conditioning
        self.models: list[dict[str, Any]] = []
        self.attention = ""
        self.resumed_at: int | None = None
        self._blocks: list[dict[str, Any]] = []
        self._timings = dict.fromkeys(("load", "text", "rollout", "decode"), 0.0)
        self._started = time.perf_counter()
        if machine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(machine.device)

    @contextmanager
    def timed(self, what: Literal["load", "text", "rollout"]) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._timings[what] += time.perf_counter() - started

    def resume(self, blocks: Sequence[dict[str, Any]]) -> None:
        """Begins with the blocks, as `add` told them, of an earlier run."""
        self._blocks, self.resumed_at = list(blocks), len(blocks)

    def add(self, result: BlockResult, told: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the report says of this block; told: what its policy says of it."""
        block = {
            "index": result.index,
            "role": result.role,
            "seconds": round(result.seconds, 4),
            "forwards": result.forwards,
            "rejected": result.rejected,
            **told,
        }
        self._blocks.append(block)
        self._timings["rollout"] += result.seconds - result.decode_seconds
        self._timings["decode"] += result.decode_seconds
        return block

    def report(self, encode_seconds: float) -> dict[str, Any]:
        """encode_seconds: how long a thread beside the rollout encoded.

        Timings are those of the last process only, which began at block `resumed_at` where that is no null. "rollout"
        has the start from an image or a video in it; "encode" runs beside it and "decode", and is no part of a sum.
        """
        job, machine = self.job, self.machine
        timings = {**self._timings, "encode": encode_seconds, "total": time.perf_counter() - self._started}
        on_gpu = machine.device.type == "cuda"
        return {
            "schema": SCHEMA,
            "version": __version__,
            "backbone": job.backbone.name,
            "prompts": [cue.to_dict() for cue in job.cues] if self.conditioning is None else None,
            "conditioning": self.conditioning,
            "seed": job.seed,
            "width": job.width,
            "height": job.height,
            "fps": job.backbone.geometry.fps,
            "frames": job.geometry.frames(len(self._blocks)),
            "schedule": job.schedule.settled([block["role"] for block in self._blocks]),
            "blocks": list(self._blocks),
            "resumed_at": self.resumed_at,
            "timings": {name: round(seconds, 3) for name, seconds in timings.items()},
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(machine.device) if on_gpu else 0,
            "environment": {
                "device": card(machine.device),
                "torch": torch.__version__,
                "attention": self.attention,
                "precision": machine.precision,
                "compile": machine.compile,
                **({"triton": no_triton() is None} if on_gpu else {"threads": torch.get_num_threads()}),
            },
            "sampling": {
                role: {"steps": list(steps), "guidance": job.backbone.guidance(job, role)}
                for role, steps in job.steps.items()
            },
            "options": job.told_options,
            "models": self.models,
        }
