"""The Wan 2.1 VAE, streaming: 8x8x4 pixels a latent, 16 channels, causal in time.

Structure and parameter names are those of Wan 2.1 (Wan-Video/Wan2.1, wan/modules/vae.py). What a causal convolution
has to remember between calls is a value that goes in and comes out, so that a stream can be forked, dropped or rebuilt:

    frames, state = vae.decode(latents, state)

The first latent frame of a clip gives 1 frame, every later one 4. Decoding in any chunks gives the same frames as
decoding the whole.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Tape:
    """Hands every causal convolution of one call its tail of the last call, and collects the new ones."""

    def __init__(self, state: StreamState) -> None:
        self.started = state.started
        self._past = iter(state.tails)
        self._tails: list[Tensor | None] = []

    def extend(self, x: Tensor, frames: int) -> Tensor:
        """x [B, C, T, H, W] with the last `frames` inputs (zeros where there are none) in front of it."""
        past = next(self._past, None)
        if past is None:
            past = x.new_zeros(*x.shape[:2], frames, *x.shape[3:])
        x = torch.cat([past, x], dim=2)
        self._tails.append(x[:, :, -frames:].clone())  # a copy: a view would keep the whole input alive
        return x

    def skip(self, tail: Tensor | None = None) -> None:
        """The convolution is passed over; `tail` is what it will find in front of its next input."""
        next(self._past, None)
        self._tails.append(tail)

    def state(self) -> StreamState:
        return StreamState(True, tuple(self._tails))


class RMSNorm(nn.Module):
    """L2 norm over the channels, times sqrt(C) and a gain."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *(1,) * dims))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * (math.sqrt(x.shape[1]) * self.gamma)


def conv3(operations: Any, inputs: int, outputs: int) -> nn.Module:
    """3x3x3, padded in space; in time its left padding is the tape's history."""
    return operations.Conv3d(inputs, outputs, 3, padding=(0, 1, 1))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, operations: Any) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            RMSNorm(inputs, 3),
            nn.SiLU(),
            conv3(operations, inputs, outputs),
            RMSNorm(outputs, 3),
            nn.SiLU(),
            nn.Identity(),  # Wan's dropout: it holds the place in the parameter names
            conv3(operations, outputs, outputs),
        )
        self.shortcut = operations.Conv3d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        norm1, act, conv1, norm2, _, _, conv2 = self.residual
        y = conv1(tape.extend(act(norm1(x)), 2))
        return self.shortcut(x) + conv2(tape.extend(act(norm2(y)), 2))


class SpatialAttention(nn.Module):
    """One head over the pixels of each frame."""

    def __init__(self, channels: int, operations: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, 2)
        self.to_qkv = operations.Conv2d(channels, 3 * channels, 1)
        self.proj = operations.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        frames = x.transpose(1, 2).flatten(0, 1)  # [B T, C, H, W]
        q, k, v = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        mixed = self.proj(mixed.reshape(frames.shape)).unflatten(0, (x.shape[0], x.shape[2]))
        return x + mixed.transpose(1, 2)


def per_frame(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


class Up(nn.Module):
    """Twice as high and wide, half the channels; with `temporal` also twice the frames, except for the very first."""

    def __init__(self, channels: int, temporal: bool, operations: Any) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"),
            operations.Conv2d(channels, channels // 2, 3, padding=1),
        )
        self.time_conv = operations.Conv3d(channels, 2 * channels, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        if self.time_conv is not None:
            if tape.started:
                y = self.time_conv(tape.extend(x, 2))
                # The two halves of the channels are the even and the odd frames.
                x = torch.stack(y.chunk(2, dim=1), dim=3).flatten(2, 3)
            else:
                tape.skip()
        return per_frame(self.resample, x)


class Down(nn.Module):
    """Half as high and wide; with `temporal` also half the frames, except for the very first."""

    def __init__(self, channels: int, temporal: bool, operations: Any) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), operations.Conv2d(channels, channels, 3, stride=2))
        self.time_conv = operations.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        x = per_frame(self.resample, x)
        if self.time_conv is not None:
            if tape.started:
                x = self.time_conv(tape.extend(x, 1))
            else:
                tape.skip(x)
        return x


