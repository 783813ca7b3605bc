"""What the rollout needs of a pair of models, whichever they are.

A Pair holds weights and nothing about a run. `lease` opens a Run: the scratch memory of one rollout (key-value caches,
text keys, workspaces), which dies with it. What has been committed so far is a Context, a frozen value that `commit`
replaces by a new one; so whatever goes wrong inside a block, the context is still the one after the block before.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..geometry import Geometry
from ..schedule import Role


@dataclass(frozen=True)
class Step:
    """One forward, or one latent frame decoded, has been launched. `index` counts from 1 within the block."""

    kind: Literal["denoise", "commit", "decode"]
    role: Role | None
    index: int
    count: int


OnStep = Callable[[Step], None]
Draw = Callable[[int], Tensor]
Context = Any  # each pair's own frozen value; `blocks` says how many blocks are committed


@dataclass(frozen=True)
class Committed:
    """What a checkpoint holds: enough to build the context after `blocks` blocks again.

    latents(b), prompt(b): what block b was committed as and from; extra: the last context's own `extra()`.
    """

    blocks: int
    latents: Callable[[int], Tensor]
    prompt: Callable[[int], Tensor]
    extra: Mapping[str, Tensor]


class Run(Protocol):
    def begin(self) -> Context: ...

    def generate(self, role: Role, context: Context, prompt: Tensor, draw: Draw) -> Tensor:
        """Latents [B, C, T, h, w], float32, of the next block. draw(j) is the block's j-th noise tensor."""
        ...

    def commit(self, context: Context, latents: Tensor, prompt: Tensor) -> tuple[Tensor, Context]:
        """The block's frames [B, 3, N, H, W] in [-1, 1], and the context that includes it."""
        ...

    def restore(self, saved: Committed) -> Context: ...


class Pair(Protocol):
    geometry: Geometry
    device: torch.device

    def lease(
        self, height: int, width: int, batch: int, on_step: OnStep
    ) -> AbstractContextManager[Run]: ...

    def describe(self) -> str:
        """Precision and attention back end, for reports and errors."""
        ...


def paced(device: torch.device, on_step: OnStep) -> OnStep:
    """`on_step`, called when at most one step is in flight: progress is true and cancelling is prompt, while the
    device always has the next step queued."""
    if device.type != "cuda":
        return on_step
    previous: torch.cuda.Event | None = None

    def wait_then_call(step: Step) -> None:
        nonlocal previous
        launched = torch.cuda.Event()
        launched.record()
        if previous is not None:
            previous.synchronize()
        previous = launched
        on_step(step)

    return wait_then_call
