"""Convolutions over the frames of a stream, which comes in parts of any length.

What a causal convolution has to remember of earlier parts is a value that goes in and comes out. Tensors are
[B, T, H, W, C]: with the channels last, norms and convolutions need no transposed copies.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused import triton_kernels
from .minimal import sums_of_taps


@dataclass(frozen=True)
class StreamState:
    """What a stream remembers: one tail of earlier inputs per causal convolution, in visiting order.

    StreamState(started=True) stands for "in the middle of a clip, with histories forgotten": from 44 latent frames on
    it decodes exactly like the stream that remembers everything, which is how a resumed run rebuilds its decoder.
    """

    started: bool = False
    tails: tuple[Tensor | None, ...] = ()


def kernels(x: Tensor) -> ModuleType | None:
    """Triton's ways for a tensor that they can take; torch's own need no more than torch.

    They know no gradients, so training goes without them.
    """
    if not x.is_cuda or torch.is_grad_enabled():
        return None
    return triton_kernels("vae_kernels", "the VAE runs on plain torch, which takes three times as long")


class Tape:
    """Hands every causal convolution of one call its tail of the last call, and collects the new ones."""

    def __init__(self, state: StreamState) -> None:
        self.started = state.started
        self._past = iter(state.tails)
        self._tails: list[Tensor | None] = []

    def taps(self, x: Tensor, norm: "RMSNorm | None" = None) -> Tensor:
        """Every frame of x [B, T, H, W, C] behind the two before it: [B, T, H, W, 3C].

        Where `norm` is given, x goes through it and SiLU first. A single frame without history remains alone
        [B, 1, H, W, C]: what would stand before it is zero.
        """
        tail = next(self._past, None)
        count = 1 if tail is None and x.shape[1] == 1 else 3
        past = _history(tail, x, 2)
        if fused := kernels(x):
            taps, tail = fused.taps(x.contiguous(), _gain(norm), past, count)
        else:
            x = torch.cat([past, x if norm is None else F.silu(norm(x))], dim=1)
            taps = torch.cat([x[:, tap : x.shape[1] - 2 + tap] for tap in range(3 - count, 3)], dim=-1)
            tail = x[:, -2:].clone()  # a view would keep all of x alive
        self._tails.append(tail)
        return taps

    def sums(self, fused: ModuleType, x: Tensor, norm: "RMSNorm | None", m: int) -> list[Tensor]:
        """Of every m frames of x and the two before them, what `minimal` multiplies."""
        past = _history(next(self._past, None), x, 2)
        parts, tail = fused.sums(x.contiguous(), _gain(norm), past, m)
        self._tails.append(tail)
        return parts

    def pairs(self, x: Tensor) -> Tensor:
        """Every second frame beside its neighbours, of one remembered frame ++ x: [B, T/2, H, W, 3C]."""
        x = torch.cat([_history(next(self._past, None), x, 1), x], dim=1)
        self._tails.append(x[:, -1:].clone())
        return torch.cat([x[:, tap : x.shape[1] - 2 + tap : 2] for tap in range(3)], dim=-1)

    def skip(self, tail: Tensor | None = None) -> None:
        """The convolution is passed over; `tail` is what it will find in front of its next input."""
        next(self._past, None)
        self._tails.append(tail)

    def state(self) -> StreamState:
        return StreamState(True, tuple(self._tails))


def _history(tail: Tensor | None, x: Tensor, frames: int) -> Tensor:
    """What stands before x: the tail of the last call, or zeros where there is none."""
    return x.new_zeros(x.shape[0], frames, *x.shape[2:]) if tail is None else tail


def _gain(norm: "RMSNorm | None") -> Tensor | None:
    return None if norm is None else norm.gamma


class RMSNorm(nn.Module):
    """L2 norm over the channels, times sqrt(C) and a gain; the gain has Wan's shape [C, 1, ...]."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *(1,) * dims))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.gamma.flatten(), eps=1e-12)


