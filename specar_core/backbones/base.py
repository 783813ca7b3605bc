"""What the rollout needs of a pair of models, whichever they are.

A Pair holds weights and nothing about a run. `lease` opens a Run: the scratch memory of one rollout (key-value caches,
text keys, workspaces), which dies with it. What has been committed so far is a Context, a frozen value that `commit`
replaces by a new one; so whatever goes wrong inside a block, the context is still the one after the block before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..files import ModelFile
from ..geometry import Geometry
from ..models.attention import choose
from ..models.compiled import compile_blocks
from ..models.vae import WanVAE
from ..models.wan import Attend
from ..schedule import Role
from ..tensor_files import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from ..job import Job


@dataclass(frozen=True)
class Step:
    """One forward, or one latent frame decoded, has been launched. `index` counts from 1 within the block."""

    kind: Literal["denoise", "commit", "decode"]
    role: Role | None
    index: int
    count: int


OnStep = Callable[[Step], None]
Draw = Callable[[int], Tensor]
Precision = Literal["bf16", "fp32"]
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


class TextEncoder(Protocol):
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Text embeddings [B, L, D]."""
        ...

    def clipped(self, prompt: str) -> str | None:
        """The last words that are kept, if the prompt is too long."""
        ...


@dataclass(frozen=True)
class Machine:
    """Where and how a job runs, as far as it should not change the video."""

    device: torch.device
    precision: Precision
    attention: str = "auto"
    compile: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class Needs:
    """Bytes on the device that a job takes: the rollout's by part, and the text encoder's, which is gone by then."""

    rollout: Mapping[str, int]
    text: int

    @property
    def peak(self) -> int:
        return max(self.text, sum(self.rollout.values()))


Progress = Callable[[str, int, int], None]  # what is loaded, bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class Backbone(ABC):
    """A pair by name: what it is made of, its defaults, and how it is loaded.

    options: whatever else changes pixels, with its default; files: to be downloaded; shipped: or part of this package,
    by "target", "drafter", "text encoder" and "vae".
    """

    name: str
    title: str
    geometry: Geometry
    width: int
    height: int
    blocks: int
    steps: Mapping[Role, tuple[int, ...]]
    options: Mapping[str, Any]
    files: tuple[ModelFile, ...] = ()
    shipped: Mapping[str, Path] = field(default_factory=dict)

    @abstractmethod
    def default_schedule(self, blocks: int) -> str:
        """The schedule, by name, of a video of this length."""

    @abstractmethod
    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        """The steps as they are used; UsageError if this model cannot walk them."""

    @abstractmethod
    def check_options(self, options: Mapping[str, Any]) -> list[str]:
        """Notices about a combination of options; UsageError, naming the value, if it cannot be."""

    def check_size(self, width: int, height: int) -> list[str]:
        """Notices about a size in pixels; UsageError, naming the value, if it cannot be."""
        self.geometry.check_size(width, height)
        return []

    @property
    def checkpoint_frames(self) -> int:
        """Latent frames that the checkpoint of a block holds: the block's own, and one of context."""
        return self.geometry.latent_frames + 1

    def guidance(self, job: "Job", role: Role) -> float | None:
        """The scale of this role's classifier-free guidance, None without it."""
        return None

    def texts(self, job: "Job") -> list[str]:
        """What is encoded, along the batch: the prompt, and what guidance leads away from if there is any."""
        return [job.prompt]

    @abstractmethod
    def forwards(self, job: "Job", role: Role, blocks: int) -> int:
        """Forwards of this role's network for as many of the job's blocks."""

    @abstractmethod
    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder: ...

    def load_pair(self, paths: Mapping[str, Path], job: "Job", machine: Machine, progress: Progress) -> Pair:
        """The models that the job needs. SpecarError names a file that is not what its role needs."""
        choice = choose(machine.device, machine.dtype, machine.attention)
        networks = {role: self.load_network(role, paths[role], machine, choice.attend, progress) for role in job.roles}
        if machine.compile:
            for network in networks.values():
                compile_blocks(network)
        vae = self.load_vae(open_checkpoint(paths["vae"]), machine, progress)
        return self.pair(networks, vae, job, choice.name)

    @abstractmethod
    def load_network(self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress) -> nn.Module:
        """One role's transformer. It is rebuilt by `type(network)(network.config, operations, network.attend)`."""

    @abstractmethod
    def load_vae(self, checkpoint: Checkpoint, machine: Machine, progress: Progress) -> WanVAE: ...

    @abstractmethod
    def pair(self, networks: Mapping[Role, Any], vae: WanVAE, job: "Job", attention: str) -> Pair:
        """The pair that runs the job, of networks and VAE that are loaded already."""

    @property
    @abstractmethod
    def text_shape(self) -> tuple[int, int]:
        """[L, D] of a prompt's embeddings."""

    @abstractmethod
    def needs(self, job: "Job", machine: Machine) -> Needs: ...


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
