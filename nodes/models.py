"""A pair of models as it travels from the loader to the sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..specar_core.backbones.base import Backbone, Machine, Pair
from ..specar_core.errors import SpecarError
from ..specar_core.files import require
from ..specar_core.job import Job
from ..specar_core.models.attention import choose
from ..specar_core.schedule import Role
from . import host
from .progress import Loading
from .vaes import as_checkpoint

CPU = torch.device("cpu")


@dataclass
class Models:
    """paths: the checkpoints that were found, by role.

    A network is read when a job first needs it. From then on it is ComfyUI's, which moves and frees it as it likes;
    nothing here lasts longer than the loader's result.
    """

    backbone: Backbone
    machine: Machine
    paths: Mapping[Role, Path]
    _handles: dict[Role, Any] = field(default_factory=dict)

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
        handles = {role: self._handle(role, choice.attend) for role in job.roles}
        needs = job.backbone.needs(job, self.machine).rollout
        host.load(list(handles.values()), sum(needs.values()) - sum(needs[f"{role} weights"] for role in job.roles))
        networks = {role: handle.model for role, handle in handles.items()}
        return self.backbone.pair(networks, decoder, job, choice.name)

    def _handle(self, role: Role, attend: Any) -> Any:
        if role not in self._handles:
            machine = replace(self.machine, device=CPU)  # ComfyUI moves it from there
            network = self.backbone.load_network(role, self.paths[role], machine, attend, Loading())
            self._handles[role] = host.hosted(network)
        return self._handles[role]
