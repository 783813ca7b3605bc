"""The race itself: one video after another from the same prompt, seed and noise, of models that are loaded once."""

import base64
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..backbones.base import roles_of
from ..errors import UsageError
from ..generate import Listener, Loaded, begun, generate, write_json
from ..job import Job
from ..machine import Machine
from ..noise import noise
from ..progress import Progress
from ..rollout import rollout
from ..schedule import Schedule
from ..score import score
from ..timeline import BlockPrompts
from ..writing import again, keep, writable, write
from . import Clip, page

log = logging.getLogger("specar")

STEADY = 2  # blocks of a role after which nothing is done for the first time


def race(
    jobs: Sequence[Job],
    machine: Machine,
    paths: Mapping[str, Path],
    out: Path,
    *,
    embed: bool = False,
    overwrite: bool = False,
    listening: Callable[[Job], Listener] = lambda job: Listener(),
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write the page `out`, the scores FILE.json and the videos FILE-1-POLICY.mp4 ... beside it; returns the scores.

    jobs: they differ in prompts and schedules only; paths: as `generate` takes them; embed: the page holds the videos,
    which lie beside it all the same. The same race again goes on with one that did not finish: its whole videos stay,
    and the one in work is resumed.
    """
    if len({job.schedule.policy for job in jobs}) < 2:
        raise UsageError("a race takes two or more different policies: --policy spread:2 --policy target-only")
    if out.suffix.lower() != ".html":
        raise UsageError(f"{out} does not end in .html, as the page of a race does")
    videos = [out.with_name(f"{out.stem}-{number}-{_slug(job)}.mp4") for number, job in enumerate(jobs, 1)]
    resume = [not overwrite and begun(job, machine, paths, video) for job, video in zip(jobs, videos, strict=True)]
    if not overwrite:
        new = [video for video, there in zip(videos, resume, strict=True) if not there]
        keep(out, *new, *(file.with_suffix(".json") for file in (new if any(resume) else [out, *new])))
    onward = again(overwrite, (out, *videos))
    writable(out, out.with_suffix(".json"), *videos)
    loaded = Loaded(jobs, machine, paths)
    if not all(there and video.exists() for video, there in zip(videos, resume, strict=True)):
        _warm_up(jobs, loaded, listening(jobs[0]), progress)
    reports = []
    try:
        for job, video, there in zip(jobs, videos, resume, strict=True):
            report = generate(
                job,
                machine,
                paths,
                video,
                overwrite=overwrite,
                resume=there,
                listener=listening(job),
                loaded=loaded,
                hint=False,
            )
            reports.append(report)
    except BaseException:
        log.warning("Go on with the whole race: %s", onward)
        raise
    addresses = [_embedded(video) if embed else quote(video.name) for video in videos]
    clips = [Clip(address, report) for address, report in zip(addresses, reports, strict=True)]
    scores = score(videos, progress)
    write_json(scores, out.with_suffix(".json"))
    write(out, page(clips, scores).encode("utf-8", "replace"))
    return scores


def _warm_up(jobs: Sequence[Job], loaded: Loaded, listener: Listener, progress: Progress) -> None:
    """Some blocks of each role that nobody sees: whoever runs first must not pay for what is done once."""
    roles = roles_of(jobs)
    blocks, targets = STEADY * len(roles), range(STEADY if "target" in roles else 0)
    job = replace(jobs[0], cues=jobs[0].cues[:1], schedule=Schedule(blocks, tuple(targets)))
    prompts = BlockPrompts(job.cues, loaded.prompt(job, listener))
    shape = job.backbone.geometry.latent_shape(job.width, job.height)
    found = rollout(
        loaded.pair(job, listener),
        job.schedule,
        prompts,
        lambda block, draw: noise(job.seed, block, draw, shape),
        height=job.height,
        width=job.width,
    )
    for done, _ in enumerate(found, 1):
        progress("warming up", done, blocks)


def _slug(job: Job) -> str:
    return re.sub(r"[^A-Za-z0-9.@-]+", "-", job.schedule.policy)[:60]


def _embedded(video: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
