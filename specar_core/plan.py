"""What a job will take, told before anything is loaded: frames, time, memory, disk, missing and damaged files."""

import json
import math
import os
import shutil
import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch

from .backbones.base import Backbone, Machine, Needs
from .errors import SpecarError, UsageError
from .files import require
from .job import Job
from .policies import parse
from .routers import Routed
from .scorers import SCORERS, unjudged
from .tensor_files import open_checkpoint
from .timeline import describe

# More than x264 at crf 17 made of any scene: 0.35 bits a pixel at 832x480, up to 1 at 96x64. Noise takes 6.
VIDEO_BITS_PER_PIXEL = 1.5
VIDEO_FILE_BYTES, VIDEO_FRAME_BYTES = 1 << 12, 100  # whatever the size: headers, the encoder's settings, the index
AUDIO_BYTES = 40_000  # a second
REPORT_BYTES, REPORT_BLOCK_BYTES = 1 << 12, 1 << 9  # beside the texts in it
COPIES = 3  # of the report: in the video, beside it, and in the run's folder with its blocks
PROCESS_BYTES = 1 << 30  # Python, torch, and the libraries for text and video (0.4 GB)
CUDA_BYTES = 2 << 30  # what its context takes on the host
GPU_MARGIN = 1 << 30  # what torch's allocator holds without using it, and the workspaces of libraries


