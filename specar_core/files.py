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

    `bytes`, shards included, is exact where `sha256` is there.
    """

    what: Literal["target", "drafter", "text encoder", "vae"]
    repository: str  # on Hugging Face
    path: str  # in the repository
    licence: str
    folder: Literal["diffusion_models", "text_encoders", "vae"]
    bytes: int
    sha256: str | None = None
    revision: str = "main"
    alternatives: tuple[str, ...] = ()  # other names of a file that serves as well
    home: str = ""  # a folder of its own inside `folder`, where it lies under its path in the repository
    companions: tuple[str, ...] = ()  # small files of the repository that come with it

    @property
    def name(self) -> str:
        """Its place inside `folder`."""
        return f"{self.home}/{self.path}" if self.home else self.path.rpartition("/")[2]


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
            f"({file.bytes / 1e9:.1f} GB; {file.path} of {file.repository})"
            for file in missing
        )
        raise SpecarError(
            f"{len(missing)} of {len(files)} model files are missing. Get them with `specar download --backbone "
            f"{backbone}`, or put them here:\n" + "\n".join(lines)
        )
    return found
