"""JSON that anybody may have written, a report or what a run's folder tells: looked at before it is used."""

import json
import math
from pathlib import Path
from typing import Any

LARGEST = 1 << 26  # bytes: four times the report of a video of a day

CUE = {"block": int, "text": str, "fade?": int, "cut?": bool}
FILE = {"file": str, "digest": str}
INPUTS = {"lora?": [{**FILE, "strength": float, "roles": [str]}], "image?": FILE, "video?": FILE, "strength?": float}
SCHEDULE = {"blocks": int, "targets": [int], "policy": str, "planned?": bool}
# What is asked of the report of a finished video, and of one whose settings are taken over.
VIDEO = {
    "backbone": str,
    "prompts": ([CUE], None),
    "seed": int,
    "width": int,
    "height": int,
    "fps": int,
    "frames": int,
    "schedule": SCHEDULE,
    "blocks": [{"role": str}],
    "options": dict,
}
SETTINGS = {
    **VIDEO,
    "options": INPUTS,
    "sampling": {"target?": {"steps": [int]}, "drafter?": {"steps": [int]}},
    "environment": {
        "device": str,
        "torch": str,
        "precision": str,
        "attention": str,
        "compile": bool,
        "triton?": bool,
        "threads?": int,
    },
    "models": [{"role": str, "file": (str, None), "digest": str}],  # ComfyUI's VAE comes from no file
}


def load(text: str | bytes) -> Any:
    """ValueError for everything that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested without end") from error


def read(path: Path) -> Any:
    """OSError if the file cannot be read, ValueError for everything that is not JSON."""
    if path.stat().st_size > LARGEST:
        raise ValueError("it is too large")
    return load(path.read_text("utf-8"))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind: a type (int is of 64 bits and no bool, float any finite number), None, a list of
    one kind, an object that has at least these members (but those with a question mark), one of any members of a kind,
    or one kind of a tuple."""
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    if isinstance(kind, list):
        return type(value) is list and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, dict) and str in kind:
        return type(value) is dict and all(fits(one, kind[str]) for one in value.values())
    if isinstance(kind, dict):
        return type(value) is dict and all(
            fits(value[name], one) if (name := key.rstrip("?")) in value else key.endswith("?")
            for key, one in kind.items()
        )
    if kind is int:
        return type(value) is int and -(2**63) <= value < 2**64
    if kind is float:
        return type(value) is float and math.isfinite(value) or fits(value, int)
    return value is None if kind is None else type(value) is kind