class Coder(nn.Module):
    """What encoder and decoder share: a stack of stages, a middle with attention, and a head."""

    conv1: nn.Module

    def _middle(self, channels: int, operations: Any) -> nn.Sequential:
        return nn.Sequential(
            Residual(channels, channels, operations),
            SpatialAttention(channels, operations),
            Residual(channels, channels, operations),
        )

    def _head(self, channels: int, outputs: int, operations: Any) -> nn.Sequential:
        return nn.Sequential(RMSNorm(channels, 3), nn.SiLU(), conv3(operations, channels, outputs))

    def _run(self, x: Tensor, tape: Tape, layers: Sequence[nn.Module], head: nn.Sequential) -> Tensor:
        x = self.conv1(tape.extend(x, 2))
        for layer in layers:
            x = layer(x, tape)
        norm, act, conv = head
        return conv(tape.extend(act(norm(x)), 2))


class Encoder(Coder):
    def __init__(self, config: "VaeConfig", operations: Any) -> None:
        super().__init__()
        widths = [config.dim * m for m in (1, *config.multipliers)]
        self.conv1 = conv3(operations, 3, widths[0])
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            for j in range(config.residual_blocks):
                stages.append(Residual(outputs if j else inputs, outputs, operations))
            if i < len(config.multipliers) - 1:
                stages.append(Down(outputs, temporal=i > 0, operations=operations))
        self.downsamples = nn.Sequential(*stages)
        self.middle = self._middle(widths[-1], operations)
        self.head = self._head(widths[-1], 2 * config.channels, operations)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return self._run(x, tape, [*self.downsamples, *self.middle], self.head)


class Decoder(Coder):
    def __init__(self, config: "VaeConfig", operations: Any) -> None:
        super().__init__()
        widths = [config.dim * m for m in (config.multipliers[-1], *reversed(config.multipliers))]
        self.conv1 = conv3(operations, config.channels, widths[0])
        self.middle = self._middle(widths[0], operations)
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            inputs = inputs // 2 if i else inputs  # the up-sampler before it halved the channels
            for j in range(config.residual_blocks + 1):
                stages.append(Residual(outputs if j else inputs, outputs, operations))
            if i < len(config.multipliers) - 1:
                stages.append(Up(outputs, temporal=i < 2, operations=operations))
        self.upsamples = nn.Sequential(*stages)
        self.head = self._head(widths[-1], 3, operations)

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

    def __init__(self, config: VaeConfig = VaeConfig(), operations: Any = nn) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config, operations), Decoder(config, operations)
        self.conv1 = operations.Conv3d(2 * config.channels, 2 * config.channels, 1)
        self.conv2 = operations.Conv3d(config.channels, config.channels, 1)

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
        mean, std = self._statistics()
        z = self.conv2((latents.to(self.device, torch.float32) * std + mean).to(self.dtype))
        return self._stream(self.decoder, z, state, following=z.shape[2])

    def encode(self, frames: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """frames [B, 3, N, H, W] -> latents [B, C, T, H/8, W/8], float32 (the mean, not a sample), and the state.

        N = 4T, or 4T - 3 where a clip begins (no state). Four frames a pass: memory does not grow with N.
        """
        started = state is not None and state.started
        if (frames.shape[2] - (not started)) % 4:
            raise ValueError(f"{frames.shape[2]} frames are not a whole number of latent frames")
        hidden, state = self._stream(self.encoder, frames.to(self.device, self.dtype), state, following=4)
        mu = self.conv1(hidden)[:, : self.config.channels].float()
        mean, std = self._statistics()
        return (mu - mean) / std, state

    def _stream(
        self, coder: nn.Module, x: Tensor, state: StreamState | None, following: int
    ) -> tuple[Tensor, StreamState]:
        """The first time step of a clip by itself, then `following` at a time."""
        state = state or StreamState()
        sizes = [] if state.started else [1]
        while left := x.shape[2] - sum(sizes):
            sizes.append(min(left, following))
        outputs = []
        for part in x.split(sizes, dim=2):
            tape = Tape(state)
            outputs.append(coder(part, tape))
            state = tape.state()
        return torch.cat(outputs, dim=2), state

    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, std = torch.tensor([MEAN, STD], device=self.device)[:, : self.config.channels, None, None, None]
        return mean, std
