"""What a job will take, told before anything is loaded: frames, time, memory, disk, missing and damaged files."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from .backbones.base import Backbone, Needs
from .errors import SpecarError, UsageError
from .files import require
from .job import Job
from .machine import Machine, card
from .routers import Routed
from .scorers import scorer_of
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
SHOWN = 400  # blocks of a schedule


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
    videos: int = 1  # like this one, one after another

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
            "videos": self.videos,
            "predicted_seconds": self.seconds,
            "predicted_seconds_of_all": None if self.seconds is None else round(self.videos * self.seconds, 1),
            "unmeasured": self.unmeasured,
            "gpu_bytes": self.gpu_bytes,
            "gpu_bytes_by_part": dict(self.needs.rollout) if self.gpu_bytes else {},
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "disk_bytes_of_all": self.videos * self.disk_bytes,
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
        on_gpu = f"{readable(self.gpu_bytes)} on the GPU, " if self.gpu_bytes else ""
        seconds = "unknown: " + str(self.unmeasured) if self.seconds is None else f"{self.seconds} s"
        disk = f"{readable(self.disk_bytes)} at most, while it is made"
        videos = []
        if self.videos > 1:
            videos = [f"videos    {self.videos}, each of them:"]
            seconds += "" if self.seconds is None else f", {self.videos * self.seconds:.1f} s for all"
            disk += f"; {readable(self.videos * self.disk_bytes)} for all"
        lines = [
            f"{job.backbone.title}, {job.width}x{job.height}",
            *videos,
            f"length    {length:.2f} s, {job.frames} frames at {geometry.fps} fps, {_count(job.blocks, 'block')}",
            *(f"prompt    {line}" for line in describe(job.cues, job.geometry) if len(job.cues) > 1),
            f"schedule  {schedule.strip[:SHOWN]}{'...' if job.blocks > SHOWN else ''}",
            f"          {schedule.policy}, {targets}, longest draft run {schedule.max_draft_run}",
            f"forwards  {forwards}",
            f"time      {seconds}",
            f"memory    {on_gpu}{readable(self.host_bytes)} on the host",
            f"disk      {disk}",
        ]
        if self.missing_files:
            lines += ["missing   " + "\n          ".join(self.missing_files)]
            lines += [f"          get them with `specar download --backbone {job.backbone.name}`"]
        lines += [f"unusable  {fault}" for fault in self.damaged_files]
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def readable(size: int) -> str:
    """Bytes, in a unit that fits."""
    unit, name = next((unit for unit in ((1e9, "GB"), (1e6, "MB")) if size >= unit[0]), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


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
    if known := scorer_of(job):  # judges while both models and the decoder's histories are there
        needs = replace(needs, rollout={**needs.rollout, "scorer": known.device_bytes})
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
    sound = AUDIO_BYTES * job.frames / geometry.fps if job.followed else 0
    latent_bytes = 4 * math.prod(geometry.latent_shape(job.width, job.height)) // geometry.latent_frames
    texts = len(json.dumps([job.told_options, [cue.to_dict() for cue in job.cues]]))
    report = REPORT_BYTES + texts + job.blocks * REPORT_BLOCK_BYTES
    video = VIDEO_FILE_BYTES + job.frames * frame_bytes
    return int(2 * video + sound) + COPIES * report + job.blocks * job.backbone.checkpoint_frames * latent_bytes


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
    if reason := backbone.unmeasured(job):
        return None, reason
    if job.followed:
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
