"""The context rule of Krea Realtime's streaming session, for a pair of causal Wan models and the Wan VAE.

No keys and values outlive a block. Before a block is generated, its model encodes K committed latent frames at t = 0
into RoPE rows 0..K-1, bidirectionally within groups of one block, and the new block sits at the rows behind them. Once
the clip is longer than K, the oldest of the K is not the stored latent: it is the last frame that latent decoded to,
encoded again as a single image. So a later block looks to the models like the second block of a clip that begins with
an image, which is the regime that they were trained in, and a hand-over between models costs nothing.

As an option a role keeps Self-Forcing's rolling cache instead (arXiv 2506.08009): keys and values of committed blocks
at absolute rows, appended by a pass at t = 0 when a block is committed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..decode import decode_on
from ..device import paced, sent
from ..geometry import Geometry
from ..models import graphs
from ..models.streaming import StreamState
from ..models.vae import WanVAE
from ..models.wan import CausalWan, KeyValueCache, TextKV
from ..noise import Draw
from ..sampling.flow import FlowTable
from ..schedule import Role
from .pair import Committed, OnStep, Step, described

# Latent frames after which a decoder that forgot its histories decodes bit-identically to one that did not: its taps
# reach back through 38. With fewer products (models/minimal.py) the rounding of a frame depends on all frames that are
# multiplied with it, which reach back through 6 more.
DECODER_MEMORY = 44


@dataclass(frozen=True)
class Rolling:
    """A rolling cache of `window` latent frames, the current block included; the first `sink` of them stay."""

    window: int
    sink: int = 0


@dataclass(frozen=True)
class SessionContext:
    """What has been committed, as far as the next block needs it. `image` is the re-encoded latent frame.

    first: the block that the clip began with, -1 where an image was given before block 0; opening: frames
    [B, 3, N, H, W] that are delivered before those of the next block.
    """

    blocks: int
    latents: Tensor  # [B, C, <= K, h, w], the newest latent frames
    last_frames: Tensor  # [B, 3, <= K, H, W], the last frame that each of them decoded to
    decoder: StreamState
    anchor: Tensor | None = None  # [B, C, 1, h, w], latent frame 0, if every block is to see it
    image: Tensor | None = None  # [B, C, 1, h, w]
    first: int = 0
    opening: Tensor | None = None

    @property
    def seen(self) -> int:
        """Blocks of this clip that are committed."""
        return self.blocks - self.first

    def extra(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the committed latents."""
        return {name: value for name in ("anchor", "image") if (value := getattr(self, name)) is not None}

    def window(self, frames: int) -> Tensor | None:
        """The context latents [B, C, K, h, w] of the next block; None where a clip begins."""
        if not self.seen:
            return None
        first = self.image if self.anchor is None else self.anchor
        if first is None or self.latents.shape[2] < frames:
            return self.latents
        return torch.cat([first, self.latents[:, :, 1:]], dim=2)


@dataclass(frozen=True)
class SessionPair:
    """A target and a drafter of the causal Wan family (either may be absent if no block asks for it).

    steps: times of the evaluations per role, descending from 1000; context_frames: K, a multiple of the block's latent
    frames; anchor_first_latent: keep latent frame 0 as the first context frame for ever, instead of re-encoding;
    stitched: how many of the first evaluations of a target block the drafter does, but for the first block of a clip;
    decoded_at_once: latent frames.
    """

    models: Mapping[Role, CausalWan]
    vae: WanVAE
    geometry: Geometry
    steps: Mapping[Role, Sequence[float]]
    shift: float = 5.0
    context_frames: int = 3
    anchor_first_latent: bool = False
    rolling: Mapping[Role, Rolling] = field(default_factory=dict)
    attention: str = "sdpa"
    stitched: int = 0
    decoded_at_once: int = 1

    def __post_init__(self) -> None:
        if self.context_frames < 1 or self.context_frames % self.geometry.latent_frames:
            raise ValueError(f"{self.context_frames} context frames are not a multiple of a block's latent frames")

    @property
    def device(self) -> torch.device:
        return self.vae.device

    def describe(self) -> str:
        return described(self.models, self.attention)

    @contextmanager
    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> Iterator["SessionRun"]:
        yield SessionRun(self, height, width, batch, paced(self.device, on_step))


