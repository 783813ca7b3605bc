"""Made clips whose measurements are known, as frames and as videos with a report."""

import json

import numpy as np
import torch

from specar_core.measures import Layout
from specar_core.video import VideoWriter

HEIGHT, WIDTH = 48, 64
LATER = 12


def layout(letters, first=6, later=LATER):
    roles = tuple({"T": "target", "d": "drafter"}[letter] for letter in letters)
    return Layout(roles, (0, *(first + later * block for block in range(len(roles)))))


def grid(period=16):
    """A smooth picture [H, W, 3] whose brightness is far from both ends."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(2 * np.pi * (x + k * y) / period) for k in range(3)]
    return 110 + 40 * np.stack(waves, -1)


def frames(brightness):
    """Of a picture that is brighter by this much in each frame; rounding to 8 bits is all that is lost."""
    return [np.clip(np.round(grid() + value), 0, 255).astype(np.uint8) for value in brightness]


def report(letters, count, **changes):
    roles = [{"T": "target", "d": "drafter"}[letter] for letter in letters]
    targets = [block for block, role in enumerate(roles) if role == "target"]
    return {
        "schema": 1,
        "backbone": "tiny",
        "prompts": [{"block": 0, "text": "waves"}],
        "conditioning": None,
        "seed": 0,
        "width": WIDTH,
        "height": HEIGHT,
        "fps": 16,
        "frames": count,
        "schedule": {"blocks": len(roles), "targets": targets, "policy": "list:" + ",".join(map(str, targets))},
        "blocks": [{"index": i, "role": role, "seconds": 0.5, "rejected": 0} for i, role in enumerate(roles)],
        "timings": {"load": 0.0, "text": 0.0, "rollout": 1.0, "decode": 1.0, "encode": 1.0, "total": 4.0},
        "sampling": {},
        "options": {"drafter_context": "session"},
        "models": [],
        **changes,
    }


def video(path, letters, brightness, **changes):
    """A finished video: its first block has 6 frames, each later one 12."""
    with VideoWriter(path, 16, WIDTH, HEIGHT) as writer:
        shown, spans = frames(brightness), layout(letters)
        for block in spans.blocks:
            writer.add_block(torch.from_numpy(np.stack(shown[spans.of_block(block)])))
        writer.finish({"specar": json.dumps(report(letters, len(shown), **changes))})
    return path
