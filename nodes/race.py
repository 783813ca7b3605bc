"""SpecARRace: videos of one prompt, seed and noise against each other, in the page and side by side in a file."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy_api.latest import InputImpl, io
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..specar_core.errors import SpecarError, UsageError
from ..specar_core.foreign import SETTINGS, fits, load
from ..specar_core.mp4 import read_metadata
from ..specar_core.race import Clip, page
from ..specar_core.report import identity, quick_digest
from ..specar_core.score import score
from ..specar_core.source import SourceVideo, length, video_size
from ..specar_core.video import VideoWriter, to_rgb8
from . import host
from .sockets import ReportSocket

VIDEO = "As SpecAR Video Decode hands it out, or loaded from ComfyUI's folders."
REPORT = "Of the sampler that made the video."
FRAMES_AT_ONCE = 12
FRAMES_PER_SEGMENT = 48  # what the sampler's segments have, 4 blocks of krea


class SpecARRace(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARRace",
            display_name="SpecAR Race",
            search_aliases=["compare videos", "side by side", "video comparison"],
            description="Compares two or three videos of the same prompt and seed: each at the pace it was generated, "
            "or all at the same frame, and side by side in one file.",
            inputs=[
                io.Video.Input("video_1", tooltip=VIDEO),
                ReportSocket.Input("report_1", tooltip=REPORT),
                io.Video.Input("video_2", tooltip=VIDEO),
                ReportSocket.Input("report_2", tooltip=REPORT),
                io.Video.Input("video_3", optional=True, tooltip=VIDEO),
                ReportSocket.Input("report_3", optional=True, tooltip=REPORT),
                io.Boolean.Input(
                    "scores",
                    default=False,
                    optional=True,
                    tooltip="Also measure hand-overs, drift, flicker and likeness to target-only, as a table and "
                    "charts below. Takes about half a minute for 400 frames of 832x480, on the CPU.",
                ),
            ],
            outputs=[io.Video.Output(display_name="VIDEO")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, video_1, report_1, video_2, report_2, video_3=None, report_3=None, scores=False) -> io.NodeOutput:
        if (video_3 is None) != (report_3 is None):
            raise UsageError("connect both `video_3` and `report_3`, or neither")
        videos = [video for video in (video_1, video_2, video_3) if video is not None]
        reports = [report for report in (report_1, report_2, report_3) if report is not None]
        paths = [host.video_file(video) for video in videos]
        for number, path in enumerate(paths, start=1):
            # Runs that came to the same latents share a file.
            connected = [identity(report) for other, report in zip(paths, reports, strict=True) if other == path]
            if (told := told_inside(path)) and told not in connected:
                raise UsageError(f"`report_{number}` is not of `video_{number}`: connect that of its own sampler")
        clips = [Clip(address(path), report) for path, report in zip(paths, reports, strict=True)]
        labels = [label(report) for report in reports]
        written = beside(paths, labels, reports[0]["fps"])
        told = page(clips, score(paths, measuring, reports) if scores else None)
        return io.NodeOutput(
            InputImpl.VideoFromFile(str(written)), ui={"specar_race": [{"page": told, "labels": labels}]}
        )


def told_inside(path: Path) -> list[Any] | None:
    """The identity of the run that the video itself says made it."""
    try:
        told = load(read_metadata(path)["specar"])
        return identity(told) if fits(told, SETTINGS) else None
    except (SpecarError, ValueError, KeyError):  # it says nothing
        return None


def measuring(what: str, done: int, total: int) -> None:
    host.stop_if_asked()
    if done % FRAMES_PER_SEGMENT == 0 or done == total:
        host.say(f"{what}: {100 * done // total} %")


def label(report: dict[str, Any]) -> str:
    return f"{report['schedule']['policy']}, {report['timings']['total']:.1f} s"


def address(path: Path) -> str:
    if found := host.address(path):
        return found
    raise UsageError(f"the page cannot show {path}: load it from ComfyUI's input folder")


def beside(paths: Sequence[Path], labels: Sequence[str], fps: int) -> Path:
    """The videos in one file, as high as the first; a shorter one holds its last frame."""
    told = json.dumps([labels, fps, [quick_digest(path) for path in paths]])
    out = host.temp_folder() / f"specar-race-{hashlib.sha256(told.encode()).hexdigest()[:32]}.mp4"
    if out.exists():
        return out
    height = video_size(paths[0])[1] // 2 * 2
    widths = [max(2, round(across * height / down / 2) * 2) for across, down in map(video_size, paths)]
    high = max(16, height // 20 * 2)
    band = torch.cat([heading(text, width, high) for text, width in zip(labels, widths, strict=True)], dim=2)
    clips = [
        SourceVideo(path, fps, width, height, length(path, fps)) for path, width in zip(paths, widths, strict=True)
    ]
    count = max(clip.count for clip in clips)
    bar = host.ProgressBar(count)
    writer = VideoWriter(
        out,
        fps,
        sum(widths),
        height + band.shape[1],
        blocks_per_segment=FRAMES_PER_SEGMENT // FRAMES_AT_ONCE,
        overwrite=True,
    )
    with writer, contextlib.ExitStack() as files:
        for clip in clips:
            files.callback(clip.close)
        for first, frames in joined(clips, count):
            host.stop_if_asked()
            above = band.expand(frames.shape[0], -1, -1, -1)
            writer.add_block(torch.cat([above, frames], dim=1))
            bar.update(first + frames.shape[0])
        writer.finish({})
    return out


def joined(clips: Sequence[SourceVideo], count: int) -> Iterator[tuple[int, Tensor]]:
    """A few frames at a time, uint8 [N, H, W, 3], the clips beside one another; and the number of the first."""
    for first in range(0, count, FRAMES_AT_ONCE):
        wanted = min(FRAMES_AT_ONCE, count - first)
        yield first, to_rgb8(torch.cat([clip.frames(first, wanted) for clip in clips], dim=4))[0]


def heading(text: str, width: int, height: int) -> Tensor:
    """uint8 [1, height, width, 3]: white on black, as large as fits."""
    picture = Image.new("RGB", (width, height))
    draw, size = ImageDraw.Draw(picture), height - 4
    while size > 6 and draw.textlength(text, ImageFont.load_default(size)) > width - 8:
        size -= 1
    draw.text((4, height // 2), text, "white", ImageFont.load_default(size), anchor="lm")
    return torch.from_numpy(np.array(picture))[None]