class Linear(nn.Module):
    """A convolution of one pixel; its weight has Wan's shape [out, in, 1, ...]."""

    def __init__(self, inputs: int, outputs: int, dims: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *(1,) * dims))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class Spatial(nn.Module):
    """A 3x3 convolution of every frame."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 2:  # Wan pads right and bottom only
            return conv2d(F.pad(x, (0, 0, 0, 1, 0, 1)), self.weight, bias=self.bias, stride=2)
        return conv2d(x, self.weight, bias=self.bias, padding=1)


class Enlarging(Spatial):
    """A 3x3 convolution of every frame at twice its height and width, each pixel repeated.

    Of the nine pixels that it meets there only four differ. So it is done before they are repeated, as four 2x2
    convolutions, one for each place of an output pixel in the pixel that it lies in: 4/9 of the products, and no large
    copy of the input.
    """

    def forward(self, x: Tensor) -> Tensor:
        weights = [part for rows in _merged(self.weight, 2) for part in _merged(rows, 3)]
        return woven(conv2d(x, torch.cat(weights), padding=1), self.bias)


def _merged(weight: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Along one axis, the two weights for even and for odd output pixels."""
    first, middle, last = weight.split(1, dim=axis)
    return torch.cat([first, middle + last], dim=axis), torch.cat([first + middle, last], dim=axis)


def woven(y: Tensor, bias: Tensor) -> Tensor:
    """The four images in the channels of y [B, T, H + 1, W + 1, 4C] as one [B, T, 2H, 2W, C], and the bias added.

    They are those of even and odd rows, each of even and odd columns; an odd pixel lies one further to the end.
    """
    if fused := kernels(y):
        return fused.woven(y.contiguous(), bias)
    height, width = y.shape[2] - 1, y.shape[3] - 1
    places = y.unflatten(-1, (2, 2, -1))
    rows = [
        torch.stack([places[:, :, a : a + height, b : b + width, a, b] for b in (0, 1)], dim=4).flatten(3, 4)
        for a in (0, 1)
    ]
    return torch.stack(rows, dim=3).flatten(2, 3).add_(bias)


class Causal(nn.Module):
    """A 3x3x3 or 3x1x1 convolution whose left padding in time is the tape's history.

    Three frames side by side in the channels make it a 2-D convolution (or a matrix product), which on Hopper runs at
    520 instead of 235 TFLOP/s for the 96 channels where most of the work is. Where frames come in groups of `together`,
    2 or 4, as all do but a clip's first, a GPU multiplies less (`minimal`), once arranged.
    """

    tap_sums: Tensor | None

    def __init__(self, inputs: int, outputs: int, spatial: bool = True, together: int = 1) -> None:
        super().__init__()
        size = 3 if spatial else 1
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, size, size))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.together, self.arranged = together, False
        self.register_buffer("tap_sums", None, persistent=False)  # made when first needed

    def arrange(self) -> None:
        """Keep the weight in memory as the 2-D convolution wants it, its shape staying Wan's; it changes no more."""
        self.arranged = True
        self.weight.data = self.weight.data.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)

    def forward(self, x: Tensor, tape: Tape, norm: RMSNorm | None = None, onto: Tensor | None = None) -> Tensor:
        """Of x [B, T, H, W, C], which goes through norm and SiLU first where there is one; `onto` is added."""
        grouped = self.arranged and self.together > 1 and x.shape[1] % self.together == 0
        fused = kernels(x) if grouped else None
        if fused is None:
            return add(self.of(tape.taps(x, norm)), self.bias, onto)
        if self.tap_sums is None:
            self.tap_sums = sums_of_taps(self.weight, self.together)
        sums = tape.sums(fused, x, norm, self.together)
        # Each sum is let go with its product, so that both are never there whole.
        taps = (weight.permute(0, 3, 1, 2) for weight in self.tap_sums)
        products = [conv2d(sums.pop(0), weight, padding=1).contiguous() for weight in taps]
        return fused.results(products, self.bias, onto)

    def of(self, taps: Tensor) -> Tensor:
        """The products alone, without the bias."""
        frames = taps.shape[-1] // self.weight.shape[1]
        weight = self.weight[:, :, 3 - frames :].permute(0, 3, 4, 2, 1).flatten(3)  # no copy once arranged
        if weight.shape[1] == 1:
            return F.linear(taps, weight.flatten(1))
        return conv2d(taps, weight.permute(0, 3, 1, 2), padding=1)


def conv2d(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """x [B, T, H, W, C], channels last in memory and for the kernel."""
    weight = weight.contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), weight, **options)
    return y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def add(y: Tensor, bias: Tensor, onto: Tensor | None) -> Tensor:
    """y, which is overwritten, with the bias, and `onto` if it is given."""
    if onto is None:
        return y.add_(bias)
    if fused := kernels(y):
        return fused.add(onto.contiguous(), y.contiguous(), bias)
    return (onto + y).add_(bias)
