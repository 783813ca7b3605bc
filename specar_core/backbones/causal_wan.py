"""Backbones made of two causal Wan models: what `krea` and `tiny` have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SpecarError, UsageError
from ..geometry import Geometry
from ..identity import identify, tensor_shapes
from ..machine import Machine
from ..models import graphs
from ..models.low_precision import lower, weight_bytes
from ..models.vae import WanVAE
from ..models.wan import Attend, CausalWan, WanConfig
from ..progress import Progress
from ..sampling.flow import FlowTable
from ..schedule import Role
from ..source import Frames, Source
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import load_into
from .base import Backbone, Needs
from .loading import decoder_bytes, encoder_bytes
from .pair import Committed, Noise, Prompts
from .session import Rolling, SessionPair
from .session_start import following, start_image

if TYPE_CHECKING:
    from ..job import Job

GEOMETRY = Geometry(fps=16, latent_frames=3, size_multiple=16, dropped=3)
SHIFT = 5.0
# Self-Forcing's list, for both models.
STEPS: Mapping[Role, tuple[int, ...]] = dict.fromkeys(("target", "drafter"), (1000, 750, 500, 250))
CONTEXT_FRAMES = 3


def times(steps: Sequence[int]) -> list[float]:
    """The times of unshifted steps q: 1000, 750, 500, 250 are 1000, 937.5, 833.33, 625 at shift 5."""
    return FlowTable(SHIFT).warped(steps)


def scaled(steps: Sequence[int], strength: float) -> tuple[int, ...]:
    """The steps of a video that follows another: Krea's rule, trunc(strength * q), each step once."""
    return tuple(dict.fromkeys(int(round(strength * step, 6)) for step in steps))


