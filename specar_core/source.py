"""What a video begins with, an image, or follows, a video: read from files and brought to the video's size and rate.

What has another shape is cropped around its middle and resized. Images are read by Pillow, which knows about
orientation, transparency and CMYK; videos by PyAV, a few frames at a time.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UsageError

log = logging.getLogger("specar")

DEFAULT_STRENGTH = 0.5
STATED = (1, 5, 6, 7, 9)  # code points of ITU-T H.273: BT.709, BT.470, SMPTE 170M and 240M, BT.2020


@dataclass(frozen=True)
class Source:
    """frames: how many a source video has at the pair's rate; strength: how far a video that follows it may stray."""

    kind: Literal["image", "video"]
    file: str
    digest: str
    width: int
    height: int
    frames: int = 1
    strength: float | None = None

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {self.kind: {"file": self.file, "digest": self.digest}}
        return told if self.strength is None else {**told, "strength": self.strength}

    def fitting(self, width: int, height: int) -> list[str]:
        """What to tell of bringing it to a size."""
        if (self.width, self.height) == (width, height):
            return []
        across, down = crop(self.width, self.height, width, height)
        cropped = f"cropped to {across}x{down} in the middle, " if (across, down) != (self.width, self.height) else ""
        resized = f"resized to {width}x{height}" if (across, down) != (width, height) else ""
        text = f"{cropped}{resized}".rstrip(", ")
        return [f"the {self.kind} is {self.width}x{self.height}: {text}"]


class Frames(Protocol):
    """Frames of a source at the video's size and rate."""

    @property
    def count(self) -> int: ...

    def frames(self, first: int, count: int) -> Tensor:
        """[1, 3, count, H, W] in [-1, 1], float32 on the CPU; behind the end the last frame again."""
        ...


def crop(width: int, height: int, wanted_width: int, wanted_height: int) -> tuple[int, int]:
    """Width and height of the largest part that has the wanted shape, to the pixel."""
    if width * wanted_height > height * wanted_width:
        return max(1, round(height * wanted_width / wanted_height)), height
    return width, max(1, round(width * wanted_height / wanted_width))


def fit(frames: Tensor, width: int, height: int) -> Tensor:
    """[N, 3, H, W], in [-1, 1] or uint8, cropped around the middle and resized to [N, 3, height, width]."""
    across, down = crop(frames.shape[3], frames.shape[2], width, height)
    left, top = (frames.shape[3] - across) // 2, (frames.shape[2] - down) // 2
    frames = frames[:, :, top : top + down, left : left + across]
    if (across, down) == (width, height):
        return frames
    resized = F.interpolate(frames, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(-1, 1) if resized.is_floating_point() else resized


# ------------------------------------------------------------------------------------------------ images


def read_image(path: Path) -> tuple[Tensor, list[str]]:
    """[1, 3, H, W] in [-1, 1], upright, and what the user should know. UsageError if it is no image."""
    from PIL import Image, ImageOps

    notices = []
    try:
        with Image.open(path) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow's own conversion keeps the lowest 8
                grey = np.asarray(image, dtype=np.float32) / 65535
                values = np.repeat(grey[:, :, None], 3, axis=2)
            elif image.mode == "F":
                values = np.repeat(np.asarray(image)[:, :, None], 3, axis=2)
            else:
                if image.has_transparency_data:
                    white = Image.new("RGBA", image.size, "white")
                    image = Image.alpha_composite(white, image.convert("RGBA"))
                    notices.append("transparent parts of the image become white")
                values = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"cannot read {path} as an image: {error}") from None
    return torch.from_numpy(np.nan_to_num(values)).clamp(0, 1).mul(2).sub(1).permute(2, 0, 1)[None], notices


@dataclass(frozen=True)
class Still:
    """An image [1, 3, H, W] as frames that are all alike."""

    image: Tensor
    count: int = 1

    def frames(self, first: int, count: int) -> Tensor:
        return self.image.unsqueeze(2).expand(-1, -1, count, -1, -1)


def still(path: Path, width: int, height: int) -> Still:
    return Still(fit(read_image(path)[0], width, height))


