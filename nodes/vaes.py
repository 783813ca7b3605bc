"""The connected VAE, as the library sees it."""

import hashlib
from typing import Any

from ..specar_core.errors import UsageError
from ..specar_core.tensor_files import Checkpoint, in_memory
from . import host


def as_checkpoint(vae: Any) -> Checkpoint:
    if not (weights := host.vae_weights(vae)):
        raise UsageError("the connected VAE is not one of ComfyUI's own: connect SpecARLoader's or VAELoader's")
    return in_memory(weights, "the connected VAE")


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over its biases and gains, which no training leaves as they were."""
    digest = hashlib.sha256()
    for name, info in sorted(checkpoint.names.items()):
        if len(info.shape) == 1:
            digest.update(name.encode() + checkpoint.tensor(name).float().cpu().numpy().tobytes())
    return digest.hexdigest()
