"""From a job to FILE.mp4 and FILE.json: text, models, rollout and encoder, one after another."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .backbones.base import Machine, Step
from .job import Job
from .noise import noise
from .report import describe_block, describe_models, report
from .rollout import BlockResult, rollout
from .video import VideoWriter, to_rgb8

log = logging.getLogger("specar")


@dataclass(frozen=True)
class Listener:
    """What the caller hears while it runs; raising in any of these ends the run and keeps the finished blocks."""

    loading: Callable[[str, int, int], None] = lambda what, done, total: None
    step: Callable[[int, Step], None] = lambda block, step: None
    block: Callable[[BlockResult], None] = lambda result: None


def generate(
    job: Job,
    machine: Machine,
    paths: Mapping[str, Path],
    out: Path,
    *,
    overwrite: bool = False,
    listener: Listener = Listener(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Write the video to `out` and its report beside it; returns the report.

    paths: the file of each model the job needs ("target", "drafter", "text encoder", "vae"). A run that does not
    finish leaves what it finished as FILE.partial.mp4 and FILE.partial.json.
    """
    started = time.perf_counter()
    geometry = job.backbone.geometry
    writer = VideoWriter(out, geometry.fps, job.width, job.height, overwrite=overwrite)  # refuses before anything loads
    timings = dict.fromkeys(("load", "text", "rollout", "decode", "encode", "total"), 0.0)
    blocks: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    attention, finished = "", False

    def story() -> dict[str, Any]:
        timings["encode"], timings["total"] = writer.encode_seconds, time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(machine.device) if machine.device.type == "cuda" else 0
        return report(
            job, machine, attention=attention, blocks=blocks, timings=timings, models=models, peak_gpu_bytes=peak
        )

    try:
        models = describe_models(
            {what: path for what, path in paths.items() if what in (*job.roles, "text encoder", "vae")}
        )
        prompt = _encode(job, machine, paths["text encoder"], listener)
        timings["text"] = time.perf_counter() - started
        loading = time.perf_counter()
        pair = job.backbone.load_pair(paths, job, machine, listener.loading)
        timings["load"], attention = time.perf_counter() - loading, pair.attention
        shape = geometry.latent_shape(job.width, job.height)
        for result in rollout(
            pair,
            job.schedule,
            lambda block: prompt,
            lambda block, draw: noise(job.seed, block, draw, shape),
            height=job.height,
            width=job.width,
            keep_first_frames=job.keep_first_frames,
            on_step=listener.step,
        ):
            writer.add_block(to_rgb8(result.frames)[0])
            blocks.append(describe_block(result))
            timings["rollout"] += result.seconds - result.decode_seconds
            timings["decode"] += result.decode_seconds
            log.debug("block %d: %s, %.2f s", result.index, result.role, result.seconds)
            listener.block(result)
        summary = story()
        writer.finish({"specar": json.dumps(summary)})
        finished = True
    finally:
        if not finished:
            summary = story()
            kept = writer.abort({"specar": json.dumps(summary)})
            if kept:
                log.warning("The finished blocks are in %s", kept)
                _write_json(summary, kept.with_suffix(".json"))
    _write_json(summary, out.with_suffix(".json"))
    return summary


def _encode(job: Job, machine: Machine, path: Path, listener: Listener) -> Tensor:
    """Text embeddings [1, L, D]. The encoder is gone afterwards: with the models it would not fit every card."""
    encoder = job.backbone.load_text_encoder(path, machine, listener.loading)
    embeddings = encoder.encode([job.prompt])
    del encoder
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return embeddings


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
