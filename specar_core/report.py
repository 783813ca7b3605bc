"""What ran, as data: one JSON object beside the video and inside it, enough to make the same video again."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .backbones.base import Machine
from .job import Job
from .plan import card
from .rollout import BlockResult

SCHEMA = 1
SAMPLED = 64  # slices of a file that go into its digest
SLICE = 1 << 16


def quick_digest(path: Path) -> str:
    """SHA-256 over a file's size, its first mebibyte and 64 slices of it: tells models apart without reading 28 GB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(1 << 20))
        for index in range(SAMPLED):
            file.seek(index * max(0, size - SLICE) // SAMPLED)
            digest.update(file.read(SLICE))
    return f"sampled-sha256:{digest.hexdigest()}"


def describe_block(result: BlockResult) -> dict[str, Any]:
    return {
        "index": result.index,
        "role": result.role,
        "seconds": round(result.seconds, 4),
        "forwards": result.forwards,
        "rejected": 0,
    }


def describe_models(paths: Mapping[str, Path]) -> list[dict[str, Any]]:
    return [
        {"role": role, "file": path.name, "bytes": path.stat().st_size, "digest": quick_digest(path)}
        for role, path in paths.items()
    ]


def differences(told: list[dict[str, Any]], paths: Mapping[str, Path]) -> list[str]:
    """What is not as it was: models of an earlier report whose file is another one now."""
    return [
        f"the {model['role']} is not the file this report was made with ({model['file']}): expect another video"
        for model in told
        if model["role"] in paths and quick_digest(paths[model["role"]]) != model["digest"]
    ]


def report(
    job: Job,
    machine: Machine,
    *,
    attention: str,
    blocks: list[dict[str, Any]],
    timings: Mapping[str, float],
    models: list[dict[str, Any]],
    peak_gpu_bytes: int,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "backbone": job.backbone.name,
        "prompts": [{"block": 0, "text": job.prompt}],
        "seed": job.seed,
        "width": job.width,
        "height": job.height,
        "fps": job.backbone.geometry.fps,
        "frames": job.backbone.geometry.frames(len(blocks), job.keep_first_frames),
        "schedule": job.schedule.to_dict(),
        "blocks": blocks,
        "timings": {name: round(seconds, 3) for name, seconds in timings.items()},
        "peak_gpu_bytes": peak_gpu_bytes,
        "environment": {
            "device": card(machine.device),
            "torch": torch.__version__,
            "attention": attention,
            "precision": machine.precision,
            "compile": machine.compile,
        },
        "sampling": {role: {"steps": list(steps), "guidance": None} for role, steps in job.steps.items()},
        "options": dict(job.options),
        "models": models,
    }
