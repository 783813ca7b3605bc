"""The Helios video transformer (arXiv:2603.04379): Wan 2.1 with the committed past as extra tokens.

A chunk of 9 noisy latent frames is denoised beside 20 clean ones: 16 far frames in coarse patches ("long"), 2 nearer
ones in finer patches ("mid"), and the first frame of the video with the last committed one in full resolution
("short"). History tokens are modulated like t = 0 and do not attend to the text. Nothing else links two chunks, so
there is no key/value cache.

`encode_text` is computed once for a prompt, `encode_history` once for a chunk. Module names are those of
huggingface/diffusers 0.42.1, so that published checkpoints load as they are.

    P = history tokens, L = noisy tokens, ordered [long | mid | short | noisy], each (frame, row, column)
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .helios_rope import pad_to_multiple, rope_table
from .joined import Projections
from .rowwise import feed_forward, gated, heads, modulated, plain_normed, rows_for
from .wan import Attend, TextKV, sdpa, sinusoid

# Parameters with one of these as a part of their dotted name are float32 whatever the rest is.
FLOAT32_PARAMETERS = ("time_embedder", "scale_shift_table", "norm2", "history_key_scale")

# Frame numbers of long, mid and short history and of the first noisy frame, the same for every chunk.
HISTORY_FRAMES: Sequence[Sequence[int]] = (range(1, 17), (17, 18), (0, 19))
NOISY_FRAME = 20


@dataclass(frozen=True)
class HeliosConfig:
    """Defaults are those of the three released models; names are those of their transformer/config.json."""

    num_attention_heads: int = 40
    attention_head_dim: int = 128
    num_layers: int = 40
    ffn_dim: int = 13824
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    rope_dim: Sequence[int] = (44, 42, 42)
    rope_theta: float = 10000.0
    eps: float = 1e-6
    is_amplify_history: bool = False

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def detect(cls, shapes: Mapping[str, Sequence[int]], overrides: Mapping[str, Any]) -> "HeliosConfig":
        """Sizes from the shapes of a checkpoint's tensors. Heads and RoPE leave no trace in shapes: `overrides` (the
        checkpoint's config.json) may say what they are."""
        dim, in_channels = shapes["patch_embedding.weight"][:2]
        sizes = {
            "num_attention_heads": dim // cls.attention_head_dim,
            "num_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
            "ffn_dim": shapes["blocks.0.ffn.net.2.weight"][1],
            "in_channels": in_channels,
            "out_channels": shapes["proj_out.weight"][0] // 4,
            "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
            "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
            "is_amplify_history": "blocks.0.attn1.history_key_scale" in shapes,
        }
        known = {name: value for name, value in overrides.items() if name in cls.__dataclass_fields__}
        return cls(**{**sizes, **known})


class History(NamedTuple):
    """What one model sees of the past while it makes a chunk."""

    tokens: Tensor  # [B, P, dim]
    rope: Tensor  # [2, P, 1, head_dim/2]: cos and sin
    modulation: Tensor  # [1, 6, dim]: that of t = 0


