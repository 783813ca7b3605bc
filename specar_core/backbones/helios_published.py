"""The repositories of the published Helios models: what lies in them, and which of the models it is.

A checkpoint does not tell; the scheduler_config.json beside it does.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecarError
from ..files import ModelFile
from ..schedule import Role
from .helios_pair import BASE, DISTILLED, MID

log = logging.getLogger("specar")


@dataclass(frozen=True)
class Published:
    """A released model: what it is here, and what its scheduler_config.json says."""

    place: str
    scheduler: Mapping[str, Any]


def scheduler(name: str, stages: int, shift: str) -> dict[str, Any]:
    return {"_class_name": name, "stages": stages, "use_dynamic_shifting": True, "time_shift_type": shift}


PUBLISHED = {
    BASE.model: Published("the target of helios", scheduler("HeliosScheduler", 1, "exponential")),
    MID.model: Published("the target of helios-mid", scheduler("HeliosScheduler", 3, "exponential")),
    DISTILLED.model: Published("the drafter", scheduler("HeliosDMDScheduler", 3, "linear")),
}


def published_file(role: Role, name: str) -> ModelFile:
    """14.3 billion float32 parameters in shards. The repository's second transformer, of an earlier stage of training,
    is left where it is."""
    return ModelFile(
        what=role,
        repository=f"BestWishYsh/{name}",
        path="transformer/diffusion_pytorch_model.safetensors.index.json",
        licence="Apache-2.0",
        folder="diffusion_models",
        bytes=57_250_000_000,
        home=name,
        companions=("transformer/config.json", "scheduler/scheduler_config.json"),
    )


def check_scheduler(folder: Path, model: str, role: Role, pair: str) -> None:
    """SpecarError if the repository around the transformer's folder is that of another model."""
    name = "scheduler_config.json"
    places = (folder.parent / "scheduler" / name, folder / name, folder.parent / name)
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        log.warning("There is no %s by %s: it is taken for %s", name, folder, model)
        return
    told, wanted = _read_json(place), PUBLISHED[model].scheduler
    for other, published in PUBLISHED.items():
        same = all(told.get(key) == published.scheduler[key] for key in ("_class_name", "stages"))
        if same and other != model:
            raise SpecarError(
                f"{folder} cannot be the {role} of {pair}, which is {model}: "
                f"by its {name} it is {other}, {published.place}"
            )
    for key, value in wanted.items():
        if told.get(key) != value:
            log.warning(
                "%s: %s is %s, not %s as that of %s; %s is used", place, key, told.get(key), value, model, value
            )


def published_config(folder: Path) -> dict[str, Any]:
    """The transformer's config.json, if there is one."""
    path = folder / "config.json"
    config = _read_json(path) if path.is_file() else {}
    return config if config.get("_class_name") == "HeliosTransformer3DModel" else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecarError(f"{path} cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(value, dict):
        raise SpecarError(f"{path} is not a JSON object. Download it again.")
    return value
