"""The causal Wan 2.1 text-to-video transformer of Self-Forcing (1.3B) and Krea Realtime (14B): one class, two sizes.

Structure and parameter names are those of Wan 2.1 (Wan-Video/Wan2.1, wan/modules/model.py); what makes it causal is
that keys and values of earlier frames come from a cache (Self-Forcing, arXiv 2506.08009, section 3).

    S = (h/2)(w/2)   tokens of one latent frame          d = width of the model
    F = latent frames of one call                        tokens are ordered (frame, row, column)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .joined import Projections
from .rowwise import Rope, added, feed_forward, heads, normed, rows_for

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
TextKV = Sequence[tuple[Tensor, Tensor]]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over [B, tokens, heads, head_dim], by torch's own choice of kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@dataclass(frozen=True)
class WanConfig:
    dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    channels: int = 16
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @classmethod
    def detect(cls, shapes: Mapping[str, Sequence[int]], overrides: Mapping[str, Any]) -> "WanConfig":
        """Sizes from the shapes of a checkpoint's tensors. Head and text sizes leave no trace in shapes: Wan's are
        128 and 512, and `overrides` (a checkpoint's own metadata) may say otherwise."""
        dim, channels = shapes["patch_embedding.weight"][:2]
        sizes = {
            "dim": dim,
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "num_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
            "num_heads": dim // 128,
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "text_dim": shapes["text_embedding.0.weight"][1],
            "channels": channels,
        }
        known = {name: value for name, value in overrides.items() if name in cls.__dataclass_fields__}
        return cls(**{**sizes, **known})


WAN_1_3B = WanConfig(dim=1536, ffn_dim=8960, num_layers=30, num_heads=12)
WAN_14B = WanConfig(dim=5120, ffn_dim=13824, num_layers=40, num_heads=40)


class KeyValueCache:
    """Keys (after RoPE) and values that one network keeps during one rollout: per layer [B, tokens, heads, head_dim].

    Frames are addressed by their absolute number. Writing frames that are already the newest overwrites them in place;
    writing beyond the capacity evicts the oldest frames, except the first `sink` ones (Self-Forcing's rolling cache).
    """

    def __init__(
        self,
        model: "CausalWan",
        batch: int,
        frames: int,
        frame_tokens: int,
        sink: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the network computes, if that is not where its weights are kept."""
        config, device = model.config, device or model.patch_embedding.bias.device
        shape = (batch, frames * frame_tokens, config.num_heads, config.head_dim)
        # A tensor a layer: an allocator finds room for these where others were, which it does not for gigabytes.
        self.keys, self.values = (
            [torch.empty(shape, dtype=model.dtype, device=device) for _ in range(config.num_layers)] for _ in range(2)
        )
        self.capacity, self.frame_tokens, self.sink = frames * frame_tokens, frame_tokens, sink * frame_tokens
        self.clear()

    def clear(self) -> None:
        """Hold nothing: frame 0 comes next."""
        self.seen = 0  # tokens that the clip has had so far
        self.filled = self.start = 0  # tokens held here; where the open slot begins

    def open(self, first_frame: int, frames: int) -> None:
        """Make room for `frames` frames from `first_frame` on, the newest frames there are."""
        tokens, end = frames * self.frame_tokens, (first_frame + frames) * self.frame_tokens
        if end > self.seen and self.filled + tokens > self.capacity:
            evicted = self.filled + tokens - self.capacity
            kept = slice(self.sink + evicted, self.filled)
            moved = slice(self.sink, self.filled - evicted)
            for buffer in (*self.keys, *self.values):
                buffer[:, moved] = buffer[:, kept].clone()
            self.filled -= evicted
        self.filled += end - self.seen
        self.seen, self.start = end, self.filled - tokens

    def slot(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of one layer: where the open frames' keys and values go, and all that their queries may see."""
        keys, values = self.keys[layer][:, : self.filled], self.values[layer][:, : self.filled]
        return keys[:, self.start :], values[:, self.start :], keys, values


def rope_angles(first_frame: int, grid: Sequence[int], head_dim: int, device: Any = None) -> Rope:
    """cos and sin [tokens, 1, head_dim/2] for tokens on a (frames, rows, columns) grid, any frame number.

    The head's pairs are split into time, height and width: head_dim - 4q, 2q and 2q dimensions with q = head_dim // 6
    (44, 42, 42 of 128); within an axis of D dimensions pair i turns by position * 10000^(-2i/D). float64 until the end.
    """
    q = head_dim // 6
    angles = []
    for axis, (start, size, dims) in enumerate(
        zip((first_frame, 0, 0), grid, (head_dim - 4 * q, 2 * q, 2 * q), strict=True)
    ):
        position = torch.arange(start, start + size, dtype=torch.float64, device=device)
        speed = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)
        shape = [1, 1, 1, dims // 2]
        shape[axis] = size
        angles.append(torch.outer(position, speed).view(shape).expand(*grid, -1))
    turn = torch.cat(angles, dim=-1).flatten(0, 2).unsqueeze(1)
    return turn.cos().float(), turn.sin().float()


def sinusoid(t: Tensor, dim: int) -> Tensor:
    """Timestep embedding [..., dim] = [cos | sin](t * 10000^(-i / (dim/2))), float64."""
    half = dim // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    turn = t.double()[..., None] * speed
    return torch.cat([turn.cos(), turn.sin()], dim=-1)


class Attention(Projections):
    """Projections shared by self- and cross-attention; queries and keys are normalised over the full width."""

    def __init__(self, config: WanConfig, operations: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (operations.Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = (operations.RMSNorm(config.dim, eps=config.eps) for _ in range(2))
        self.heads = config.num_heads

    @property
    def three(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q, self.k, self.v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.norm_k(self.k(x)), self.v(x)
        return k.unflatten(-1, (self.heads, -1)), v.unflatten(-1, (self.heads, -1))


class Block(nn.Module):
    def __init__(self, config: WanConfig, operations: Any) -> None:
        super().__init__()
        dim, eps = config.dim, config.eps
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))
        self.norm1 = operations.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.self_attn = Attention(config, operations)
        self.norm3 = operations.LayerNorm(dim, eps=eps)
        self.cross_attn = Attention(config, operations)
        self.norm2 = operations.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.ffn = nn.Sequential(
            operations.Linear(dim, config.ffn_dim), nn.GELU(approximate="tanh"), operations.Linear(config.ffn_dim, dim)
        )

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        rope: Rope,
        text_kv: tuple[Tensor, Tensor],
        slot: tuple[Tensor, Tensor, Tensor, Tensor],
        group: int,
        wanted: int,
        attend: Attend,
    ) -> Tensor:
        """x [B, F, S, d], e [B, F, 6, d]; slot: of the cache; frames see those of their `group` and of earlier ones.

        Only the last `wanted` frames are computed beyond their keys and values, and returned.
        """
        own_keys, own_values, keys, values = slot
        own, text, size = self.self_attn, self.cross_attn, x.shape[2]
        rows = (self.modulation.to(e) + e).unsqueeze(3).unbind(2)
        _, hidden = normed(x, self.norm1, own.q, rows[0], rows[1])
        q, k, v = own.project(hidden, wanted * size)
        heads(k, own.norm_k, rope, own.heads, out=own_keys)
        heads(v, None, None, own.heads, out=own_values)
        del k, v  # parts of a product with q, they would hold on to all of it
        if not wanted:
            return x[:, :0]
        x = x[:, -wanted:]
        _, _, gate1, shift2, scale2, gate2 = (row[:, -wanted:] for row in rows)
        cos, sin = (part[-wanted * size :] for part in rope)
        q = heads(q, own.norm_q, (cos, sin), own.heads)
        mixed = own.o(rows_for(_grouped(attend, q, keys, values, group * size).flatten(2), own.o))

        x, hidden = normed(x, self.norm3, text.q, update=mixed.view_as(x), gate=gate1)
        q = heads(text.q(hidden), text.norm_q, None, text.heads)
        mixed = text.o(rows_for(attend(q, *text_kv).flatten(2), text.o))

        first, _, second = self.ffn
        x, hidden = normed(x, self.norm2, first, shift2, scale2, update=mixed.view_as(x))
        return added(x, feed_forward(first, second, hidden).view_as(x), gate2)


def _grouped(attend: Attend, q: Tensor, keys: Tensor, values: Tensor, group: int) -> Tensor:
    """Attention that is bidirectional inside a group of tokens and causal between groups; own keys stand last."""
    past = keys.shape[1] - q.shape[1]
    ends = range(group, q.shape[1] + 1, group)
    parts = [attend(q[:, end - group : end], keys[:, : past + end], values[:, : past + end]) for end in ends]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Head(nn.Module):
    def __init__(self, config: WanConfig, operations: Any) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim))
        self.norm = operations.LayerNorm(config.dim, eps=config.eps, elementwise_affine=False)
        self.head = operations.Linear(config.dim, 4 * config.channels)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        shift, scale = (self.modulation.to(e) + e.unsqueeze(2)).unsqueeze(3).unbind(2)
        return self.head(torch.addcmul(shift, self.norm(x), 1 + scale))


