"""What is handed to a device, and what is told of it, without waiting for the work that it has still to do."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Told = TypeVar("Told")


class Clock:
    """Moments of a device's work, marked without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another; waits until the device is there."""
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000


def sent(noise: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device."""
    if device.type != "cuda" or noise.device.type != "cpu":
        return noise.to(device)
    return noise.pin_memory().to(device, non_blocking=True)


def paced(device: torch.device, on_step: Callable[[Told], None]) -> Callable[[Told], None]:
    """`on_step`, called when at most one step is in flight: progress is true and cancelling is prompt, while the
    device always has the next step queued."""
    if device.type != "cuda":
        return on_step
    previous: torch.cuda.Event | None = None

    def wait_then_call(step: Told) -> None:
        nonlocal previous
        launched = torch.cuda.Event()
        launched.record()
        if previous is not None:
            previous.synchronize()
        previous = launched
        on_step(step)

    return wait_then_call
