"""What a LATENT says about the video in it, and where its decoded file lies."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..specar_core.geometry import decoded_frames
from ..specar_core.job import Job
from . import host


@dataclass(frozen=True)
class Layout:
    """The entry "specar" beside the samples; without it they are one clip of plain Wan."""

    backbone: str | None
    latent_frames_per_clip: int
    drop_first: int
    fps: int

    @classmethod
    def of_job(cls, job: Job) -> "Layout":
        geometry = job.backbone.geometry
        dropped = geometry.delivered_from(job.keep_first_frames)
        return cls(job.backbone.name, geometry.clip(job.blocks), dropped, geometry.fps)

    @classmethod
    def of_latent(cls, latent: Mapping[str, Any]) -> "Layout":
        return cls(**latent["specar"]) if "specar" in latent else cls(None, latent["samples"].shape[2], 0, 16)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def frames(self, samples: Tensor) -> int:
        return decoded_frames(samples.shape[2], self.latent_frames_per_clip) - self.drop_first


def decoded_file(samples: Tensor, layout: Layout, vae: str) -> Path:
    """Where these samples, decoded by the VAE with this fingerprint, are or would be: by content, so that no file is
    taken for another."""
    digest = hashlib.sha256(json.dumps([layout.to_dict(), vae, list(samples.shape)]).encode())
    digest.update(samples.float().contiguous().cpu().numpy())
    return host.temp_folder() / f"specar-{digest.hexdigest()[:32]}.mp4"
