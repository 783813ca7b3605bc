"""What every benchmark needs: full-size networks with random weights, the machine in words, medians of device times."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


def random_network(
    build: Callable[[], nn.Module], dtype: torch.dtype, device: str = "cuda", keep_fp32: Collection[str] = ()
) -> nn.Module:
    """A network on the device whose activations keep an ordinary scale: no weights are available, speed needs none.

    Parameters with one of `keep_fp32` as a part of their dotted name are float32.
    """
    with torch.device("meta"):
        network = build().to(dtype)
    for name, value in network.named_parameters():
        if not set(keep_fp32).isdisjoint(name.split(".")):
            value.data = value.data.float()
    network = network.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, value in network.named_parameters():
        if value.dim() == 1 or "gamma" in name:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            fan_in = value[0].numel()
            value.normal_(0, fan_in**-0.5, generator=generator)
    return network


def machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"card": "CPU", "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def milliseconds(work: Callable[[], Any], repeats: int = 7, warmup: int = 2) -> float:
    """Median device time of one call."""
    for _ in range(warmup):
        work()
    return statistics.median(timed(work) for _ in range(repeats))


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds of one call by the GPU's clock, or by ours where there is no GPU."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Stages:
    """Device seconds by stage, from an event after every step of a rollout. Pass it as `on_step`."""

    def __init__(self) -> None:
        self.events: list[tuple[str, torch.cuda.Event]] = []
        self.mark("start")

    def mark(self, stage: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((stage, event))

    def __call__(self, block: int, step: Any) -> None:
        self.mark(step.role or step.kind)

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self.events, self.events[1:], strict=False):
            totals[stage] = totals.get(stage, 0.0) + before.elapsed_time(after) / 1000
        return {stage: round(seconds, 3) for stage, seconds in totals.items()}
