"""Kills a run at random points and lets it go on. A program of its own, because it forks: killed.py FOLDER TIMES.

A point is a step of a model or of the decoder, or an operation on a file of the run; which ones is decided by the
number of runs alone. Prints a line of JSON for each: where it was killed, and what was left.
"""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import av
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small import small_backbone

from specar_core.backbones.base import Machine
from specar_core.generate import Listener, generate
from specar_core.job import resolve

BLOCKS = 7
CPU = Machine(torch.device("cpu"), "fp32")
FILES = ("open", "os.rename", "os.remove", "os.rmdir")


def make(backbone, out: Path, resume: bool = False, listener: Listener = Listener()) -> dict:  # noqa: B008
    job, _ = resolve(backbone, prompt="a red ball", blocks=BLOCKS, k=2)
    return generate(job, CPU, backbone.shipped, out, resume=resume, listener=listener)


def frames(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray().tobytes() for frame in container.decode(video=0)]


def points(backbone, out: Path, last: int, told: Path) -> None:
    """A run that is killed at point `last`, and that writes how many there are if it gets to its end."""
    count = itertools.count(1)

    def point(*_) -> None:
        if next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def operation(event: str, arguments: tuple) -> None:
        if event in FILES and str(out.parent) in str(arguments[0]):
            point()

    sys.addaudithook(operation)
    make(backbone, out, listener=Listener(step=point))
    told.write_text(str(next(count) - 1))


def main(folder: Path, times: int) -> None:
    torch.set_num_threads(1)
    (folder / "models").mkdir()
    backbone = small_backbone(folder / "models")
    whole = folder / "whole.mp4"
    report = make(backbone, whole)
    expected = frames(whole)
    fork = multiprocessing.get_context("fork")

    def killed(out: Path, last: int) -> bool:
        out.parent.mkdir()
        process = fork.Process(target=points, args=(backbone, out, last, folder / "points"))
        process.start()
        process.join()
        return process.exitcode == -signal.SIGKILL

    assert not killed(folder / "all" / "a.mp4", 0)
    total = int((folder / "points").read_text())
    for last in sorted(random.Random(times).sample(range(1, total + 1), times)):
        out = folder / str(last) / "a.mp4"
        was_killed = killed(out, last)
        left = len(list(out.with_suffix(".run").glob("block-*.safetensors")))
        if (out.with_suffix(".run") / "run.json").exists():
            again = make(backbone, out, resume=True)
        elif not out.exists():  # killed before there was anything to go on with, or when all was done
            again = make(backbone, out)
        rest = sorted(path.name for path in out.parent.iterdir())
        told = {
            "point": last,
            "of": total,
            "killed": was_killed,
            "blocks": left,
            "same frames": frames(out) == expected,
            "same blocks": [b["role"] for b in again["blocks"]] == [b["role"] for b in report["blocks"]],
            "files": rest,
        }
        print(json.dumps(told), flush=True)
        shutil.rmtree(out.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
