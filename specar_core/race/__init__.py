"""Videos of the same prompt, seed and noise against each other: one HTML page that needs nothing but the videos."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from typing import Any

from ..backbones import backbone
from ..charts import STYLE, section
from ..errors import UsageError
from ..measures import Layout
from ..metrics import Json

SCRIPTS = ("schedule.js", "placing.js", "race.js")
# The same for videos of one scene, which are those that may race.
SCENE = ("backbone", "prompts", "conditioning", "seed")


@dataclass(frozen=True)
class Clip:
    """A finished video: its address (a URL, relative ones against the page, or a data URI) and its report."""

    video: str
    report: Mapping[str, Any]


def page(clips: Sequence[Clip], scores: Json | None = None) -> str:
    """The text of the page. Clips of different prompts or seeds become scenes to choose from.

    scores: what `score` found on the same videos in the same order. Raises UsageError without a clip.
    """
    if not clips:
        raise UsageError("the page of a race needs a video")
    scenes: dict[str, list[int]] = {}
    for index, clip in enumerate(clips):
        scenes.setdefault(json.dumps([clip.report.get(name) for name in SCENE]), []).append(index)
    told = {"clips": [_told(clip) for clip in clips], "scenes": list(scenes.values())}
    charts = "".join(
        f'<div data-scores="{number}">{section(_of_scene(scores, indices))}</div>'
        for number, indices in enumerate(scenes.values())
        if scores
    )
    parts = {
        "style": _text("race.css") + STYLE,
        "script": "".join(map(_script, SCRIPTS)),
        "data": json.dumps(told, ensure_ascii=False).replace("<", "\\u003c"),  # a prompt may hold </script>
        "charts": charts,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _text("page.html"))


def _of_scene(scores: Json, indices: Sequence[int]) -> Json:
    return {**scores, "clips": [scores["clips"][index] for index in indices]}


def _told(clip: Clip) -> Json:
    report = clip.report
    return {
        "video": clip.video,
        "label": report["schedule"]["policy"],
        "starts": Layout.of(report, backbone(report["backbone"]).geometry).starts,
        "report": report,
    }


def _script(name: str) -> str:
    """To stand in one page with the scripts that it imports."""
    return re.sub(r"^import .*\n", "", _text(name), flags=re.MULTILINE)


def _text(name: str) -> str:
    return (package_files(__package__) / name).read_text("utf-8")
