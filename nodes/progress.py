"""What the page shows while a node runs: how far it is, and the newest block as a moving picture."""

import logging
import time

from PIL import Image

from ..specar_core.backbones.pair import Step
from ..specar_core.forecast import Forecast
from ..specar_core.job import Job
from ..specar_core.rollout import BlockResult
from ..specar_core.video import to_rgb8
from . import host

log = logging.getLogger("specar")

INTERVAL = 0.125  # seconds between messages to the page


class Loading:
    """Tells what is being read, as a progress function of specar_core."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        host.stop_if_asked()
        if time.monotonic() - self._told >= INTERVAL:
            self._told = time.monotonic()
            host.say(f"loading the {what}: {100 * done // total} %")


class Generating:
    def __init__(self, job: Job) -> None:
        self._job, self._forecast, self._bar = job, Forecast(job), host.ProgressBar(job.work)
        self._frames: list[Image.Image] = []  # of the newest block, the next one to show first
        self._shown = 0.0
        self._previews = host.previews_wanted()

    def step(self, block: int, step: Step) -> None:
        host.stop_if_asked()
        text = self._forecast.step(block, step)
        if time.monotonic() - self._shown < INTERVAL:
            self._bar.update(self._forecast.done)
            return
        self._shown = time.monotonic()
        host.say(text)
        if self._frames:
            self._frames.append(self._frames.pop(0))
        self._bar.update(self._forecast.done, self._frames[-1] if self._frames else None)

    def block(self, result: BlockResult) -> None:
        self._forecast.learn(result)
        self._frames = self._pictures(result) if self._previews else []
        if result.index + 1 == self._job.blocks:
            self._bar.update(self._job.work, self._frames[-1] if self._frames else None)

    def _pictures(self, result: BlockResult) -> list[Image.Image]:
        """None if that fails: the run goes on, and the next block's are tried again."""
        try:
            return [Image.fromarray(frame.numpy()) for frame in to_rgb8(result.frames[:1])[0]]
        except Exception as error:
            log.warning("no preview of block %d (%s)", result.index, error)
            return []