@dataclass(frozen=True)
class Plan:
    job: Job
    needs: Needs
    seconds: float | None  # how long it will take; None where nobody measured, and `unmeasured` says so
    unmeasured: str | None
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    missing_files: tuple[str, ...]
    damaged_files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        job = self.job
        return {
            "backbone": job.backbone.name,
            "blocks": job.blocks,
            "frames": job.frames,
            "fps": job.backbone.geometry.fps,
            "seconds": job.frames / job.backbone.geometry.fps,
            "width": job.width,
            "height": job.height,
            "prompts": [cue.to_dict() for cue in job.cues],
            "schedule": job.schedule.to_dict(),
            "forwards": job.forwards,
            "forwards_at_least": job.at_least.forwards,
            "predicted_seconds": self.seconds,
            "unmeasured": self.unmeasured,
            "gpu_bytes": self.gpu_bytes,
            "gpu_bytes_by_part": dict(self.needs.rollout) if self.gpu_bytes else {},
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "missing_files": list(self.missing_files),
            "damaged_files": list(self.damaged_files),
        }

    def text(self) -> str:
        job, schedule, geometry = self.job, self.job.schedule, self.job.backbone.geometry
        length = job.frames / geometry.fps
        fewest = job.at_least.forwards
        forwards = ", ".join(
            f"{role} {count}" if count == fewest[role] else f"{role} {fewest[role]} to {count}"
            for role, count in job.forwards.items()
        )
        targets = f"{'at least ' if job.is_open else ''}{_count(len(job.at_least.schedule.targets), 'target')}"
        on_gpu = f"{_size(self.gpu_bytes)} on the GPU, " if self.gpu_bytes else ""
        seconds = "unknown: " + str(self.unmeasured) if self.seconds is None else f"{self.seconds} s"
        lines = [
            f"{job.backbone.title}, {job.width}x{job.height}",
            f"length    {length:.2f} s, {job.frames} frames at {geometry.fps} fps, {_count(job.blocks, 'block')}",
            *(f"prompt    {line}" for line in describe(job.cues, job.geometry) if len(job.cues) > 1),
            f"schedule  {schedule.strip}",
            f"          {schedule.policy}, {targets}, longest draft run {schedule.max_draft_run}",
            f"forwards  {forwards}",
            f"time      {seconds}",
            f"memory    {on_gpu}{_size(self.host_bytes)} on the host",
            f"disk      {_size(self.disk_bytes)} at most, while it is made",
        ]
        if self.missing_files:
            lines += ["missing   " + "\n          ".join(self.missing_files)]
            lines += [f"          get them with `specar download --backbone {job.backbone.name}`"]
        lines += [f"unusable  {fault}" for fault in self.damaged_files]
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    unit, name = next((unit for unit in ((1e9, "GB"), (1e6, "MB")) if size >= unit[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


CHANGES = ("--blocks", "--width", "--schedule")


def refusal(planned: Plan, machine: Machine, folder: Path, changes: Collection[str] = CHANGES) -> str | None:
    """Why the job cannot run here, with the numbers and the smallest change that would help; None if it can.

    folder: where the video is kept while it is made; what an unfinished run left there need not fit once more. changes:
    the options that the user has to change it.
    """
    if reason := unjudged(planned.job):
        return reason
    present = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    there = {"host memory": host_memory(), "disk space": free_bytes(folder) + present}
    if machine.device.type == "cuda":
        if machine.precision == "bf16" and torch.cuda.get_device_capability(machine.device) < (8, 0):
            return f"{card(machine.device)} has no bf16 (that takes compute capability 8.0): use --precision fp32"
        there["GPU memory"], total = torch.cuda.mem_get_info(machine.device)
        missing = shortages(planned, {**there, "GPU memory": total})
        if not missing and (missing := shortages(planned, there)):
            held = _size(total - there["GPU memory"])
            return f"{'; '.join(missing)}: other programs hold {held} of the GPU, close some"
    missing = shortages(planned, there)
    return f"{'; '.join(missing)}. {smallest_change(planned.job, machine, there, changes)}." if missing else None


def shortages(planned: Plan, there: Mapping[str, int]) -> list[str]:
    needs = {
        "GPU memory": planned.gpu_bytes + GPU_MARGIN,
        "host memory": planned.host_bytes,
        "disk space": planned.disk_bytes,
    }
    return [
        f"not enough {what}: about {_size(needs[what])} needed, {_size(size)} there"
        for what, size in there.items()
        if needs[what] > size
    ]


def smallest_change(job: Job, machine: Machine, there: Mapping[str, int], options: Collection[str] = CHANGES) -> str:
    """What to try. For the disk, fewer blocks; for memory the first of a smaller size, the drafter alone, and both."""

    def fits(change: tuple[str, Job]) -> bool:
        return not shortages(plan(change[1], machine), there)

    alone = replace(job, schedule=parse("draft-only", job.blocks)[0])
    sizes = [(f"--schedule draft-only {text}", change) for text, change in smaller(alone)]
    ways: list[Sequence[tuple[str, Job]]] = [list(smaller(job)), [("--schedule draft-only", alone)], sizes]
    if not shortages(plan(job, machine), {**there, "disk space": sys.maxsize}):
        lengths = range(job.blocks - 1, 0, -1)
        first = bisect_left(lengths, True, key=lambda blocks: fits(shorter(job, blocks)))
        ways = [[shorter(job, blocks)] for blocks in lengths[first : first + 1]]
    for changes in ways:  # each falls from the smallest change to the largest
        if changes and changes[0][0].split()[0] not in options:
            continue
        if (first := bisect_left(changes, True, key=fits)) < len(changes):
            return f"It fits with {changes[first][0]}"
    return "Nothing smaller fits: more memory or another disk is needed" if options else "Make room for it"


def shorter(job: Job, blocks: int) -> tuple[str, Job]:
    targets = tuple(block for block in job.schedule.targets if block < blocks)
    return f"--blocks {blocks}", replace(job, schedule=replace(job.schedule, blocks=blocks, targets=targets))


def smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """The same shape at down to half the width."""
    step = job.backbone.geometry.size_multiple
    for width in range(job.width - step, max(job.width // 2, step) - 1, -step):
        height = max(step, round(job.height * width / job.width / step) * step)
        yield f"--width {width} --height {height}", replace(job, width=width, height=height)


def damaged_files(backbone: Backbone, paths: Mapping[str, Path]) -> list[str]:
    """What is wrong with the files of these models: cut off, another model, ... Headers only, so it takes no time."""
    faults = []
    for what, path in paths.items():
        try:
            backbone.check_model(what, open_checkpoint(path))
        except (SpecarError, UsageError) as error:
            faults.append(str(error))
    return faults


def model_files(job: Job, models: Path, named: Mapping[str, Path]) -> dict[str, Path]:
    """Each file: shipped, named, or below the folder `models`. SpecarError if one is missing or damaged."""
    required = require(job.files, models, job.backbone.name, named)
    if faults := damaged_files(job.backbone, required):
        raise SpecarError("\n".join(faults))
    return {**job.backbone.shipped, **required}


def plan(job: Job, machine: Machine, missing_files: Sequence[str] = (), damaged_files: Sequence[str] = ()) -> Plan:
    needs = job.backbone.needs(job, machine)
    if isinstance(job.schedule, Routed):  # judges while both models and the decoder's histories are there
        needs = replace(needs, rollout={**needs.rollout, "scorer": SCORERS[job.backbone.scorer].device_bytes})
    on_gpu = machine.device.type == "cuda"
    seconds, unmeasured = predict(job, machine)
    geometry = job.backbone.geometry
    frames_bytes = geometry.later_frames * job.width * job.height * 3
    return Plan(
        job=job,
        needs=needs,
        seconds=seconds,
        unmeasured=unmeasured,
        gpu_bytes=needs.peak if on_gpu else 0,
        host_bytes=PROCESS_BYTES + 4 * frames_bytes + (CUDA_BYTES if on_gpu else needs.peak),
        disk_bytes=disk_bytes(job),
        missing_files=tuple(missing_files),
        damaged_files=tuple(damaged_files),
    )


def disk_bytes(job: Job) -> int:
    """At most, of anything but noise: the segments, the video that they are joined to, and the blocks' checkpoints."""
    geometry = job.backbone.geometry
    frame_bytes = VIDEO_FRAME_BYTES + job.width * job.height * VIDEO_BITS_PER_PIXEL / 8
    sound = AUDIO_BYTES * job.frames / geometry.fps if job.source and job.source.strength is not None else 0
    latent_bytes = 4 * math.prod(geometry.latent_shape(job.width, job.height)) // geometry.latent_frames
    texts = len(json.dumps([job.told_options, [cue.to_dict() for cue in job.cues]]))
    report = REPORT_BYTES + texts + job.blocks * REPORT_BLOCK_BYTES
    video = VIDEO_FILE_BYTES + job.frames * frame_bytes
    return int(2 * video + sound) + COPIES * report + job.blocks * job.backbone.checkpoint_frames * latent_bytes


def card(device: torch.device) -> str:
    """The device as the table of measured costs calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def predict(job: Job, machine: Machine) -> tuple[float | None, str | None]:
    """Seconds from the first block to the finished file, models loaded and warm, and a reason if there are none.

    From the table that benchmarks/costs.py writes, in proportion to the pixels and to the forwards of a block.
    """
    table: list[Mapping[str, Any]] = json.loads((package_files(__package__) / "costs.json").read_text("utf-8"))
    name, backbone = card(machine.device), job.backbone
    measured = {"card": name, "backbone": backbone.name, "precision": machine.precision, "compile": machine.compile}
    found = [row for row in table if all(row[key] == value for key, value in measured.items())]
    if not found:
        return None, f"{backbone.name} was not measured on {name} ({machine.precision})"
    if job.options.get("guidance") == 1:
        return None, "it was measured with guidance, which takes twice the time"
    if job.source and job.source.strength is not None:
        return None, "following a video was not measured"
    most = _seconds(job, found[0])
    if job.is_open:
        judging = ", judging not counted" if isinstance(job.schedule, Routed) else ""
        return None, f"settled while it runs: {_seconds(job.at_least, found[0])} to {most} s{judging}"
    return most, None


def _seconds(job: Job, row: Mapping[str, Any]) -> float:
    seconds = 0.0
    for role, blocks in job.blocks_by_role.items():
        generating = (row[role] - row["decode"]) * job.forwards[role] / row["forwards"][role]
        seconds += generating + blocks * (row["decode"] + row["beside"])
    scale = job.width * job.height / (row["width"] * row["height"])
    return round(scale * (seconds + row["end"]), 1)


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    for place in (folder, *folder.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    raise SpecarError(f"There is no {folder.anchor} for {folder}: choose another folder.")  # a drive of Windows


def host_memory(root: Path = Path("/")) -> int:
    """Memory this process may use: the machine's, or less if its control groups (version 2 or 1) say so."""
    limits = [_installed_memory()]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            top, name = top / "memory", "memory.limit_in_bytes"
        # A container may see its own group as the top, under a path that only the host has.
        inside = top / path.strip("/")
        for folder in (inside, *inside.parents):
            limit = folder / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                limits.append(int(text))
            if folder == top:
                break
    return min(limits)


def _installed_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import ctypes

    kilobytes = ctypes.c_ulonglong()
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))  # type: ignore[attr-defined]
    return kilobytes.value << 10
