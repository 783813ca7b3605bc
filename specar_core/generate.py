"""From a job to FILE.mp4 and FILE.json: text, models, rollout and encoder, one after another."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .backbones.base import Machine, Pair, Step
from .job import Job
from .noise import noise
from .report import Record, describe_models
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
    fps = job.backbone.geometry.fps
    record = Record(job, machine)
    with VideoWriter(out, fps, job.width, job.height, overwrite=overwrite) as writer:  # refuses before anything loads
        needed = (*job.roles, "text encoder", "vae")
        record.models = describe_models({what: path for what, path in paths.items() if what in needed})
        with record.timed("text"):
            prompt = _encode(job, machine, paths["text encoder"], listener)
        with record.timed("load"):
            pair = job.backbone.load_pair(paths, job, machine, listener.loading)
        report = render(pair, prompt, record, writer, listener)
    _write_json(report, out.with_suffix(".json"))
    return report


def render(
    pair: Pair, prompt: Tensor, record: Record, writer: VideoWriter, listener: Listener, *, tagged: bool = True
) -> dict[str, Any]:
    """Roll out the job of `record` into the writer's file; returns the report, which the file holds too if `tagged`.

    prompt: text embeddings, a row [L, D] for each text. What an unfinished run leaves is described in `generate`.
    """
    job, finished = record.job, False
    shape = job.backbone.geometry.latent_shape(job.width, job.height)
    record.attention = pair.attention

    def tags(report: dict[str, Any]) -> dict[str, str]:
        return {"specar": json.dumps(report)} if tagged else {}

    try:
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
            record.add(result)
            log.debug("block %d: %s, %.2f s", result.index, result.role, result.seconds)
            listener.block(result)
        report = record.report(writer.encode_seconds)
        writer.finish(tags(report))
        finished = True
    finally:
        if not finished:
            report = record.report(writer.encode_seconds)
            if partial := writer.abort(tags(report)):
                log.warning("The finished blocks are in %s", partial)
                _write_json(report, partial.with_suffix(".json"))
    return report


def _encode(job: Job, machine: Machine, path: Path, listener: Listener) -> Tensor:
    """Embeddings, a row [L, D] for each text. The encoder is gone afterwards: few cards hold it and the models."""
    encoder = job.backbone.load_text_encoder(path, machine, listener.loading)
    embeddings = encoder.encode(job.backbone.texts(job))
    del encoder
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return embeddings


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
