"""What this machine can do: device, attention back ends, precision, encoder, model files."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import __version__, files
from .backbones import NAMES, backbone
from .machine import card, free_bytes, host_memory
from .models import low_precision
from .models.attention import BACKENDS, Absent, probe
from .models.fused import no_triton


@dataclass(frozen=True)
class Findings:
    machine: dict[str, str]
    attention: dict[str, str]
    models: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {"machine": self.machine, "attention": self.attention, "models": self.models}

    def text(self) -> str:
        lines = []
        for title, entries in self.to_dict().items():
            lines += [title, *(f"  {name}: {value}" for name, value in entries.items())]
        return "\n".join(lines)


def examine(models_dir: Path | None) -> Findings:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = files.models_dir(models_dir)
    machine = {
        "specar": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": card(device),
        "host memory": f"{host_memory() / 1e9:.1f} GB",
        "free disk": f"{free_bytes(models) / 1e9:.1f} GB at {models}",
        "video encoder": _encoder(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["GPU memory"] = f"{properties.total_memory / 1e9:.1f} GB"
        machine["compute capability"] = f"{properties.major}.{properties.minor}"
        machine["cuDNN"] = str(torch.backends.cudnn.version())
        reason = low_precision.unavailable(device)
        machine["precision fp8"] = f"no: {reason}" if reason else "yes"
        reason = no_triton()
        machine["kernels"] = f"none, which is slower: {reason}" if reason else "Triton"
    return Findings(machine, {b.name: _state(b, device, dtype) for b in BACKENDS}, _models(models))


def _state(backend, device: torch.device, dtype: torch.dtype) -> str:
    try:
        probe(backend, device, dtype)
    except Absent as absent:
        return f"no: {absent}"
    return "yes" if backend.automatic else "yes, when asked for by name"


def _encoder() -> str:
    import av

    try:
        av.codec.Codec("libx264", "w")
    except ValueError:
        return f"PyAV {av.__version__} has no libx264; install the usual build: pip install av"
    return f"libx264 (PyAV {av.__version__})"


def _models(models: Path) -> dict[str, str]:
    found = {}
    for name in NAMES:
        pair = backbone(name)
        for file in pair.files:
            path = files.locate(file, models)
            found[f"{name} {file.what}"] = str(path) if path else f"missing: {models / file.folder / file.name}"
        for what, path in pair.shipped.items():
            found[f"{name} {what}"] = str(path) if path.exists() else f"missing from this installation: {path}"
    return found
