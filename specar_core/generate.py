"""From a job to FILE.mp4 and FILE.json: text, models, rollout and encoder, one after another."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from .backbones.pair import Committed, Noise, Pair, Step
from .checkpoint import TOLD, RunFolder, read_run, used
from .errors import SpecarError, UsageError, first_line
from .foreign import SETTINGS, fits, load
from .inputs import changed_inputs
from .job import Job
from .machine import Machine
from .mp4 import read_metadata
from .noise import noise
from .report import Record, changed_models, describe_models, identity
from .rollout import BlockResult, rollout
from .scorers import deciding
from .source import Frames, SourceVideo, still
from .timeline import BlockPrompts
from .video import VideoWriter, check_place, partials, to_rgb8
from .writing import write

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
    loaded: "Loaded | None" = None,
    hint: bool = True,
) -> dict[str, Any]:
    """Write the video to `out` and its report beside it; returns the report.

    paths: the file of each model the job needs ("target", "drafter", "text encoder", "vae"), and of what else goes into
    it ("image" or "video", "lora 1", ...). A run that does not finish leaves its folder, `run_dir` or else FILE.run,
    from which `resume` goes on with the same job and models, and what it finished as FILE.partial.mp4 and .json.
    loaded: what this video shares with others. hint: say how to go on with it alone.
    """
    loaded = loaded or Loaded([job], machine, paths)
    needed = _needed(job, paths)
    record = Record(job, machine)
    record.models = describe_models(needed)
    with RunFolder(run_dir or out.with_suffix(".run"), resume=resume) as run:
        if resume:
            report = _finished(out, record)
            if not report or (run.folder / TOLD).exists():
                _check_same(run.folder, record, needed)
            if report:
                write_json(report, out.with_suffix(".json"))
                for partial in partials(run.folder):
                    partial.unlink(missing_ok=True)
                run.remove()
                return report
        with VideoWriter(  # refuses before anything loads
            out,
            job.backbone.geometry.fps,
            job.width,
            job.height,
            folder=run.folder,
            keep_blocks=run.blocks if resume else None,
            overwrite=overwrite,
            audio=paths["video"] if job.followed else None,
        ) as writer:
            with record.timed("text"):
                prompt = loaded.prompt(job, listener)
            with record.timed("load"):
                pair = loaded.pair(job, listener)
            record.attention = pair.attention
            files = {what: str(path.absolute()) for what, path in paths.items() if what in (*needed, *job.inputs)}
            beside = out.absolute().parent == run.folder.parent  # then both may be moved together
            place = f"../{out.name}" if beside else str(out.absolute())
            run.begin({"out": place, "overwrite": overwrite, "files": files, "report": record.report(0.0)})
            try:
                with record.timed("rollout"):
                    source = opened(job, paths)
                report = render(pair, prompt, record, writer, run, listener, source=source)
                write_json(report, out.with_suffix(".json"))
                run.remove()
            except torch.OutOfMemoryError as error:
                todo = "Free some, or ask `specar plan` what takes less"
                raise SpecarError(f"the GPU's memory ran out ({first_line(error)}). {todo}.") from error
            finally:
                if hint and used(run.folder):
                    log.warning("Go on with: specar resume %s", quote(str(run.folder)))
    return report


class Loaded:
    """Text embeddings and models of jobs that differ in prompts and schedules only, loaded once, when first needed."""

    def __init__(self, jobs: Sequence[Job], machine: Machine, paths: Mapping[str, Path]) -> None:
        self.jobs, self.machine, self.paths = jobs, machine, paths
        self._rows: dict[str, Tensor] = {}
        self._pairs: Callable[[Job], Pair] | None = None

    def prompt(self, job: Job, listener: Listener) -> Tensor:
        """Embeddings, a row [L, D] for each of the job's texts."""
        if not self._rows:
            self._rows = self._encoded(listener)
        return torch.stack([self._rows[text] for text in job.backbone.texts(job)]).to(self.machine.device)

    def pair(self, job: Job, listener: Listener) -> Pair:
        if self._pairs is None:
            self._pairs = job.backbone.load_models(self.paths, self.jobs, self.machine, listener.loading)
        return self._pairs(job)

    def _encoded(self, listener: Listener) -> dict[str, Tensor]:
        """In host memory: there may be many. The encoder is gone afterwards: few cards hold it and the models."""
        texts = list(dict.fromkeys(text for job in self.jobs for text in job.backbone.texts(job)))
        encoder = self.jobs[0].backbone.load_text_encoder(self.paths["text encoder"], self.machine, listener.loading)
        rows = encoder.encode(texts).cpu()
        del encoder
        if self.machine.device.type == "cuda":
            torch.cuda.empty_cache()
        return dict(zip(texts, rows, strict=True))


