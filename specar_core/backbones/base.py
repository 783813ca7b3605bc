"""A pair by name: what it is made of, what it needs, and how it is loaded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from torch import Tensor, nn

from ..files import ModelFile
from ..geometry import Geometry
from ..lora import merge
from ..machine import Machine
from ..models.attention import choose
from ..models.compiled import compile_blocks
from ..models.vae import VaeConfig, WanVAE
from ..models.wan import Attend
from ..progress import Progress
from ..schedule import Role
from ..source import Frames, Source
from ..tensor_files import Checkpoint, open_checkpoint
from ..timeline import texts
from .loading import TEXT_BYTES, check_umt5, checked_vae, load_umt5, load_vae
from .pair import Committed, Noise, Pair, Prompts

if TYPE_CHECKING:
    from ..job import Job


class TextEncoder(Protocol):
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Text embeddings [B, L, D]."""
        ...


@dataclass(frozen=True)
class Needs:
    """Bytes on the device that a job takes: the rollout's by part, and the text encoder's, which is gone by then."""

    rollout: Mapping[str, int]
    text: int

    @property
    def peak(self) -> int:
        return max(self.text, sum(self.rollout.values()))


def roles_of(jobs: Sequence["Job"]) -> list[Role]:
    """The models that any of these jobs needs."""
    return [role for role in get_args(Role) if any(role in job.roles for job in jobs)]


@dataclass(frozen=True, kw_only=True)
class Backbone(ABC):
    """A pair by name: what it is made of, its defaults, and how it is loaded.

    default_schedule: by name, that of a video of so many blocks; options: whatever else changes pixels, with its
    default; text_bytes: what the text encoder takes, with its work; continues_video: a source video is what came
    before, and not what is followed; files: to be downloaded; shipped: or part of this package, by "target", "drafter",
    "text encoder" and "vae"; scorer: of scorers, what a router judges drafts by.
    """

    name: str
    title: str
    geometry: Geometry
    width: int
    height: int
    blocks: int
    default_schedule: Callable[[int], str]
    steps: Mapping[Role, tuple[int, ...]]
    options: Mapping[str, Any]
    vae_config: VaeConfig = VaeConfig()
    text_bytes: int = TEXT_BYTES
    continues_video: bool = False
    files: tuple[ModelFile, ...] = ()
    shipped: Mapping[str, Path] = field(default_factory=dict)
    scorer: str = "image-reward"

    @abstractmethod
    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        """The steps as they are used; UsageError if this model cannot walk them."""

    @abstractmethod
    def check_options(self, job: "Job") -> list[str]:
        """Notices about what was asked for and does nothing here; UsageError, naming the value, if it cannot be."""
        idle = {role: steps for role, steps in job.steps.items() if role not in job.roles}
        asked = (role for role, steps in idle.items() if steps != self.check_steps(role, self.steps[role]))
        return [f"the {role} makes no block: its steps do nothing here" for role in asked]

    def delivering(self, options: Mapping[str, Any], source: Source | None) -> Geometry:
        """The geometry of a video with these options and this source."""
        image = source is not None and source.kind == "image" and self.geometry.one_clip
        return replace(self.geometry, image=image, dropped=0 if image else self.geometry.dropped)

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

    def unmeasured(self, job: "Job") -> str | None:
        """Why the times that were measured tell nothing of this job."""
        return None

    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder:
        return load_umt5(path, machine, progress)

    def load_vae(self, checkpoint: Checkpoint, machine: Machine, progress: Progress) -> WanVAE:
        return load_vae(checkpoint, self.vae_config, machine, progress)

    def load_pair(self, paths: Mapping[str, Path], job: "Job", machine: Machine, progress: Progress) -> Pair:
        """The models that the job needs. SpecarError names a file that is not what its role needs."""
        return self.load_models(paths, [job], machine, progress)(job)

    def load_models(
        self, paths: Mapping[str, Path], jobs: Sequence["Job"], machine: Machine, progress: Progress
    ) -> Callable[["Job"], Pair]:
        """What any of these jobs needs, which differ in prompts and schedules only; then each one's pair at once."""
        choice = choose(machine.device, machine.dtype, machine.attention)
        networks: dict[Role, Any] = {
            role: self.load_network(role, paths[role], machine, choice.attend, progress) for role in roles_of(jobs)
        }
        for role, network in networks.items():
            loras = [(f"lora {index}", lora) for index, lora in enumerate(jobs[0].loras, 1) if role in lora.roles]
            if loras:
                merge(network, paths[role], [(open_checkpoint(paths[name]), lora.strength) for name, lora in loras])
            if machine.device.type == "cuda":
                network.join()
            if machine.compile:
                compile_blocks(network)
        vae = self.load_vae(open_checkpoint(paths["vae"]), machine, progress)
        return lambda job: self.pair({role: networks[role] for role in job.roles}, vae, job, choice.name)

    @abstractmethod
    def outline(self, role: Role) -> nn.Module:
        """One role's transformer on the meta device: names and shapes."""

    def check_model(self, what: str, checkpoint: Checkpoint) -> None:
        """SpecarError if, by its header, this cannot be the "target", "drafter", "text encoder" or "vae"."""
        if what == "vae":
            checked_vae(checkpoint, self.vae_config)
        elif what == "text encoder":
            self.check_text_encoder(checkpoint)
        else:
            self.check_network("target" if what == "target" else "drafter", checkpoint)

    def check_text_encoder(self, checkpoint: Checkpoint) -> None:
        check_umt5(checkpoint)

    @abstractmethod
    def check_network(self, role: Role, checkpoint: Checkpoint) -> None: ...

    @abstractmethod
    def load_network(self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress) -> nn.Module:
        """One role's transformer. It is rebuilt by `type(network)(network.config, operations, network.attend)`, but for
        the layers that `models/low_precision.py` put into it."""

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
