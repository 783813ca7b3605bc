"""How a Helios video begins with an image, or goes on from a video: given latents in place of committed ones.

They are noised as the history was in training. Unlike the published pipelines, the VAE's encodings are its means, not
samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..noise import Draw
from ..source import Frames
from .helios_pair import HISTORY, HeliosContext, HeliosPair
from .pair import Committed

# Sigmas are uniform in this range. More noise lets more move, and keeps less likeness.
SIGMAS = (0.111, 0.135)
# Draws of block 0 that no sampler uses. At DRAWS and DRAWS + 1: the anchor's noise and its sigma. At DRAWS + 2 + 2c and
# the next: those of the c-th given clip, counted back from the last.
DRAWS = 100


def start_image(pair: HeliosPair, image: Tensor, draw: Draw) -> Committed:
    """What a rollout resumes from so that the video begins with an image [B, 3, 1, H, W] in [-1, 1].

    The image is the anchor, and the last latent frame of a clip that shows nothing else is the last committed one. draw
    is block 0's.
    """
    still = image.expand(-1, -1, pair.geometry.later_frames, -1, -1)
    with torch.inference_mode():
        return start(pair.vae.encode(image)[0], [pair.vae.encode(still)[0][:, :, -1:]], draw)


def start_video(pair: HeliosPair, video: Frames, draw: Draw) -> Committed:
    """As start_image, to continue a video of at least 33 frames.

    Its first frame is the anchor. Of its end as many whole clips are encoded as the history reaches back; what is
    generated follows its last frame.
    """
    size = pair.geometry.later_frames
    count = min(video.count // size, -(-sum(HISTORY) // pair.geometry.latent_frames))
    with torch.inference_mode():
        anchor = pair.vae.encode(video.frames(0, 1))[0]
        firsts = range(video.count - count * size, video.count, size)
        return start(anchor, [pair.vae.encode(video.frames(first, size))[0] for first in firsts], draw)


def start(anchor: Tensor, clips: Sequence[Tensor], draw: Draw) -> Committed:
    """From latents: anchor [B, C, 1, h, w], clips [B, C, 1 to 9, h, w], the newest last."""
    past = [noised(clip, draw, DRAWS + 2 + 2 * back) for back, clip in enumerate(reversed(clips))]
    unknown = torch.zeros_like(anchor).expand(-1, -1, sum(HISTORY), -1, -1)
    history = torch.cat([unknown, *reversed(past)], dim=2)[:, :, -sum(HISTORY) :].contiguous()
    context = HeliosContext(0, history, noised(anchor, draw, DRAWS))
    never: Mapping[int, Tensor] = {}
    return Committed(0, never.__getitem__, never.__getitem__, context.extra())


def noised(latents: Tensor, draw: Draw, number: int) -> Tensor:
    """Latents [B, C, T, h, w] with the noise of draw `number`, and a sigma a latent frame from the draw behind it."""
    frames, (least, most) = latents.shape[2], SIGMAS
    white, normal = (draw(number + offset).to(latents.device)[:, :, :frames] for offset in (0, 1))
    chance = torch.special.ndtr(normal[:, :1, :, :1, :1])  # uniform in 0..1
    return torch.lerp(latents, white, least + (most - least) * chance)
