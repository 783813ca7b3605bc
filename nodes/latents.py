"""What a LATENT says about the video in it, and where its decoded file lies."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from ..specar_core.geometry import decoded_frames
from ..specar_core.job import Job
from . import host


@dataclass(frozen=True)
class Layout:
    """The entry "specar" beside the samples; without it they are one clip of plain Wan. cuts: latent frames that a
    prompt timeline begins a new clip with."""

    backbone: str | None
    latent_frames_per_clip: int
    drop_first: int
    fps: int
    cuts: tuple[int, ...] = ()

    @classmethod
    def of_job(cls, job: Job) -> "Layout":
        geometry = job.geometry
        cuts = tuple(block * geometry.latent_frames for block in geometry.cuts) if geometry.one_clip else ()
        return cls(job.backbone.name, geometry.clip(job.blocks), geometry.dropped, geometry.fps, cuts)

    @classmethod
    def of_latent(cls, latent: Mapping[str, Any]) -> "Layout":
        return cls(**latent["specar"]) if "specar" in latent else cls(None, latent["samples"].shape[2], 0, 16)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self, samples: Tensor) -> Iterator[Tensor]:
        """The samples between cuts."""
        end = samples.shape[2]  # another node may have cut it short
        edges = [0, *(cut for cut in self.cuts if cut < end), end]
        yield from (samples[:, :, start:end] for start, end in pairwise(edges))

    def frames(self, samples: Tensor) -> int:
        decoded = (decoded_frames(part.shape[2], self.latent_frames_per_clip) for part in self.parts(samples))
        return sum(decoded) - self.drop_first


def decoded_file(samples: Tensor, layout: Layout, vae: str) -> Path:
    """Where these samples, decoded by the VAE with this fingerprint, are or would be: by content, so that no file is
    taken for another."""
    digest = hashlib.sha256(json.dumps([layout.to_dict(), vae, list(samples.shape)]).encode())
    digest.update(samples.float().contiguous().cpu().numpy())
    return host.temp_folder() / f"specar-{digest.hexdigest()[:32]}.mp4"
