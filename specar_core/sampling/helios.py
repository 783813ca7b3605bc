"""How the three Helios models turn noise into a chunk of latents (arXiv:2603.04379; huggingface/diffusers 0.42.1).

Base denoises at full resolution with UniPC. Mid and Distilled climb a pyramid of quarter, half and full resolution: Mid
with UniPC in each level, Distilled in a few steps that start again from where the level started.

A network is a function velocity(x, t) of latents [B, C, T, h, w] and a time 0..1000 that gives the flow noise - x0,
guidance included; on_step(x) is called with the new sample after each call of it. draw(j) is the chunk's j-th white
noise [B, C, T, h, w]: 0 is where it starts from, 1 and 2 are what the levels of half and full resolution add. steps:
how many at each resolution.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..noise import Draw
from .helios_schedule import LEVELS, base_sigmas, distilled_sigmas, mid_sigmas
from .unipc import UniPC

Velocity = Callable[[Tensor, float], Tensor]
OnSample = Callable[[Tensor], None]
Sample = Callable[[Velocity, Draw, Sequence[int], OnSample], Tensor]  # one of the three below

# CFG-Zero* (arXiv:2503.18886): Mid's first steps do not move; the flow there is worse than none.
ZEROED_STEPS = 2


def sample_base(velocity: Velocity, draw: Draw, steps: Sequence[int], on_step: OnSample) -> Tensor:
    """UniPC at one resolution; times are fractional."""
    noise = draw(0)
    sigmas = base_sigmas(steps[0], token_count(noise))
    return _unipc(velocity, noise, sigmas, [1000 * sigma for sigma in sigmas], on_step)


def sample_mid(velocity: Velocity, draw: Draw, steps: Sequence[int], on_step: OnSample) -> Tensor:
    """The pyramid with UniPC, steps[i] of them in level i; the velocity is not asked in the zeroed steps."""

    def solve(x: Tensor, index: int, tokens: int) -> Tensor:
        sigmas = mid_sigmas(steps[index], tokens)
        zeroed = 0 if index else ZEROED_STEPS
        return _unipc(velocity, x, sigmas, LEVELS[index].times(sigmas), on_step, zeroed)

    return _pyramid(draw, solve)


def sample_distilled(velocity: Velocity, draw: Draw, steps: Sequence[int], on_step: OnSample) -> Tensor:
    """The pyramid with DMD, steps[i] of them in level i."""

    def solve(x: Tensor, index: int, tokens: int) -> Tensor:
        sigmas = distilled_sigmas(steps[index], tokens)
        return dmd(velocity, x, sigmas, LEVELS[index].times(sigmas), on_step)

    return _pyramid(draw, solve)


def _pyramid(draw: Draw, solve: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    x = draw(0)
    for _ in LEVELS[1:]:
        x = 2 * F.avg_pool3d(x, (1, 2, 2))  # the mean of four has half the deviation
    for index, level in enumerate(LEVELS):
        tokens = token_count(x)  # of the level below: so do the published pipelines
        if index:
            x = upsampled(x)
            white = draw(index)[..., : x.shape[-2], : x.shape[-1]]
            x = level.keep * x + level.renoise * block_noise(white)
        x = solve(x, index, tokens)
    return x


def _unipc(
    velocity: Velocity,
    x: Tensor,
    sigmas: Sequence[float],
    times: Sequence[float],
    on_step: OnSample,
    zeroed: int = 0,
) -> Tensor:
    solver = UniPC(sigmas)
    for step, time in enumerate(times[:-1]):
        if step < zeroed:
            x = solver.step(torch.zeros_like(x), x)
            continue
        x = solver.step(velocity(x, time), x)
        on_step(x)
    return x


def dmd(velocity: Velocity, x: Tensor, sigmas: Sequence[float], times: Sequence[float], on_step: OnSample) -> Tensor:
    """Predict the end, go back towards the start by the next sigma: always the same start, no fresh noise."""
    start = x
    for sigma, following, time in zip(sigmas, sigmas[1:], times, strict=False):
        end = x - sigma * velocity(x, time)
        x = (1 - following) * end + following * start
        on_step(x)
    return x


def token_count(x: Tensor) -> int:
    """Tokens of noisy latents, with patches of 2 x 2."""
    return x[0, 0].numel() // 4


def upsampled(x: Tensor) -> Tensor:
    """Each value four times, in a 2 x 2 block."""
    return x.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)


def block_noise(white: Tensor) -> Tensor:
    """Noise of variance 1 whose 2 x 2 blocks sum to 0 (covariance -1/3 inside a block), from white noise.

    Added to up-sampled noise, which is equal inside a block, it makes white noise (arXiv:2410.05954).
    """
    return math.sqrt(4 / 3) * (white - upsampled(F.avg_pool3d(white, (1, 2, 2))))


def guided(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance."""
    return uncond + scale * (cond - uncond)


def guided_zero_star(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """CFG-Zero* (arXiv:2503.18886): guidance from the multiple of uncond that is nearest to cond, for each sample."""
    c, u = cond.float().flatten(1), uncond.float().flatten(1)
    nearest = (c * u).sum(1) / (u.square().sum(1) + 1e-8)
    return guided(cond, nearest.view(-1, 1, 1, 1, 1) * uncond, scale)
