"""Stage 1, `python -m training.vae`: the Wan VAE at a small width."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from specar_core.backbones.loading import load_vae
from specar_core.backbones.tiny import VAE_CONFIG
from specar_core.machine import Machine
from specar_core.models.streaming import StreamState, Tape
from specar_core.models.vae import MEAN, STD, WanVAE
from specar_core.tensor_files import open_checkpoint

from .loop import Training, save_scores, save_weights
from .scores import AGREEMENTS, measure, summarise
from .shapes import render, sample_scene

SHORT, LONG = 17, 65  # frames of a clip; the long ones show the decoder what lies behind a clip's beginning
RATE, DECODER_RATE = 1e-3, 1.5e-3
STEPS, DECODER_STEPS = 2100, 5800
LATENT_NOISE = 0.15  # of each channel's deviation, added before decoding: a generator will err as well
HELD_OUT = 1 << 40  # seeds from here on are for evaluation


class Autoencoder(nn.Module):
    """Whole clips there and back, with gradients: the same numbers as the streaming calls, in two calls a coder."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = WanVAE(VAE_CONFIG)

    def forward(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """clips [B, 3, N, H, W] -> the same, and the latents [B, T, h, w, C] before normalisation."""
        hidden = through(self.vae.encoder, clips.permute(0, 2, 3, 4, 1))
        latents = self.vae.conv1(hidden)[..., : VAE_CONFIG.channels]
        spread = latents.detach().flatten(0, -2).std(0)
        noisy = latents + LATENT_NOISE * spread * torch.randn_like(latents)
        return through(self.vae.decoder, self.vae.conv2(noisy)).permute(0, 4, 1, 2, 3), latents


def through(coder: nn.Module, x: Tensor) -> Tensor:
    """The first time step of a clip by itself, then all others at once."""
    outputs, state = [], StreamState()
    for part in (x[:, :1], x[:, 1:]):
        tape = Tape(state)
        outputs.append(coder(part, tape))
        state = tape.state()
    return torch.cat(outputs, dim=1)


def initialise(vae: WanVAE) -> None:
    """Residual branches begin at zero, so that the whole is linear at first. With branches that add to the signal from
    the start, what reaches the end hardly depends on the clip, and the loss stays at the mean picture's for long."""
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(parameter)
        elif name.endswith(("bias", "residual.6.weight", "proj.weight")):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def clip_pool(clips: int, frames: int, seed: int, device: torch.device) -> Tensor:
    """Rendered clips [N, 3, T, H, W], 8 bits a value."""
    pool = []
    for first in range(seed, seed + clips, 256):
        scenes = [sample_scene(number) for number in range(first, min(first + 256, seed + clips))]
        pool.append(((render(scenes, 0, frames, device=device) + 1) * 127.5).round().byte())
    return torch.cat(pool)


def reconstruction_loss(model: Autoencoder, pool: Tensor, batch: int) -> dict[str, Tensor]:
    chosen = torch.randint(len(pool), (batch,), device=pool.device)
    clips = pool[chosen].bfloat16() / 127.5 - 1
    # bfloat16 throughout, not autocast, which would keep the norms and all that follows them in float32.
    half = {name: value.bfloat16() for name, value in model.named_parameters()}
    decoded, latents = functional_call(model, half, (clips,))
    error = (decoded - clips).float()
    return {
        # Squares find the figures: for the mean of absolute errors a picture without them is nearly as good, and
        # training stays there (17 dB). Once the errors are small, absolute ones outweigh them and keep edges sharp.
        "squares": 4 * error.square().mean(),
        "pixels": error.abs().mean(),
        "edges": 0.5 * (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()) / 2,
        "motion": 0.1 * error.diff(dim=2).abs().mean(),
        "latents": 1e-3 * (latents.float().square().mean() - 1).relu(),  # the scale is of no use
    }


@torch.no_grad()
def normalise(vae: WanVAE, pool: Tensor) -> None:
    """Fold the latents' mean and deviation into the outermost layers, so that under Wan's own fixed statistics they
    come out as N(0, 1) a channel and the file is an ordinary Wan VAE."""
    mean, std = torch.tensor([MEAN, STD], device=pool.device)
    parts = [vae.encode(clips.float() / 127.5 - 1)[0] for clips in pool[:256].split(32)]
    seen = (torch.cat(parts).transpose(0, 1).flatten(1) * std[:, None] + mean[:, None]).double()
    offset, scale = seen.mean(1).float(), seen.std(1).float()
    inner, outer = vae.conv1, vae.conv2
    channels = len(mean)
    inner.weight[:channels] *= (std / scale).view(-1, 1, 1, 1, 1)
    inner.bias[:channels] = (inner.bias[:channels] - offset) * std / scale + mean
    outer.bias.add_(outer.weight.flatten(1) @ (offset - mean * scale / std))
    outer.weight.mul_((scale / std).view(1, -1, 1, 1, 1))


def read_vae(path: Path, device: torch.device) -> WanVAE:
    machine = Machine(device, "bf16" if device.type == "cuda" else "fp32")
    return load_vae(open_checkpoint(path), VAE_CONFIG, machine, lambda what, done, total: None)


@torch.no_grad()
def gate(vae: WanVAE, clips: int, frames: int = 69) -> dict[str, float]:
    """How well held-out clips are rendered again: peak signal to noise, and the scores against their captions."""
    scenes = [sample_scene(HELD_OUT + number) for number in range(clips)]
    true = render(scenes, 0, frames, device=vae.device)
    latents, _ = vae.encode(true)
    seen, _ = vae.decode(latents)
    seen = seen.float().clamp(-1, 1)
    scores = [summarise(measure(clip, scene.description)) for clip, scene in zip(seen, scenes, strict=True)]
    error = F.mse_loss(seen, true, reduction="none").mean((1, 2, 3, 4))
    names = (*AGREEMENTS, "agreement", "outline", "sharpness")
    return {
        "psnr": (10 * torch.log10(4 / error)).mean().item(),
        "latent_mean": latents.mean().item(),
        "latent_std": latents.std().item(),
        **{name: sum(score[name] for score in scores) / clips for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help=f"default {STEPS}, of the decoder alone {DECODER_STEPS}")
    parser.add_argument("--batch", type=int, default=32, help="clips of 17 frames a step")
    parser.add_argument("--pool", type=int, default=24576, help="clips of 17 frames to draw from")
    parser.add_argument("--decoder", action="store_true", help="train on the decoder of FOLDER; its latents stay valid")
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = True  # its first guess is poor for so few channels

    model = Autoencoder().to(device)
    if options.decoder:
        model.vae.load_state_dict(load_file(options.folder / "vae.safetensors", device=str(device)))
        model.requires_grad_(False)
        for part in (model.vae.conv2, model.vae.decoder):
            part.requires_grad_(True)
    else:
        initialise(model.vae)
    short = clip_pool(options.pool, SHORT, 0, device)
    long = clip_pool(options.pool // 4, LONG, options.pool, device)
    short_loss = partial(reconstruction_loss, model, short, options.batch)
    long_loss = partial(reconstruction_loss, model, long, options.batch // 4)
    rate, steps = (DECODER_RATE, DECODER_STEPS) if options.decoder else (RATE, STEPS)
    training = Training({"vae": (model, rate)}, options.steps or steps)
    training.run([short_loss, short_loss, long_loss], options.folder / ("decoder" if options.decoder else "vae"))
    average: Any = training.averages["vae"]
    vae: WanVAE = average.vae
    if not options.decoder:
        normalise(vae, long)
    save_weights(vae, options.folder / "vae.safetensors")
    clips = 32 if device.type == "cuda" else 2
    save_scores(options.folder / "vae.json", gate(read_vae(options.folder / "vae.safetensors", device), clips))


if __name__ == "__main__":
    main()
