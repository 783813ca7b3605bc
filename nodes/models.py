"""A pair of models as it travels from the loader to the sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..specar_core.backbones.base import Backbone
from ..specar_core.backbones.pair import Pair
from ..specar_core.errors import SpecarError
from ..specar_core.files import require
from ..specar_core.job import Job
from ..specar_core.lora import Lora, merge
from ..specar_core.machine import Machine
from ..specar_core.models.attention import choose
from ..specar_core.plan import plan
from ..specar_core.schedule import Role
from ..specar_core.tensor_files import open_checkpoint
from . import host
from .progress import Loading
from .vaes import as_checkpoint

CPU = torch.device("cpu")


@dataclass
class Models:
    """paths: the checkpoints that were found, by role; loras: (the one role that it is for, file, strength).

    A network is read when a job first needs it. From then on it is ComfyUI's, which moves and frees it as it likes;
    nothing here lasts longer than the loader's result. A job with other LoRAs reads it anew: there is never a second
    copy, and what a LoRA changed is undone exactly.
    """

    backbone: Backbone
    machine: Machine
    paths: Mapping[Role, Path]
    loras: tuple[tuple[Role | None, Path, float], ...] = ()
    _handles: dict[Role, tuple[list[Lora], Any]] = field(default_factory=dict)  # shared by all of one loader

    def check(self, roles: Sequence[Role]) -> None:
        """SpecarError, with the place of each, for files that are missing."""
        files = [file for file in self.backbone.files if file.what in roles]
        require(files, host.models_folder(), self.backbone.name, self.paths)

    def pair(self, job: Job, vae: Any) -> Pair:
        """The pair for one job, loaded; its VAE is built from the connected one's weights, and lives as long."""
        if job.backbone is not self.backbone:
            raise SpecarError(
                f"the schedule was made for {job.backbone.name}, but the models are {self.backbone.name}: connect the "
                f"Scheduler to the same Loader"
            )
        self.check(job.roles)
        checkpoint = as_checkpoint(vae)
        host.make_room(checkpoint.bytes)
        decoder = self.backbone.load_vae(checkpoint, self.machine, Loading())
        choice = choose(self.machine.device, self.machine.dtype, self.machine.attention)
        handles = {role: self._handle(role, choice.attend, job) for role in job.roles}
        needs = plan(job, self.machine).needs.rollout
        host.load(list(handles.values()), sum(needs.values()) - sum(needs[f"{role} weights"] for role in job.roles))
        networks = {role: handle.model for role, handle in handles.items()}
        return self.backbone.pair(networks, decoder, job, choice.name)

    def _handle(self, role: Role, attend: Any, job: Job) -> Any:
        wanted = [(path, lora) for (_, path, _), lora in zip(self.loras, job.loras, strict=True) if role in lora.roles]
        loras = [lora for _, lora in wanted]
        if role in self._handles and self._handles[role][0] != loras:
            del self._handles[role]
        if role not in self._handles:
            machine = replace(self.machine, device=CPU)  # ComfyUI moves it from there
            network = self.backbone.load_network(role, self.paths[role], machine, attend, Loading())
            if wanted:
                merge(network, self.paths[role], [(open_checkpoint(path), lora.strength) for path, lora in wanted])
            self._handles[role] = loras, host.hosted(network)
        return self._handles[role][1]
