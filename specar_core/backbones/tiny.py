"""The tiny pair: architecture and code path of `krea` at a size that runs on any laptop. Its weights are shipped."""

from dataclasses import dataclass
from pathlib import Path

from ..machine import Machine
from ..models.tiny_text import TinyText, load_tiny_text, outline
from ..models.vae import VaeConfig
from ..models.wan import WanConfig
from ..progress import Progress
from ..schedule import Role
from ..tensor_files import Checkpoint
from .causal_wan import CausalWanBackbone

FOLDER = Path(__file__).parent / "tiny"
TEXT_LENGTH, TEXT_DIM = 32, 64
CONFIGS: dict[Role, WanConfig] = {
    "target": WanConfig(
        dim=192, ffn_dim=768, num_layers=6, num_heads=6, freq_dim=64, text_dim=TEXT_DIM, text_len=TEXT_LENGTH
    ),
    "drafter": WanConfig(
        dim=96, ffn_dim=384, num_layers=3, num_heads=3, freq_dim=64, text_dim=TEXT_DIM, text_len=TEXT_LENGTH
    ),
}
VAE_CONFIG = VaeConfig(dim=8)


@dataclass(frozen=True, kw_only=True)
class TinyBackbone(CausalWanBackbone):
    def load_text_encoder(self, path: Path, machine: Machine, progress: Progress) -> TinyText:
        return load_tiny_text(path, machine.device)

    def check_text_encoder(self, checkpoint: Checkpoint) -> None:
        outline(checkpoint)


TINY = TinyBackbone(
    name="tiny",
    title="tiny pair: coloured shapes",
    width=96,
    height=64,
    blocks=8,
    default_schedule=lambda blocks: "max-run:5",
    configs=CONFIGS,
    vae_config=VAE_CONFIG,
    text_bytes=1 << 20,
    shipped={
        "target": FOLDER / "target.safetensors",
        "drafter": FOLDER / "drafter.safetensors",
        "text encoder": FOLDER / "text_encoder.safetensors",
        "vae": FOLDER / "vae.safetensors",
    },
    scorer="agreement",
)
