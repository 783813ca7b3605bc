"""What is measured on the frames of a finished video, one after another: numbers for every frame and every block.

Frames are uint8 [H, W, 3]; arithmetic is float32 on 0...255. However long the video, memory holds two frames and the
small luma pictures of block 0.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .errors import SpecarError, reason
from .geometry import Geometry

Frame = NDArray[np.uint8]
Values = NDArray[np.float64]
LUMA = np.array([0.2126, 0.7152, 0.0722], np.float32)  # of BT.709, on the coded values
CELL = 4  # pixels along the sides of the cells that motion is measured on
THUMBNAIL = 36, 64  # luma pictures that tell whether a rollout returns to its start
RETURNS_AFTER = 5  # blocks in which a likeness to the start says nothing
DARK, BRIGHT = 2, 253  # a channel this low or this high counts as clipped
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03  # of SSIM: Wang et al., https://doi.org/10.1109/TIP.2003.819861

# Measures of one frame, each defined in `_measure`; "motion" is the change to the next frame.
MEASURES = ("luma", "contrast", "saturation", "sharpness", "colourfulness", "red", "green", "blue", "motion")


@dataclass(frozen=True)
class Layout:
    """Which model generated each block, and where its frames begin; `starts` ends with the number of all frames, and
    `cuts` are later blocks that begin another shot."""

    roles: tuple[str, ...]
    starts: tuple[int, ...]
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, report: Mapping[str, Any], geometry: Geometry) -> "Layout":
        """Of a video by its report and the geometry of its backbone. Block 0 has what the other blocks leave: that
        holds for an image before it, and for frames that are not delivered."""
        roles = tuple(block["role"] for block in report["blocks"])
        cuts = tuple(cue["block"] for cue in report["prompts"] or () if cue.get("cut") and cue["block"] < len(roles))
        geometry = replace(geometry, cuts=cuts)
        first = report["frames"] - geometry.frames(len(roles))
        return cls(roles, (0, *(first + geometry.frames(block) for block in range(1, len(roles) + 1))), cuts)

    @property
    def frames(self) -> int:
        return self.starts[-1]

    @property
    def blocks(self) -> range:
        return range(len(self.roles))

    @property
    def boundaries(self) -> list[int]:
        """The later blocks, without cuts."""
        return [block for block in self.blocks[1:] if block not in self.cuts]

    @property
    def shots(self) -> list[range]:
        """The blocks of each shot."""
        edges = (0, *self.cuts, len(self.roles))
        return [range(start, end) for start, end in zip(edges, edges[1:], strict=False)]

    def of_block(self, block: int) -> slice:
        return slice(self.starts[block], self.starts[block + 1])

    def inside(self, block: int) -> slice:
        """The differences between frames of the same block."""
        return slice(self.starts[block], self.starts[block + 1] - 1)

    @cached_property
    def positions(self) -> tuple[int | None, ...]:
        """Blocks since the last target block, 0 for a target block; None where there is none in the shot."""
        found: list[int | None] = []
        for block, role in enumerate(self.roles):
            before = found[-1] if found and block not in self.cuts else None
            found.append(0 if role == "target" else None if before is None else before + 1)
        return tuple(found)


@dataclass(frozen=True)
class Track:
    """Measured on a whole video of N frames: by measure [N], differences [N-1] between one frame and the next, shares
    of clipped pixels [N], and the likeness of each frame to block 0 [N], NaN in the blocks next to it."""

    measures: Mapping[str, Values]
    differences: Values
    clipped: Values
    likeness: Values

    def block_means(self, layout: Layout) -> dict[str, Values]:
        return {
            name: np.array([values[layout.of_block(block)].mean() for block in layout.blocks])
            for name, values in self.measures.items()
        }


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of a video as uint8 [H, W, 3]. Raises SpecarError for a file that cannot be decoded."""
    import av

    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                # RGB has no matrix, see source.py.
                picture = frame.to_ndarray(format="rgb24", src_colorspace="ITU709", dst_colorspace="DEFAULT")
                yield np.asarray(picture, np.uint8)
    except (av.FFmpegError, OSError, IndexError) as error:
        raise SpecarError(f"Cannot read {path} as a video: {reason(error)}") from error


def measure(frames: Iterable[Frame], layout: Layout) -> Track:
    """One pass over a video. Raises SpecarError if it has not the frames that the layout says."""
    measures: dict[str, list[float]] = {name: [] for name in MEASURES}
    differences, clipped, likeness = [], [], []
    start: list[Tensor] = []
    before: tuple[NDArray[np.int16], NDArray[np.float32]] | None = None
    count = 0
    for index, frame in enumerate(_counted(frames, layout.frames)):
        values, luma, clipped_share = _measure(frame)
        small, cells, wide = _thumbnail(luma), _cells(luma), frame.astype(np.int16)
        for name, value in values.items():
            measures[name].append(value)
        if before is not None:
            differences.append(float(np.abs(wide - before[0]).mean()))
            measures["motion"].append(float(np.abs(cells - before[1]).mean()))
        clipped.append(clipped_share)
        if index < layout.starts[1]:
            start.append(small)
        late = len(layout.roles) > RETURNS_AFTER + 1 and index >= layout.starts[RETURNS_AFTER + 1]
        likeness.append(ssim(small.expand(len(start), -1, -1), torch.stack(start)).max().item() if late else np.nan)
        before, count = (wide, cells), index + 1
    measures["motion"] += [measures["motion"][-1] if count > 1 else 0.0]
    return Track(
        {name: np.array(values) for name, values in measures.items()},
        np.array(differences),
        np.array(clipped),
        np.array(likeness),
    )


