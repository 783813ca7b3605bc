"""Kills runs at random points and lets them go on. A program of its own, because it forks.

    killed.py FOLDER TIMES KIND...

Kinds of runs are the functions of KINDS. A point is a step of a model or of the decoder, or an operation on a file of
the run; which ones is decided by the number of kills alone, and a single one is in the middle. Prints a line of JSON
for each: where it was killed, and what was left.
"""

import contextlib
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
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small import small_backbone

from specar_core.generate import Listener, generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.video import VideoWriter

BLOCKS = 7
CPU = Machine(torch.device("cpu"), "fp32")
FILES = ("open", "os.rename", "os.remove", "os.rmdir")


def make(backbone, out: Path, listener: Listener = Listener(), **options) -> dict:  # noqa: B008
    job, _ = resolve(backbone, prompt="a red ball", blocks=BLOCKS, k=2)
    return generate(job, CPU, backbone.shipped, out, listener=listener, **options)


def leave(job, paths, out: Path, at: int) -> None:
    """Begins a video, and ends in its block `at`."""

    class Stop(Exception):
        pass

    def stop(block, step):
        if block == at:
            raise Stop

    with contextlib.suppress(Stop):
        generate(job, CPU, paths, out, listener=Listener(step=stop))
        raise AssertionError(f"there is no block {at}")


def frames(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray().tobytes() for frame in container.decode(video=0)]


def drawn(backbone, folder: Path, inputs: Inputs = Inputs(), **settings):  # noqa: B008
    """A job, and the files that it takes."""
    settings = {"prompt": "a red ball", "k": 2, **settings}
    job, _ = resolve(backbone, blocks=BLOCKS, source=inputs.source(16)[0], **settings)
    return inputs.with_loras(job)[0], {**backbone.shipped, **inputs.paths}


def router(backbone, folder: Path):
    prompt = "a large red ball on navy"  # by which drafts can be judged
    return drawn(backbone, folder, prompt=prompt, k=None, schedule="sdvg-quantile:3@4")


def timeline(backbone, folder: Path):
    lines = "0s: a red ball\n1.2s fade 1s: a ball\n3.6s cut: red"
    return drawn(backbone, folder, prompt="", timeline=lines, k=None, schedule="keyed:3")


def lora(backbone, folder: Path):
    path, change = folder / "lora.safetensors", torch.full((48, 48), 0.05)
    save_file({"blocks.0.self_attn.q.diff": change}, path)
    return drawn(backbone, folder, Inputs(((None, path, 0.5),)))


def image(backbone, folder: Path):
    Image.effect_noise((48, 32), 64).convert("RGB").save(folder / "image.png")
    return drawn(backbone, folder, Inputs(kind="image", path=folder / "image.png"))


def video(backbone, folder: Path):
    pictures = np.random.default_rng(0).integers(0, 256, (40, 32, 48, 3), dtype=np.uint8)
    with VideoWriter(folder / "video.mp4", 16, 48, 32) as writer:
        writer.add_block(torch.from_numpy(pictures))
        writer.finish({})
    return drawn(backbone, folder, Inputs(kind="video", path=folder / "video.mp4", strength=0.6))


KINDS = {made.__name__: made for made in (drawn, router, timeline, lora, image, video)}


def points(job, paths, out: Path, last: int, told: Path) -> None:
    """A run that is killed at point `last`, and that writes how many there are if it gets to its end."""
    count = itertools.count(1)

    def point(*_) -> None:
        if next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def operation(event: str, arguments: tuple) -> None:
        if event in FILES and str(out.parent) in str(arguments[0]):
            point()

    sys.addaudithook(operation)
    generate(job, CPU, paths, out, listener=Listener(step=point))
    told.write_text(str(next(count) - 1))


def kill(kind: str, job, paths, folder: Path, times: int) -> None:
    whole = folder / "whole.mp4"
    report = generate(job, CPU, paths, whole)
    expected = frames(whole)
    fork = multiprocessing.get_context("fork")

    def killed(out: Path, last: int) -> bool:
        out.parent.mkdir()
        process = fork.Process(target=points, args=(job, paths, out, last, folder / "points"))
        process.start()
        process.join()
        return process.exitcode == -signal.SIGKILL

    assert not killed(folder / "all" / "a.mp4", 0)
    total = int((folder / "points").read_text())
    chosen = random.Random(times).sample(range(1, total + 1), times) if times > 1 else [total // 2]
    for last in sorted(chosen):
        out = folder / str(last) / "a.mp4"
        was_killed = killed(out, last)
        left = len(list(out.with_suffix(".run").glob("block-*.safetensors")))
        if (out.with_suffix(".run") / "run.json").exists():
            again = generate(job, CPU, paths, out, resume=True)
        elif not out.exists():  # killed before there was anything to go on with, or when all was done
            again = generate(job, CPU, paths, out)
        rest = sorted(path.name for path in out.parent.iterdir())
        told = {
            "kind": kind,
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


def main(folder: Path, times: int, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    (folder / "models").mkdir()
    backbone = small_backbone(folder / "models")
    for kind in kinds:
        (folder / kind).mkdir()
        job, paths = KINDS[kind](backbone, folder / kind)
        kill(kind, job, paths, folder / kind, times)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ["drawn"])
