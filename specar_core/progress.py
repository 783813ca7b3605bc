"""Progress for people, on a terminal: what is loaded, which block and step runs, and how long it will still take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .backbones.base import Step
from .download import Progress as DownloadProgress
from .forecast import Forecast
from .generate import Listener
from .job import Job


def bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def shown(job: Job, console: Console) -> Iterator[Listener]:
    forecast = Forecast(job)
    with bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def loading(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"loading the {what}", completed=done, total=total)

        def step(block: int, step: Step) -> None:
            text = forecast.step(block, step)
            progress.update(task, description=text, completed=forecast.done, total=job.work)

        yield Listener(loading, step, forecast.learn)


@contextmanager
def downloading(console: Console) -> Iterator[Callable[[DownloadProgress], None]]:
    with bar(console) as progress:
        task = progress.add_task("starting", total=None)

        def update(state: DownloadProgress) -> None:
            progress.update(
                task, description=f"{state.stage} {state.file.name}", completed=state.done, total=state.total
            )

        yield update
