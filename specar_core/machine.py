"""The machine that a job runs on: what was chosen of it, and what it has."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from .errors import SpecarError, UsageError
from .models import low_precision
from .models.attention import check_name
from .schedule import Role

Precision = Literal["bf16", "fp8", "fp8-target", "fp32"]


@dataclass(frozen=True)
class Machine:
    """Where and how a job runs, as far as it should not change the video."""

    device: torch.device
    precision: Precision
    attention: str = "auto"
    compile: bool = False

    @classmethod
    def here(
        cls,
        precision: str | None = None,
        attention: str = "auto",
        compile: bool = False,
        threads: int | None = None,
    ) -> "Machine":
        """This computer. UsageError for a name that is unknown; no precision: what suits the device.

        threads: how many a CPU sums with, and so the last bits of what comes out, where a video is made again.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if threads and device.type == "cpu":
            torch.set_num_threads(threads)
        precision = precision or ("bf16" if device.type == "cuda" else "fp32")
        if precision not in get_args(Precision):
            raise UsageError(f"unknown precision '{precision}'; known are {', '.join(get_args(Precision))}")
        if precision.startswith("fp8"):
            low_precision.check(device)
        check_name(attention)
        return cls(device, precision, attention, compile)  # type: ignore[arg-type]

    def in_fp8(self, role: Role) -> bool:
        """Whether the wide layers of this model are."""
        return self.precision == "fp8" or (self.precision == "fp8-target" and role == "target")

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is not in fp8."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


def card(device: torch.device) -> str:
    """The device as reports and the table of measured costs call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


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
