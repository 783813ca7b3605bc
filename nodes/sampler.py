"""SpecARSpeculativeSampler: the rollout, decoded and written to disk as it goes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from ..specar_core.backbones.pair import Pair
from ..specar_core.checkpoint import RunFolder, used
from ..specar_core.errors import SpecarError, UsageError
from ..specar_core.generate import Listener, render
from ..specar_core.inputs import Inputs
from ..specar_core.job import Job, resolve
from ..specar_core.machine import free_bytes
from ..specar_core.plan import plan
from ..specar_core.refusal import shortages
from ..specar_core.report import Record, describe_models, identity
from ..specar_core.rollout import BlockResult
from ..specar_core.scorers import scorer_of, unjudged
from ..specar_core.source import DEFAULT_STRENGTH
from ..specar_core.timeline import texts
from ..specar_core.video import VideoWriter
from . import host
from .latents import Layout, decoded_file
from .models import Models
from .progress import Generating
from .prompts import cues_of, digest, embeddings
from .sockets import ModelsSocket, ReportSocket, ScheduleSocket
from .sources import Connected, connected
from .vaes import as_checkpoint, fingerprint


class SpecARSpeculativeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARSpeculativeSampler",
            display_name="SpecAR Speculative Sampler",
            search_aliases=["speculative video", "autoregressive video", "long video sampler"],
            description="Generates a long video block after block, each by the model that the schedule names. What is "
            "finished is decoded and on disk at once: cancelling keeps it, and queueing again goes on.",
            inputs=[
                ModelsSocket.Input("models"),
                ScheduleSocket.Input("schedule"),
                io.Conditioning.Input(
                    "positive",
                    tooltip="A prompt, encoded by the pair's text encoder (for krea and helios UMT5-XXL), or a SpecAR "
                    "Prompt Timeline.",
                ),
                io.Vae.Input("vae", tooltip="Wan 2.1's VAE, or tiny's own. Blocks are decoded while the video grows."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**64 - 1,
                    control_after_generate=True,
                    tooltip="Decides all noise. The same for every schedule, so that videos can be compared.",
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="For pairs with guidance (helios). krea and tiny have none."
                ),
                io.Image.Input(
                    "start_image", optional=True, tooltip="The first frame. Cropped in the middle to the video's shape."
                ),
                io.Video.Input(
                    "source_video",
                    optional=True,
                    tooltip="krea and tiny: followed frame by frame, with its sound. helios: continued from its end.",
                ),
                io.Float.Input(
                    "strength",
                    default=DEFAULT_STRENGTH,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="How far the video may stray from source_video; at 1 nothing of it is left. Unused without "
                    "one, and by helios.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="LATENT"), ReportSocket.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        models: Models,
        schedule: Job,
        positive,
        vae,
        seed,
        negative=None,
        start_image=None,
        source_video=None,
        strength=DEFAULT_STRENGTH,
    ) -> io.NodeOutput:
        given = connected(schedule.backbone, start_image, source_video, strength)
        job, notices = resolve(
            schedule.backbone,
            cues=cues_of(positive, schedule.backbone),
            seed=seed,
            blocks=schedule.blocks,
            width=schedule.width,
            height=schedule.height,
            schedule=schedule.schedule.policy,
            steps=schedule.steps,
            options=schedule.options,
            source=given.source,
        )
        if scorer_of(job) and "" in texts(job.cues):
            raise UsageError(
                "a router judges drafts by the text of the prompt, and `positive` does not tell it: connect a SpecAR "
                "Prompt Timeline, of which one line will do (`0s: TEXT`), or a SpecAR Prompt List"
            )
        if reason := unjudged(job):
            raise SpecarError(reason)
        job, matched = Inputs(models.loras).with_loras(job)
        if missing := shortages(plan(job, models.machine), {"disk space": free_bytes(host.output_folder())}):
            raise SpecarError(f"{missing[0]} ({host.output_folder()}): free some, or make a shorter video")
        prompt = embeddings(job, positive, negative)
        record = Record(job, models.machine, conditioning=digest(prompt, job.cues))
        with record.timed("load"):
            pair = models.pair(job, vae)
        decoder = as_checkpoint(vae)
        used = {"role": "vae", "file": None, "bytes": decoder.bytes, "digest": fingerprint(decoder)}
        record.models = [*describe_models({role: models.paths[role] for role in job.roles}), used]
        record.attention = pair.attention

        latents, report, video = sample(pair, prompt, record, given)
        samples, layout = host.to_vae_space(latents), Layout.of_job(job)
        os.replace(video, decoded_file(samples, layout, used["digest"]))
        told = [f"{report['frames']} frames in {report['timings']['total']:.1f} s{outcome(report)}", *notices, *matched]
        host.say("\n".join(told))
        return io.NodeOutput({"samples": samples, "specar": layout.to_dict()}, report, ui={"specar": [report]})


def outcome(report: dict[str, Any]) -> str:
    """What a schedule came to that was settled while it ran."""
    if report["schedule"].get("planned", True):
        return ""
    targets, rejected = len(report["schedule"]["targets"]), sum(block["rejected"] for block in report["blocks"])
    return f", {targets} of {len(report['blocks'])} blocks by the target, {rejected} drafts rejected"


def sample(pair: Pair, prompt: Tensor, record: Record, given: Connected) -> tuple[Tensor, dict[str, Any], Path]:
    """Runs the job, or goes on with it: its latents, its report and its video."""
    job, name = record.job, run_name(record)
    progress = Generating(job)
    video = host.temp_folder() / f"{name}.mp4"
    with (
        run_folder(name) as run,
        VideoWriter(
            video,
            job.backbone.geometry.fps,
            job.width,
            job.height,
            folder=run.folder,
            keep_blocks=run.blocks,
            overwrite=True,
            audio=given.audio,
        ) as writer,
    ):
        latents = [run.latents(block) for block in range(run.blocks)]

        def block(result: BlockResult) -> None:
            latents.append(result.latents.float().cpu())
            progress.block(result)

        run.begin({"report": record.report(0.0)})
        listener = Listener(step=progress.step, block=block)
        try:
            source, tagged = given.open(job), host.metadata_wanted()
            report = render(pair, prompt, record, writer, run, listener, source=source, tagged=tagged)
            run.remove()
        finally:
            if (partial := writer.partial_path).exists() or used(run.folder):
                kept = partial if partial.exists() else run.folder  # there was no room for it
                host.say(f"stopped: the finished blocks are in output/{kept.name}; queue the graph again to go on")
    return torch.cat(latents, dim=2), report, video


def run_folder(name: str) -> RunFolder:
    folder = host.output_folder() / f"{name}.run"
    try:
        return RunFolder(folder, resume=True)
    except UsageError:  # its lock was removed
        raise UsageError(f"{folder} is no longer whole: remove that folder, and queue the graph again") from None


def run_name(record: Record) -> str:
    """A file name for everything that decides the pixels of a run: the same graph finds what it left unfinished."""
    told = record.report(0.0)
    text = json.dumps([identity(told), told["environment"]], sort_keys=True)
    return f"specar-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
