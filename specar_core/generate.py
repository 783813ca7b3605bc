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
from .checkpoint import RunFolder, read_run
from .errors import SpecarError, UsageError
from .job import Job
from .noise import noise
from .report import Record, describe_models, differences, identity
from .rollout import BlockResult, rollout
from .video import VideoWriter, read_metadata, replacing, to_rgb8, unfinished

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
    run_dir: Path | None = None,
    resume: bool = False,
    listener: Listener = Listener(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Write the video to `out` and its report beside it; returns the report.

    paths: the file of each model the job needs ("target", "drafter", "text encoder", "vae"). A run that does not
    finish leaves its folder, `run_dir` or else FILE.run, from which `resume` goes on with the same job and models, and
    what it finished as FILE.partial.mp4 and FILE.partial.json.
    """
    needed = {what: path for what, path in paths.items() if what in (*job.roles, "text encoder", "vae")}
    record = Record(job, machine)
    record.models = describe_models(needed)
    with RunFolder(run_dir or out.with_suffix(".run"), resume=resume) as run:
        if resume:
            _check_same(run.folder, record, needed)
            if report := _finished(out, record):
                write_json(report, out.with_suffix(".json"))
                run.remove()
                return report
        elif run.used and not overwrite:
            raise unfinished(run.folder)
        with VideoWriter(  # refuses before anything loads
            out,
            job.backbone.geometry.fps,
            job.width,
            job.height,
            folder=run.folder,
            keep_blocks=run.blocks if resume else None,
            overwrite=overwrite,
        ) as writer:
            with record.timed("text"):
                prompt = _encode(job, machine, paths["text encoder"], listener)
            with record.timed("load"):
                pair = job.backbone.load_pair(paths, job, machine, listener.loading)
            record.attention = pair.attention
            files = {what: str(path.absolute()) for what, path in needed.items()}
            beside = out.absolute().parent == run.folder.parent  # then both may be moved together
            place = f"../{out.name}" if beside else str(out.absolute())
            run.begin({"out": place, "overwrite": overwrite, "files": files, "report": record.report(0.0)})
            try:
                report = render(pair, prompt, record, writer, run, listener)
                write_json(report, out.with_suffix(".json"))
                run.remove()
            except torch.OutOfMemoryError as error:
                todo = "Free some, or ask `specar plan` what takes less"
                raise SpecarError(f"the GPU's memory ran out ({str(error).splitlines()[0]}). {todo}.") from error
            finally:
                if run.used:
                    log.warning("Go on with: specar resume %s", run.folder)
    return report


def render(
    pair: Pair,
    prompt: Tensor,
    record: Record,
    writer: VideoWriter,
    run: RunFolder,
    listener: Listener,
    *,
    tagged: bool = True,
) -> dict[str, Any]:
    """Roll out the job of `record` into the writer's file; returns the report, which the file holds too if `tagged`.

    prompt: text embeddings, a row [L, D] for each text; run: where blocks are kept until then, and taken from. What an
    unfinished run leaves is described in `generate`.
    """
    job, finished = record.job, False
    shape = job.backbone.geometry.latent_shape(job.width, job.height)
    record.attention = pair.attention
    if run.blocks:
        record.resume(run.told())

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
            resume=run.committed(writer.blocks_done, lambda block: prompt),
            known=run.latents,
            keep_first_frames=job.keep_first_frames,
            on_step=listener.step,
        ):
            writer.add_block(to_rgb8(result.frames)[0])
            if result.index < run.blocks:  # was in no finished segment yet
                continue
            run.add(result, record.add(result))
            log.debug("block %d: %s, %.2f s", result.index, result.role, result.seconds)
            listener.block(result)
        report = record.report(writer.encode_seconds)
        writer.finish(tags(report))
        finished = True
        if not writer.partial_path.exists():
            writer.partial_path.with_suffix(".json").unlink(missing_ok=True)
    finally:
        if not finished:
            report = record.report(writer.encode_seconds)
            if partial := writer.abort(tags(report)):
                log.warning("The finished blocks are in %s", partial)
                write_json(report, partial.with_suffix(".json"))
    return report


def _check_same(folder: Path, record: Record, paths: Mapping[str, Path]) -> None:
    """The run in this folder must be the one that is to be continued; where it was begun may be another machine."""
    told, now = read_run(folder)["report"], record.report(0.0)
    for difference in differences(told["models"], paths):
        raise SpecarError(f"{folder} cannot be continued: {difference}. Put that file back.")
    if identity(told) != identity(now):
        raise UsageError(f"{folder} is the run of another video; give its own settings, or another folder")
    for what in ("device", "torch", "compile"):
        if (before := told["environment"][what]) != (here := now["environment"][what]):
            log.warning("The run was begun with %s %s, this is %s: frames may differ a little", what, before, here)


def _finished(out: Path, record: Record) -> dict[str, Any] | None:
    """The report in `out` if it is this very video: a run may be killed when only its folder is left to remove."""
    try:
        report = json.loads(read_metadata(out)["specar"]) if out.exists() else None
        same = report and len(report["blocks"]) == record.job.blocks and identity(report) == identity(record.report(0))
    except (SpecarError, ValueError, KeyError, TypeError):  # some other file
        return None
    return report if same else None


def _encode(job: Job, machine: Machine, path: Path, listener: Listener) -> Tensor:
    """Embeddings, a row [L, D] for each text. The encoder is gone afterwards: few cards hold it and the models."""
    encoder = job.backbone.load_text_encoder(path, machine, listener.loading)
    embeddings = encoder.encode(job.backbone.texts(job))
    del encoder
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return embeddings


def write_json(value: dict[str, Any], path: Path) -> None:
    data = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")
    with replacing(path, len(data)) as part:
        part.write_bytes(data)
