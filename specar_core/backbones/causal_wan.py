"""Backbones made of two causal Wan models: what `krea` and `tiny` have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SpecarError, UsageError
from ..geometry import Geometry
from ..models.vae import VaeConfig, WanVAE
from ..models.wan import Attend, CausalWan, WanConfig
from ..sampling.flow import FlowTable
from ..schedule import Role
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import canonical_name, canonical_names, identify, load_into
from .base import Backbone, Machine, Needs, Progress, TextEncoder
from .session import Rolling, SessionPair

if TYPE_CHECKING:
    from ..job import Job

GEOMETRY = Geometry(fps=16, latent_frames=3, first_frames=9, later_frames=12, dropped=3, size_multiple=16)
SHIFT = 5.0
# Self-Forcing's list, for both models.
STEPS: Mapping[Role, tuple[int, ...]] = dict.fromkeys(("target", "drafter"), (1000, 750, 500, 250))
CONTEXT_FRAMES = 3
# Elements for each pixel of a frame and each channel of the VAE's width: the decoder's histories, 944.3 M at 832x480
# and width 96; and what one decoding step takes beside those that it is given (measured: 5.5 GB, in half precision).
DECODER_STATE = 944.3e6 / (832 * 480 * 96)
DECODER_WORK = 5.5e9 / 2 / (832 * 480 * 96)


def times(steps: Sequence[int]) -> list[float]:
    """The times of unshifted steps q: 1000, 750, 500, 250 are 1000, 937.5, 833.33, 625 at shift 5."""
    return FlowTable(SHIFT).warped(steps)


def drafter_context(text: str) -> dict[Role, Rolling]:
    """`session`, or `rolling:WINDOW[:SINK]` in latent frames for Self-Forcing's own rolling cache."""
    if text == "session":
        return {}
    name, *numbers = text.split(":")
    if name != "rolling" or not 1 <= len(numbers) <= 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise UsageError(f"unknown drafter context '{text}'; known are session and rolling:WINDOW[:SINK]")
    window, sink = (int(n) for n in [*numbers, "0"][:2])
    if window < sink + 2 * GEOMETRY.latent_frames:
        raise UsageError(
            f"a rolling window of {window} latent frames is too small for {sink} sink frames; "
            f"the least is {sink + 2 * GEOMETRY.latent_frames}: one block of context and the current block"
        )
    return {"drafter": Rolling(window, sink)}


