"""The files that go into a video beside the models: an image or a video to begin with, and LoRAs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import lora
from .errors import UsageError
from .job import Job
from .report import quick_digest
from .schedule import Role
from .source import Source, length, read_image, video_size

NAMES = ("lora", "image", "video", "strength")  # what a report's options tell of them


@dataclass(frozen=True)
class Inputs:
    """loras: (the one role that it is for, file, strength); path: the file of what the video begins with or follows."""

    loras: tuple[tuple[Role | None, Path, float], ...] = ()
    kind: Literal["image", "video"] | None = None
    path: Path | None = None
    strength: float | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """As `generate` wants them."""
        given = {f"lora {index}": path for index, (_, path, _) in enumerate(self.loras, 1)}
        return {**given, self.kind: self.path} if self.kind and self.path else given

    def source(self, fps: int) -> tuple[Source | None, list[str]]:
        """What the video begins with or follows, and what to tell of it."""
        if self.kind is None or self.path is None:
            if self.strength is not None:
                raise UsageError(f"a strength of {self.strength:g} is for --video FILE, and there is none")
            return None, []
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a folder and no {self.kind}")
        if not self.path.is_file():
            raise UsageError(f"there is no {self.kind} {self.path}")
        notices: list[str] = []
        if self.kind == "image":
            image, notices = read_image(self.path)
            (height, width), frames = image.shape[2:], 1
        else:
            (width, height), frames = video_size(self.path), length(self.path, fps)
        digest = quick_digest(self.path)
        return Source(self.kind, self.path.name, digest, width, height, frames, self.strength), notices

    def with_loras(self, job: Job) -> tuple[Job, list[str]]:
        """The job with the LoRAs on the models that they fit, and what to tell of them. Reads headers only."""
        if not self.loras:
            return job, []
        networks = {role: job.backbone.outline(role) for role in job.roles}
        fitted, notices = [], []
        for asked, path, strength in self.loras:
            if not path.is_file():
                raise UsageError(f"there is no LoRA {path}")
            one, told = lora.fitted(lora.Lora(path.name, quick_digest(path), strength, asked), path, networks)
            fitted.append(one)
            notices += told
        notices += lora.lacking(fitted, job.roles, None if job.is_open else job.schedule)
        return replace(job, loras=tuple(fitted)), notices


def asked_inputs(
    loras: Sequence[str],
    image: Path | None,
    video: Path | None,
    strength: float | None,
    told: Mapping[str, Any],
    folders: Sequence[Path],
) -> Inputs:
    """What is asked for; in the place of what is not, what an earlier video was made with.

    loras: `[ROLE=]FILE[:STRENGTH]`; told: the options of its report; folders: where files are looked for.
    """
    if image and video:
        raise UsageError("give only one of image and video")
    replaced = {*(["lora"] if loras else []), *(["image", "video", "strength"] if image or video else [])}
    inputs = of_options({name: value for name, value in told.items() if name not in replaced}, {}, folders)
    if loras:
        parsed = [lora.parse(text) for text in loras]
        found = [(role, find(file, folders, "LoRA"), number) for role, file, number in parsed]
        inputs = replace(inputs, loras=tuple(found))
    if image or video:
        inputs = replace(inputs, kind="image" if image else "video", path=image or video)
    return inputs if strength is None else replace(inputs, strength=strength)


def of_options(options: Mapping[str, Any], files: Mapping[str, str], folders: Sequence[Path]) -> Inputs:
    """What an earlier video was made with, from the options of its report. files: where they were, if that is known."""

    def place(what: str, told: Mapping[str, Any]) -> Path:
        return Path(files[what]) if what in files else find(told["file"], folders, what)

    given = []
    for index, told in enumerate(options.get("lora", ()), 1):
        role = told["roles"][0] if len(told["roles"]) == 1 else None
        given.append((role, place(f"lora {index}", told), float(told["strength"])))
    kind: Any = next((kind for kind in ("image", "video") if kind in options), None)
    return Inputs(tuple(given), kind, place(kind, options[kind]) if kind else None, options.get("strength"))


def find(file: str, folders: Sequence[Path], what: str) -> Path:
    """UsageError if the file is in none of these folders."""
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    where = ", ".join(str(folder.absolute()) for folder in folders)
    raise UsageError(f"there is no {what} {file} in {where}")


def changed_inputs(told: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was: files of an earlier report's options that are others now."""

    def files(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        named = {f"LoRA {told['file']}": told for told in options.get("lora", ())}
        return {**named, **{kind: options[kind] for kind in ("image", "video") if kind in options}}

    before, here = files(told), files(now)
    return [
        f"the {what} is not the file it was made with"
        for what in before.keys() & here.keys()
        if before[what]["digest"] != here[what]["digest"]
    ]
