"""Helios-Base 14B, or Helios-Mid 14B, as target and Helios-Distilled 14B as drafter (arXiv:2603.04379).

The three have one architecture and differ in weights and sampler.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecarError, UsageError
from ..geometry import Geometry
from ..identity import canonical_name, identify, tensor_shapes
from ..machine import Machine
from ..models.helios import FLOAT32_PARAMETERS, HeliosConfig, HeliosTransformer
from ..models.helios_names import helios_name
from ..models.low_precision import lower, weight_bytes
from ..models.vae import WanVAE
from ..models.wan import Attend
from ..progress import Progress
from ..schedule import Role
from ..source import Frames
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import load_into
from .base import Backbone, Needs
from .helios_pair import BASE, DISTILLED, GEOMETRY, HISTORY, MID, HeliosPair, Recipe, decoded_at_once
from .helios_published import check_scheduler, published_config, published_file
from .helios_start import start_image, start_video
from .loading import TEXT_ENCODER_FILE, VAE_FILE, decoder_bytes
from .pair import Committed, Noise, Prompts

if TYPE_CHECKING:
    from ..job import Job

# The one that the scripts of github.com/PKU-YuanGroup/Helios give to all three models.
NEGATIVE = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
TEXT_LENGTH = 512  # tokens
# Bytes of activations for each token and channel when they are most, by the bytes of a number: counted operation by
# operation, while queries and keys are turned in float32 or, if everything is float32, inside the feed-forward layer.
WORK = {2: 25, 4: 45}


@dataclass(frozen=True, kw_only=True)
class HeliosBackbone(Backbone):
    recipes: Mapping[Role, Recipe]
    config: HeliosConfig = HeliosConfig()
    geometry: Geometry = GEOMETRY
    width: int = 640
    height: int = 384
    blocks: int = 22
    default_schedule: Callable[[int], str] = lambda blocks: f"spread:{-(-2 * blocks // 22)}"
    continues_video: bool = True
    options: Mapping[str, Any] = field(default_factory=lambda: {"guidance": BASE.guidance, "negative": NEGATIVE})

    def check_size(self, width: int, height: int) -> list[str]:
        self.geometry.check_size(width, height)
        if (width, height) == (self.width, self.height):
            return []
        return [f"Helios was trained at {self.width}x{self.height} only; {width}x{height} may look worse"]

    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        model, count = self.recipes[role].model, len(self.recipes[role].steps)
        if len(steps) != count or min(steps) < 1:
            what = "1 number" if count == 1 else f"{count} numbers, one a resolution, each"
            raise UsageError(
                f"the {role}'s steps ({model}) must be {what} of at least 1, not {','.join(map(str, steps))}"
            )
        return tuple(steps)

    def check_options(self, job: "Job") -> list[str]:
        scale = job.options["guidance"]
        if not (math.isfinite(scale) and scale >= 1):
            raise UsageError(f"guidance must be at least 1, which is none, not {scale:g}")
        notices = super().check_options(job)
        if scale == 1:
            return [*notices, "guidance 1 is none: the negative prompt is not used"]
        guided = any(self.guidance(job, role) for role in job.roles)
        asked = (name for name, default in self.options.items() if not guided and job.options[name] != default)
        return [*notices, *(f"{name} does nothing here: no block is made with guidance" for name in asked)]

    @property
    def checkpoint_frames(self) -> int:
        return self.geometry.latent_frames + sum(HISTORY) + 1

    def recipe(self, job: "Job", role: Role) -> Recipe:
        """As the job wants it."""
        recipe, scale = self.recipes[role], job.options["guidance"]
        return replace(recipe, steps=job.steps[role], combine=recipe.combine if scale > 1 else None, guidance=scale)

    def guidance(self, job: "Job", role: Role) -> float | None:
        recipe = self.recipe(job, role)
        return recipe.guidance if recipe.combine else None

    def texts(self, job: "Job") -> list[str]:
        guided = any(self.guidance(job, role) for role in job.roles)
        return [*super().texts(job), job.options["negative"]] if guided else super().texts(job)

    def forwards(self, job: "Job", role: Role, blocks: int) -> int:
        return blocks * self.recipe(job, role).forwards

    def unmeasured(self, job: "Job") -> str | None:
        guided = job.options["guidance"] > 1
        return None if guided else "it was measured with guidance, which takes twice the time"

    def outline(self, role: Role) -> HeliosTransformer:
        with torch.device("meta"):
            return HeliosTransformer(self.config)

    def check_network(self, role: Role, checkpoint: Checkpoint) -> None:
        if (found := identify(checkpoint)).kind != "helios":
            raise SpecarError(f"{checkpoint.path} cannot be the {role} of {self.name}: it is a {found}")

    def load_network(
        self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress
    ) -> HeliosTransformer:
        checkpoint = open_checkpoint(path)
        self.check_network(role, checkpoint)
        folder = checkpoint.path.parent
        check_scheduler(folder, self.recipes[role].model, role, self.name)
        with torch.device("meta"):
            config = HeliosConfig.detect(tensor_shapes(checkpoint, current_name), published_config(folder))
            network = HeliosTransformer(config, attend=attend)
        if machine.in_fp8(role):
            lower(network)
        load_into(
            network.eval(),
            checkpoint,
            dtype=machine.dtype,
            device=machine.device,
            keep_fp32=FLOAT32_PARAMETERS,
            rename=current_name,
            progress=partial(progress, role),
        )
        return network

    def steered(
        self, pair: HeliosPair, kind: str, source: Frames, prompts: Prompts, noise: Noise
    ) -> tuple[Committed | None, Noise]:
        draw = partial(noise, 0)
        if kind == "image":
            return start_image(pair, source.frames(0, 1), draw), noise
        return start_video(pair, source, draw), noise

    @property
    def text_shape(self) -> tuple[int, int]:
        return TEXT_LENGTH, self.config.text_dim

    def pair(self, networks: Mapping[Role, HeliosTransformer], vae: WanVAE, job: "Job", attention: str) -> HeliosPair:
        return HeliosPair(
            models=networks,
            vae=vae,
            recipes={role: self.recipe(job, role) for role in job.roles},
            geometry=job.geometry,
            attention=attention,
        )

    def needs(self, job: "Job", machine: Machine) -> Needs:
        """Bytes by part, from the parts' sizes."""
        size = machine.dtype.itemsize
        _, _, frames, height, width = self.geometry.latent_shape(job.width, job.height)
        # Patches: of the noisy frames, of two history frames like them, and of the rest in coarse ones.
        tokens = int((frames / 4 + 2 / 4 + 1 / 16 + 4 / 64) * height * width)
        gpu: dict[str, int] = {}
        rows = {role: 2 if self.guidance(job, role) else 1 for role in job.roles}
        for role in job.roles:
            build = partial(HeliosTransformer, self.config)
            gpu[f"{role} weights"] = weight_bytes(build, size, machine.in_fp8(role), FLOAT32_PARAMETERS)
            keys_values = 2 * size * self.config.num_layers * self.config.dim * TEXT_LENGTH
            gpu[f"{role} text keys and values"] = rows[role] * keys_values
        gpu["vae weights"] = weight_bytes(partial(WanVAE, self.vae_config), size)
        denoising = WORK[size] * max(rows.values()) * tokens * self.config.dim
        at_once = decoded_at_once(machine.device)
        # Nothing of the decoder outlives a block.
        gpu["work"] = max(denoising, sum(decoder_bytes(size, job.width * job.height, self.vae_config, at_once)))
        return Needs(gpu, text=self.text_bytes)


def current_name(stored: str) -> str | None:
    """The name in `HeliosTransformer` of a stored tensor, whatever wrote it."""
    name = canonical_name(stored)
    return None if name is None else helios_name(name)


HELIOS = HeliosBackbone(
    name="helios",
    title="Helios-Base 14B + Helios-Distilled 14B",
    recipes={"target": BASE, "drafter": DISTILLED},
    steps={"target": (50,), "drafter": (2, 2, 2)},
    files=(
        published_file("target", BASE.model),
        published_file("drafter", DISTILLED.model),
        TEXT_ENCODER_FILE,
        VAE_FILE,
    ),
)
HELIOS_MID = replace(
    HELIOS,
    name="helios-mid",
    title="Helios-Mid 14B + Helios-Distilled 14B",
    recipes={"target": MID, "drafter": DISTILLED},
    steps={"target": (20, 20, 20), "drafter": (2, 2, 2)},
    files=(published_file("target", MID.model), *HELIOS.files[1:]),
)