@dataclass(frozen=True, kw_only=True)
class CausalWanBackbone(Backbone):
    configs: Mapping[Role, WanConfig]
    vae_config: VaeConfig
    schedule: Callable[[int], str]
    text_encoder: Callable[[Path, Machine, Progress], TextEncoder]
    text_bytes: int
    geometry: Geometry = GEOMETRY
    steps: Mapping[Role, tuple[int, ...]] = field(default_factory=lambda: dict(STEPS))
    options: Mapping[str, Any] = field(
        default_factory=lambda: {
            "terminal_step": False,
            "keep_first_frames": False,
            "anchor_first_latent": False,
            "drafter_context": "session",
        }
    )

    def default_schedule(self, blocks: int) -> str:
        return self.schedule(blocks)

    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        falling = all(a > b for a, b in zip(steps, steps[1:], strict=False))
        if not steps or steps[0] != 1000 or not falling or steps[-1] < 0:
            raise UsageError(f"the {role}'s steps must fall from 1000 to at least 0, not {','.join(map(str, steps))}")
        return tuple(steps)

    def check_options(self, options: Mapping[str, Any]) -> list[str]:
        rolling = drafter_context(options["drafter_context"])
        if rolling and options["anchor_first_latent"]:
            return ["the anchored first latent frame is for the target only: the drafter keeps a rolling cache"]
        return []

    def forwards(self, job: "Job", role: Role, blocks: int) -> int:
        clean_passes = job.blocks if blocks and role in drafter_context(job.options["drafter_context"]) else 0
        return blocks * len(self.all_steps(job, role)) + clean_passes

    def all_steps(self, job: "Job", role: Role) -> tuple[int, ...]:
        """`terminal_step` adds Krea's own last evaluation, at t = 0, where the list does not end with it already."""
        steps = job.steps[role]
        return (*steps, 0) if job.options["terminal_step"] and steps[-1] else steps

    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder:
        return self.text_encoder(path, machine, progress)

    def load_network(self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress) -> CausalWan:
        checkpoint = open_checkpoint(path)
        found = identify(checkpoint)
        if found.kind != "wan":
            raise SpecarError(f"{path} cannot be the {role}: it is a {found}")
        if not self.fits(checkpoint, role):
            other: Role = "drafter" if role == "target" else "target"
            hint = f"; it is the {other}'s" if self.fits(checkpoint, other) else ""
            raise SpecarError(f"{path} cannot be the {role} of {self.name}: it is a {found}{hint}")
        with torch.device("meta"):
            network = CausalWan(self.configs[role], attend=attend)
        told = named(progress, role)
        load_into(network.eval(), checkpoint, dtype=machine.dtype, device=machine.device, progress=told)
        return network

    def load_vae(self, checkpoint: Checkpoint, machine: Machine, progress: Progress) -> WanVAE:
        return load_vae(checkpoint, self.vae_config, machine, progress)

    @property
    def text_shape(self) -> tuple[int, int]:
        return self.configs["target"].text_len, self.configs["target"].text_dim

    def pair(self, networks: Mapping[Role, CausalWan], vae: WanVAE, job: "Job", attention: str) -> SessionPair:
        return SessionPair(
            models=networks,
            vae=vae,
            geometry=self.geometry,
            steps={role: times(self.all_steps(job, role)) for role in job.roles},
            shift=SHIFT,
            context_frames=CONTEXT_FRAMES,
            anchor_first_latent=job.options["anchor_first_latent"],
            rolling=drafter_context(job.options["drafter_context"]) if "drafter" in job.roles else {},
            attention=attention,
        )

    def fits(self, checkpoint: Checkpoint, role: Role) -> bool:
        """Heads and text length leave no trace in shapes; they are taken on trust."""
        config = self.configs[role]
        overrides = {"num_heads": config.num_heads, "text_len": config.text_len}
        return WanConfig.detect(shapes(checkpoint), overrides) == config

    def needs(self, job: "Job", machine: Machine) -> Needs:
        """Bytes by part. Nothing but the parts' sizes enters; `work` was fitted to measured peaks."""
        size = 2 if machine.precision == "bf16" else 4
        shape = self.geometry.latent_shape(job.width, job.height)
        tokens, pixels = shape[-1] * shape[-2] // 4, job.width * job.height
        rolling = drafter_context(job.options["drafter_context"])
        gpu: dict[str, int] = {}
        for role in job.roles:
            config = self.configs[role]
            frames = rolling[role].window if role in rolling else CONTEXT_FRAMES + self.geometry.latent_frames
            gpu[f"{role} weights"] = size * parameters(partial(CausalWan, config))
            gpu[f"{role} keys and values"] = 2 * size * config.num_layers * config.dim * frames * tokens
            gpu[f"{role} text keys and values"] = 2 * size * config.num_layers * config.dim * config.text_len
        widest = max((self.configs[role] for role in job.roles), key=lambda config: config.dim)
        gpu["vae weights"] = size * parameters(partial(WanVAE, self.vae_config))
        histories, decoding = decoder_bytes(size, pixels, self.vae_config)
        gpu["decoder histories"] = 2 * histories  # of the block before, and of the latent frame before
        denoising = 2 * self.geometry.latent_frames * tokens * widest.ffn_dim * 3
        gpu["work"] = max(decoding, size * denoising)
        return Needs(gpu, text=self.text_bytes)


def load_vae(checkpoint: Checkpoint, wanted: VaeConfig | None, machine: Machine, progress: Progress) -> WanVAE:
    """SpecarError if it is no Wan VAE, or not the one that is `wanted`."""
    if (found := identify(checkpoint)).kind != "wan-vae":
        raise SpecarError(f"{checkpoint.path} cannot be the VAE: it is a {found}")
    config = VaeConfig.detect(shapes(checkpoint))
    if wanted not in (None, config):
        raise SpecarError(f"{checkpoint.path} cannot be the VAE: it is a {found}, and width {wanted.dim} is needed")
    with torch.device("meta"):
        vae = WanVAE(config)
    # Half precision as in Krea's session: its 11 bits of mantissa suit pixels better than bfloat16's 8.
    dtype = torch.float16 if machine.precision == "bf16" else torch.float32
    load_into(vae.eval(), checkpoint, dtype=dtype, device=machine.device, progress=named(progress, "vae"))
    return vae.arrange()


def decoder_bytes(size: int, pixels: int, config: VaeConfig) -> tuple[int, int]:
    """Bytes of the decoder's histories, and of the work of decoding one latent frame, the new histories included;
    `size` bytes a number."""
    return size * int(DECODER_STATE * pixels * config.dim), size * int(DECODER_WORK * pixels * config.dim)


def shapes(checkpoint: Checkpoint, rename: Callable[[str], str | None] = canonical_name) -> dict[str, tuple[int, ...]]:
    names = canonical_names(checkpoint.names, rename)
    return {name: checkpoint.names[stored].shape for name, stored in names.items()}


def named(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)


def parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(value.numel() for value in build().parameters())
