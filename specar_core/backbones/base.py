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
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..files import ModelFile
from ..geometry import Geometry
from ..lora import merge
from ..models import low_precision
from ..models.attention import check_name, choose
from ..models.compiled import compile_blocks
from ..models.vae import WanVAE
from ..models.wan import Attend
from ..noise import Draw
from ..progress import Progress
from ..schedule import Role
from ..source import Frames
from ..tensor_files import Checkpoint, open_checkpoint
from ..timeline import texts

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
Prompts = Callable[[int], Tensor]
Noise = Callable[[int, int], Tensor]
Precision = Literal["bf16", "fp8", "fp32"]
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


class TextEncoder(Protocol):
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Text embeddings [B, L, D]."""
        ...


@dataclass(frozen=True)
class Machine:
    """Where and how a job runs, as far as it should not change the video."""

    device: torch.device
    precision: Precision
    attention: str = "auto"
    compile: bool = False

    @classmethod
    def here(
        cls,
        precision: str | None = None,
        attention: str = "auto",
        compile: bool = False,
        threads: int | None = None,
    ) -> "Machine":
        """This computer. UsageError for a name that is unknown; no precision: what suits the device.

        threads: how many a CPU sums with, and so the last bits of what comes out, where a video is made again.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if threads and device.type == "cpu":
            torch.set_num_threads(threads)
        precision = precision or ("bf16" if device.type == "cuda" else "fp32")
        if precision not in get_args(Precision):
            raise UsageError(f"unknown precision '{precision}'; known are {', '.join(get_args(Precision))}")
        if precision == "fp8":
            low_precision.check(device)
        check_name(attention)
        return cls(device, precision, attention, compile)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is not in fp8."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


@dataclass(frozen=True)
class Needs:
    """Bytes on the device that a job takes: the rollout's by part, and the text encoder's, which is gone by then."""

    rollout: Mapping[str, int]
    text: int

    @property
    def peak(self) -> int:
        return max(self.text, sum(self.rollout.values()))


@dataclass(frozen=True, kw_only=True)
class Backbone(ABC):
    """A pair by name: what it is made of, its defaults, and how it is loaded.

    options: whatever else changes pixels, with its default; continues_video: a source video is what came before, and
    not what is followed; files: to be downloaded; shipped: or part of this package, by "target", "drafter", "text
    encoder" and "vae"; scorer: of scorers.py, what a router judges drafts by.
    """

    name: str
    title: str
    geometry: Geometry
    width: int
    height: int
    blocks: int
    steps: Mapping[Role, tuple[int, ...]]
    options: Mapping[str, Any]
    continues_video: bool = False
    files: tuple[ModelFile, ...] = ()
    shipped: Mapping[str, Path] = field(default_factory=dict)
    scorer: str = "image-reward"

    @abstractmethod
    def default_schedule(self, blocks: int) -> str:
        """The schedule, by name, of a video of this length."""

    @abstractmethod
    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        """The steps as they are used; UsageError if this model cannot walk them."""

    @abstractmethod
    def check_options(self, options: Mapping[str, Any], steps: Mapping[Role, Sequence[int]]) -> list[str]:
        """Notices about a combination of options and steps; UsageError, naming the value, if it cannot be."""

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
        """What is encoded, along the batch: each prompt, and what guidance leads away from if there is any."""
        return texts(job.cues)

    @abstractmethod
    def forwards(self, job: "Job", role: Role, blocks: int) -> int:
        """Forwards of this role's network for as many of the job's blocks."""

    @abstractmethod
    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder: ...

    def load_pair(self, paths: Mapping[str, Path], job: "Job", machine: Machine, progress: Progress) -> Pair:
        """The models that the job needs. SpecarError names a file that is not what its role needs."""
        return self.load_models(paths, [job], machine, progress)(job)

    def load_models(
        self, paths: Mapping[str, Path], jobs: Sequence["Job"], machine: Machine, progress: Progress
    ) -> Callable[["Job"], Pair]:
        """What any of these jobs needs, which differ in prompts and schedules only; then each one's pair at once."""
        choice = choose(machine.device, machine.dtype, machine.attention)
        roles = [role for role in get_args(Role) if any(role in job.roles for job in jobs)]
        networks: dict[Role, Any] = {
            role: self.load_network(role, paths[role], machine, choice.attend, progress) for role in roles
        }
        for role, network in networks.items():
            loras = [(f"lora {index}", lora) for index, lora in enumerate(jobs[0].loras, 1) if role in lora.roles]
            if loras:
                merge(network, paths[role], [(open_checkpoint(paths[name]), lora.strength) for name, lora in loras])
            if machine.device.type == "cuda":
                network.join()
        if machine.compile:
            for network in networks.values():
                compile_blocks(network)
        vae = self.load_vae(open_checkpoint(paths["vae"]), machine, progress)
        return lambda job: self.pair({role: networks[role] for role in job.roles}, vae, job, choice.name)

    @abstractmethod
    def outline(self, role: Role) -> nn.Module:
        """One role's transformer on the meta device: names and shapes."""

    @abstractmethod
    def check_model(self, what: str, checkpoint: Checkpoint) -> None:
        """SpecarError if, by its header, this cannot be the "target", "drafter", "text encoder" or "vae"."""

    @abstractmethod
    def load_network(self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress) -> nn.Module:
        """One role's transformer. It is rebuilt by `type(network)(network.config, operations, network.attend)`, but for
        the layers that `models/low_precision.py` put into it."""

    @abstractmethod
    def load_vae(self, checkpoint: Checkpoint, machine: Machine, progress: Progress) -> WanVAE: ...

    @abstractmethod
    def pair(self, networks: Mapping[Role, Any], vae: WanVAE, job: "Job", attention: str) -> Pair:
        """The pair that runs the job, of networks and VAE that are loaded already."""

    @abstractmethod
    def steered(
        self, pair: Any, kind: Literal["image", "video"], source: Frames, prompts: Prompts, noise: Noise
    ) -> tuple[Committed | None, Noise]:
        """What a rollout with a source resumes from, and its noise."""

    @property
    @abstractmethod
    def text_shape(self) -> tuple[int, int]:
        """[L, D] of a prompt's embeddings."""

    @abstractmethod
    def needs(self, job: "Job", machine: Machine) -> Needs: ...


def described(networks: Mapping[Role, Any], attention: str) -> str:
    """What `Pair.describe` says."""

    def precision(network: Any) -> str:
        return "fp8" if any(low_precision.lowered(network)) else str(network.dtype).removeprefix("torch.")

    return ", ".join([*(f"{role} {precision(one)}" for role, one in networks.items()), f"attention {attention}"])


def sent(noise: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without waiting for what the device has still to do."""
    if device.type != "cuda" or noise.device.type != "cpu":
        return noise.to(device)
    return noise.pin_memory().to(device, non_blocking=True)


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
