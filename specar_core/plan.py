"""What a job will take, told before anything is loaded: frames, time, memory, disk, missing files."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch

from .backbones.base import Machine, Needs
from .errors import SpecarError
from .job import Job

# 8 bits a pixel come out of x264 at crf 17 as about this many (832x480, moving scenes); noise takes far more.
VIDEO_BITS_PER_PIXEL = 0.35
PROCESS_BYTES = 3 << 30  # Python, torch and a CUDA context


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
            "schedule": job.schedule.to_dict(),
            "forwards": job.forwards,
            "predicted_seconds": self.seconds,
            "unmeasured": self.unmeasured,
            "gpu_bytes": self.gpu_bytes,
            "gpu_bytes_by_part": dict(self.needs.rollout),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "missing_files": list(self.missing_files),
        }

    def text(self) -> str:
        job, schedule, geometry = self.job, self.job.schedule, self.job.backbone.geometry
        length = job.frames / geometry.fps
        forwards = ", ".join(f"{role} {count}" for role, count in job.forwards.items())
        seconds = "unknown: " + str(self.unmeasured) if self.seconds is None else f"{self.seconds} s"
        roles = "".join("T" if schedule.role(block) == "target" else "d" for block in range(job.blocks))
        lines = [
            f"{job.backbone.title}, {job.width}x{job.height}",
            f"length    {length:.2f} s, {job.frames} frames at {geometry.fps} fps, {job.blocks} blocks",
            f"schedule  {roles}",
            f"          {schedule.policy}, {len(schedule.targets)} targets, longest draft run {schedule.max_draft_run}",
            f"forwards  {forwards}",
            f"time      {seconds}",
            f"memory    {_gigabytes(self.gpu_bytes)} on the GPU, {_gigabytes(self.host_bytes)} on the host",
            f"disk      {_gigabytes(self.disk_bytes)} at most, while it is made",
        ]
        if self.missing_files:
            lines += ["missing   " + "\n          ".join(self.missing_files)]
            lines += [f"          get them with `specar download --backbone {job.backbone.name}`"]
        return "\n".join(lines)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def refuse(planned: Plan, machine: Machine, out: Path) -> None:
    """SpecarError, with the numbers, if the job cannot fit the card, the host's memory or the disk."""
    limits = [
        ("host memory", planned.host_bytes, host_memory()),
        ("disk space", planned.disk_bytes, free_bytes(out.absolute().parent)),
    ]
    if machine.device.type == "cuda":
        limits.append(("GPU memory", planned.gpu_bytes, torch.cuda.get_device_properties(machine.device).total_memory))
    for what, needed, there in limits:
        if needed > there:
            raise SpecarError(
                f"not enough {what}: about {_gigabytes(needed)} needed, {_gigabytes(there)} there. "
                f"See `specar plan`; a smaller size or fewer models resident (--schedule draft-only) take less."
            )


def plan(job: Job, machine: Machine, missing_files: tuple[str, ...] = ()) -> Plan:
    needs = job.backbone.needs(job, machine)
    on_gpu = machine.device.type == "cuda"
    seconds, unmeasured = predict(job, machine)
    frames_bytes = job.backbone.geometry.later_frames * job.width * job.height * 3
    return Plan(
        job=job,
        needs=needs,
        seconds=seconds,
        unmeasured=unmeasured,
        gpu_bytes=needs.peak if on_gpu else 0,
        host_bytes=PROCESS_BYTES + 4 * frames_bytes + (0 if on_gpu else needs.peak),
        disk_bytes=int(2 * job.frames * job.width * job.height * VIDEO_BITS_PER_PIXEL / 8),
        missing_files=missing_files,
    )


def card(device: torch.device) -> str:
    """The device as the table of measured costs calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def predict(job: Job, machine: Machine) -> tuple[float | None, str | None]:
    """Seconds from the first block to the finished file, models loaded and warm, and a reason if there are none."""
    table: list[Mapping[str, Any]] = json.loads((package_files(__package__) / "costs.json").read_text("utf-8"))
    name = card(machine.device)
    measured = {"card": name, "backbone": job.backbone.name, "precision": machine.precision, "compile": machine.compile}
    found = [row for row in table if all(row[key] == value for key, value in measured.items())]
    if not found:
        return None, f"{job.backbone.name} was not measured on {name} ({machine.precision})"
    row = found[0]
    scale = job.width * job.height / (row["width"] * row["height"])
    blocks = [row[job.schedule.role(b) if b else f"{job.schedule.role(b)} without context"] for b in range(job.blocks)]
    return round(scale * (sum(blocks) + row["end"]), 1), None


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def host_memory() -> int:
    """Memory this process may use: the machine's, or less if a control group (version 2 or 1) says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
