"""The one place that converts seconds, frames, latent frames and blocks, and that checks lengths and sizes.

A latent frame is one time step of the latent space; the first one of a clip decodes to 1 frame, each later one
to 4. Krea and Self-Forcing decode one long clip (9, 12, 12, ... frames a block, the first 3 not delivered, which
gives the published 426 frames for 36 blocks); Helios decodes every block as a clip of its own (33 frames a block).
"""

import math
from dataclasses import dataclass

from .errors import UsageError

MOST_PIXELS = 16384  # along a side: more is more than x264 encodes
MOST_BLOCKS = 100_000  # most of a day


def decoded_frames(latent_frames: int, clip: int) -> int:
    """Frames that latent frames decode to, `clip` of them in one stream."""
    whole, rest = divmod(latent_frames, clip)
    return whole * (4 * clip - 3) + (4 * rest - 3 if rest else 0)


def check_blocks(count: int) -> None:
    if count < 1:
        raise UsageError(f"a video needs at least 1 block, not {count}")
    if count > MOST_BLOCKS:
        raise UsageError(f"a video has at most {MOST_BLOCKS:,} blocks, not {count:,}")


@dataclass(frozen=True)
class Geometry:
    """How the blocks of a pair become frames.

    latent_frames: latent frames a block; size_multiple: width and height in pixels are multiples of it; one_clip: the
    whole video is decoded as one clip, and not every block by itself; dropped: decoded frames of block 0 that are not
    delivered; cuts: later blocks that begin a new clip; image: the first frame is an image that block 0 follows, which
    so is no beginning of a clip; latent_channels and the spatial factor 8 are those of the Wan 2.1 VAE.
    """

    fps: int
    latent_frames: int
    size_multiple: int
    one_clip: bool = True
    dropped: int = 0
    cuts: tuple[int, ...] = ()
    image: bool = False
    latent_channels: int = 16
    spatial_factor: int = 8

    @property
    def first_frames(self) -> int:
        """Frames that block 0 gives."""
        return 1 + self.later_frames if self.image else self.clip_start

    @property
    def clip_start(self) -> int:
        """Frames of a block that a clip begins with."""
        return decoded_frames(self.latent_frames, self.latent_frames)

    @property
    def later_frames(self) -> int:
        """Frames of every other block."""
        return 4 * self.latent_frames if self.one_clip else self.clip_start

    def frames(self, blocks: int) -> int:
        """Frames that a video of `blocks` blocks has."""
        if not blocks:
            return 0
        begun = sum(cut < blocks for cut in self.cuts)
        later = (blocks - 1 - begun) * self.later_frames + begun * self.clip_start
        return self.first_frames - self.dropped + later

    def clip(self, blocks: int) -> int:
        """Latent frames that are decoded as one clip: those of the whole video, or of one block."""
        return self.latent_frames * (blocks if self.one_clip else 1)

    def seconds(self, blocks: int) -> float:
        return self.frames(blocks) / self.fps

    def blocks_for_frames(self, frames: int) -> int:
        """The fewest blocks that hold `frames` frames."""
        if frames < 1:
            raise UsageError(f"a video needs at least 1 frame, not {frames}")
        missing = frames - self.frames(1)
        blocks = 1 + max(0, -(-missing // self.later_frames))
        while self.frames(blocks) < frames:  # cuts make some blocks shorter
            blocks += 1
        return blocks

    def blocks_for_seconds(self, seconds: float) -> int:
        """The fewest blocks that last `seconds` seconds."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"the length must be more than 0 seconds, not {seconds:g}")
        # 1e-9 frames of tolerance: 0.1 s at 30 fps must be 3 frames, not 4.
        return self.blocks_for_frames(math.ceil(seconds * self.fps - 1e-9))

    def check_size(self, width: int, height: int) -> None:
        for name, value in (("width", width), ("height", height)):
            step = self.size_multiple
            if value < step:
                raise UsageError(f"{name} {value} is too small; the least is {step}")
            if value > MOST_PIXELS:
                raise UsageError(f"{name} {value} is too large; the most is {MOST_PIXELS}")
            if value % step:
                below = value // step * step
                raise UsageError(f"{name} {value} is not a multiple of {step}; use {below} or {below + step}")

    def latent_shape(self, width: int, height: int, batch: int = 1) -> tuple[int, int, int, int, int]:
        """[B, C, T, h, w] of one block's latents."""
        factor = self.spatial_factor
        return (batch, self.latent_channels, self.latent_frames, height // factor, width // factor)
