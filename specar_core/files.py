"""Which model files a pair needs, where they are looked for, and what to say when one is missing.

The folders are those of ComfyUI, so that both share one tree.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import SpecarError, UsageError
from .tensor_files import parts


@dataclass(frozen=True)
class ModelFile:
    """One published file, or the index of a checkpoint in shards, which lie beside it and belong to it.

    `bytes` and `sha256` are exact where known; `about_bytes` is always there, for planning, shards included.
    """

    what: Literal["target", "drafter", "text encoder", "vae"]
    repository: str  # on Hugging Face
    path: str  # in the repository
    licence: str
    folder: Literal["diffusion_models", "text_encoders", "vae"]
    about_bytes: int
    bytes: int | None = None
    sha256: str | None = None
    revision: str = "main"
    alternatives: tuple[str, ...] = ()  # other names of a file that serves as well
    home: str = ""  # a folder of its own inside `folder`, where it lies under its path in the repository
    companions: tuple[str, ...] = ()  # small files of the repository that come with it

    @property
    def name(self) -> str:
        """Its place inside `folder`."""
        return f"{self.home}/{self.path}" if self.home else self.path.rpartition("/")[2]

    @property
    def size(self) -> int:
        return self.bytes or self.about_bytes


def models_dir(option: str | Path | None = None) -> Path:
    """The folder with the model folders: the option, else SPECAR_MODELS, else one in the user's data directory."""
    if chosen := option or os.environ.get("SPECAR_MODELS"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        data = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        data = "~/Library/Application Support"
    else:
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "specar" / "models"


def locate(file: ModelFile, models: Path) -> Path | None:
    """Where the file is, below the folder that holds the model folders."""
    return locate_in(file, models / file.folder)


def locate_in(file: ModelFile, folder: Path) -> Path | None:
    """Where the file is, under its own name or another that serves. Broken links, unreadable folders and an index that
    lacks shards are skipped."""
    candidates = (folder / name for name in (file.name, *file.alternatives))
    return next((path for path in candidates if os.path.exists(path) and all(map(os.path.exists, parts(path)))), None)


def find(
    files: Sequence[ModelFile], models: Path, named: Mapping[str, Path]
) -> tuple[dict[str, Path], list[ModelFile]]:
    """Paths by what they are, those the user named first; and the files that are neither named nor in the folders."""
    found: dict[str, Path] = {file.what: path for file in files if (path := locate(file, models))}
    return {**found, **named}, [file for file in files if file.what not in found and file.what not in named]


def require(files: Sequence[ModelFile], models: Path, backbone: str, named: Mapping[str, Path]) -> dict[str, Path]:
    """As find, with nothing missing.

    UsageError for a named path that does not exist; SpecarError for files that are missing, with the place of each and
    the command that fetches them.
    """
    for what, path in named.items():
        if not os.path.exists(path):
            raise UsageError(f"There is no {what} at {path}. Check the path, or leave the option out.")
    found, missing = find(files, models, named)
    if missing:
        lines = (
            f"  {file.what}: {models / file.folder / file.name} "
            f"({file.size / 1e9:.1f} GB; {file.path} of {file.repository})"
            for file in missing
        )
        raise SpecarError(
            f"{len(missing)} of {len(files)} model files are missing. Get them with `specar download --backbone "
            f"{backbone}`, or put them here:\n" + "\n".join(lines)
        )
    return found


# Sizes and licences: the repositories' file pages and model cards on huggingface.co, 2026.
TEXT_ENCODER = ModelFile(
    what="text encoder",
    repository="Comfy-Org/Wan_2.1_ComfyUI_repackaged",
    path="split_files/text_encoders/umt5_xxl_fp16.safetensors",
    licence="Apache-2.0",
    folder="text_encoders",
    about_bytes=11_366_399_385,
    bytes=11_366_399_385,
    sha256="7b8850f1961e1cf8a77cca4c964a358d303f490833c6c087d0cff4b2f99db2af",
    alternatives=(
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        "models_t5_umt5-xxl-enc-bf16.pth",
        "models_t5_umt5-xxl-enc-bf16.safetensors",
    ),
)
VAE = ModelFile(
    what="vae",
    repository="Comfy-Org/Wan_2.1_ComfyUI_repackaged",
    path="split_files/vae/wan_2.1_vae.safetensors",
    licence="Apache-2.0",
    folder="vae",
    about_bytes=253_815_318,
    bytes=253_815_318,
    sha256="2fc39d31359a4b0a64f55876d8ff7fa8d780956ae2cb13463b0223e15148976b",
    alternatives=("Wan2.1_VAE.pth", "Wan2.1_VAE.safetensors"),
)

KREA_FILES = (
    ModelFile(
        what="target",
        repository="krea/krea-realtime-video",
        path="krea-realtime-video-14b.safetensors",
        licence="Apache-2.0 (the weights, by their model card)",
        folder="diffusion_models",
        about_bytes=28_580_000_000,
    ),
    ModelFile(
        what="drafter",
        repository="gdhe17/Self-Forcing",
        path="checkpoints/self_forcing_dmd.pt",
        licence="Apache-2.0",
        folder="diffusion_models",
        about_bytes=5_680_000_000,
        alternatives=("self_forcing_dmd.safetensors",),
    ),
    TEXT_ENCODER,
    VAE,
)


def _helios(what: Literal["target", "drafter"], name: str) -> ModelFile:
    """14.3 billion float32 parameters in shards. The repository's second transformer, of an earlier stage of training,
    is left where it is."""
    return ModelFile(
        what=what,
        repository=f"BestWishYsh/{name}",
        path="transformer/diffusion_pytorch_model.safetensors.index.json",
        licence="Apache-2.0",
        folder="diffusion_models",
        about_bytes=57_250_000_000,
        home=name,
        companions=("transformer/config.json", "scheduler/scheduler_config.json"),
    )


HELIOS_FILES = (_helios("target", "Helios-Base"), _helios("drafter", "Helios-Distilled"), TEXT_ENCODER, VAE)
HELIOS_MID_FILES = (_helios("target", "Helios-Mid"), *HELIOS_FILES[1:])
