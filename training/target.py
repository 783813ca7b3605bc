"""Stage 3, `python -m training.target`: the text encoder and the target, by flow matching."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specar_core.backbones.tiny import TEXT_DIM, TEXT_LENGTH
from specar_core.models.tiny_text import TinyText
from specar_core.models.wan import CausalWan

from .flow import build, keys_values, mixed, predict, shaken, shifted, sigma_at, some_levels
from .latents import Latents, load_latents, vocabulary
from .loop import Training, save_weights

RATE = 1e-3
FIRST = 0.35  # share of blocks 0, where the positions have to be made up
TEXT: dict[str, Any] = {"words": vocabulary(), "length": TEXT_LENGTH, "dim": TEXT_DIM, "layers": 2, "heads": 4}


def new_text(device: torch.device) -> TinyText:
    text = TinyText(**TEXT).to(device)
    nn.init.normal_(text.position, std=0.1)
    nn.init.normal_(text.embedding.weight, std=0.5)
    return text


def terse(ids: Tensor) -> Tensor:
    """Captions [B, L], one in eight of them without some of its words: a prompt need not say everything."""
    some = torch.rand(len(ids), 1, device=ids.device) < 0.125
    dropped = some & (torch.rand(ids.shape, device=ids.device) < 0.3) & (ids > 0)
    order = dropped.to(torch.uint8).argsort(dim=1, stable=True)
    return ids.masked_fill(dropped, 0).gather(1, order)


def noise_levels(count: int, device: torch.device) -> Tensor:
    """Half of them anywhere on the shifted scale, half of them where a rollout evaluates."""
    anywhere, levels = shifted(torch.rand(count, device=device)), sigma_at(some_levels(count, device))
    return torch.where(torch.rand(count, device=device) < 0.5, levels, anywhere)


def flow_loss(model: CausalWan, text: TinyText, data: Latents, batch: int) -> dict[str, Tensor]:
    first = int(FIRST * batch)
    losses = {}
    for name, (*context, x0, ids) in {"first": data.first(first), "later": data.later(batch - first)}.items():
        with torch.autocast(x0.device.type, torch.bfloat16):
            embeddings = text(terse(ids))
        sigma, noise = noise_levels(len(x0), x0.device), torch.randn_like(x0)
        behind = shaken(context[0]) if context else None
        flow = predict(model, keys_values(model, embeddings), behind, mixed(x0, noise, sigma), sigma)
        losses[name] = (flow - (noise - x0)).square().mean()
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--continue", dest="onwards", action="store_true", help="train on what is in FOLDER")
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(3)

    data = load_latents(options.folder, device)
    text, model = new_text(device), build("target", device, options.compile)
    if options.onwards:
        text.load_state_dict(load_file(options.folder / "text_encoder.safetensors", device=str(device)))
        model.load_state_dict(load_file(options.folder / "teacher.safetensors", device=str(device)))
    training = Training({"text": (text, RATE), "teacher": (model, RATE)}, options.steps)
    training.run([partial(flow_loss, model, text, data, options.batch)], options.folder / "target")
    save_weights(training.averages["text"], options.folder / "text_encoder.safetensors", text=TEXT)
    save_weights(training.averages["teacher"], options.folder / "teacher.safetensors")


if __name__ == "__main__":
    main()
