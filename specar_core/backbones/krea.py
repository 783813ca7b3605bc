"""Krea Realtime 14B as target, Self-Forcing 1.3B as drafter: two sizes of the causal Wan 2.1 text-to-video model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..files import KREA_FILES
from ..models.text import TextEncoder
from ..models.vae import VaeConfig
from ..models.wan import WAN_1_3B, WAN_14B
from .base import Machine, Progress
from .causal_wan import CausalWanBackbone


def load_text_encoder(path: Path, machine: Machine, progress: Progress) -> TextEncoder:
    # On a CPU the bfloat16 weights stay mapped from the file, instead of becoming 23 GB of float32.
    return TextEncoder.load(
        path,
        dtype=torch.bfloat16,
        device=machine.device,
        progress=partial(progress, "text encoder"),
    )


@dataclass(frozen=True, kw_only=True)
class KreaBackbone(CausalWanBackbone):
    def default_schedule(self, blocks: int) -> str:
        return f"spread:{-(-7 * blocks // 36)}"

    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TextEncoder:
        return load_text_encoder(path, machine, progress)


KREA = KreaBackbone(
    name="krea",
    title="Krea Realtime 14B + Self-Forcing 1.3B",
    width=832,
    height=480,
    blocks=36,
    files=KREA_FILES,
    configs={"target": WAN_14B, "drafter": WAN_1_3B},
    vae_config=VaeConfig(),
    text_bytes=11_361_820_672 + (1 << 30),  # UMT5-XXL in bfloat16, and its work
)