# ------------------------------------------------------------------------------------------------ videos


class SourceVideo:
    """A video file at another size and rate: frame j is what is on the screen at j / fps seconds.

    Frames are read in order; going back starts at the beginning again. Memory does not depend on the length.
    """

    def __init__(self, path: Path, fps: int, width: int, height: int) -> None:
        self.count = length(path, fps)
        self._path, self._fps, self._size = path, fps, (width, height)
        self._rewind()

    def frames(self, first: int, count: int) -> Tensor:
        frames = torch.stack([self._at(index) for index in range(first, first + count)])
        return frames.float().div(127.5).sub(1).transpose(0, 1)[None]

    def _rewind(self) -> None:
        self._shown = timed_frames(self._path)
        self._now, self._next = next(self._shown)[1], next(self._shown, None)
        self._fitted: Tensor | None = None
        self._index = 0

    def _at(self, index: int) -> Tensor:
        """uint8 [3, H, W]."""
        if index < self._index:
            self._rewind()
        self._index = index
        while self._next and self._next[0] <= Fraction(index, self._fps):
            self._now, self._next, self._fitted = self._next[1], next(self._shown, None), None
        if self._fitted is None:
            picture = torch.from_numpy(upright(self._now)).permute(2, 0, 1)[None]
            self._fitted = fit(picture, *self._size)[0]
        return self._fitted


def timed_frames(path: Path) -> Iterator[tuple[Fraction, Any]]:
    """The frames of a video file and the times when they are shown, in seconds from the first. At least one frame.

    UsageError if it holds none; where it is damaged the video ends, with a warning.
    """
    import av

    start, time = None, Fraction(0)
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video_stream(path, container)):
                shown = time if frame.time is None else Fraction(frame.pts) * frame.time_base
                start = shown if start is None else start
                yield shown - start, frame
                time = shown + Fraction(1, 25)
    except (OSError, ValueError, av.FFmpegError) as error:
        if start is None:
            raise UsageError(f"cannot read {path} as a video: {error}") from None
        log.warning("%s is damaged behind %.2f s: the frame before is held (%s)", path, float(time - start), error)
    if start is None:
        raise UsageError(f"{path} holds no frame of video")


def video_stream(path: Path, container: Any) -> Any:
    if not container.streams.video:
        raise UsageError(f"{path} holds no video")
    return container.streams.video[0]


def length(path: Path, fps: int) -> int:
    """How many frames at this rate a video file lasts, by its packets; nothing is decoded."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = video_stream(path, container)
            usual = 1 / (stream.average_rate or Fraction(25))
            begin, end = None, Fraction(0)
            for packet in container.demux(stream):
                if packet.pts is not None:
                    shown = packet.pts * packet.time_base
                    begin = shown if begin is None else min(begin, shown)
                    end = max(end, shown + (packet.duration * packet.time_base if packet.duration else usual))
    except (OSError, ValueError, av.FFmpegError) as error:
        raise UsageError(f"cannot read {path} as a video: {error}") from None
    return max(1, math.ceil((end - begin) * fps - Fraction(1, 1000))) if begin is not None else 1


def video_size(path: Path) -> tuple[int, int]:
    """Width and height as its first frame is shown."""
    _, frame = next(timed_frames(path))
    turned = round(frame.rotation / 90) % 2
    return (frame.height, frame.width) if turned else (frame.width, frame.height)


def upright(frame: Any) -> np.ndarray:
    """uint8 [H, W, 3] of a decoded frame, turned as its file says."""
    told: dict[str, Any] = {"src_color_range": frame.color_range} if frame.color_range else {}
    if frame.colorspace not in STATED:  # BT.709 for HD and BT.601 below, as players take it
        told["src_colorspace"] = "ITU709" if frame.height >= 720 else "ITU601"
    picture = frame.reformat(format="rgb24", interpolation="BICUBIC", dst_color_range="JPEG", **told).to_ndarray()
    return np.ascontiguousarray(np.rot90(picture, round(frame.rotation / 90)))
