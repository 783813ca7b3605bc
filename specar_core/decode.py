"""Latents to frames."""

from collections.abc import Callable, Iterator

from torch import Tensor

from .models.streaming import StreamState
from .models.vae import WanVAE


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
    vae: WanVAE,
    latents: Tensor,
    state: StreamState,
    told: Callable[[int], None] = lambda done: None,
    at_once: int = 1,
) -> tuple[list[Tensor], StreamState]:
    """The frames of each of these latent frames, and the stream's state behind them; told(how many are done).

    at_once: latent frames that are decoded together, which a large GPU does faster, in that many times the memory.
    """
    decoded: list[Tensor] = []
    for some in latents.split(at_once, dim=2):
        sizes = [4 if index or state.started else 1 for index in range(some.shape[2])]
        frames, state = vae.decode(some, state)
        for one in frames.float().clamp(-1, 1).split(sizes, dim=2):
            decoded.append(one)
            told(len(decoded))
    return decoded, state
