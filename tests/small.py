"""A whole backbone with random weights in real files: the code path of `tiny`, in milliseconds a block."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from specar_core.backbones.base import Backbone
from specar_core.backbones.tiny import TINY
from specar_core.models.tiny_text import TinyText
from specar_core.models.vae import VaeConfig, WanVAE
from specar_core.models.wan import CausalWan, WanConfig

WIDTH, HEIGHT = 48, 32
SHARED = {"num_heads": 2, "freq_dim": 16, "text_dim": 16, "text_len": 8}
CONFIGS = {
    "target": WanConfig(dim=48, ffn_dim=64, num_layers=2, **SHARED),
    "drafter": WanConfig(dim=24, ffn_dim=48, num_layers=1, **SHARED),
}
VAE_CONFIG = VaeConfig(dim=2)
TEXT = {"words": ["a", "red", "ball"], "length": 8, "dim": 16, "heads": 2}


def small_backbone(folder: Path) -> Backbone:
    """Called `tiny`, so that reports of it can be read back."""
    networks = {
        "target": CausalWan(CONFIGS["target"]),
        "drafter": CausalWan(CONFIGS["drafter"]),
        "vae": WanVAE(VAE_CONFIG),
        "text encoder": TinyText(**TEXT),
    }
    files = {}
    for number, (what, network) in enumerate(networks.items()):
        generator = torch.Generator().manual_seed(number)
        state = {name: torch.randn(value.shape, generator=generator) for name, value in network.state_dict().items()}
        state = {
            name: value / max(1, value[0].numel()) ** 0.5 if value.dim() > 1 else value for name, value in state.items()
        }
        files[what] = folder / f"{what}.safetensors"
        save_file(state, files[what], {"config": json.dumps({"text": TEXT})})
    return replace(TINY, configs=CONFIGS, vae_config=VAE_CONFIG, width=WIDTH, height=HEIGHT, shipped=files)
