"""What the `specar` command does about a video, whatever its options: plans it, makes it, or makes one a prompt."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from . import files
from .backbones.base import Backbone
from .bars import run_bar
from .checkpoint import check_folder
from .console import say, stderr
from .errors import SpecarError, UsageError
from .generate import Loaded, begun, generate
from .inputs import Inputs
from .job import Job, resolve
from .machine import Machine
from .models import attention, compiled
from .plan import damaged_files, plan
from .refusal import CHANGES, refusal
from .timeline import Cue, describe
from .video import check_name, check_place
from .writing import again


def machine_for(
    told: dict[str, Any], precision: str | None = None, attention: str | None = None, compiled: bool | None = None
) -> Machine:
    """This one; as it is asked for, else as an earlier video tells."""
    return Machine.here(
        precision or told.get("precision"),
        attention or told.get("attention", "auto"),
        told.get("compile", False) if compiled is None else compiled,
        told.get("threads"),
    )


def resolved(pair: Backbone, settings: dict[str, Any], inputs: Inputs) -> tuple[Job, dict[str, Path]]:
    """The job, and the files that go into it beside the models."""
    if settings.keys().isdisjoint(("prompt", "timeline", "cues")):
        raise UsageError("what should the video show? Give --prompt TEXT, or --example NAME of `specar examples`")
    source, seen = inputs.source(pair.geometry.fps)
    job, notices = resolve(pair, **settings, source=source)
    job, matched = inputs.with_loras(job)
    for notice in dict.fromkeys([*seen, *notices, *matched]):  # a LoRA may be given twice
        say(f"notice: {notice}")
    return job, inputs.paths


def show_plan(
    job: Job,
    prompts: Sequence[str],
    machine: Machine,
    models_dir: Path | None,
    named: dict[str, Path],
    out: Path,
    as_json: bool,
    *,
    overwrite: bool,
    run_dir: Path | None,
) -> None:
    models = files.models_dir(models_dir)
    there, missing = files.find(job.files, models, named)
    absent = [str(models / file.folder / file.name) for file in missing]
    planned = plan(job, machine, absent, damaged_files(job.backbone, there))
    if not prompts:
        refused = why_not(job, machine, out, overwrite=overwrite, run_dir=run_dir)
    else:
        planned, whole = replace(planned, videos=len(prompts)), not absent and not planned.damaged_files
        paths = {**job.backbone.shipped, **there}  # by which a video is known that is there already
        refused = why_not_all(videos_of(job, prompts, out), machine, paths, overwrite) if whole else None
    if as_json:
        print(json.dumps({**planned.to_dict(), "refusal": refused}, indent=1))
    else:
        print(planned.text())
        if refused:
            print("refused   " + refused.replace("\n", "\n          "))
    if refused or planned.missing_files or planned.damaged_files:
        raise typer.Exit(1)


def why_not(job: Job, machine: Machine, out: Path, *, overwrite: bool, run_dir: Path | None) -> str | None:
    """What `generate` would say, models apart, before anything is loaded."""
    folder = run_dir or out.with_suffix(".run")
    try:
        check_places(out, folder, overwrite=overwrite)
        able(job, machine, folder, CHANGES)
    except (SpecarError, UsageError) as error:
        return str(error)
    return None


def why_not_all(
    videos: Sequence[tuple[Job, Path]], machine: Machine, paths: Mapping[str, Path], overwrite: bool
) -> str | None:
    """What `generate` would say of a prompt file, models apart: of all its videos, or of those that would fail."""
    try:
        able_all(videos, machine)
    except (SpecarError, UsageError) as error:
        return str(error)
    failures = []
    for job, out in videos:
        try:
            if overwrite or not begun(job, machine, paths, out):
                check_places(out, out.with_suffix(".run"), overwrite=overwrite)
        except (SpecarError, UsageError) as error:
            failures.append(f"{out}: {error}")
    return "\n".join([f"{len(failures)} of {len(videos)} videos would fail", *failures]) if failures else None


def check_places(out: Path, folder: Path, *, overwrite: bool) -> None:
    check_place(out.absolute(), folder.absolute(), overwrite=overwrite)
    check_folder(folder.absolute())


def make_video(
    job: Job,
    machine: Machine,
    paths: dict[str, Path],
    out: Path,
    as_json: bool,
    *,
    overwrite: bool,
    run_dir: Path | None,
    resume: bool = False,
) -> None:
    machine = able(job, machine, run_dir or out.with_suffix(".run"), () if resume else CHANGES)
    if len(job.cues) > 1:
        for line in describe(job.cues, job.geometry):
            say(f"prompt: {line}")
    with run_bar(job, stderr) as listener:
        report = generate(
            job, machine, paths, out, overwrite=overwrite, run_dir=run_dir, resume=resume, listener=listener
        )
    print(json.dumps(report, indent=1) if as_json else out)


def videos_of(job: Job, prompts: Sequence[str], out: Path) -> list[tuple[Job, Path]]:
    """A video of each prompt, and its place."""
    return [
        (replace(job, cues=(Cue(0, prompt),)), out.with_name(f"{out.stem}-{number:04d}{out.suffix}"))
        for number, prompt in enumerate(prompts, 1)
    ]


def make_videos(
    job: Job,
    prompts: Sequence[str],
    machine: Machine,
    paths: dict[str, Path],
    out: Path,
    as_json: bool,
    overwrite: bool,
) -> None:
    """A video of each prompt, one after another; what failed is listed at the end.

    The same again goes on: whole videos stay, one that was begun is resumed, what failed is tried once more.
    """
    videos = videos_of(job, prompts, out)
    onward = again(overwrite, (place for _, place in videos))
    machine = able_all(videos, machine)
    loaded, reports, failures = Loaded([one for one, _ in videos], machine, paths), [], []
    for one, place in videos:
        try:
            there = not overwrite and begun(one, machine, paths, place)
            with run_bar(one, stderr) as listener:
                report = generate(
                    one,
                    machine,
                    paths,
                    place,
                    overwrite=overwrite,
                    resume=there,
                    listener=listener,
                    loaded=loaded,
                    hint=False,
                )
        except (SpecarError, UsageError) as error:
            failures.append(f"{place}: {error}")
            if isinstance(error, UsageError) and not overwrite:  # something is in its way
                onward = f"the same command again; with --overwrite it makes all {len(videos)} videos anew"
            continue
        except BaseException:
            say(f"Go on with all {len(videos)} videos: {onward}")
            raise
        reports.append(report)
        if not as_json:
            print(place)
    if as_json:
        print(json.dumps(reports, indent=1))
    if failures:
        lines = [f"{len(failures)} of {len(videos)} videos failed", *failures, f"Once that is mended: {onward}"]
        raise SpecarError("\n".join(lines))


def able_all(videos: Sequence[tuple[Job, Path]], machine: Machine) -> Machine:
    """As `able`, for the first of these videos that is not there."""
    check_name(videos[0][1])
    job, out = next((video for video in videos if not video[1].exists()), videos[0])
    return able(job, machine, out.with_suffix(".run"), CHANGES)


def able(job: Job, machine: Machine, folder: Path, changes: Collection[str]) -> Machine:
    """The machine as it can run the job; SpecarError or UsageError if it cannot.

    folder: where the video is kept until it is done; changes: the command's options that may help.
    """
    if machine.compile and (reason := compiled.no_compiler(machine.device)):
        say(f"notice: runs without --compile: {reason}")
        machine = replace(machine, compile=False)
    if machine.attention != "auto":
        attention.named(machine.device, machine.dtype, machine.attention)
    if refused := refusal(plan(job, machine), machine, folder, changes):
        raise SpecarError(refused)
    return machine
