"""The stored Helios tensors, the tiny transformers that they were made with, and a VAE to go with them."""

import json

import torch
from conftest import GOLDEN
from safetensors import safe_open
from safetensors.torch import load_file

from specar_core.models.helios import HeliosConfig, HeliosTransformer
from specar_core.models.vae import VaeConfig, WanVAE

FOLDER = GOLDEN / "helios"
TINY = json.loads((FOLDER / "tiny_config.json").read_text())
PARTS = ("long", "mid", "short")


def golden(name):
    """Tensors and metadata of a file, e.g. golden("fwd_full")."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        return {key: file.get_tensor(key) for key in file.keys()}, metadata


def transformer(state, config=TINY):
    """A Helios transformer with these weights, named and configured as published."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    model = HeliosTransformer(HeliosConfig.detect(shapes, config))
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def tiny(*weights, **changes):
    state = {key: value for name in weights for key, value in load_file(FOLDER / f"{name}.safetensors").items()}
    return transformer(state, {**TINY, **changes})


def small_vae():
    """Random weights, two channels wide: a chunk takes a tenth of a second."""
    with torch.device("meta"):
        vae = WanVAE(VaeConfig(dim=2, residual_blocks=1))
    generator = torch.Generator().manual_seed(0)
    for name, value in vae.to_empty(device="cpu").requires_grad_(False).named_parameters():
        if value.dim() == 1 or name.endswith("gamma"):
            value.fill_(name.endswith("gamma"))
        else:
            value.normal_(0, value[0].numel() ** -0.5, generator=generator)
    return vae.eval()