def render(
    pair: Pair,
    prompt: Tensor,
    record: Record,
    writer: VideoWriter,
    run: RunFolder,
    listener: Listener,
    *,
    source: Frames | None = None,
    tagged: bool = True,
) -> dict[str, Any]:
    """Roll out the job of `record` into the writer's file; returns the report, which the file holds too if `tagged`.

    prompt: text embeddings, a row [L, D] for each text; source: the frames of the job's source, closed in the end; run:
    where blocks are kept until then, and taken from. What an unfinished run leaves is described in `generate`.
    """
    job, finished, told = record.job, False, run.told()
    shape = job.backbone.geometry.latent_shape(job.width, job.height)
    prompts = BlockPrompts(job.cues, prompt)
    if not run.holds(shape):
        raise SpecarError(f"{run.folder} holds blocks of another video: start again with --overwrite.")
    if run.blocks:
        record.resume(told)

    def tags(report: dict[str, Any]) -> dict[str, str]:
        return {"specar": json.dumps(report)} if tagged else {}

    def white(block: int, draw: int) -> Tensor:
        return noise(job.seed, block, draw, shape)

    try:
        start: Committed | None = None
        drawn: Noise = white
        if job.source and source:
            with record.timed("rollout"):
                start, drawn = job.backbone.steered(pair, job.source.kind, source, prompts, white)
        with deciding(job, record.machine, told) as policy:
            for result in rollout(
                pair,
                policy,
                prompts,
                drawn,
                height=job.height,
                width=job.width,
                resume=run.committed(writer.blocks_done, prompts, job.geometry.cuts, start),
                known=run.latents,
                on_step=listener.step,
            ):
                writer.add_block(to_rgb8(result.frames)[0])
                if result.index < run.blocks:  # was in no finished segment yet
                    continue
                run.add(result, record.add(result, policy.told(result.index)))
                log.debug("block %d: %s, %.2f s", result.index, result.role, result.seconds)
                listener.block(result)
        writer.close()
        report = record.report(writer.encode_seconds)
        writer.finish(tags(report))
        finished = True
        if not writer.partial_path.exists():
            writer.partial_path.with_suffix(".json").unlink(missing_ok=True)
    finally:
        if source:
            source.close()
        if not finished:
            writer.close()
            report = record.report(writer.encode_seconds)
            if partial := writer.abort(tags(report)):
                log.warning("The finished blocks are in %s", partial)
                try:
                    write_json(report, partial.with_suffix(".json"))
                except SpecarError as error:  # what ended the run is to be told, and its folder has the same
                    log.error("%s", error)
    return report


def begun(job: Job, machine: Machine, paths: Mapping[str, Path], out: Path) -> bool:
    """Whether `generate` can resume this very video: it is finished, or its run is there. Raises UsageError or
    SpecarError for a folder FILE.run of another one, or if what it would write is in the way."""
    folder = out.with_suffix(".run")
    if not (folder / TOLD).exists() and not out.exists():
        return False  # before models are read for their digests: there may be many videos
    record, needed = Record(job, machine), _needed(job, paths)
    record.models = describe_models(needed)
    finished = _finished(out, record) is not None
    if (folder / TOLD).exists():
        _check_same(folder, record, needed)
        if not finished:
            check_place(out.absolute(), folder.absolute(), overwrite=False, continues=True)
        return True
    return finished


def _needed(job: Job, paths: Mapping[str, Path]) -> dict[str, Path]:
    return {what: path for what, path in paths.items() if what in (*job.roles, "text encoder", "vae")}


def opened(job: Job, paths: Mapping[str, Path]) -> Frames | None:
    """The frames of the job's source."""
    if job.source is None:
        return None
    path = paths[job.source.kind]
    if job.source.kind == "image":
        return still(path, job.width, job.height)
    return SourceVideo(path, job.geometry.fps, job.width, job.height, job.source.frames)


def _check_same(folder: Path, record: Record, paths: Mapping[str, Path]) -> None:
    """The run in this folder must be the one that is to be continued; where it was begun may be another machine."""
    told, now = read_run(folder)["report"], record.report(0.0)
    for changed in [*changed_models(told["models"], paths), *changed_inputs(told["options"], now["options"])]:
        raise SpecarError(f"{folder} cannot be continued: {changed}. Put that file back.")
    if identity(told) != identity(now):
        raise UsageError(
            f"{folder} is the run of another video: give its own settings, choose another name, or start again with "
            "--overwrite"
        )
    for what in ("device", "torch", "compile", "triton", "threads"):
        if (before := told["environment"].get(what)) != (here := now["environment"].get(what)):
            log.warning("The run was begun with %s %s, this is %s: frames may differ a little", what, before, here)


def _finished(out: Path, record: Record) -> dict[str, Any] | None:
    """The report in `out` if it is this very video: a run may be killed when only its folder is left to remove."""
    try:
        report: Any = load(read_metadata(out)["specar"]) if out.exists() else None
        same = fits(report, SETTINGS) and len(report["blocks"]) == record.job.blocks
        same = same and identity(report) == identity(record.report(0.0))
    except (SpecarError, ValueError, KeyError):  # some other file
        return None
    return report if same else None


def write_json(value: dict[str, Any], path: Path) -> None:
    write(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
