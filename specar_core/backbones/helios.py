"""Helios-Base 14B, or Helios-Mid 14B, as target and Helios-Distilled 14B as drafter (arXiv:2603.04379).

The three have one architecture and differ in weights and sampler. A checkpoint does not tell which one it is; the
scheduler_config.json of its repository does.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecarError, UsageError
from ..files import HELIOS_FILES, HELIOS_MID_FILES
from ..geometry import Geometry
from ..models.helios import FLOAT32_PARAMETERS, HeliosConfig, HeliosTransformer
from ..models.helios_names import helios_name
from ..models.low_precision import lower, weight_bytes
from ..models.vae import VaeConfig, WanVAE
from ..models.wan import Attend
from ..schedule import Role
from ..source import Frames
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import canonical_name, identify, load_into
from .base import Backbone, Committed, Machine, Needs, Noise, Progress, Prompts, TextEncoder
from .causal_wan import check_umt5, checked_vae, decoder_bytes, load_vae, shapes
from .helios_pair import BASE, DISTILLED, GEOMETRY, HISTORY, MID, HeliosPair, Recipe
from .helios_start import start_image, start_video
from .krea import KREA, load_text_encoder

if TYPE_CHECKING:
    from ..job import Job

log = logging.getLogger("specar")

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


@dataclass(frozen=True)
class Published:
    """A released model: what it is here, and what its scheduler_config.json says."""

    place: str
    scheduler: Mapping[str, Any]


def scheduler(name: str, stages: int, shift: str) -> dict[str, Any]:
    return {"_class_name": name, "stages": stages, "use_dynamic_shifting": True, "time_shift_type": shift}


PUBLISHED = {
    BASE.model: Published("the target of helios", scheduler("HeliosScheduler", 1, "exponential")),
    MID.model: Published("the target of helios-mid", scheduler("HeliosScheduler", 3, "exponential")),
    DISTILLED.model: Published("the drafter", scheduler("HeliosDMDScheduler", 3, "linear")),
}


@dataclass(frozen=True, kw_only=True)
class HeliosBackbone(Backbone):
    recipes: Mapping[Role, Recipe]
    config: HeliosConfig = HeliosConfig()
    vae_config: VaeConfig = VaeConfig()
    text_bytes: int = KREA.text_bytes
    geometry: Geometry = GEOMETRY
    width: int = 640
    height: int = 384
    blocks: int = 22
    continues_video: bool = True
    options: Mapping[str, Any] = field(default_factory=lambda: {"guidance": BASE.guidance, "negative": NEGATIVE})

    def default_schedule(self, blocks: int) -> str:
        return f"spread:{-(-2 * blocks // 22)}"

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

    def check_options(self, options: Mapping[str, Any], steps: Mapping[Role, Sequence[int]]) -> list[str]:
        scale = options["guidance"]
        if not (math.isfinite(scale) and scale >= 1):
            raise UsageError(f"guidance must be at least 1, which is none, not {scale:g}")
        return [] if scale > 1 else ["guidance 1 is none: the negative prompt is not used"]

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

    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder:
        return load_text_encoder(path, machine, progress)

    def outline(self, role: Role) -> HeliosTransformer:
        with torch.device("meta"):
            return HeliosTransformer(self.config)

    def check_model(self, what: str, checkpoint: Checkpoint) -> None:
        if what == "vae":
            checked_vae(checkpoint, self.vae_config)
        elif what == "text encoder":
            check_umt5(checkpoint)
        else:
            self.check_network("target" if what == "target" else "drafter", checkpoint)

    def check_network(self, role: Role, checkpoint: Checkpoint) -> None:
        if (found := identify(checkpoint)).kind != "helios":
            raise SpecarError(f"{checkpoint.path} cannot be the {role} of {self.name}: it is a {found}")

    def load_network(
        self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress
    ) -> HeliosTransformer:
        checkpoint = open_checkpoint(path)
        self.check_network(role, checkpoint)
        folder = checkpoint.path.parent
        self.check_scheduler(folder, role)
        with torch.device("meta"):
            config = HeliosConfig.detect(shapes(checkpoint, current_name), published_config(folder))
            network = HeliosTransformer(config, attend=attend)
        if machine.precision == "fp8":
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

    def load_vae(self, checkpoint: Checkpoint, machine: Machine, progress: Progress) -> WanVAE:
        return load_vae(checkpoint, self.vae_config, machine, progress)

    def steered(
        self, pair: HeliosPair, kind: str, source: Frames, prompts: Prompts, noise: Noise
    ) -> tuple[Committed | None, Noise]:
        draw = partial(noise, 0)
        if kind == "image":
            return start_image(pair, source.frames(0, 1), draw), noise
        size = self.geometry.later_frames
        end = size * min(source.count // size, -(-sum(HISTORY) // self.geometry.latent_frames))
        video = torch.cat([source.frames(0, 1), source.frames(source.count - end, end)], dim=2)
        return start_video(pair, video, draw), noise

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

    def check_scheduler(self, folder: Path, role: Role) -> None:
        """SpecarError if the repository around the transformer's folder is that of another model."""
        model = self.recipes[role].model
        name = "scheduler_config.json"
        places = (folder.parent / "scheduler" / name, folder / name, folder.parent / name)
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            log.warning("There is no %s by %s: it is taken for %s", name, folder, model)
            return
        told, wanted = read_json(place), PUBLISHED[model].scheduler
        for other, published in PUBLISHED.items():
            same = all(told.get(key) == published.scheduler[key] for key in ("_class_name", "stages"))
            if same and other != model:
                raise SpecarError(
                    f"{folder} cannot be the {role} of {self.name}, which is {model}: "
                    f"by its {name} it is {other}, {published.place}"
                )
        for key, value in wanted.items():
            if told.get(key) != value:
                log.warning(
                    "%s: %s is %s, not %s as that of %s; %s is used", place, key, told.get(key), value, model, value
                )

    def needs(self, job: "Job", machine: Machine) -> Needs:
        """Bytes by part, from the parts' sizes."""
        size, fp8 = machine.dtype.itemsize, machine.precision == "fp8"
        _, _, frames, height, width = self.geometry.latent_shape(job.width, job.height)
        # Patches: of the noisy frames, of two history frames like them, and of the rest in coarse ones.
        tokens = int((frames / 4 + 2 / 4 + 1 / 16 + 4 / 64) * height * width)
        gpu: dict[str, int] = {}
        rows = {role: 2 if self.guidance(job, role) else 1 for role in job.roles}
        for role in job.roles:
            build = partial(HeliosTransformer, self.config)
            gpu[f"{role} weights"] = weight_bytes(build, size, fp8, FLOAT32_PARAMETERS)
            keys_values = 2 * size * self.config.num_layers * self.config.dim * TEXT_LENGTH
            gpu[f"{role} text keys and values"] = rows[role] * keys_values
        gpu["vae weights"] = weight_bytes(partial(WanVAE, self.vae_config), size)
        denoising = WORK[size] * max(rows.values()) * tokens * self.config.dim
        # Nothing of the decoder outlives a block.
        gpu["work"] = max(denoising, sum(decoder_bytes(size, job.width * job.height, self.vae_config)))
        return Needs(gpu, text=self.text_bytes)


def current_name(stored: str) -> str | None:
    """The name in `HeliosTransformer` of a stored tensor, whatever wrote it."""
    name = canonical_name(stored)
    return None if name is None else helios_name(name)


def published_config(folder: Path) -> dict[str, Any]:
    """The transformer's config.json, if there is one."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    return config if config.get("_class_name") == "HeliosTransformer3DModel" else {}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecarError(f"{path} cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(value, dict):
        raise SpecarError(f"{path} is not a JSON object. Download it again.")
    return value


HELIOS = HeliosBackbone(
    name="helios",
    title="Helios-Base 14B + Helios-Distilled 14B",
    recipes={"target": BASE, "drafter": DISTILLED},
    steps={"target": (50,), "drafter": (2, 2, 2)},
    files=HELIOS_FILES,
)
HELIOS_MID = replace(
    HELIOS,
    name="helios-mid",
    title="Helios-Mid 14B + Helios-Distilled 14B",
    recipes={"target": MID, "drafter": DISTILLED},
    steps={"target": (20, 20, 20), "drafter": (2, 2, 2)},
    files=HELIOS_MID_FILES,
)
