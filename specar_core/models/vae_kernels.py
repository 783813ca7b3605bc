"""The VAE's memory-bound steps as Triton kernels: what torch does in four to six passes, in one.

Frames are [B, T, H, W, C], contiguous, so that a program handles all channels of some pixels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .minimal import POINTS

TILE = 2048  # values a program holds
SMALL = 512  # of several tensors


@triton.jit
def _active(place, inside, gamma, channel, C: tl.constexpr, NORM: tl.constexpr):
    """Values through norm and SiLU, where there is a norm, as the tensor would hold them."""
    v = tl.load(place, inside, other=0.0).to(tl.float32)
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v, 1) / C + 1e-12)[:, None]
        v *= tl.load(gamma + channel, channel < C, other=0.0).to(tl.float32)[None, :]
        v *= tl.sigmoid(v)
    return v.to(place.dtype.element_ty)


@triton.jit
def _taps(x, gamma, past, taps, tail, T, P, C: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
          TAPS: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    frame, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)  # frames count from the first one of the history
    pixel, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, WIDTH)
    inside = (pixel < P)[:, None] & (channel < C)[None, :]
    place = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    if frame < 2:
        value = tl.load(past + (batch * 2 + frame) * P * C + place, inside, other=0.0)
    else:
        value = _active(x + (batch * T + frame - 2) * P * C + place, inside, gamma, channel, C, NORM)
    spread = pixel.to(tl.int64)[:, None] * (TAPS * C) + channel[None, :]
    for tap in tl.static_range(TAPS):  # a frame is the first tap of the output two frames before it, and so on
        out = frame - 2 + (TAPS - 1 - tap)
        if (out >= 0) & (out < T):
            tl.store(taps + (batch * T + out) * P * TAPS * C + tap * C + spread, value, inside)
    if frame >= T:
        tl.store(tail + (batch * 2 + frame - T) * P * C + place, value, inside)


def taps(x: Tensor, gamma: Tensor | None, past: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Every frame behind the `count` - 1 before it, [B, T, H, W, count * C], and the last two frames.

    Of x [B, T, H, W, C], normalised over the channels, times gamma, through SiLU (where gamma is given); behind past
    [B, 2, H, W, C], which went through that when it came.
    """
    batch, frames, height, width, channels = x.shape
    out, tail = x.new_empty(batch, frames, height, width, count * channels), torch.empty_like(past)
    tile = triton.next_power_of_2(channels)
    pixels = max(1, TILE // tile)
    grid = (triton.cdiv(height * width, pixels), frames + 2, batch)
    _taps[grid](x, gamma, past, out, tail, frames, height * width, channels, tile, pixels, count, gamma is not None)
    return out, tail


@triton.jit
def _sums(x, gamma, past, s0, s1, s2, s3, s4, s5, tail, GROUPS, P, A: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
          WIDTH: tl.constexpr, PIXELS: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """The rows of `minimal.matrices(M)[0]`, in pairs of points: the even powers, plus and minus the odd ones."""
    batch = tl.program_id(1).to(tl.int64)
    stored: tl.constexpr = s0.dtype.element_ty
    B: tl.constexpr = 1 / A
    pixel, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, WIDTH)
    inside = (pixel < P)[:, None] & (channel < C)[None, :]
    place = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    d0 = tl.load(past + batch * 2 * P * C + place, inside, other=0.0).to(tl.float32)
    d1 = tl.load(past + (batch * 2 + 1) * P * C + place, inside, other=0.0).to(tl.float32)
    for group in range(GROUPS):
        first, out = (batch * GROUPS + group) * M, (batch * GROUPS + group) * P * C + place
        d2 = _active(x + first * P * C + place, inside, gamma, channel, C, NORM).to(tl.float32)
        d3 = _active(x + (first + 1) * P * C + place, inside, gamma, channel, C, NORM).to(tl.float32)
        if M == 2:
            tl.store(s0 + out, (d2 - d0).to(stored), inside)
            tl.store(s1 + out, (d2 + d1).to(stored), inside)
            tl.store(s2 + out, (d2 - d1).to(stored), inside)
            tl.store(s3 + out, (d3 - d1).to(stored), inside)
            d0, d1 = d2, d3
        else:
            d4 = _active(x + (first + 2) * P * C + place, inside, gamma, channel, C, NORM).to(tl.float32)
            d5 = _active(x + (first + 3) * P * C + place, inside, gamma, channel, C, NORM).to(tl.float32)
            tl.store(s0 + out, (d0 - (A * A + B * B) * d2 + d4).to(stored), inside)
            even, odd = d4 - B * B * d2, A * (d3 - B * B * d1)
            tl.store(s1 + out, (even + odd).to(stored), inside)
            tl.store(s2 + out, (even - odd).to(stored), inside)
            even, odd = d4 - A * A * d2, B * (d3 - A * A * d1)
            tl.store(s3 + out, (even + odd).to(stored), inside)
            tl.store(s4 + out, (even - odd).to(stored), inside)
            tl.store(s5 + out, (d1 - (A * A + B * B) * d3 + d5).to(stored), inside)
            d0, d1 = d4, d5
    tl.store(tail + batch * 2 * P * C + place, d0.to(stored), inside)
    tl.store(tail + (batch * 2 + 1) * P * C + place, d1.to(stored), inside)


def sums(x: Tensor, gamma: Tensor | None, past: Tensor, m: int) -> tuple[list[Tensor], Tensor]:
    """The m + 2 sums of each m frames and the two before them, [B, T/m, H, W, C] each, and the last two frames.

    Of x and past as in `taps`.
    """
    batch, frames, height, width, channels = x.shape
    parts = [x.new_empty(batch, frames // m, height, width, channels) for _ in range(m + 2)]
    tail = torch.empty_like(past)
    tile = triton.next_power_of_2(channels)
    pixels = max(1, SMALL // tile)
    grid = (triton.cdiv(height * width, pixels), batch)
    _sums[grid](x, gamma, past, *parts, *parts[: 4 - m], tail, frames // m, height * width, POINTS[m][1], m, channels,
                tile, pixels, gamma is not None, num_warps=2)  # fmt: skip
    return parts, tail


@triton.jit
def _results(p0, p1, p2, p3, p4, p5, bias, onto, out, N, A: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
             SIZE: tl.constexpr, ONTO: tl.constexpr):  # fmt: skip
    """The rows of `minimal.matrices(M)[2]`."""
    B: tl.constexpr = 1 / A
    group, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside, source = place < N, group * N + place
    first = tl.load(p0 + source, inside).to(tl.float32)
    plus, minus = tl.load(p1 + source, inside).to(tl.float32), tl.load(p2 + source, inside).to(tl.float32)
    last = tl.load(p3 + source, inside).to(tl.float32) if M == 2 else tl.load(p5 + source, inside).to(tl.float32)
    even, odd = plus + minus, plus - minus
    if M == 4:
        plus, minus = tl.load(p3 + source, inside).to(tl.float32), tl.load(p4 + source, inside).to(tl.float32)
        even2, odd2 = plus + minus, plus - minus
    added = tl.load(bias + place % C).to(tl.float32)
    for frame in tl.static_range(M):
        if M == 2:
            v = first + even if frame == 0 else odd + last
        else:
            v = A**frame * (even if frame % 2 == 0 else odd) + B**frame * (even2 if frame % 2 == 0 else odd2)
            if frame == 0:
                v += first
            if frame == 3:
                v += last
        v += added
        target = (group * M + frame) * N + place
        if ONTO:
            v += tl.load(onto + target, inside).to(tl.float32)
        tl.store(out + target, v.to(out.dtype.element_ty), inside)


def results(products: Sequence[Tensor], bias: Tensor, onto: Tensor | None) -> Tensor:
    """The m frames [B, T, H, W, C] of each m + 2 products [B, T/m, H, W, C], and the bias and `onto` added."""
    m, (batch, groups, height, width, channels) = len(products) - 2, products[0].shape
    out = bias.new_empty(batch, groups * m, height, width, channels)
    size = height * width * channels
    _results[(triton.cdiv(size, SMALL), batch * groups)](
        *products, *products[: 4 - m], bias, onto, out, size, POINTS[m][1], m, channels, SMALL, onto is not None
    )
    return out


@triton.jit
def _add(x, y, bias, out, N, C: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < N
    total = tl.load(x + place, inside).to(tl.float32) + tl.load(y + place, inside).to(tl.float32)
    total += tl.load(bias + place % C).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def add(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """x + y + bias, with the bias along the last axis."""
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), TILE),)](x, y, bias, out, x.numel(), x.shape[-1], TILE)
    return out


@triton.jit
def _woven(y, bias, out, H, W, C: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    frame, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    column, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, WIDTH)
    inside = (column < 2 * W)[:, None] & (channel < C)[None, :]
    down, right = row % 2, column % 2
    source = (frame * (H + 1) + row // 2 + down) * (W + 1) + column // 2 + right
    image = 2 * down + right
    value = tl.load(y + (4 * source + image)[:, None] * C + channel[None, :], inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    place = ((frame * 2 * H + row) * 2 * W + column)[:, None] * C + channel[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


def woven(y: Tensor, bias: Tensor) -> Tensor:
    """y [B, T, H + 1, W + 1, 4C] as [B, T, 2H, 2W, C], with the bias."""
    batch, frames, height, width, channels = y.shape[0], y.shape[1], y.shape[2] - 1, y.shape[3] - 1, y.shape[4] // 4
    out = y.new_empty(batch, frames, 2 * height, 2 * width, channels)
    tile = triton.next_power_of_2(channels)
    pixels = max(1, TILE // tile)
    grid = (triton.cdiv(2 * width, pixels), 2 * height, batch * frames)
    _woven[grid](y, bias, out, height, width, channels, tile, pixels)
    return out
