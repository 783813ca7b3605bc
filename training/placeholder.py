"""The tiny pair before it is trained: random weights of the right shapes, the same on every machine.

    python -m training.placeholder

Three values a tensor (-s, 0, s with s by fan-in), so that the files compress well.
"""

import json
from dataclasses import asdict

import torch
from safetensors.torch import save_file
from torch import nn

from specar_core.backbones.tiny import CONFIGS, FOLDER, TEXT_DIM, TEXT_LENGTH, VAE_CONFIG
from specar_core.models.tiny_text import TinyText
from specar_core.models.vae import WanVAE
from specar_core.models.wan import CausalWan

from .latents import vocabulary


def fill(network: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.named_parameters():
        if value.dim() == 1 or "gamma" in name:
            value.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            signs = torch.randint(-1, 2, value.shape, generator=generator)
            value.data.copy_(signs * (1.5 / value[0].numel()) ** 0.5)
    return network


def save(network: nn.Module, name: str, config: dict[str, object]) -> None:
    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in network.state_dict().items()}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata={"config": json.dumps(config)} if config else None)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for role, sizes in CONFIGS.items():
        save(fill(CausalWan(sizes), 1), role, {"transformer": asdict(sizes)})
    save(fill(WanVAE(VAE_CONFIG), 2), "vae", {})
    words = vocabulary()
    text = {"words": words, "length": TEXT_LENGTH, "dim": TEXT_DIM}
    save(fill(TinyText(words, TEXT_LENGTH, TEXT_DIM), 3), "text_encoder", {"text": text})


if __name__ == "__main__":
    main()
