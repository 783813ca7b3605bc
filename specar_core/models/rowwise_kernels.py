"""What stands between a transformer's matrix products as Triton kernels: one pass over the rows each.

A program takes one whole row, computes in float32 and rounds once. Vectors that modulate are [B, G, d], one for every
`size` tokens of a batch element, the last for all that are left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_LARGEST = tl.constexpr(448.0)  # of e4m3


@triton.jit
def _quantise(row, out, scale, at, place, inside, FP8: tl.constexpr):
    """Stores a row as it is, or as fp8 with its scale."""
    if FP8:
        factor = tl.maximum(tl.max(tl.abs(row), 0), 1e-12) / FP8_LARGEST
        tl.store(scale + at, factor)
        row = row / factor
    tl.store(out + place, row.to(out.dtype.element_ty), inside)


@triton.jit
def _residual_norm(x, y, gate, total, shift, scale, out, out_scale, N, size, G, gate_b, gate_g, norm_b, norm_g, eps,
                   D: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
                   PLUS: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    batch, group = at // N, tl.minimum(at % N // size, G - 1)
    channel = tl.arange(0, WIDTH)
    inside = channel < D
    place = at * D + channel
    row = tl.load(x + place, inside, other=0.0).to(tl.float32)
    if ADD:
        update = tl.load(y + place, inside, other=0.0).to(tl.float32)
        if GATE:
            update *= tl.load(gate + batch * gate_b + group * gate_g + channel, inside, other=0.0).to(tl.float32)
        rounded = (row + update).to(total.dtype.element_ty)
        tl.store(total + place, rounded, inside)
        row = rounded.to(tl.float32)
    if NORM:
        row = tl.where(inside, row - tl.sum(row, 0) / D, 0.0)
        row *= tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        vector = batch * norm_b + group * norm_g + channel
        row *= tl.load(scale + vector, inside, other=0.0).to(tl.float32) + PLUS
        row += tl.load(shift + vector, inside, other=0.0).to(tl.float32)
        _quantise(row, out, out_scale, at, place, inside, FP8)


@triton.jit
def _turn(x, gain, cos, sin, out, N, x_b, x_n, out_b, eps, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
          NORM: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    batch, token = at // N, at % N
    channel = tl.arange(0, WIDTH)
    inside = channel < D
    row = tl.load(x + batch * x_b + token * x_n + channel, inside, other=0.0).to(tl.float32)
    if NORM:
        row *= tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        row *= tl.load(gain + channel, inside, other=0.0).to(tl.float32)
    if ROPE:
        even, odd = tl.split(tl.reshape(row, [WIDTH // 2, 2]))
        pair = tl.arange(0, WIDTH // 2)
        angle, known = token * HALF + pair % HALF, pair < D // 2
        c, s = tl.load(cos + angle, known, other=0.0), tl.load(sin + angle, known, other=0.0)
        row = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [WIDTH])
    tl.store(out + batch * out_b + token * D + channel, row.to(out.dtype.element_ty), inside)


@triton.jit
def _activate(x, out, scale, D: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = channel < D
    row = tl.load(x + at * D + channel, inside, other=0.0).to(tl.float32)
    if GELU:  # by tanh; (1 + tanh(u)) / 2 is 1 / (1 + 2 ** (-2u log2(e))), u = sqrt(2 / pi) * (x + 0.044715 x ** 3)
        row /= 1.0 + tl.exp2(row * (-2.302208198144325 - 0.10294324 * row * row))
    _quantise(row, out, scale, at, at * D + channel, inside, True)


def _shape(width: int) -> dict[str, int]:
    size = triton.next_power_of_2(width)
    return {"WIDTH": size, "num_warps": max(1, size // 2048)}


def _vectors(vector: Tensor | None) -> tuple[int, int]:
    """Strides over the batch and the groups."""
    return (vector.stride(0), vector.stride(1)) if vector is not None and vector.dim() == 3 else (0, 0)


def residual_norm(
    x: Tensor,
    size: int = 1,
    *,
    update: Tensor | None = None,
    gate: Tensor | None = None,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    plus: float = 1.0,
    eps: float = 1e-6,
    fp8: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """total = x + gate * update (gate may be 1, update 0), and LayerNorm(total) * (plus + scale) + shift where these
    are given: total, normed, and the scales [B, N, 1] of the normed rows if they are wanted in fp8.

    x, update [B, N, d] contiguous; gate, shift, scale [B, G, d], or the latter two [d].
    """
    batch, tokens, width = x.shape
    total = x if update is None else torch.empty_like(x)
    normed = out_scale = None
    if scale is not None:
        normed = torch.empty_like(x, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
        out_scale = x.new_empty(batch, tokens, 1, dtype=torch.float32) if fp8 else None
    groups = next((v.shape[1] for v in (gate, scale) if v is not None and v.dim() == 3), 1)
    _residual_norm[(batch * tokens,)](
        x, update, gate, total, shift, scale, normed, out_scale, tokens, size, groups, *_vectors(gate),
        *_vectors(scale), eps, width, ADD=update is not None, GATE=gate is not None, NORM=scale is not None, PLUS=plus,
        FP8=fp8, **_shape(width),
    )  # fmt: skip
    return total, normed, out_scale


def turn(x: Tensor, gain: Tensor | None, rope: tuple[Tensor, Tensor] | None, out: Tensor, eps: float) -> Tensor:
    """x [B, N, d], rows contiguous, through RMSNorm (where gain [d] is given) and RoPE (where angles
    [N, 1, head_dim / 2] are), into out [B, N, heads, head_dim], contiguous but for the batch."""
    batch, tokens, width = x.shape
    cos, sin = (angles.contiguous() for angles in rope) if rope else (None, None)
    _turn[(batch * tokens,)](
        x, gain, cos, sin, out, tokens, x.stride(0), x.stride(1), out.stride(0), eps, width,
        HALF=out.shape[-1] // 2, NORM=gain is not None, ROPE=rope is not None, **_shape(width),
    )  # fmt: skip
    return out


def quantised(x: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of x [..., d], through GELU first if wanted, in fp8, and their scales [..., 1]."""
    x = x.contiguous()
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    _activate[(scale.numel(),)](x, out, scale, x.shape[-1], GELU=gelu, **_shape(x.shape[-1]))
    return out, scale
