"""A pair's own text encoder in the shape of a ComfyUI CLIP, as far as CLIPTextEncode needs it."""

from dataclasses import dataclass
from typing import Any

from ..specar_core.backbones.base import TextEncoder


@dataclass(frozen=True)
class OwnClip:
    encoder: TextEncoder

    def tokenize(self, text: str, **options: Any) -> str:
        return text  # the encoder has its own tokenizer

    def encode_from_tokens_scheduled(self, tokens: str, **options: Any) -> list:
        """CONDITIONING of one entry [1, L, D]."""
        return [[self.encoder.encode([tokens]).float().cpu(), {"pooled_output": None}]]