class Attention(Projections):
    """Projections shared by self- and cross-attention; queries and keys are normalised over the full width."""

    def __init__(self, config: HeliosConfig, operations: Any, amplify_history: bool = False) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.num_attention_heads
        self.to_q, self.to_k, self.to_v = (operations.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.Sequential(operations.Linear(dim, dim))
        self.norm_q, self.norm_k = (operations.RMSNorm(dim, eps=config.eps) for _ in range(2))
        self.history_key_scale = nn.Parameter(torch.empty(self.heads)) if amplify_history else None

    @property
    def three(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.to_q, self.to_k, self.to_v

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.norm_k(self.to_k(x)), self.to_v(x)
        return k.unflatten(-1, (self.heads, -1)), v.unflatten(-1, (self.heads, -1))

    def amplify(self, keys: Tensor, past: int) -> Tensor:
        """History keys times 1 to 10, one factor a head, in a model that learned them (none of the released does)."""
        if self.history_key_scale is None:
            return keys
        factor = 1 + 9 * self.history_key_scale.to(keys.device).sigmoid().unsqueeze(-1)
        return torch.cat([(keys[:, :past] * factor).to(keys.dtype), keys[:, past:]], dim=1)


def two_layers(in_dim: int, activation: nn.Module, dim: int, operations: Any) -> nn.Module:
    first, second = operations.Linear(in_dim, dim), operations.Linear(dim, dim)
    return nn.Sequential(OrderedDict(linear_1=first, activation=activation, linear_2=second))


def feed_forward_layers(dim: int, hidden: int, operations: Any) -> nn.Module:
    """Under its published names net.0.proj and net.2; net.1 was the dropout."""
    first = OrderedDict(proj=operations.Linear(dim, hidden), activation=nn.GELU(approximate="tanh"))
    net = nn.Sequential(nn.Sequential(first), nn.Identity(), operations.Linear(hidden, dim))
    return nn.Sequential(OrderedDict(net=net))


class Block(nn.Module):
    def __init__(self, config: HeliosConfig, operations: Any) -> None:
        super().__init__()
        dim, eps = config.dim, config.eps
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, dim))
        self.norm1 = operations.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.attn1 = Attention(config, operations, config.is_amplify_history)
        self.norm2 = operations.LayerNorm(dim, eps=eps)
        self.attn2 = Attention(config, operations)
        self.norm3 = operations.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.ffn: Any = feed_forward_layers(dim, config.ffn_dim, operations)

    def forward(
        self,
        hidden: Tensor,
        past: int,
        modulation: Tensor,
        rope: Tensor,
        text_kv: tuple[Tensor, Tensor],
        attend: Attend,
        drop_past: bool,
    ) -> Tensor:
        """hidden [B, P + L, dim] with past = P; modulation [B, 2, 6, dim] of history and noisy tokens.

        With drop_past the history gives keys and values only, and the result is [B, L, dim].
        """
        rows = self.scale_shift_table.to(modulation.device).unsqueeze(1) + modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = rows.unbind(2)

        own, text, tokens = self.attn1, self.attn2, hidden.shape[1]
        y = modulated(hidden, self.norm1, shift1, scale1, past, own.to_q)
        q, k, v = own.project(y, tokens - past if drop_past else tokens)
        cos, sin = rope
        k = own.amplify(heads(k, own.norm_k, (cos, sin), own.heads), past)
        if drop_past:
            hidden, cos, sin, past = hidden[:, past:], cos[past:], sin[past:], 0
        q = heads(q, own.norm_q, (cos, sin), own.heads)
        mixed = attend(q, k, v.unflatten(-1, (own.heads, -1))).flatten(2)
        hidden = gated(hidden, own.to_out(rows_for(mixed, own.to_out[0])), gate1, past)

        noisy = hidden[:, past:]
        q = heads(text.to_q(plain_normed(noisy, self.norm2, text.to_q)), text.norm_q, None, text.heads)
        noisy += text.to_out(rows_for(attend(q, *text_kv).flatten(2), text.to_out[0]))

        first, second = self.ffn.net[0].proj, self.ffn.net[2]
        y = modulated(hidden, self.norm3, shift2, scale2, past, first)
        return gated(hidden, feed_forward(first, second, y), gate2, past)


class ConditionEmbedder(nn.Module):
    def __init__(self, config: HeliosConfig, operations: Any) -> None:
        super().__init__()
        self.freq_dim, dim = config.freq_dim, config.dim
        self.time_embedder = two_layers(config.freq_dim, nn.SiLU(), dim, operations)
        self.time_proj = operations.Linear(dim, 6 * dim)
        self.text_embedder = two_layers(config.text_dim, nn.GELU(approximate="tanh"), dim, operations)

    def time(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Embedding [B, dim] of t [B], computed in float32, and the blocks' modulation [B, 6, dim], both in dtype."""
        embedding = self.time_embedder(sinusoid(t, self.freq_dim).float()).to(dtype)
        return embedding, self.time_proj(F.silu(embedding)).unflatten(-1, (6, -1))


class OutputNorm(nn.Module):
    def __init__(self, config: HeliosConfig, operations: Any) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, config.dim))
        self.norm = operations.LayerNorm(config.dim, eps=config.eps, elementwise_affine=False)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        shift, scale = (self.scale_shift_table.to(x.device) + embedding.unsqueeze(1)).split(1, dim=1)
        return torch.addcmul(shift, self.norm(x.float()), 1 + scale).to(x.dtype)


