"""What a video begins with, an IMAGE, or follows, a VIDEO, as the library sees it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..specar_core.backbones.base import Backbone
from ..specar_core.errors import UsageError
from ..specar_core.job import Job
from ..specar_core.report import quick_digest
from ..specar_core.source import Frames, Source, SourceVideo, Still, fit, length, video_size
from . import host


@dataclass(frozen=True)
class Connected:
    """audio: the file whose sound goes into the video."""

    source: Source | None = None
    open: Callable[[Job], Frames | None] = lambda job: None
    audio: Path | None = None


def connected(backbone: Backbone, image: Tensor | None, video: Any, strength: float) -> Connected:
    if image is not None and video is not None:
        raise UsageError("connect only one of `start_image` and `source_video`")
    if image is not None:
        picture = as_picture(image)
        digest = "sha256:" + hashlib.sha256(picture.contiguous().numpy()).hexdigest()
        source = Source("image", "IMAGE", digest, picture.shape[3], picture.shape[2])
        return Connected(source, lambda job: Still(fit(picture, job.width, job.height)))
    if video is not None:
        path, fps = host.video_file(video), backbone.geometry.fps
        chosen = None if backbone.continues_video else strength
        source = Source("video", path.name, quick_digest(path), *video_size(path), length(path, fps), chosen)
        return Connected(
            source,
            lambda job: SourceVideo(path, fps, job.width, job.height, source.frames),
            None if backbone.continues_video else path,
        )
    return Connected()


def as_picture(image: Tensor) -> Tensor:
    """IMAGE [1, H, W, C] in [0, 1] as [1, 3, H, W] in [-1, 1]; what is transparent becomes white."""
    if image.shape[0] != 1:
        raise UsageError(f"`start_image` must be one image, not {image.shape[0]}")
    image = image.float().cpu().permute(0, 3, 1, 2)
    colours = image[:, :3].expand(-1, 3, -1, -1)
    if image.shape[1] == 4:
        colours = colours * image[:, 3:] + (1 - image[:, 3:])
    return colours.clamp(0, 1).mul(2).sub(1)