def listed(steps: Sequence[int]) -> str:
    return ",".join(map(str, steps))


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
    geometry: Geometry = GEOMETRY
    steps: Mapping[Role, tuple[int, ...]] = field(default_factory=lambda: dict(STEPS))
    options: Mapping[str, Any] = field(
        default_factory=lambda: {
            "terminal_step": False,
            "keep_first_frames": False,
            "anchor_first_latent": False,
            "drafter_context": "session",
            "stitch": 0,
        }
    )

    def check_steps(self, role: Role, steps: Sequence[int]) -> tuple[int, ...]:
        falling = all(a > b for a, b in zip(steps, steps[1:], strict=False))
        if not steps or steps[0] != 1000 or not falling or steps[-1] < 0:
            raise UsageError(f"the {role}'s steps must begin with 1000 and fall, to 0 at least, not {listed(steps)}")
        return tuple(steps)

    def check_options(self, job: "Job") -> list[str]:
        options, drafts, targets = job.options, job.steps["drafter"], job.steps["target"]
        stitch, context = options["stitch"], options["drafter_context"]
        if stitch and drafts != targets:
            raise UsageError(
                f"stitch {stitch} takes the same steps for both models, not {listed(drafts)} for the drafter "
                f"and {listed(targets)} for the target"
            )
        if not 0 <= stitch < len(drafts):
            most = len(drafts) - 1
            raise UsageError(f"the drafter can do 0 to {most} of a target block's {most + 1} steps, not {stitch}")
        notices = super().check_options(job)
        if stitch and not self.stitched(job):
            notices.append("stitch does nothing here: no target block goes on from another block")
        if context != self.options["drafter_context"] and "drafter" not in job.roles:
            notices.append("drafter-context does nothing here: the drafter makes no block")
        if drafter_context(context) and options["anchor_first_latent"]:
            notices.append("the anchored first latent frame is for the target only: the drafter keeps a rolling cache")
        if options["keep_first_frames"] and job.source and job.source.kind == "image":
            notices.append("keep-first-frames does nothing here: after an image no frame is dropped")
        return notices

    def delivering(self, options: Mapping[str, Any], source: Source | None) -> Geometry:
        geometry = super().delivering(options, source)
        return replace(geometry, dropped=0) if options["keep_first_frames"] else geometry

    def forwards(self, job: "Job", role: Role, blocks: int) -> int:
        forwards = blocks * len(self.all_steps(job, role))
        if role == "target":
            forwards -= self.stitched(job)
        elif not job.is_open:  # else every block is counted as a draft anyway
            forwards += self.stitched(job)
        clean_passes = job.commits if forwards and role in drafter_context(job.options["drafter_context"]) else 0
        return forwards + clean_passes

    def stitched(self, job: "Job") -> int:
        """Evaluations of target blocks that the drafter does."""
        targets = range(job.blocks) if job.is_open else job.schedule.targets
        return self.stitch(job) * len(set(targets) - {0, *job.geometry.cuts})

    def stitch(self, job: "Job") -> int:
        return min(job.options["stitch"], len(self.all_steps(job, "drafter")) - 1)

    def all_steps(self, job: "Job", role: Role) -> tuple[int, ...]:
        """`terminal_step` adds Krea's own last evaluation, at t = 0, where the list does not end with it already."""
        steps = job.steps[role]
        if job.source and job.source.strength is not None:
            steps = scaled(steps, job.source.strength)
        return (*steps, 0) if job.options["terminal_step"] and steps[-1] else steps

    def outline(self, role: Role) -> CausalWan:
        with torch.device("meta"):
            return CausalWan(self.configs[role])

    def check_network(self, role: Role, checkpoint: Checkpoint) -> None:
        found = identify(checkpoint)
        if found.kind != "wan":
            raise SpecarError(f"{checkpoint.path} cannot be the {role}: it is a {found}")
        if not self.fits(checkpoint, role):
            other: Role = "drafter" if role == "target" else "target"
            hint = f"; it is the {other}'s" if self.fits(checkpoint, other) else ""
            raise SpecarError(f"{checkpoint.path} cannot be the {role} of {self.name}: it is a {found}{hint}")

    def load_network(self, role: Role, path: Path, machine: Machine, attend: Attend, progress: Progress) -> CausalWan:
        checkpoint = open_checkpoint(path)
        self.check_network(role, checkpoint)
        with torch.device("meta"):
            network = CausalWan(self.configs[role], attend=attend)
        if machine.in_fp8(role):
            lower(network)
        told = partial(progress, role)
        load_into(network.eval(), checkpoint, dtype=machine.dtype, device=machine.device, progress=told)
        return network

    def steered(
        self, pair: SessionPair, kind: str, source: Frames, prompts: Prompts, noise: Noise
    ) -> tuple[Committed | None, Noise]:
        if kind == "image":
            return start_image(pair, source.frames(0, 1), prompts), noise
        return None, following(pair, source, noise)

    @property
    def text_shape(self) -> tuple[int, int]:
        return self.configs["target"].text_len, self.configs["target"].text_dim

    def pair(self, networks: Mapping[Role, CausalWan], vae: WanVAE, job: "Job", attention: str) -> SessionPair:
        return SessionPair(
            models=networks,
            vae=vae,
            geometry=job.geometry,
            steps={role: times(self.all_steps(job, role)) for role in job.roles},
            shift=SHIFT,
            context_frames=CONTEXT_FRAMES,
            anchor_first_latent=job.options["anchor_first_latent"],
            rolling=drafter_context(job.options["drafter_context"]) if "drafter" in job.roles else {},
            attention=attention,
            stitched=self.stitch(job),
            decoded_at_once=self.decoded_at_once(job, vae.device),
        )

    def decoded_at_once(self, job: "Job", device: torch.device) -> int:
        """Latent frames: a block on a GPU that holds the target, whose keys and values have left as much memory as that
        takes. It saves a twentieth of the time."""
        return self.geometry.latent_frames if "target" in job.roles and device.type == "cuda" else 1

    def fits(self, checkpoint: Checkpoint, role: Role) -> bool:
        """Heads and text length leave no trace in shapes; they are taken on trust."""
        config = self.configs[role]
        overrides = {"num_heads": config.num_heads, "text_len": config.text_len}
        return WanConfig.detect(tensor_shapes(checkpoint), overrides) == config

    def needs(self, job: "Job", machine: Machine) -> Needs:
        """Bytes by part. Nothing but the parts' sizes enters; `work` was fitted to measured peaks."""
        size = machine.dtype.itemsize
        shape = self.geometry.latent_shape(job.width, job.height)
        tokens, pixels = shape[-1] * shape[-2] // 4, job.width * job.height
        rolling = drafter_context(job.options["drafter_context"])
        gpu: dict[str, int] = {}
        caches: dict[Role, int] = {}
        for role in job.roles:
            config = self.configs[role]
            frames = rolling[role].window if role in rolling else CONTEXT_FRAMES + self.geometry.latent_frames
            gpu[f"{role} weights"] = weight_bytes(partial(CausalWan, config), size, machine.in_fp8(role))
            caches[role] = 2 * size * config.num_layers * config.dim * frames * tokens
            gpu[f"{role} text keys and values"] = 2 * size * config.num_layers * config.dim * config.text_len
        widest = max((self.configs[role] for role in job.roles), key=lambda config: config.dim)
        gpu["vae weights"] = weight_bytes(partial(WanVAE, self.vae_config), size)
        at_once = self.decoded_at_once(job, machine.device)
        histories, decoding = decoder_bytes(size, pixels, self.vae_config, at_once)
        gpu["decoder histories"] = histories
        if job.source and job.source.kind == "video":
            gpu["encoder histories"] = encoder_bytes(size, pixels, self.vae_config)

        def denoising(config: WanConfig) -> int:
            return size * 2 * self.geometry.latent_frames * tokens * config.ffn_dim * 3

        # Rolling caches stay, and so do those of recorded forwards, with what these work in.
        recorded = {role for role, held in caches.items() if held <= graphs.LARGEST and machine.device.type == "cuda"}
        kept = sum(caches.pop(role) for role in {*rolling, *recorded} & caches.keys())
        kept += sum(denoising(self.configs[role]) for role in recorded)
        if kept:
            gpu["keys and values that are kept"] = kept
        # One model at a time denoises, with keys and values of its own; or a block is decoded from the one before on.
        gpu["work"] = max(denoising(widest) + max(caches.values(), default=0), decoding + histories)
        return Needs(gpu, text=self.text_bytes)
