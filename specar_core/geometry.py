"""The one place that converts seconds, frames, latent frames and blocks, and that checks sizes.

A latent frame is one time step of the latent space; the first one of a clip decodes to 1 frame, each later one
to 4. Krea and Self-Forcing decode one long clip (9, 12, 12, ... frames a block, the first 3 not delivered, which
gives the published 426 frames for 36 blocks); Helios decodes every block as a clip of its own (33 frames a block).
"""

import math
from dataclasses import dataclass

from .errors import UsageError


def decoded_frames(latent_frames: int, clip: int) -> int:
    """Frames that latent frames decode to, `clip` of them in one stream."""
    whole, rest = divmod(latent_frames, clip)
    return whole * (4 * clip - 3) + (4 * rest - 3 if rest else 0)


@dataclass(frozen=True)
class Geometry:
    """How the blocks of a pair become frames.

    latent_frames: latent frames a block; first_frames, later_frames: frames that block 0 and every later block decode
    to; dropped: decoded frames of block 0 that are not delivered unless asked for; size_multiple: width and height in
    pixels are multiples of it; latent_channels and the spatial factor 8 are those of the Wan 2.1 VAE.
    """

    fps: int
    latent_frames: int
    first_frames: int
    later_frames: int
    dropped: int
    size_multiple: int
    latent_channels: int = 16
    spatial_factor: int = 8

    def delivered_from(self, keep_first_frames: bool = False) -> int:
        """Index of the first decoded frame of block 0 that is delivered."""
        return 0 if keep_first_frames else self.dropped

    def frames(self, blocks: int, keep_first_frames: bool = False) -> int:
        """Frames that a video of `blocks` blocks has."""
        if not blocks:
            return 0
        return self.first_frames - self.delivered_from(keep_first_frames) + (blocks - 1) * self.later_frames

    def clip(self, blocks: int) -> int:
        """Latent frames that are decoded as one stream: those of the whole video, or of one block."""
        return self.latent_frames * (1 if self.first_frames == self.later_frames else blocks)

    def seconds(self, blocks: int, keep_first_frames: bool = False) -> float:
        return self.frames(blocks, keep_first_frames) / self.fps

    def blocks_for_frames(self, frames: int, keep_first_frames: bool = False) -> int:
        """The fewest blocks that hold `frames` frames."""
        if frames < 1:
            raise UsageError(f"a video needs at least 1 frame, not {frames}")
        missing = frames - self.frames(1, keep_first_frames)
        return 1 + max(0, -(-missing // self.later_frames))

    def blocks_for_seconds(self, seconds: float, keep_first_frames: bool = False) -> int:
        """The fewest blocks that last `seconds` seconds."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"the length must be more than 0 seconds, not {seconds:g}")
        # 1e-9 frames of tolerance: 0.1 s at 30 fps must be 3 frames, not 4.
        return self.blocks_for_frames(math.ceil(seconds * self.fps - 1e-9), keep_first_frames)

    def check_size(self, width: int, height: int) -> None:
        for name, value in (("width", width), ("height", height)):
            step = self.size_multiple
            if value < step:
                raise UsageError(f"{name} {value} is too small; the least is {step}")
            if value % step:
                below = value // step * step
                raise UsageError(f"{name} {value} is not a multiple of {step}; use {below} or {below + step}")

    def latent_shape(self, width: int, height: int, batch: int = 1) -> tuple[int, int, int, int, int]:
        """[B, C, T, h, w] of one block's latents."""
        factor = self.spatial_factor
        return (batch, self.latent_channels, self.latent_frames, height // factor, width // factor)
