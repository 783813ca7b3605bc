"""The rollout: choose a role, generate a block, commit it, report it.

Exactly one model generates each block, and what it generated is committed to the one context that both models see.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .backbones.base import Committed, Context, Pair, Step
from .errors import SpecarError
from .schedule import Role, Schedule

Prompts = Callable[[int], Tensor]
Noise = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class BlockResult:
    """One committed block: latents [B, C, T, h, w] float32, frames [B, 3, N, H, W] in [-1, 1], both on the device.

    `decode_seconds` is the part of `seconds` that turned latents into frames.
    """

    index: int
    role: Role
    latents: Tensor
    frames: Tensor
    context: Context
    seconds: float
    decode_seconds: float
    forwards: int


def rollout(
    pair: Pair,
    schedule: Schedule,
    prompts: Prompts,
    noise: Noise,
    *,
    height: int,
    width: int,
    batch: int = 1,
    resume: Committed | None = None,
    known: Callable[[int], Tensor | None] = lambda block: None,
    keep_first_frames: bool = False,
    on_step: Callable[[int, Step], None] = lambda block, step: None,
) -> Iterator[BlockResult]:
    """Generate the blocks of `schedule`, one after another.

    prompts(b): text embeddings [B, L, D] of block b, and where a model is guided the negative prompts' behind them;
    noise(b, j): its j-th noise tensor [B, C, T, h, w]. resume: what an earlier run committed, and which is not yielded
    again; known(b): the latents of block b if an earlier run generated it, which is then decoded and committed only.
    on_step(b, step) is called after every forward and every decoded latent frame; raising in it ends the rollout, and
    the blocks that were yielded stay good.
    """
    block, forwards = 0, 0

    def count(step: Step) -> None:
        nonlocal forwards
        forwards += step.kind != "decode"
        on_step(block, step)

    with pair.lease(height, width, batch, count) as run:
        context = run.begin() if resume is None else run.restore(resume)
        for block in range(context.blocks, schedule.blocks):
            started, forwards = time.perf_counter(), 0
            role, prompt = schedule.role(block), prompts(block)
            if (found := known(block)) is not None:
                latents = found.to(pair.device)
            else:
                latents = run.generate(role, context, prompt, partial(noise, block))
            if not torch.isfinite(latents).all():
                raise SpecarError(
                    f"block {block} ({role}) came out with NaN or infinite values ({pair.describe()}); "
                    f"the blocks before it are good. Try another precision or attention back end."
                )
            generated = time.perf_counter()
            frames, context = run.commit(context, latents, prompt)
            if not torch.isfinite(frames).all():
                raise SpecarError(
                    f"block {block} was decoded to NaN, though its latents are finite ({pair.describe()}); the blocks "
                    f"before it are good. Try another VAE file, or --precision fp32."
                )
            if frames.is_cuda:
                torch.cuda.synchronize(frames.device)
            ended = time.perf_counter()
            if block == 0:
                frames = frames[:, :, pair.geometry.delivered_from(keep_first_frames) :]
            yield BlockResult(block, role, latents, frames, context, ended - started, ended - generated, forwards)
