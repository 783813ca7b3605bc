"""Noise as a pure function of (seed, block, draw).

Drawn on the CPU in float32, so that it is the same on every device and in every precision, and does not depend on the
number of blocks, on the schedule, or on the model that uses it. Draw 0 is the initial noise of a block; what the later
draws are for is the sampler's business.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Draw = Callable[[int], Tensor]  # the j-th noise tensor of a block


def noise(seed: int, block: int, draw: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise of `shape`, float32 on the CPU."""
    digest = hashlib.sha256(f"specar:noise:{seed}:{block}:{draw}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randn(tuple(shape), generator=generator)
