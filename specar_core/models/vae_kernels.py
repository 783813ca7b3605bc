"""The VAE's memory-bound steps as Triton kernels: what torch does in four to six passes, in one.

Frames are [B, T, H, W, C], contiguous, so that a program handles all channels of some pixels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # values a program holds


@triton.jit
def _taps(x, bias, gamma, past, taps, tail, T, P, C: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
          BIAS: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    frame, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)  # frames count from the first one of the history
    pixel, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, WIDTH)
    inside = (pixel < P)[:, None] & (channel < C)[None, :]
    place = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    if frame < 2:
        value = tl.load(past + (batch * 2 + frame) * P * C + place, inside, other=0.0)
    else:
        v = tl.load(x + (batch * T + frame - 2) * P * C + place, inside, other=0.0).to(tl.float32)
        if BIAS:
            v += tl.load(bias + channel, channel < C, other=0.0).to(tl.float32)[None, :]
        if NORM:
            v *= tl.rsqrt(tl.sum(v * v, 1) / C + 1e-12)[:, None]
            v *= tl.load(gamma + channel, channel < C, other=0.0).to(tl.float32)[None, :]
            v *= tl.sigmoid(v)
        value = v.to(taps.dtype.element_ty)
    spread = pixel.to(tl.int64)[:, None] * (3 * C) + channel[None, :]
    for tap in tl.static_range(3):  # a frame is the first tap of the output two frames before it, and so on
        out = frame - 2 + (2 - tap)
        if (out >= 0) & (out < T):
            tl.store(taps + (batch * T + out) * P * 3 * C + tap * C + spread, value, inside)
    if frame >= T:
        tl.store(tail + (batch * 2 + frame - T) * P * C + place, value, inside)


def taps(x: Tensor, bias: Tensor | None, gamma: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """Every frame beside the two before it, [B, T, H, W, 3C], and the last two frames.

    Of x + bias [B, T, H, W, C], normalised over the channels, times gamma, through SiLU (where gamma is given); behind
    past [B, 2, H, W, C], which went through that when it came.
    """
    batch, frames, height, width, channels = x.shape
    out, tail = x.new_empty(batch, frames, height, width, 3 * channels), torch.empty_like(past)
    tile = triton.next_power_of_2(channels)
    pixels = max(1, TILE // tile)
    grid = (triton.cdiv(height * width, pixels), frames + 2, batch)
    _taps[grid](x, bias, gamma, past, out, tail, frames, height * width, channels, tile, pixels,
                bias is not None, gamma is not None)  # fmt: skip
    return out, tail


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
