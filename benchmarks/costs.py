"""Turns benchmark results into the table by which `specar plan` predicts times.

    python -m benchmarks.costs          writes specar_core/costs.json from benchmarks/results/*.json

A result is called BACKBONE-CARD-HOW.json and was measured at the backbone's own size and with its own steps. A row
says, in seconds: a block of each role, its decoding included, and how much of it is that; what a block takes beside
that on average, as the encoder may hold it up; and the end, from the last block to the finished file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import specar_core
from specar_core.backbones import NAMES, backbone

from .common import write

RESULTS = Path(__file__).parent / "results"
TABLE = Path(specar_core.__file__).parent / "costs.json"


def row(name: str, result: dict[str, Any]) -> dict[str, Any]:
    pair = backbone(name)
    videos = [video for video in result["videos"] if not video.get("derived")]
    mixed = [video for video in videos if {"target", "drafter"} <= video["median_block_seconds"].keys()]
    both = max(mixed, key=lambda video: video["k"])  # medians of most target blocks
    block = both["median_block_seconds"]
    blocks = {"target": both["k"], "drafter": both["blocks"] - both["k"]}

    def beside(video: dict[str, Any]) -> float:
        drafts = video["blocks"] - video["k"]
        return (video["rollout_seconds"] - video["k"] * block["target"] - drafts * block["drafter"]) / video["blocks"]

    calls = result["milliseconds"]
    return {
        "card": result["machine"]["card"],
        "backbone": name,
        "precision": result.get("precision", "bf16"),
        "compile": result.get("compile", False),
        "width": pair.width,
        "height": pair.height,
        **block,
        "decode": round((calls["vae decode, one block"] + calls.get("vae encode, one frame", 0)) / 1000, 4),
        "forwards": {role: both["forwards"][role] // blocks[role] for role in blocks},
        "beside": round(mean(map(beside, videos)), 4),
        "end": round(mean(video["seconds"] - video["rollout_seconds"] for video in videos), 3),
    }


def table() -> list[dict[str, Any]]:
    names = sorted(NAMES, key=len, reverse=True)  # helios-mid before helios
    found = ((next((n for n in names if path.name.startswith(n + "-")), None), path) for path in RESULTS.glob("*.json"))
    rows = [row(name, json.loads(path.read_text("utf-8"))) for name, path in sorted(found, key=str) if name]
    return rows + list(together(rows))


def together(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of fp8-target: the target's block of one run, all else of the one in bf16."""
    for full, low in product(rows, repeat=2):
        same = all(full[key] == low[key] for key in ("card", "backbone", "compile"))
        if same and (full["precision"], low["precision"]) == ("bf16", "fp8"):
            yield {**full, "precision": "fp8-target", "target": low["target"]}


if __name__ == "__main__":
    write(table(), TABLE)
