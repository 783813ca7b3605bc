"""What a video begins with, an image, or follows, a video: read from files and brought to the video's size and rate.

What has another shape is cropped around its middle and resized. Images are read by Pillow, which knows about
orientation, transparency and CMYK; videos by PyAV, a few frames at a time.
"""

import contextlib
import logging
import math
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UsageError, reason

log = logging.getLogger("specar")

DEFAULT_STRENGTH = 0.5
ROUNDED = Fraction(1, 1000)  # seconds: Matroska tells whole milliseconds
WIDEST = Fraction(8)  # pixels: what a damaged file tells may be anything
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

    def close(self) -> None:
        """No more frames are wanted."""
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

    def close(self) -> None:
        pass


def still(path: Path, width: int, height: int) -> Still:
    return Still(fit(read_image(path)[0], width, height))


# ------------------------------------------------------------------------------------------------ videos


class SourceVideo:
    """A video file at another size and rate: frame j is what is on the screen at j / fps seconds.

    Frames are read in order; going back starts at the beginning again. Memory does not depend on the length. count: how
    many frames there are, see `length`. `close` it when no more frames are wanted.
    """

    def __init__(self, path: Path, fps: int, width: int, height: int, count: int) -> None:
        self.count = count
        self._path, self._fps, self._size = path, fps, (width, height)
        self._rewind()

    def frames(self, first: int, count: int) -> Tensor:
        frames = torch.stack([self._at(index) for index in range(first, first + count)])
        return frames.float().div(127.5).sub(1).transpose(0, 1)[None]

    def close(self) -> None:
        self._file.close()

    def _rewind(self) -> None:
        self._file = shown_frames(self._path)
        self._now, self._next = next(self._file), next(self._file, None)
        self._fitted: Tensor | None = None
        self._index = 0

    def _at(self, index: int) -> Tensor:
        """uint8 [3, H, W]."""
        if index < self._index:
            self.close()
            self._rewind()
        self._index = index
        while self._next and self._next.seconds <= Fraction(index, self._fps) + ROUNDED:
            self._now, self._next, self._fitted = self._next, next(self._file, None), None
        if self._fitted is None:
            picture = torch.from_numpy(self._now.picture()).permute(2, 0, 1)[None]
            self._fitted = fit(picture, *self._size)[0]
        return self._fitted


@dataclass(frozen=True)
class Shown:
    """A decoded frame. seconds: when it is shown, from the first one on; pixel: its pixels' width over their height."""

    seconds: Fraction
    frame: Any
    pixel: Fraction

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as a player shows it, in square pixels and turned as its file says."""
        width, height = self._wide, self.frame.height
        return (height, width) if self._quarters % 2 else (width, height)

    def picture(self) -> np.ndarray:
        """uint8 [H, W, 3] of that size."""
        frame = self.frame
        told: dict[str, Any] = {"src_color_range": frame.color_range} if frame.color_range else {}
        if frame.colorspace not in STATED:  # BT.709 for HD and BT.601 below, as players take it
            told["src_colorspace"] = "ITU709" if frame.height >= 720 else "ITU601"
        # RGB has no matrix: PyAV before 17 heeds the source's only where this says another.
        told |= {"interpolation": "BICUBIC", "dst_colorspace": "DEFAULT", "dst_color_range": "JPEG"}
        picture = frame.reformat(width=self._wide, height=frame.height, format="rgb24", **told).to_ndarray()
        return np.ascontiguousarray(np.rot90(picture, self._quarters))

    @property
    def _wide(self) -> int:
        return max(1, round(self.frame.width * self.pixel))

    @property
    def _quarters(self) -> int:
        return round(self.frame.rotation / 90)


def shown_frames(path: Path) -> Generator[Shown, None, None]:
    """The frames of a video file, at least one.

    UsageError if it holds none; where it is damaged the video ends, with a warning.
    """
    import av

    start, time = None, Fraction(0)
    try:
        with av.open(str(path)) as container:
            stream = video_stream(container)
            usual = usual_seconds(stream)
            pixel = min(max(stream.sample_aspect_ratio or Fraction(1), 1 / WIDEST), WIDEST)
            for frame in container.decode(stream):
                time = time if frame.pts is None else frame.pts * frame.time_base
                start = time if start is None else start
                yield Shown(time - start, frame, pixel)
                time += usual
    except (OSError, ValueError, av.FFmpegError) as error:
        if start is None:
            raise unreadable(path, error) from None
        behind = float(time - start)
        log.warning("%s is damaged behind %.2f s: the frame before is held (%s)", path, behind, reason(error))
    if start is None:
        raise UsageError(f"{path} holds no frame of video")


def unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"cannot read {path} as a video: {reason(error)}")


def video_stream(container: Any) -> Any:
    """The video of a file, and not the picture on its cover. ValueError if there is none."""
    if stream := container.streams.best("video"):
        return stream
    raise ValueError("it holds no video")


def usual_seconds(stream: Any) -> Fraction:
    """How long a frame is shown where nothing tells it."""
    return 1 / (stream.average_rate or Fraction(25))


def length(path: Path, fps: int) -> int:
    """How many frames at this rate a video file lasts, by its packets; nothing is decoded."""
    import av

    begin, end = None, Fraction(0)
    try:
        with av.open(str(path)) as container:
            stream = video_stream(container)
            usual = usual_seconds(stream)
            for packet in container.demux(stream):
                if not packet.size:  # the end
                    continue
                shown = end if packet.pts is None else packet.pts * packet.time_base
                lasts = usual if packet.pts is None or not packet.duration else packet.duration * packet.time_base
                begin = shown if begin is None else min(begin, shown)
                end = max(end, shown + lasts)
    except (OSError, ValueError, av.FFmpegError) as error:
        raise unreadable(path, error) from None
    return max(1, math.ceil((end - begin - ROUNDED) * fps)) if begin is not None else 1


def video_size(path: Path) -> tuple[int, int]:
    """Width and height as its first frame is shown."""
    with contextlib.closing(shown_frames(path)) as frames:
        return next(frames).size