class HeliosTransformer(nn.Module):
    """Flow prediction for one chunk, given the history.

    operations: as in CausalWan; here too the network computes where its inputs are.
    """

    def __init__(self, config: HeliosConfig, operations: Any = nn, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config, self.attend = config, attend

        def patch(size: tuple[int, int, int]) -> Any:
            return operations.Conv3d(config.in_channels, config.dim, kernel_size=size, stride=size)

        self.patch_embedding, self.patch_short = patch((1, 2, 2)), patch((1, 2, 2))
        self.patch_mid, self.patch_long = patch((2, 4, 4)), patch((4, 8, 8))
        self.condition_embedder = ConditionEmbedder(config, operations)
        self.blocks: Any = nn.ModuleList(Block(config, operations) for _ in range(config.num_layers))
        self.norm_out = OutputNorm(config, operations)
        self.proj_out = operations.Linear(config.dim, 4 * config.out_channels)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.bias.dtype

    def join(self) -> None:
        """Fewer products from now on; for weights that stay where they are."""
        for block in self.blocks:
            block.attn1.join()

    def encode_text(self, embeddings: Tensor) -> TextKV:
        """Keys and values of the cross-attention, per block, from text embeddings [B, text tokens, text_dim].

        They depend on the prompt only. No row is masked: the zeroed tail of a short prompt is attended as well.
        """
        hidden = self.condition_embedder.text_embedder(embeddings.to(self.dtype))
        return [block.attn2.keys_values(hidden) for block in self.blocks]

    def encode_history(self, long: Tensor, mid: Tensor, short: Tensor) -> History:
        """Patches and positions of committed latents [B, C, T, h, w], T = 16, 2 and 2 (first frame, last frame).

        They have full resolution also where the noisy latents are coarser.
        """
        height, width = short.shape[-2] // 2, short.shape[-1] // 2
        tokens, ropes = [], []
        for latents, name, frames in zip((long, mid, short), ("long", "mid", "short"), HISTORY_FRAMES, strict=True):
            patch = getattr(self, f"patch_{name}")
            tokens.append(self._patches(patch, latents))
            numbers = torch.cat([torch.full((1,), number, device=latents.device) for number in frames])
            ropes.append(self._rope(numbers, height, width, pool=patch.kernel_size[0]))
        modulation = self.condition_embedder.time(torch.zeros(1, device=short.device), self.dtype)[1]
        return History(torch.cat(tokens, dim=1), torch.cat(ropes, dim=1), modulation)

    def forward(self, latents: Tensor, t: Tensor, history: History, text: TextKV) -> Tensor:
        """The flow noise - clean [B, C, T, h, w] of noisy latents at time t [B], 0..1000."""
        batch, channels, frames, height, width = latents.shape
        grid = (frames, height // 2, width // 2)
        numbers = torch.arange(NOISY_FRAME, NOISY_FRAME + frames, device=latents.device)
        rope = torch.cat([history.rope, self._rope(numbers, *grid[1:])], dim=1).contiguous()
        embedding, modulation = self.condition_embedder.time(t, self.dtype)
        both = torch.stack([history.modulation.expand_as(modulation), modulation], dim=1)

        past = history.tokens.shape[1]
        hidden = torch.cat([history.tokens, self._patches(self.patch_embedding, latents)], dim=1)
        for block, text_kv in zip(self.blocks, text, strict=True):
            # Nobody reads what the last block would make of the history.
            drop_past = block is self.blocks[-1]
            hidden = block(hidden, past, both, rope, text_kv, self.attend, drop_past)

        # A token's 64 values are (2, 2, C): row and column inside the patch, then the channel.
        flow = self.proj_out(self.norm_out(hidden, embedding)).view(batch, *grid, 2, 2, -1)
        return flow.permute(0, 6, 1, 2, 4, 3, 5).reshape(batch, -1, frames, height, width)

    def _patches(self, patch: Any, latents: Tensor) -> Tensor:
        return patch(pad_to_multiple(latents.to(self.dtype), patch.kernel_size)).flatten(2).transpose(1, 2)

    def _rope(self, frames: Tensor, height: int, width: int, pool: int = 1) -> Tensor:
        return rope_table(frames, height, width, self.config.rope_dim, self.config.rope_theta, pool)
