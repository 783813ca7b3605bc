"""The Wan 2.1 VAE, streaming: 8x8x4 pixels a latent, 16 channels, causal in time.

Structure and parameter names are those of Wan 2.1 (Wan-Video/Wan2.1, wan/modules/vae.py). What a causal convolution
has to remember between calls is a value that goes in and comes out, so that a stream can be forked, dropped or rebuilt:

    frames, state = vae.decode(latents, state)

The first latent frame of a clip gives 1 frame, every later one 4. Decoding in any chunks gives the same frames as
decoding the whole. Inside, tensors are [B, T, H, W, C]: with the channels last, norms and convolutions need no
transposed copies.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger("specar")

MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip


@dataclass(frozen=True)
class StreamState:
    """What a stream remembers: one tail of earlier inputs per causal convolution, in visiting order.

    StreamState(started=True) stands for "in the middle of a clip, with histories forgotten": from 38 latent frames on
    it decodes exactly like the stream that remembers everything, which is how a resumed run rebuilds its decoder.
    """

    started: bool = False
    tails: tuple[Tensor | None, ...] = ()


def kernels(x: Tensor) -> ModuleType | None:
    """Triton's `taps`, `add` and `woven` for a tensor that they can take; torch's own need no more than torch.

    They know no gradients, so training goes without them.
    """
    return None if not x.is_cuda or torch.is_grad_enabled() else _kernels()


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from . import vae_kernels
    except ImportError as error:
        log.info("the VAE runs on plain torch, at about half the speed: %s", error)
        return None
    return vae_kernels


class Tape:
    """Hands every causal convolution of one call its tail of the last call, and collects the new ones."""

    def __init__(self, state: StreamState) -> None:
        self.started = state.started
        self._past = iter(state.tails)
        self._tails: list[Tensor | None] = []

    def taps(self, x: Tensor, norm: "RMSNorm | None" = None, bias: Tensor | None = None) -> Tensor:
        """Every frame of x [B, T, H, W, C] beside the two before it: [B, T, H, W, 3C].

        Where `bias` is given, x still lacks it from the convolution before; where `norm` is, x goes through norm and
        SiLU first.
        """
        past = self._take(x, 2)
        if fused := kernels(x):
            gamma = None if norm is None else norm.gamma
            taps, tail = fused.taps(x.contiguous(), bias, gamma, past)
        else:
            x = x if bias is None else x + bias
            x = torch.cat([past, x if norm is None else F.silu(norm(x))], dim=1)
            taps = torch.cat([x[:, tap : x.shape[1] - 2 + tap] for tap in range(3)], dim=-1)
            tail = x[:, -2:].clone()  # a view would keep all of x alive
        self._tails.append(tail)
        return taps

    def pairs(self, x: Tensor) -> Tensor:
        """Every second frame beside its neighbours, of one remembered frame ++ x: [B, T/2, H, W, 3C]."""
        x = torch.cat([self._take(x, 1), x], dim=1)
        self._tails.append(x[:, -1:].clone())
        return torch.cat([x[:, tap : x.shape[1] - 2 + tap : 2] for tap in range(3)], dim=-1)

    def skip(self, tail: Tensor | None = None) -> None:
        """The convolution is passed over; `tail` is what it will find in front of its next input."""
        next(self._past, None)
        self._tails.append(tail)

    def state(self) -> StreamState:
        return StreamState(True, tuple(self._tails))

    def _take(self, x: Tensor, frames: int) -> Tensor:
        past = next(self._past, None)
        return x.new_zeros(x.shape[0], frames, *x.shape[2:]) if past is None else past


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

    It takes the taps of its input. Three frames side by side in the channels make it a 2-D convolution (or a matrix
    product), which on Hopper runs at 520 instead of 235 TFLOP/s for the 96 channels where most of the work is.
    """

    def __init__(self, inputs: int, outputs: int, spatial: bool = True) -> None:
        super().__init__()
        size = 3 if spatial else 1
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, size, size))
        self.bias = nn.Parameter(torch.empty(outputs))

    def without_bias(self, taps: Tensor) -> Tensor:
        """For whoever adds the bias in a pass that is needed anyway."""
        weight = self.weight.permute(0, 3, 4, 2, 1).flatten(3)  # [out, kh, kw, 3 in]: no copy once arranged
        if weight.shape[1] == 1:
            return F.linear(taps, weight.flatten(1))
        return conv2d(taps, weight.permute(0, 3, 1, 2), padding=1)

    def arrange(self) -> None:
        """Keep the weight in memory as the 2-D convolution wants it; its shape stays Wan's."""
        self.weight.data = self.weight.data.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)

    def forward(self, taps: Tensor) -> Tensor:
        return self.without_bias(taps).add_(self.bias)


