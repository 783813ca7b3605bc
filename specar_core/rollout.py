"""The rollout: choose a role, generate a block, commit it, report it.

Exactly one model generates each block, and what it generated is committed to the one context that both models see.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backbones.pair import Committed, Context, Noise, Pair, Prompts, Step
from .device import Clock
from .errors import SpecarError
from .schedule import Policy, Role


@dataclass(frozen=True)
class BlockResult:
    """One committed block: latents [B, C, T, h, w] float32, frames [B, 3, N, H, W] in [-1, 1], both on the device.

    `decode_seconds` is the part of `seconds` that turned latents into frames; forwards of the commit are no part of it.
    `rejected` drafts were made and judged in vain: they are in the times and the forwards, and nowhere else.
    """

    index: int
    role: Role
    latents: Tensor
    frames: Tensor
    context: Context
    seconds: float
    decode_seconds: float
    forwards: int
    rejected: int = 0


def rollout(
    pair: Pair,
    policy: Policy,
    prompts: Prompts,
    noise: Noise,
    *,
    height: int,
    width: int,
    batch: int = 1,
    resume: Committed | None = None,
    known: Callable[[int], Tensor | None] = lambda block: None,
    on_step: Callable[[int, Step], None] = lambda block, step: None,
) -> Iterator[BlockResult]:
    """Generate the blocks of a schedule, or of another policy, one after another.

    prompts(b): text embeddings [B, L, D] of block b, and where a model is guided the negative prompts' behind them;
    noise(b, j): its j-th noise tensor [B, C, T, h, w]. resume: what an earlier run committed, and which is not yielded
    again; known(b): the latents of block b if an earlier run generated it, which is then decoded and committed only.
    on_step(b, step) is called after every forward and every decoded latent frame. Raising in it ends the rollout, as
    SpecarError does where a block is not finite: the blocks that were yielded stay good.
    """
    block, forwards, clock = resume.blocks if resume else 0, 0, Clock(pair.device)
    decoded = clock.mark()
    first: Tensor | None = None

    def count(step: Step) -> None:
        nonlocal forwards, decoded
        if step.kind == "decode":
            decoded = clock.mark()
        else:
            forwards += 1
        on_step(block, step)

    def draw(index: int) -> Tensor:
        """The block's noise, whose first draw may be there already."""
        return noise(block, index) if index or first is None else first

    with pair.lease(height, width, batch, count) as run:
        context = run.begin() if resume is None else run.restore(resume)
        for block in range(context.blocks, policy.blocks):
            started, forwards, decode_seconds, rejected = time.perf_counter(), 0, 0.0, 0
            role, prompt, found = policy.role(block), prompts(block), known(block)
            if block in pair.geometry.cuts:
                context = run.begin(block)
            while True:
                if found is not None:
                    latents = found.to(pair.device)
                else:
                    latents = run.generate(role, context, prompt, draw)
                generated = decoded = clock.mark()
                frames, advanced = run.commit(context, latents, prompt)
                finite = [torch.isfinite(value).all() for value in (latents, frames)]
                following = noise(block + 1, 0) if block + 1 < policy.blocks else None  # while the device is busy
                good = "; the blocks before it are good" if block else ""
                if not finite[0]:  # the first wait for the device in this block
                    raise SpecarError(
                        f"block {block} ({role}) came out with NaN or infinite values ({pair.describe()}){good}. "
                        "Try another precision or attention back end."
                    )
                if not finite[1]:
                    raise SpecarError(
                        f"block {block} was decoded to NaN, though its latents are finite ({pair.describe()}){good}. "
                        "Try another VAE file, or --precision fp32."
                    )
                decode_seconds += clock.seconds(generated, decoded)
                if role == "target" or policy.accepts(block, frames):
                    break
                role, rejected = "target", rejected + 1
                del latents, frames, advanced  # of the draft: memory for the target
            context, first = advanced, following
            seconds = time.perf_counter() - started
            if block == 0:
                frames = frames[:, :, pair.geometry.dropped :]
            yield BlockResult(block, role, latents, frames, context, seconds, decode_seconds, forwards, rejected)
