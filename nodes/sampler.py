"""SpecARSpeculativeSampler: the rollout, decoded and written to disk as it goes."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from comfy_api.latest import io
from torch import Tensor

from ..specar_core.backbones.base import Backbone, Pair
from ..specar_core.checkpoint import RunFolder
from ..specar_core.errors import SpecarError, UsageError
from ..specar_core.generate import Listener, render
from ..specar_core.job import Job
from ..specar_core.plan import free_bytes, plan, shortages
from ..specar_core.report import Record, describe_models, identity
from ..specar_core.rollout import BlockResult
from ..specar_core.video import VideoWriter
from . import host
from .latents import Layout, decoded_file
from .models import Models
from .progress import Progress
from .sockets import ModelsSocket, ReportSocket, ScheduleSocket
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
                    "positive", tooltip="One prompt, encoded by the pair's text encoder (for krea and helios UMT5-XXL)."
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
            ],
            outputs=[io.Latent.Output(display_name="LATENT"), ReportSocket.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, models: Models, schedule: Job, positive, vae, seed, negative=None) -> io.NodeOutput:
        job = replace(schedule, seed=seed)
        if missing := shortages(plan(job, models.machine), {"disk space": free_bytes(host.output_folder())}):
            raise SpecarError(f"{missing[0]} ({host.output_folder()}): free some, or make a shorter video")
        prompt = embeddings(job, positive, negative)
        record = Record(job, models.machine, conditioning=digest(prompt))
        with record.timed("load"):
            pair = models.pair(job, vae)
        connected = as_checkpoint(vae)
        used = {"role": "vae", "file": None, "bytes": connected.bytes, "digest": fingerprint(connected)}
        record.models = [*describe_models({role: models.paths[role] for role in job.roles}), used]
        record.attention = pair.attention

        latents, report, video = sample(pair, prompt, record)
        samples, layout = host.to_vae_space(latents), Layout.of_job(job)
        os.replace(video, decoded_file(samples, layout, used["digest"]))
        host.say(f"{report['frames']} frames in {report['timings']['total']:.1f} s")
        return io.NodeOutput({"samples": samples, "specar": layout.to_dict()}, report, ui={"specar": [report]})


def sample(pair: Pair, prompt: Tensor, record: Record) -> tuple[Tensor, dict[str, Any], Path]:
    """Runs the job, or goes on with it: its latents, its report and its video."""
    job, name = record.job, run_name(record)
    progress = Progress(job)
    with RunFolder(host.output_folder() / f"{name}.run", resume=True) as run:
        latents = [run.latents(block) for block in range(run.blocks)]

        def block(result: BlockResult) -> None:
            latents.append(result.latents.float().cpu())
            progress.block(result)

        video = host.temp_folder() / f"{name}.mp4"
        writer = VideoWriter(
            video,
            job.backbone.geometry.fps,
            job.width,
            job.height,
            folder=run.folder,
            keep_blocks=run.blocks,
            overwrite=True,
        )
        run.begin({"report": record.report(0.0)})
        listener = Listener(step=progress.step, block=block)
        try:
            report = render(pair, prompt, record, writer, run, listener, tagged=host.metadata_wanted())
            run.remove()
        finally:
            if writer.partial_path.exists():
                kept = writer.partial_path.name
                host.say(f"stopped: the finished blocks are in output/{kept}; queue the graph again to go on")
    return torch.cat(latents, dim=2), report, video


def embeddings(job: Job, positive: list, negative: list | None) -> Tensor:
    """Text embeddings, a row [L, D] for the prompt and, under guidance, one for the negative prompt."""
    guided = len(job.backbone.texts(job)) > 1
    if not guided and negative is not None:
        raise UsageError(f"{job.backbone.name} runs without guidance and has no use for `negative`: disconnect it")
    if guided and negative is None:
        raise UsageError(f"{job.backbone.name} runs with guidance: connect a negative prompt, an empty one if need be")
    rows = {"positive": positive, "negative": negative} if guided else {"positive": positive}
    return torch.cat([embedding(job.backbone, name, conditioning) for name, conditioning in rows.items()])


def embedding(backbone: Backbone, name: str, conditioning: list) -> Tensor:
    """[1, L, D], padded with zero rows or cut as the models were trained with."""
    length, width = backbone.text_shape
    if len(conditioning) != 1 or conditioning[0][0].shape[0] != 1:
        raise UsageError(f"`{name}` must hold one prompt: do not combine conditionings, and do not batch them")
    prompt = conditioning[0][0]
    if prompt.shape[2] != width:
        raise UsageError(
            f"`{name}` is {prompt.shape[2]} wide, and {backbone.name} needs {width}: encode it with the CLIP of its "
            + ("Loader" if backbone.shipped else "Loader, or of a CLIPLoader of type wan")
        )
    prompt = prompt[:, :length]
    return F.pad(prompt, (0, 0, 0, length - prompt.shape[1]))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().cpu().numpy()).hexdigest()


def run_name(record: Record) -> str:
    """A file name for everything that decides the pixels of a run: the same graph finds what it left unfinished."""
    told = record.report(0.0)
    text = json.dumps([identity(told), told["environment"]], sort_keys=True)
    return f"specar-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
