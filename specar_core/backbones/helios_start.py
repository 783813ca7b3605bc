"""How a Helios video begins with an image, or goes on from a video: given latents in place of committed ones.

They are noised as the history was in training. Unlike the published pipelines, the VAE's encodings are its means, not
samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..noise import Draw
from .helios_pair import HISTORY, HeliosContext, HeliosPair
from .pair import Committed

# Sigmas are uniform in this range. More noise lets more move, and keeps less likeness.
SIGMAS = (0.111, 0.135)
# Draws of block 0 that no sampler uses. At DRAWS and DRAWS + 1: the anchor's noise and its sigma. At DRAWS + 2 + 2c and
# the next: those of the c-th given clip, counted back from the last.
DRAWS = 100


def start_image(pair: HeliosPair, image: Tensor, draw: Draw, sigmas: tuple[float, float] = SIGMAS) -> Committed:
    """What a rollout resumes from so that the video begins with an image [B, 3, 1, H, W] in [-1, 1].

    The image is the anchor, and the last latent frame of a clip that shows nothing else is the last committed one. draw
    is block 0's; sigmas: the noise on the given latents is uniform between them.
    """
    still = image.expand(-1, -1, pair.geometry.later_frames, -1, -1)
    with torch.inference_mode():
        return start(pair.vae.encode(image)[0], [pair.vae.encode(still)[0][:, :, -1:]], draw, sigmas)


def start_video(pair: HeliosPair, video: Tensor, draw: Draw, sigmas: tuple[float, float] = SIGMAS) -> Committed:
    """As start_image, to continue a video [B, 3, N, H, W] of at least 33 frames.

    Its first frame is the anchor. Of its end as many whole clips are encoded as the history reaches back; what is
    generated follows its last frame.
    """
    size = pair.geometry.later_frames
    count = min(video.shape[2] // size, -(-sum(HISTORY) // pair.geometry.latent_frames))
    if not count:
        raise UsageError(f"a video to continue must have at least {size} frames, not {video.shape[2]}")
    with torch.inference_mode():
        clips = [pair.vae.encode(clip)[0] for clip in video[:, :, -count * size :].split(size, dim=2)]
        return start(pair.vae.encode(video[:, :, :1])[0], clips, draw, sigmas)


def start(anchor: Tensor, clips: Sequence[Tensor], draw: Draw, sigmas: tuple[float, float] = SIGMAS) -> Committed:
    """From latents: anchor [B, C, 1, h, w], clips [B, C, 1 to 9, h, w], the newest last."""
    past = [noised(clip, draw, DRAWS + 2 + 2 * back, sigmas) for back, clip in enumerate(reversed(clips))]
    unknown = torch.zeros_like(anchor).expand(-1, -1, sum(HISTORY), -1, -1)
    history = torch.cat([unknown, *reversed(past)], dim=2)[:, :, -sum(HISTORY) :].contiguous()
    context = HeliosContext(0, history, noised(anchor, draw, DRAWS, sigmas))
    never: Mapping[int, Tensor] = {}
    return Committed(0, never.__getitem__, never.__getitem__, context.extra())


def noised(latents: Tensor, draw: Draw, number: int, sigmas: tuple[float, float]) -> Tensor:
    """Latents [B, C, T, h, w] with the noise of draw `number`, and a sigma a latent frame from the draw behind it."""
    frames, (least, most) = latents.shape[2], sigmas
    white, normal = (draw(number + offset).to(latents.device)[:, :, :frames] for offset in (0, 1))
    chance = torch.special.ndtr(normal[:, :1, :, :1, :1])  # uniform in 0..1
    return torch.lerp(latents, white, least + (most - least) * chance)