class CausalWan(nn.Module):
    """Flow prediction for new latent frames, given those in the cache.

    operations: where Linear, Conv3d, LayerNorm and RMSNorm are taken from, so that a host can put in its own, whose
    weights may lie elsewhere until they are used: it computes where its inputs are.
    """

    def __init__(self, config: WanConfig, operations: Any = nn, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        dim, linear = config.dim, operations.Linear
        self.patch_embedding = operations.Conv3d(config.channels, dim, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Sequential(linear(config.text_dim, dim), nn.GELU(approximate="tanh"), linear(dim, dim))
        self.time_embedding = nn.Sequential(linear(config.freq_dim, dim), nn.SiLU(), linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), linear(dim, 6 * dim))
        self.blocks: Any = nn.ModuleList(Block(config, operations) for _ in range(config.num_layers))
        self.head = Head(config, operations)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.bias.dtype

    def join(self) -> None:
        """Fewer products from now on; for weights that stay where they are."""
        for block in self.blocks:
            block.self_attn.join()

    def encode_text(self, embeddings: Tensor) -> TextKV:
        """Keys and values of the cross-attention, per layer, from text embeddings [B, text_len, text_dim].

        They depend on the prompt only. No row is masked: Wan attends to the zeroed tail of a short prompt as well.
        """
        hidden = self.text_embedding(embeddings.to(self.dtype))
        return [block.cross_attn.keys_values(hidden) for block in self.blocks]

    def forward(
        self,
        latents: Tensor,
        timesteps: Tensor,
        text: TextKV,
        cache: KeyValueCache,
        first_frame: int,
        group: int | None = None,
        wanted: int | None = None,
    ) -> Tensor:
        """The flow [B, C, wanted, h, w] of the last `wanted` (default: all) of these latent frames.

        latents [B, C, F, h, w]; timesteps [B, F] in 0..1000, one a frame; first_frame: number of the first of them,
        which is its RoPE row and its place in the cache; group: frames that see one another, earlier groups being
        visible to later ones (default: all F). Keys and values of all F frames are in the cache afterwards.
        """
        batch, channels, frames, height, width = latents.shape
        group, wanted = group or frames, frames if wanted is None else wanted
        grid = (frames, height // 2, width // 2)

        x = self.patch_embedding(latents.to(self.dtype)).flatten(3).permute(0, 2, 3, 1)  # [B, F, S, d]
        e = self.time_embedding(sinusoid(timesteps, self.config.freq_dim).to(self.dtype))
        e0 = self.time_projection(e).unflatten(-1, (6, -1))
        rope = rope_angles(first_frame, grid, self.config.head_dim, latents.device)

        cache.open(first_frame, frames)
        last = len(self.blocks) - 1
        for layer, (block, text_kv) in enumerate(zip(self.blocks, text, strict=True)):
            keep = wanted if layer == last else frames
            x = block(x, e0, rope, text_kv, cache.slot(layer), group, keep, self.attend)

        # A token's 64 values are (2, 2, C): row and column inside the patch, then the channel.
        y = self.head(x, e[:, frames - wanted :]).view(batch, wanted, *grid[1:], 2, 2, channels)
        return y.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, channels, wanted, height, width)
