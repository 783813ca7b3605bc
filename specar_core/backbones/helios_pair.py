"""The context rule of Helios (arXiv:2603.04379), for a pair of its transformers and the Wan VAE.

A block is a chunk of 9 latent frames, which the VAE decodes as a clip of its own. Every forward sees the last 19
committed latent frames and an anchor, the first latent frame of the video, as tokens beside the noisy ones. So to
commit is to append, and a hand-over costs nothing.

A prompt of a rollout has one row [L, D] for each video of the batch. Where a model is guided, the rows of the negative
prompts follow, [2B, L, D], and both halves of the guidance are one forward.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode import decode_on
from ..device import paced, sent
from ..geometry import Geometry
from ..models.helios import HeliosTransformer
from ..models.streaming import StreamState
from ..models.vae import WanVAE
from ..models.wan import TextKV
from ..noise import Draw
from ..sampling.helios import (
    ZEROED_STEPS,
    Sample,
    guided,
    guided_zero_star,
    sample_base,
    sample_distilled,
    sample_mid,
)
from ..schedule import Role
from .pair import Committed, OnStep, Step, described

GEOMETRY = Geometry(fps=24, latent_frames=9, size_multiple=64, one_clip=False)
HISTORY = (16, 2, 1)  # latent frames in coarse, finer and full resolution, the newest last


@dataclass(frozen=True)
class Recipe:
    """How a model makes a chunk.

    steps: how many at each resolution; combine(cond, uncond, guidance): the flow under guidance, None without it;
    zeroed: how many of the first steps move nothing and need no forward.
    """

    model: str
    sample: Sample
    steps: Sequence[int]
    combine: Callable[[Tensor, Tensor, float], Tensor] | None = None
    guidance: float = 1.0
    zeroed: int = 0

    @property
    def forwards(self) -> int:
        """Those of a chunk; both halves of the guidance are one."""
        return sum(self.steps) - min(self.zeroed, self.steps[0])


# Steps and guidance: the scripts of github.com/PKU-YuanGroup/Helios.
BASE = Recipe("Helios-Base", sample_base, (50,), guided, 5.0)
MID = Recipe("Helios-Mid", sample_mid, (20, 20, 20), guided_zero_star, 5.0, ZEROED_STEPS)
DISTILLED = Recipe("Helios-Distilled", sample_distilled, (2, 2, 2))


def decoded_at_once(device: torch.device) -> int:
    """Latent frames: a third of a block on a GPU, where it saves a twentieth of the decoder's time."""
    return 3 if device.type == "cuda" else 1


@dataclass(frozen=True)
class HeliosContext:
    """What has been committed, as far as the next block needs it."""

    blocks: int
    history: Tensor  # [B, C, 19, h, w] float32, zeros before the beginning
    anchor: Tensor | None = None  # [B, C, 1, h, w] float32, None before block 0

    def extra(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the committed latents."""
        return {name: value for name in ("history", "anchor") if (value := getattr(self, name)) is not None}

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The 16 far frames, the 2 nearer ones, and the anchor with the last one."""
        long, mid, near = self.history.split(HISTORY, dim=2)
        anchor = torch.zeros_like(near) if self.anchor is None else self.anchor
        return long, mid, torch.cat([anchor, near], dim=2)


@dataclass(frozen=True)
class HeliosPair:
    """A target and a drafter (either may be absent if no block asks for it), each with its recipe."""

    models: Mapping[Role, HeliosTransformer]
    vae: WanVAE
    recipes: Mapping[Role, Recipe]
    geometry: Geometry = GEOMETRY
    attention: str = "sdpa"

    @property
    def device(self) -> torch.device:
        return self.vae.device

    def describe(self) -> str:
        return described(self.models, self.attention)

    @contextmanager
    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> Iterator["HeliosRun"]:
        yield HeliosRun(self, height, width, batch, paced(self.device, on_step))


class HeliosRun:
    """One rollout's scratch memory: the text keys and values of each model."""

    def __init__(self, pair: HeliosPair, height: int, width: int, batch: int, on_step: OnStep) -> None:
        self.pair, self.on_step = pair, on_step
        self.shape = pair.geometry.latent_shape(width, height, batch)
        self._texts: dict[Role, tuple[Tensor, TextKV]] = {}

    @torch.inference_mode()
    def begin(self, block: int = 0) -> HeliosContext:
        batch, channels, _, height, width = self.shape
        return HeliosContext(block, torch.zeros(batch, channels, sum(HISTORY), height, width, device=self.pair.device))

    @torch.inference_mode()
    def generate(self, role: Role, context: HeliosContext, prompt: Tensor, draw: Draw) -> Tensor:
        """draw(0) is the initial noise; draws 1 and 2 renoise the levels of half and full resolution."""
        model, recipe, device = self.pair.models[role], self.pair.recipes[role], self.pair.device
        combine, halves = recipe.combine, 2 if recipe.combine else 1
        text = self._text(role, prompt, halves)
        history = model.encode_history(*context.parts())
        history = history._replace(tokens=history.tokens.repeat(halves, 1, 1))
        done = itertools.count(1)

        def velocity(x: Tensor, t: float) -> Tensor:
            times = torch.full((halves * len(x),), float(t), device=device)
            flow = model(x.repeat(halves, 1, 1, 1, 1), times, history, text).float()
            if combine:
                cond, uncond = flow.chunk(2)
                return combine(cond, uncond, recipe.guidance)
            return flow

        def told(x: Tensor) -> None:
            self.on_step(Step("denoise", role, next(done), recipe.forwards))

        return recipe.sample(velocity, lambda j: sent(draw(j), device), recipe.steps, told)

    @torch.inference_mode()
    def commit(self, context: HeliosContext, latents: Tensor, prompt: Tensor) -> tuple[Tensor, HeliosContext]:
        count = latents.shape[2]
        decoded, _ = decode_on(
            self.pair.vae,
            latents,
            StreamState(),
            lambda done: self.on_step(Step("decode", None, done, count)),
            decoded_at_once(self.pair.device),
        )
        anchor = latents[:, :, :1].clone() if context.anchor is None else context.anchor
        history = torch.cat([context.history[:, :, latents.shape[2] :], latents], dim=2)
        return torch.cat(decoded, dim=2), HeliosContext(context.blocks + 1, history, anchor)

    @torch.inference_mode()
    def restore(self, saved: Committed) -> HeliosContext:
        extra = {name: tensor.to(self.pair.device) for name, tensor in saved.extra.items()}
        return HeliosContext(saved.blocks, **extra)

    def _text(self, role: Role, prompt: Tensor, halves: int) -> TextKV:
        known = self._texts.get(role)
        if known is None or known[0] is not prompt:
            rows = halves * self.shape[0]
            if len(prompt) < rows:
                raise ValueError(f"the {role} needs {rows} rows of text embeddings, not {len(prompt)}")
            rows_here = prompt[:rows].to(self.pair.device)
            known = self._texts[role] = (prompt, self.pair.models[role].encode_text(rows_here))
        return known[1]
