"""SpecARVideoDecode: LATENT to VIDEO, in memory that does not grow with its length."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import InputImpl, io
from torch import Tensor

from ..specar_core.backbones.loading import decoder_bytes, load_vae
from ..specar_core.decode import decode
from ..specar_core.errors import UsageError
from ..specar_core.models.vae import WanVAE
from ..specar_core.video import VideoWriter, to_rgb8
from . import host
from .latents import Layout, decoded_file
from .progress import Loading
from .sockets import ReportSocket
from .vaes import as_checkpoint, fingerprint

# What the sampler's segments have, 4 blocks of krea: latent frames that one encoder sees.
LATENT_FRAMES_PER_SEGMENT = 12

# ComfyUI keeps what a node handed out, and does not notice when somebody empties its temp folder.
handed_out: set[Path] = set()
lost: list[Path] = []


class SpecARVideoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARVideoDecode",
            display_name="SpecAR Video Decode",
            search_aliases=["video decode", "streaming vae decode"],
            description="Hands out the video that the sampler wrote. Latents that changed since are decoded anew, into "
            "a file, without a seam between blocks.",
            inputs=[
                io.Latent.Input("samples"),
                io.Vae.Input("vae"),
                ReportSocket.Input(
                    "report",
                    optional=True,
                    tooltip="Goes into a file that is decoded anew, unless its length or size was changed.",
                ),
                io.Boolean.Input(
                    "images",
                    default=False,
                    optional=True,
                    tooltip="Fill IMAGE too. It holds every frame in memory: 4.8 MB each at 832x480, 4.6 GB a minute. "
                    "VIDEO stays on disk.",
                ),
            ],
            outputs=[io.Video.Output(display_name="VIDEO"), io.Image.Output(display_name="IMAGE")],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs) -> int:
        """Videos that were lost are made anew."""
        gone = {path for path in handed_out if not path.exists()}
        handed_out.difference_update(gone)
        lost.extend(gone)
        return len(lost)

    @classmethod
    def execute(cls, samples, vae, report=None, images=False) -> io.NodeOutput:
        latents, layout = samples["samples"], Layout.of_latent(samples)
        if latents.ndim != 5 or latents.shape[0] != 1:
            raise UsageError(f"`samples` must be one video [1, 16, T, h, w], not {list(latents.shape)}")
        if (frames := layout.frames(latents)) < 1:
            raise UsageError(
                f"`samples` are too short: the first {layout.drop_first} frames are left out, and there are no more"
            )
        connected = as_checkpoint(vae)
        path = decoded_file(latents, layout, fingerprint(connected))
        height, width = 8 * latents.shape[3], 8 * latents.shape[4]
        if report and [report[name] for name in ("frames", "width", "height")] != [shown(path, frames), width, height]:
            report = None
            host.say("the report is left out: it tells of a video of another length or size")
        pictures = torch.empty(frames, height, width, 3) if images else None
        writer = None
        if not path.exists():
            writer = VideoWriter(
                path,
                layout.fps,
                width,
                height,
                blocks_per_segment=LATENT_FRAMES_PER_SEGMENT,
                overwrite=True,
            )
        if writer or images:
            machine = host.machine("auto", "sdpa")
            host.make_room(connected.bytes)
            decoder = load_vae(connected, None, machine, Loading())
            host.make_room(sum(decoder_bytes(machine.dtype.itemsize, width * height, decoder.config, at_once=1)))
            stream(decoder, host.from_vae_space(latents), layout, writer, pictures, tags(report))
        handed_out.add(path)
        image = pictures if images else host.blocked("IMAGE is empty while `images` is off: switch it on, or use VIDEO")
        return io.NodeOutput(InputImpl.VideoFromFile(str(path)), image, ui={"specar": [report]} if report else None)


def shown(path: Path, frames: int) -> int:
    """Frames of the file, or that it will have. The sampler's has more than its latents give, after a start image."""
    return InputImpl.VideoFromFile(str(path)).get_frame_count() if path.exists() else frames


def stream(
    vae: WanVAE,
    latents: Tensor,
    layout: Layout,
    writer: VideoWriter | None,
    pictures: Tensor | None,
    metadata: dict[str, str],
) -> None:
    """Decodes once, into the file and into IMAGE, whichever is wanted."""
    bar, done = host.ProgressBar(layout.frames(latents)), 0
    with writer or nullcontext():
        for frames in decoded(vae, latents, layout):
            host.stop_if_asked()
            if writer:
                writer.add_block(to_rgb8(frames)[0])
            if pictures is not None:
                pictures[done : done + frames.shape[2]] = frames[0].permute(1, 2, 3, 0).add(1).div(2)
            done += frames.shape[2]
            bar.update(done)
        if writer:
            writer.finish(metadata)


def decoded(vae: WanVAE, latents: Tensor, layout: Layout) -> Iterator[Tensor]:
    dropped = layout.drop_first
    for part in layout.parts(latents):
        yield from decode(vae, part, layout.latent_frames_per_clip, dropped)
        dropped = 0


def tags(report: dict[str, Any] | None) -> dict[str, str]:
    return {"specar": json.dumps(report)} if report and host.metadata_wanted() else {}
