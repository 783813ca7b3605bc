"""How a video of a session pair begins with an image, or follows another video.

An image, held for the frames of a block, is what was committed before block 0: its latents are block 0's context, and
decoding them primes the decoder. The video then begins with the image itself.

A video is followed block by block: its latents, noised to the first time of the steps, take the place of the initial
noise (SDEdit, arXiv:2108.01073, as in Krea Realtime's sessions). The latents are those of one stream, or of one for
each clip if there are cuts.
"""

import torch
from torch import Tensor

from ..device import sent
from ..models.streaming import StreamState
from ..sampling.flow import FlowTable
from ..source import Frames
from .pair import Committed, Noise, Prompts
from .session import SessionPair

# Latent frames after which an encoder that forgot its histories encodes bit-identically to one that did not: 28 by its
# taps, and 3 more as in a decoder (`DECODER_MEMORY`).
ENCODER_MEMORY = 31


def start_image(pair: SessionPair, image: Tensor, prompts: Prompts) -> Committed:
    """What a rollout resumes from so that the video begins with an image [B, 3, 1, H, W] in [-1, 1]."""
    with torch.inference_mode():
        given = pair.vae.encode(image.expand(-1, -1, pair.geometry.clip_start, -1, -1))[0]
    extra = {"opening": image}
    if pair.anchor_first_latent:
        extra["anchor"] = given[:, :, :1]
    return Committed(0, {-1: given}.__getitem__, lambda block: prompts(0), extra, first=-1)


class VideoLatents:
    """The latents [B, C, T, h, w] of a source video for each block, in constant memory.

    A delivered frame of the video is what the source shows at its time; the frames that are decoded before the first
    delivered one, and then dropped, repeat it.
    """

    def __init__(self, pair: SessionPair, source: Frames) -> None:
        self._pair, self._source = pair, source
        self._block, self._latents, self._state = -1, torch.empty(0), StreamState()

    @torch.inference_mode()
    def __call__(self, block: int) -> Tensor:
        if block == self._block:
            return self._latents
        first = max(cut for cut in (0, *self._pair.geometry.cuts) if cut <= block)
        if block != self._block + 1 or block == first:
            replayed = -(-ENCODER_MEMORY // self._pair.geometry.latent_frames)
            oldest = max(first, block - replayed)
            self._state = StreamState(started=oldest > first)
            for before in range(oldest, block):
                self._encode(before)
        self._latents, self._block = self._encode(block), block
        return self._latents

    def _encode(self, block: int) -> Tensor:
        geometry = self._pair.geometry
        first, end = geometry.frames(block), geometry.frames(block + 1)
        frames = self._source.frames(first, end - first)
        if block == 0:
            held = frames[:, :, :1].expand(-1, -1, geometry.dropped, -1, -1)
            frames = torch.cat([held, frames], dim=2)
        latents, self._state = self._pair.vae.encode(frames, self._state)
        return latents


def following(pair: SessionPair, source: Frames, noise: Noise) -> Noise:
    """Noise for a rollout that follows a video: in place of a block's initial noise, the noised source."""
    table, latents = FlowTable(pair.shift), VideoLatents(pair, source)
    (time,) = {steps[0] for steps in pair.steps.values()}

    def drawn(block: int, draw: int) -> Tensor:
        white = noise(block, draw)
        return white if draw else table.renoise(latents(block), sent(white, pair.device), time)

    return drawn