def conv2d(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """x [B, T, H, W, C], channels last in memory and for the kernel."""
    weight = weight.contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), weight, **options)
    return y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def add(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    if fused := kernels(x):
        return fused.add(x.contiguous(), y.contiguous(), bias)
    return (x + y).add_(bias)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.residual: Any = nn.ModuleDict(
            {  # named by their place in Wan's list, which holds SiLU and dropout too
                "0": RMSNorm(inputs, 3),
                "2": Causal(inputs, outputs),
                "3": RMSNorm(outputs, 3),
                "6": Causal(outputs, outputs),
            }
        )
        self.shortcut = Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        norm1, conv1, norm2, conv2 = self.residual.values()
        y = conv1.without_bias(tape.taps(x, norm1))
        y = conv2.without_bias(tape.taps(y, norm2, conv1.bias))
        return add(self.shortcut(x), y, conv2.bias)


class SpatialAttention(nn.Module):
    """One head over the pixels of each frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, 2)
        self.to_qkv = Linear(channels, 3 * channels, dims=2)
        self.proj = Linear(channels, channels, dims=2)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2, 3).chunk(3, dim=-1)  # [B, T, H W, C]
        return x + self.proj(F.scaled_dot_product_attention(q, k, v)).view_as(x)


class Up(nn.Module):
    """Twice as high and wide, half the channels; with `temporal` also twice the frames, except for the very first."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), Enlarging(channels, channels // 2))
        self.time_conv = Causal(channels, 2 * channels, spatial=False) if temporal else None

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        if self.time_conv is not None:
            if tape.started:
                # The two halves of the channels are the even and the odd frames.
                x = torch.stack(self.time_conv(tape.taps(x)).chunk(2, dim=-1), dim=2).flatten(1, 2)
            else:
                tape.skip()
        return self.resample(x)


class Down(nn.Module):
    """Half as high and wide; with `temporal` also half the frames, except for the very first."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), Spatial(channels, channels, stride=2))
        self.time_conv = Causal(channels, channels, spatial=False) if temporal else None

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        x = self.resample(x)
        if self.time_conv is not None:
            if tape.started:
                x = self.time_conv(tape.pairs(x))
            else:
                tape.skip(x)
        return x


class Coder(nn.Module):
    """What encoder and decoder share: a stack of stages, a middle with attention, and a head."""

    conv1: Causal

    def _middle(self, channels: int) -> nn.Sequential:
        return nn.Sequential(Residual(channels, channels), SpatialAttention(channels), Residual(channels, channels))

    def _head(self, channels: int, outputs: int) -> nn.ModuleDict:
        return nn.ModuleDict({"0": RMSNorm(channels, 3), "2": Causal(channels, outputs)})

    def _run(self, x: Tensor, tape: Tape, layers: Sequence[nn.Module], head: Any) -> Tensor:
        x = self.conv1(tape.taps(x))
        for layer in layers:
            x = layer(x, tape)
        norm, conv = head.values()
        return conv(tape.taps(x, norm))


class Encoder(Coder):
    def __init__(self, config: "VaeConfig") -> None:
        super().__init__()
        widths = [config.dim * m for m in (1, *config.multipliers)]
        self.conv1 = Causal(3, widths[0])
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            for j in range(config.residual_blocks):
                stages.append(Residual(outputs if j else inputs, outputs))
            if i < len(config.multipliers) - 1:
                stages.append(Down(outputs, temporal=i > 0))
        self.downsamples = nn.Sequential(*stages)
        self.middle = self._middle(widths[-1])
        self.head = self._head(widths[-1], 2 * config.channels)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return self._run(x, tape, [*self.downsamples, *self.middle], self.head)


class Decoder(Coder):
    def __init__(self, config: "VaeConfig") -> None:
        super().__init__()
        widths = [config.dim * m for m in (config.multipliers[-1], *reversed(config.multipliers))]
        self.conv1 = Causal(config.channels, widths[0])
        self.middle = self._middle(widths[0])
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            inputs = inputs // 2 if i else inputs  # the up-sampler before it halved the channels
            for j in range(config.residual_blocks + 1):
                stages.append(Residual(outputs if j else inputs, outputs))
            if i < len(config.multipliers) - 1:
                stages.append(Up(outputs, temporal=i < 2))
        self.upsamples = nn.Sequential(*stages)
        self.head = self._head(widths[-1], 3)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return self._run(x, tape, [*self.middle, *self.upsamples], self.head)


@dataclass(frozen=True)
class VaeConfig:
    dim: int = 96
    residual_blocks: int = 2
    channels: int = 16
    multipliers: tuple[int, ...] = (1, 2, 4, 4)

    @classmethod
    def detect(cls, shapes: Mapping[str, Sequence[int]]) -> "VaeConfig":
        """Width and depth from the shapes of a checkpoint's tensors; the multipliers are Wan's."""
        stage0 = {name.split(".")[2] for name in shapes if name.startswith("encoder.downsamples.")}
        first_down = min(int(i) for i in stage0 if f"encoder.downsamples.{i}.resample.1.weight" in shapes)
        return cls(
            dim=shapes["encoder.conv1.weight"][0],
            residual_blocks=first_down,
            channels=shapes["conv2.weight"][0],
        )


class WanVAE(nn.Module):
    """Latents are normalised: (z - MEAN) / STD, as the transformers see them. Frames are in [-1, 1], not clamped."""

    def __init__(self, config: VaeConfig = VaeConfig()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.conv1 = Linear(2 * config.channels, 2 * config.channels)
        self.conv2 = Linear(config.channels, config.channels)

    def arrange(self) -> "WanVAE":
        """Lay the loaded weights out for speed."""
        for layer in self.modules():
            if isinstance(layer, Causal):
                layer.arrange()
            elif isinstance(layer, Spatial):
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.conv2.bias.dtype

    @property
    def device(self) -> torch.device:
        return self.conv2.bias.device

    def decode(self, latents: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """latents [B, C, T, h, w] -> frames [B, 3, N, 8h, 8w] and the state to go on with.

        N = 4T, or 4T - 3 where a clip begins (no state).
        """
        mean, std = _statistics(self.device)
        z = latents.to(self.device, torch.float32).permute(0, 2, 3, 4, 1) * std + mean
        frames, state = self._stream(self.decoder, self.conv2(z.to(self.dtype)), state, following=z.shape[1])
        return frames.permute(0, 4, 1, 2, 3), state

    def encode(self, frames: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """frames [B, 3, N, H, W] -> latents [B, C, T, H/8, W/8], float32 (the mean, not a sample), and the state.

        N = 4T, or 4T - 3 where a clip begins (no state). Four frames a pass: memory does not grow with N.
        """
        started = state is not None and state.started
        if (frames.shape[2] - (not started)) % 4:
            raise ValueError(f"{frames.shape[2]} frames are not a whole number of latent frames")
        x = frames.to(self.device, self.dtype).permute(0, 2, 3, 4, 1)
        hidden, state = self._stream(self.encoder, x, state, following=4)
        mean, std = _statistics(self.device)
        mu = self.conv1(hidden)[..., : self.config.channels].float()
        return ((mu - mean) / std).permute(0, 4, 1, 2, 3).contiguous(), state

    def _stream(
        self, coder: nn.Module, x: Tensor, state: StreamState | None, following: int
    ) -> tuple[Tensor, StreamState]:
        """The first time step of a clip by itself, then `following` at a time."""
        state = state or StreamState()
        sizes = [] if state.started else [1]
        while left := x.shape[1] - sum(sizes):
            sizes.append(min(left, following))
        outputs = []
        for part in x.split(sizes, dim=1):
            tape = Tape(state)
            outputs.append(coder(part, tape))
            state = tape.state()
        return torch.cat(outputs, dim=1), state


@functools.cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, because sending them is a wait for everything that the device has still to do."""
    with torch.inference_mode(False):  # or training could not use them
        mean, std = torch.tensor([MEAN, STD], device=device)
    return mean, std
