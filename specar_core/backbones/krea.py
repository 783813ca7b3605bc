"""Krea Realtime 14B as target, Self-Forcing 1.3B as drafter: two sizes of the causal Wan 2.1 text-to-video model."""

from ..files import ModelFile
from ..models.wan import WAN_1_3B, WAN_14B
from .causal_wan import CausalWanBackbone
from .loading import TEXT_ENCODER_FILE, VAE_FILE

KREA = CausalWanBackbone(
    name="krea",
    title="Krea Realtime 14B + Self-Forcing 1.3B",
    width=832,
    height=480,
    blocks=36,
    default_schedule=lambda blocks: f"spread:{-(-7 * blocks // 36)}",
    files=(
        ModelFile(
            what="target",
            repository="krea/krea-realtime-video",
            path="krea-realtime-video-14b.safetensors",
            licence="Apache-2.0 (the weights, by their model card)",
            folder="diffusion_models",
            bytes=28_580_000_000,
        ),
        ModelFile(
            what="drafter",
            repository="gdhe17/Self-Forcing",
            path="checkpoints/self_forcing_dmd.pt",
            licence="Apache-2.0",
            folder="diffusion_models",
            bytes=5_680_000_000,
            alternatives=("self_forcing_dmd.safetensors",),
        ),
        TEXT_ENCODER_FILE,
        VAE_FILE,
    ),
    configs={"target": WAN_14B, "drafter": WAN_1_3B},
)
