"""ImageReward (arXiv:2304.05977): how well a frame shows what a text says, typically from -2 to 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .outside import Outside

if TYPE_CHECKING:
    from . import Scorer

IMAGE_REWARD = Outside(
    "ImageReward",
    "SPECAR_IMAGE_REWARD",
    "1.8 GB to ~/.cache/ImageReward",
    "image-reward",
    "torch torchvision image-reward==1.5 'transformers<4.40' git+https://github.com/openai/CLIP.git",
)


@contextmanager
def image_reward(device: torch.device) -> Iterator["Scorer"]:
    with IMAGE_REWARD.open(str(device)) as ask:

        def score(prompt: str, frames: Tensor) -> Tensor:
            pixels = (frames.permute(1, 2, 3, 0) * 255).round().to(torch.uint8).cpu().contiguous()
            scores = ask(pixels.numpy().tobytes(), prompt=prompt, shape=list(pixels.shape))
            return torch.tensor(scores, dtype=torch.float32)

        yield score


def unreadable(prompt: str) -> str | None:
    return None if prompt else "drafts cannot be judged without the text of the prompt"
