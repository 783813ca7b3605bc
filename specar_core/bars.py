"""Progress for people, on a terminal: what is loaded, which block and step runs, and how long it will still take."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console

from .backbones.pair import Step
from .forecast import Forecast
from .generate import Listener
from .job import Job
from .progress import Progress


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TextColumn("{task.percentage:>3.0f} %"))
    with rich.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("starting", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


@contextmanager
def run_bar(job: Job, console: Console) -> Iterator[Listener]:
    with bar(console) as tell:
        yield run_listener(job, tell)


def run_listener(job: Job, tell: Progress) -> Listener:
    forecast = Forecast(job)

    def loading(what: str, done: int, total: int) -> None:
        tell(f"loading the {what}", done, total)

    def step(block: int, step: Step) -> None:
        text = forecast.step(block, step)
        tell(text, forecast.done, job.work)

    return Listener(loading, step, forecast.learn)
