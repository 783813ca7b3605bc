"""The Wan 2.1 VAE, streaming: 8x8x4 pixels a latent, 16 channels, causal in time.

Structure and parameter names are those of Wan 2.1 (Wan-Video/Wan2.1, wan/modules/vae.py). What a causal convolution
has to remember between calls is a value that goes in and comes out, so that a stream can be forked, dropped or rebuilt:

    frames, state = vae.decode(latents, state)

The first latent frame of a clip gives 1 frame, every later one 4. Decoding in any chunks gives the same frames as
decoding the whole. Inside, tensors are [B, T, H, W, C] (models/streaming.py).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .streaming import Causal, Enlarging, Linear, RMSNorm, Spatial, StreamState, Tape

MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

FRAMES = (1, 2, 4, 4)  # of a latent frame, in the decoder's four stages
BEGINNING = StreamState()  # of a clip


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, together: int = 1) -> None:
        super().__init__()
        self.residual: Any = nn.ModuleDict(
            {  # named by their place in Wan's list, which holds SiLU and dropout too
                "0": RMSNorm(inputs, 3),
                "2": Causal(inputs, outputs, together=together),
                "3": RMSNorm(outputs, 3),
                "6": Causal(outputs, outputs, together=together),
            }
        )
        self.shortcut = Linear(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        norm1, conv1, norm2, conv2 = self.residual.values()
        return conv2(conv1(x, tape, norm1), tape, norm2, self.shortcut(x))


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
                x = torch.stack(self.time_conv(x, tape).chunk(2, dim=-1), dim=2).flatten(1, 2)
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
                x = self.time_conv.of(tape.pairs(x)).add_(self.time_conv.bias)
            else:
                tape.skip(x)
        return x


class Coder(nn.Module):
    """What encoder and decoder share: a stack of stages, a middle with attention, and a head."""

    conv1: Causal

    def _middle(self, channels: int) -> nn.Sequential:
        return nn.Sequential(Residual(channels, channels), SpatialAttention(channels), Residual(channels, channels))

    def _head(self, channels: int, outputs: int, together: int = 1) -> nn.ModuleDict:
        return nn.ModuleDict({"0": RMSNorm(channels, 3), "2": Causal(channels, outputs, together=together)})

    def _run(self, x: Tensor, tape: Tape, layers: Sequence[nn.Module], head: Any) -> Tensor:
        x = self.conv1(x, tape)
        for layer in layers:
            x = layer(x, tape)
        norm, conv = head.values()
        return conv(x, tape, norm)


class Encoder(Coder):
    def __init__(self, config: "VaeConfig") -> None:
        super().__init__()
        widths = [config.dim * m for m in (1, *config.multipliers)]
        self.conv1 = Causal(3, widths[0])
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            for j in range(config.residual_blocks):
                stages.append(Residual(outputs if j else inputs, outputs, FRAMES[3 - i]))
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
                stages.append(Residual(outputs if j else inputs, outputs, FRAMES[i]))
            if i < len(config.multipliers) - 1:
                stages.append(Up(outputs, temporal=i < 2))
        self.upsamples = nn.Sequential(*stages)
        self.head = self._head(widths[-1], 3, FRAMES[-1])

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

    def decode(self, latents: Tensor, state: StreamState = BEGINNING) -> tuple[Tensor, StreamState]:
        """latents [B, C, T, h, w] -> frames [B, 3, N, 8h, 8w] and the state to go on with.

        N = 4T, or 4T - 3 where a clip begins.
        """
        mean, std = _statistics(self.device)
        z = latents.to(self.device, torch.float32).permute(0, 2, 3, 4, 1) * std + mean
        frames, state = self._stream(self.decoder, self.conv2(z.to(self.dtype)), state, following=z.shape[1])
        return frames.permute(0, 4, 1, 2, 3), state

    def encode(self, frames: Tensor, state: StreamState = BEGINNING) -> tuple[Tensor, StreamState]:
        """frames [B, 3, N, H, W] -> latents [B, C, T, H/8, W/8], float32 (the mean, not a sample), and the state.

        N = 4T, or 4T - 3 where a clip begins. Four frames a pass: memory does not grow with N.
        """
        if (frames.shape[2] - (not state.started)) % 4:
            raise ValueError(f"{frames.shape[2]} frames are not a whole number of latent frames")
        x = frames.to(self.device, self.dtype).permute(0, 2, 3, 4, 1)
        hidden, state = self._stream(self.encoder, x, state, following=4)
        mean, std = _statistics(self.device)
        mu = self.conv1(hidden)[..., : self.config.channels].float()
        return ((mu - mean) / std).permute(0, 4, 1, 2, 3).contiguous(), state

    def _stream(self, coder: nn.Module, x: Tensor, state: StreamState, following: int) -> tuple[Tensor, StreamState]:
        """The first time step of a clip by itself, then `following` at a time."""
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
