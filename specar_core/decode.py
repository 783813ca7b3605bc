"""Latents to frames."""

from collections.abc import Callable, Iterator

from torch import Tensor

from .models.vae import StreamState, WanVAE


def decode(vae: WanVAE, latents: Tensor, clip: int, dropped: int = 0) -> Iterator[Tensor]:
    """Committed latents [B, C, T, h, w] outside a rollout, in memory that does not depend on their number: frames
    [B, 3, N, H, W] in [-1, 1], float32, of one latent frame after another; without the first `dropped`.

    clip: latent frames that are decoded as one stream (`Geometry.clip`).
    """
    state = StreamState()
    for index, latent in enumerate(latents.split(1, dim=2)):
        (frames,), state = decode_on(vae, latent, StreamState() if index % clip == 0 else state)
        skipped = min(dropped, frames.shape[2])
        dropped -= skipped
        if skipped < frames.shape[2]:
            yield frames[:, :, skipped:]


def decode_on(
    vae: WanVAE, latents: Tensor, state: StreamState, told: Callable[[int], None] = lambda done: None
) -> tuple[list[Tensor], StreamState]:
    """The frames of each of these latent frames, and the stream's state behind them; told(how many are done)."""
    decoded = []
    for latent in latents.split(1, dim=2):
        frames, state = vae.decode(latent, state)
        decoded.append(frames.float().clamp(-1, 1))
        told(len(decoded))
    return decoded, state
