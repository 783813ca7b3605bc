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
from ..models import low_precision
from ..noise import Draw
from ..schedule import Role


@dataclass(frozen=True)
class Step:
    """One forward, or one latent frame decoded, has been launched. `index` counts from 1 within the block."""

    kind: Literal["denoise", "commit", "decode"]
    role: Role | None
    index: int
    count: int


OnStep = Callable[[Step], None]
Prompts = Callable[[int], Tensor]
Noise = Callable[[int, int], Tensor]
Context = Any  # each pair's own frozen value; `blocks` says how many blocks are committed


@dataclass(frozen=True)
class Committed:
    """What a checkpoint holds: enough to build the context after `blocks` blocks again.

    latents(b), prompt(b): what block b was committed as and from; extra: the last context's own `extra()`; first: the
    block that the clip began with, -1 where latents were given before block 0.
    """

    blocks: int
    latents: Callable[[int], Tensor]
    prompt: Callable[[int], Tensor]
    extra: Mapping[str, Tensor]
    first: int = 0


class Run(Protocol):
    def begin(self, block: int = 0) -> Context:
        """The context of a clip that begins with this block."""
        ...

    def generate(self, role: Role, context: Context, prompt: Tensor, draw: Draw) -> Tensor:
        """Latents [B, C, T, h, w], float32, of the next block. draw(j) is the block's j-th noise tensor."""
        ...

    def commit(self, context: Context, latents: Tensor, prompt: Tensor) -> tuple[Tensor, Context]:
        """The block's frames [B, 3, N, H, W] in [-1, 1], and the context that includes it."""
        ...

    def restore(self, saved: Committed) -> Context: ...


class Pair(Protocol):
    @property
    def geometry(self) -> Geometry: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def attention(self) -> str:
        """The attention back end's name."""
        ...

    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> AbstractContextManager[Run]: ...

    def describe(self) -> str:
        """Precision and attention back end, for reports and errors."""
        ...


def described(networks: Mapping[Role, Any], attention: str) -> str:
    """What `Pair.describe` says."""

    def precision(network: Any) -> str:
        return "fp8" if any(low_precision.lowered(network)) else str(network.dtype).removeprefix("torch.")

    return ", ".join([*(f"{role} {precision(one)}" for role, one in networks.items()), f"attention {attention}"])