def fidelity(frames: Iterable[Frame], reference: Iterable[Frame], layout: Layout) -> tuple[Values, Values]:
    """PSNR, infinite where frames are identical, and SSIM of each block against the same block of another video.

    Raises SpecarError if one of them has not the frames that the layout says, or frames of another size.
    """
    squares, likeness = np.zeros(layout.frames), np.zeros(layout.frames)
    pairs = zip(_counted(frames, layout.frames), _counted(reference, layout.frames), strict=True)
    for index, (frame, other) in enumerate(pairs):
        if frame.shape != other.shape:
            raise SpecarError(f"the frames are {frame.shape[1::-1]}, those to compare with {other.shape[1::-1]}")
        squares[index] = np.square(frame.astype(np.int32) - other).mean()
        lumas = (torch.from_numpy(picture.astype(np.float32) @ LUMA)[None] for picture in (frame, other))
        likeness[index] = ssim(*lumas).item()
    with np.errstate(divide="ignore"):
        psnr = [10 * np.log10(255**2 / squares[layout.of_block(block)].mean()) for block in layout.blocks]
    return np.array(psnr), np.array([likeness[layout.of_block(block)].mean() for block in layout.blocks])


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean structural similarity [N] of luma pictures [N, H, W] float32, 0...255, over the valid area; pictures of at
    least 11 x 11 pixels."""
    offsets = torch.arange(WINDOW) - WINDOW // 2
    weights = torch.softmax(-(offsets**2) / (2 * SIGMA**2), 0).tolist()

    def blurred(pictures: Tensor) -> Tensor:  # ten times as fast as a convolution of one channel
        for axis in (1, 2):
            size = pictures.shape[axis] - WINDOW + 1
            parts = [pictures.narrow(axis, start, size) for start in range(WINDOW)]
            total = parts[0] * weights[0]
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                total.add_(part, alpha=weight)
            pictures = total
        return pictures

    mean_a, mean_b, square_a, square_b, product = blurred(torch.cat([a, b, a * a, b * b, a * b])).chunk(5)
    variance_a, variance_b = square_a - mean_a**2, square_b - mean_b**2
    covariance = product - mean_a * mean_b
    c1, c2 = (K1 * 255) ** 2, (K2 * 255) ** 2
    map_ = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    map_ /= (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    return map_.mean((1, 2))


def _counted(frames: Iterable[Frame], expected: int) -> Iterator[Frame]:
    count = 0
    for frame in frames:
        count += 1
        if count <= expected:
            yield frame
    if count != expected:
        raise SpecarError(f"it has {count} frames, and its report says {expected}")


def _measure(frame: Frame) -> tuple[dict[str, float], NDArray[np.float32], float]:
    """The measures of one frame but motion, its luma [H, W], and the share of its pixels that are clipped."""
    red, green, blue = np.ascontiguousarray(frame.transpose(2, 0, 1), np.float32)
    luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    highest, lowest = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    laplacian = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:] - 4 * luma[1:-1, 1:-1]
    red_green, yellow_blue = red - green, (red + green) / 2 - blue
    # Hasler and Süsstrunk, https://doi.org/10.1117/12.477378
    spread = np.hypot(red_green.std(), yellow_blue.std())
    colourfulness = spread + 0.3 * np.hypot(red_green.mean(), yellow_blue.mean())
    measures = {
        "luma": luma.mean(),
        "contrast": luma.std(),
        "saturation": ((highest - lowest) / np.maximum(highest, 1)).mean(),  # levels are whole: 0 or at least 1
        "sharpness": laplacian.var(),
        "colourfulness": colourfulness,
        "red": red.mean(),
        "green": green.mean(),
        "blue": blue.mean(),
    }
    clipped = float(((lowest <= DARK) | (highest >= BRIGHT)).mean())
    return {name: float(value) for name, value in measures.items()}, luma, clipped


def _cells(luma: NDArray[np.float32]) -> NDArray[np.float32]:
    height, width = (size // CELL for size in luma.shape)
    return luma[: height * CELL, : width * CELL].reshape(height, CELL, width, CELL).mean((1, 3))


def _thumbnail(luma: NDArray[np.float32]) -> Tensor:
    return F.interpolate(torch.from_numpy(luma)[None, None], THUMBNAIL, mode="area")[0, 0]
