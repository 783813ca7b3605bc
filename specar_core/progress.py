"""Progress for people, on a terminal: what is loaded, which block and step runs, and how long it will still take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .backbones.base import Step
from .download import Progress as DownloadProgress
from .generate import Listener
from .job import Job
from .rollout import BlockResult


def bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Forecast:
    """Seconds left: drafter and target blocks cost different amounts, learnt from the blocks so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: dict[str, list[float]] = {"target": [], "drafter": []}

    def learn(self, result: BlockResult) -> None:
        self.seconds[result.role].append(result.seconds)

    def left(self, done: int) -> float | None:
        means = {role: sum(times) / len(times) for role, times in self.seconds.items() if times}
        rest = [self.job.schedule.role(block) for block in range(done, self.job.blocks)]
        return sum(means[role] for role in rest) if all(role in means for role in rest) else None


@contextmanager
def shown(job: Job, console: Console) -> Iterator[Listener]:
    forecast, started = Forecast(job), time.perf_counter()
    with bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def loading(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"loading the {what}", completed=done, total=total)

        def step(block: int, step: Step) -> None:
            role = job.schedule.role(block)
            what = "decoding" if step.kind == "decode" else f"{role}, step {step.index} of {step.count}"
            left = forecast.left(block)
            frames = job.backbone.geometry.frames(block, job.keep_first_frames)
            rate = f", {frames / (time.perf_counter() - started):.1f} fps" if block else ""
            rest = "" if left is None else f", {left:.0f} s left"
            progress.update(
                task,
                description=f"block {block + 1} of {job.blocks}, {what}{rate}{rest}",
                completed=block + step.index / (step.count + 1) * (0.5 if step.kind != "decode" else 1),
                total=job.blocks,
            )

        def block(result: BlockResult) -> None:
            forecast.learn(result)
            progress.update(task, completed=result.index + 1)

        yield Listener(loading, step, block)


@contextmanager
def downloading(console: Console) -> Iterator[Callable[[DownloadProgress], None]]:
    with bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def update(state: DownloadProgress) -> None:
            progress.update(
                task, description=f"{state.stage} {state.file.name}", completed=state.done, total=state.total
            )

        yield update