class SessionRun:
    """One rollout's scratch memory: rolling caches of keys and values, and each model's text keys and values."""

    def __init__(self, pair: SessionPair, height: int, width: int, batch: int, on_step: OnStep) -> None:
        self.pair, self.on_step = pair, on_step
        self.shape = pair.geometry.latent_shape(width, height, batch)
        self.table = FlowTable(pair.shift)
        self._caches: dict[Role, KeyValueCache] = {}
        self._graphs: dict[Role, graphs.Forwards] = {}
        self._texts: dict[Role, tuple[Tensor, TextKV]] = {}
        self._begun: tuple[Tensor, Tensor] | None = None  # a context's latents, and the stitched part of its next block

    @torch.inference_mode()
    def begin(self, block: int = 0) -> SessionContext:
        for role in self.pair.rolling:
            self._cache(role).clear()
        batch, channels, _, height, width = self.shape
        factor = self.pair.geometry.spatial_factor
        return SessionContext(
            blocks=block,
            first=block,
            latents=torch.zeros(batch, channels, 0, height, width, device=self.pair.device),
            last_frames=torch.zeros(batch, 3, 0, height * factor, width * factor, device=self.pair.device),
            decoder=StreamState(),
        )

    @torch.inference_mode()
    def generate(self, role: Role, context: SessionContext, prompt: Tensor, draw: Draw) -> Tensor:
        """Few-step generation: predict x0, mix it with fresh noise for the next time, and so on; no guidance.

        A stitched target block goes on from the drafter's first evaluations, which a draft of it may have done already.
        """
        evaluations, stitched = len(self.pair.steps[role]), self.pair.stitched
        if role == "drafter" or not stitched or not context.blocks or not context.seen:
            return self._denoise(role, context, prompt, draw, range(evaluations))
        if self._begun is None or self._begun[0] is not context.latents:
            self._denoise("drafter", context, prompt, draw, range(stitched))
        assert self._begun is not None
        return self._denoise(role, context, prompt, draw, range(stitched, evaluations), self._begun[1])

    def _denoise(
        self,
        role: Role,
        context: SessionContext,
        prompt: Tensor,
        draw: Draw,
        evaluations: range,
        begun: Tensor | None = None,
    ) -> Tensor:
        """Some of a block's evaluations; begun: what the ones before them predicted."""
        pair = self.pair
        text, cache = self._text(role, prompt), self._cache(role)
        forward = self._forward(role, cache)
        frames = pair.geometry.latent_frames
        if role in pair.rolling:
            seen, first = None, context.seen * frames
        else:
            cache.clear()
            seen = context.window(pair.context_frames)
            first = 0 if seen is None else seen.shape[2]

        steps = pair.steps[role]
        x = sent(draw(0), pair.device) if begun is None else begun
        for index in evaluations:
            t = steps[index]
            if index:
                x = self.table.renoise(x, sent(draw(index), pair.device), t)
            if index == evaluations.start and seen is not None:
                # The context pass rides along with the first evaluation: context frames never see the noisy block.
                both = torch.cat([seen, x], dim=2)
                times = self._times(len(x), (0.0, first), (t, frames))
                flow = forward(both, times, text, 0, group=frames, wanted=frames)
            else:
                flow = forward(x, self._times(len(x), (t, frames)), text, first)
            x = self.table.x0_from_flow(flow, x, t)
            if role == "drafter" and index + 1 == pair.stitched:
                self._begun = (context.latents, x)
            self.on_step(Step("denoise", role, index + 1, len(steps)))
        return x

    @torch.inference_mode()
    def commit(self, context: SessionContext, latents: Tensor, prompt: Tensor) -> tuple[Tensor, SessionContext]:
        pair, keep = self.pair, self.pair.context_frames
        count = latents.shape[2]
        decoded, decoder = decode_on(
            pair.vae,
            latents,
            context.decoder,
            lambda done: self.on_step(Step("decode", None, done, count)),
            pair.decoded_at_once,
        )

        last_frames = torch.cat([context.last_frames, *(frames[:, :, -1:] for frames in decoded)], dim=2)[:, :, -keep:]
        for role in pair.rolling:
            self._append(role, context.seen, latents, prompt)
        advanced = SessionContext(
            blocks=context.blocks + 1,
            first=context.first,
            latents=torch.cat([context.latents, latents], dim=2)[:, :, -keep:],
            last_frames=last_frames,
            decoder=decoder,
            **self._anchor_and_image(context, latents, last_frames),
        )
        opening = [] if context.opening is None else [context.opening]
        return torch.cat([*opening, *decoded], dim=2), advanced

    @torch.inference_mode()
    def restore(self, saved: Committed) -> SessionContext:
        """The context after `saved.blocks` blocks. The decoder's histories are rebuilt by decoding the newest latents
        again, so that everything that follows is bit-identical on a deterministic device."""
        pair, keep = self.pair, self.pair.context_frames
        frames = pair.geometry.latent_frames
        replayed = -(-(DECODER_MEMORY + keep - frames) // frames)
        oldest = max(saved.first, saved.blocks - replayed)
        blocks = [saved.latents(block).to(pair.device) for block in range(oldest, saved.blocks)]
        decoder = StreamState(started=oldest > saved.first)
        last_frames: list[Tensor] = []
        for latents in blocks:
            decoded, decoder = decode_on(pair.vae, latents, decoder, at_once=pair.decoded_at_once)
            last_frames = [*last_frames, *(frames[:, :, -1:] for frames in decoded)][-keep:]
        for role in pair.rolling:
            for block in range(saved.first, saved.blocks):
                latents = saved.latents(block).to(pair.device)
                self._append(role, block - saved.first, latents, saved.prompt(block))
        return SessionContext(
            blocks=saved.blocks,
            first=saved.first,
            latents=torch.cat(blocks, dim=2)[:, :, -keep:],
            last_frames=torch.cat(last_frames, dim=2),
            decoder=decoder,
            **{name: tensor.to(pair.device) for name, tensor in saved.extra.items()},
        )

    def _anchor_and_image(self, context: SessionContext, latents: Tensor, last_frames: Tensor) -> dict[str, Tensor]:
        """The first context frame of the next block, where it is not simply the oldest latent frame."""
        pair = self.pair
        if pair.anchor_first_latent:
            return {"anchor": latents[:, :, :1].clone() if context.anchor is None else context.anchor}
        if (context.seen + 1) * latents.shape[2] > pair.context_frames:
            return {"image": pair.vae.encode(last_frames[:, :, :1])[0]}
        return {}

    def _append(self, role: Role, block: int, latents: Tensor, prompt: Tensor) -> None:
        """Keys and values of a clip's committed block into a rolling cache; the same block again replaces them."""
        frames = latents.shape[2]
        cache, times = self._cache(role), self._times(len(latents), (0.0, frames))
        self.pair.models[role](latents, times, self._text(role, prompt), cache, block * frames, wanted=0)
        self.on_step(Step("commit", role, 1, 1))

    def _cache(self, role: Role) -> KeyValueCache:
        """Rolling caches and those of recorded forwards are kept. Any other is for one block: while that is decoded,
        its memory is the decoder's."""
        if role in self._caches:
            return self._caches[role]
        batch, _, frames, height, width = self.shape
        rolling = self.pair.rolling.get(role)
        size, sink = (rolling.window, rolling.sink) if rolling else (self.pair.context_frames + frames, 0)
        tokens = (height // 2) * (width // 2)
        cache = KeyValueCache(self.pair.models[role], batch, size, tokens, sink, self.pair.device)
        if rolling or graphs.usable(self.pair.models[role], cache):
            self._caches[role] = cache
        return cache

    def _forward(self, role: Role, cache: KeyValueCache) -> Callable[..., Tensor]:
        """The model's forward with this cache, recorded where that is faster."""
        model = self.pair.models[role]
        if role in self.pair.rolling or not graphs.usable(model, cache):
            return lambda latents, times, text, first, **options: model(latents, times, text, cache, first, **options)
        if role not in self._graphs:
            self._graphs[role] = graphs.Forwards(model, cache)
        return self._graphs[role]

    def _text(self, role: Role, prompt: Tensor) -> TextKV:
        known = self._texts.get(role)
        if known is None or known[0] is not prompt:
            keys_values = self.pair.models[role].encode_text(prompt.to(self.pair.device))
            known = self._texts[role] = (prompt, keys_values)
        return known[1]

    def _times(self, batch: int, *spans: tuple[float, int]) -> Tensor:
        """[B, F] from spans of (time, frames)."""
        return torch.cat([torch.full((batch, frames), t, device=self.pair.device) for t, frames in spans], dim=1)
