"""What an earlier video was made with, from its report, as the settings of another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SpecarError, UsageError
from .foreign import SETTINGS, fits, load, read
from .geometry import MOST_BLOCKS
from .mp4 import read_metadata
from .policies import parse

# Settings of which one replaces another: what is asked for now replaces the whole group of an earlier report.
EXCLUSIVE = (
    ("prompt", "timeline", "cues"),
    ("seconds", "blocks", "frames"),
    ("k", "schedule", "max_run", "time_budget"),
)


def report_in(path: Path) -> Any:
    """What a report says, or a video that holds one."""
    try:
        return load(read_metadata(path)["specar"]) if path.suffix.lower() == ".mp4" else read(path)
    except (SpecarError, KeyError):
        raise UsageError(f"{path} has no report of SpecAR in it") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not the report of a SpecAR video") from None


def told_by(path: Path, report: Any) -> dict[str, Any]:
    """The settings that a video was made with, from its report, which lies in `path`."""
    from .inputs import NAMES
    from .report import SCHEMA
    from .timeline import Cue

    if fits(report, {"schema": int}) and report["schema"] != SCHEMA:
        raise UsageError(f"{path} is a report of another version of SpecAR: schema {report['schema']}, not {SCHEMA}")
    try:
        if not fits(report, SETTINGS) or not 0 < report["schedule"]["blocks"] <= MOST_BLOCKS:
            raise ValueError("another kind of report")
        schedule, cues = report["schedule"], [Cue(**prompt) for prompt in report["prompts"] or []]
        starts = [cue.block for cue in cues]
        if starts != sorted(set(starts)) or min(starts, default=0) or min((cue.fade for cue in cues), default=0) < 0:
            raise ValueError("prompts out of order")
        parsed, _ = parse(schedule["policy"], schedule["blocks"])
        if schedule.get("planned", True):
            same = list(parsed.targets) == schedule["targets"]
        else:  # what it came to is made again, unless it came to no end
            same = len(report["blocks"]) < schedule["blocks"]
        spec = schedule["policy"] if same else "list:" + ",".join(map(str, schedule["targets"]))
        if spec.startswith("keyed:"):  # its marks come from the prompts, which may be others this time
            spec = spec.removesuffix("@" + ",".join(map(str, starts[1:])))
        return {
            "backbone": report["backbone"],
            "settings": {
                **({"cues": cues} if cues else {}),
                "seed": report["seed"],
                "width": report["width"],
                "height": report["height"],
                "blocks": schedule["blocks"],
                "schedule": spec,
            },
            "steps": {role: sampling["steps"] for role, sampling in report["sampling"].items()},
            "options": {name: value for name, value in report["options"].items() if name not in NAMES},
            "inputs": {name: value for name, value in report["options"].items() if name in NAMES},
            "precision": report["environment"]["precision"],
            "attention": report["environment"]["attention"],
            "compile": report["environment"]["compile"],
            "threads": report["environment"].get("threads"),
            "models": report["models"],
        }
    except (ValueError, TypeError):
        raise UsageError(f"{path} is not the report of a SpecAR video") from None


def merged(told: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for `resolve`: what is asked for now (steps and options one by one), else what was told."""
    settings = dict(told.get("settings", {}))
    for group in EXCLUSIVE:
        if any(name in asked for name in group):
            for name in group:
                settings.pop(name, None)
    settings.update(asked)
    for name in ("steps", "options"):
        settings[name] = {**told.get(name, {}), **asked.get(name, {})}
    return settings
