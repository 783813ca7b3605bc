"""Committed latents to frames outside a rollout, in memory that does not depend on their number."""

from collections.abc import Iterator

from torch import Tensor

from .models.vae import StreamState, WanVAE


def decode(vae: WanVAE, latents: Tensor, clip: int, dropped: int = 0) -> Iterator[Tensor]:
    """Frames [B, 3, N, H, W] in [-1, 1], float32, of one latent frame after another; without the first `dropped`.

    latents [B, C, T, h, w], normalised; clip: latent frames that are decoded as one stream (`Geometry.clip`).
    """
    state = StreamState()
    for index, latent in enumerate(latents.split(1, dim=2)):
        frames, state = vae.decode(latent, StreamState() if index % clip == 0 else state)
        skipped = min(dropped, frames.shape[2])
        dropped -= skipped
        if skipped < frames.shape[2]:
            yield frames[:, :, skipped:].float().clamp(-1, 1)
