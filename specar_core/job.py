"""Everything that decides the pixels of one video, resolved from what the user asked for and checked in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .backbones.base import Backbone
from .errors import UsageError
from .files import ModelFile
from .foreign import fits
from .geometry import Geometry, check_blocks
from .lora import Lora
from .policies import parse
from .routers import Open, Routed
from .schedule import Role, Schedule
from .source import DEFAULT_STRENGTH, Source
from .timeline import Cue, cuts, snap, within
from .timeline import parse as parse_timeline


@dataclass(frozen=True)
class Job:
    """One video. cues: its prompts; steps: each role's denoising steps; options: of the backbone, whatever else changes
    pixels."""

    backbone: Backbone
    cues: tuple[Cue, ...]
    seed: int
    width: int
    height: int
    schedule: Schedule
    steps: Mapping[Role, tuple[int, ...]]
    options: Mapping[str, Any]
    loras: tuple[Lora, ...] = ()
    source: Source | None = None

    @property
    def blocks(self) -> int:
        return self.schedule.blocks

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models this job needs: a schedule of one role leaves the other one unloaded."""
        return tuple(role for role, forwards in self.forwards.items() if forwards)

    @property
    def files(self) -> list[ModelFile]:
        """What must be on the disk: a model that no block asks for is not among them."""
        unused = {"target", "drafter"}.difference(self.roles)
        return [file for file in self.backbone.files if file.what not in unused]

    @property
    def blocks_by_role(self) -> dict[Role, int]:
        """Blocks that each role generates; at most, where that is settled while it runs."""
        targets = len(self.schedule.targets)
        return {"target": self.blocks if self.is_open else targets, "drafter": self.blocks - targets}

    @property
    def is_open(self) -> bool:
        """Whether the schedule is settled while the video is made: by a router, or by a time budget."""
        return isinstance(self.schedule, Open)

    @property
    def at_least(self) -> "Job":
        """The same with the fewest target blocks that it may come to."""
        return replace(self, schedule=self.schedule.least) if isinstance(self.schedule, Open) else self

    @property
    def commits(self) -> int:
        """How often a block is decoded and handed to the context, at most: rejected drafts are, too."""
        judged = self.blocks_by_role["drafter"] if isinstance(self.schedule, Routed) else 0
        return self.blocks + judged

    @property
    def geometry(self) -> Geometry:
        """The backbone's, as the options, the prompts and the source want it."""
        return replace(self.backbone.delivering(self.options, self.source), cuts=cuts(self.cues))

    @property
    def followed(self) -> Source | None:
        """The source, if it is a video that this one follows and does not continue."""
        return self.source if self.source and self.source.strength is not None else None

    @property
    def inputs(self) -> list[str]:
        """The files that it needs beside the models, as `paths` call them."""
        loras = [f"lora {index}" for index, _ in enumerate(self.loras, 1)]
        return [*loras, self.source.kind] if self.source else loras

    @property
    def told_options(self) -> dict[str, Any]:
        """Everything else that changes pixels, as a report tells it."""
        loras = {"lora": [lora.to_dict() for lora in self.loras]} if self.loras else {}
        return {**self.options, **loras, **(self.source.to_dict() if self.source else {})}

    @property
    def frames(self) -> int:
        return self.geometry.frames(self.blocks)

    @property
    def forwards(self) -> dict[Role, int]:
        """Forwards each model will run, at most."""
        return {role: self.backbone.forwards(self, role, blocks) for role, blocks in self.blocks_by_role.items()}

    @property
    def work(self) -> int:
        """How often `on_step` will be called, at most: once a forward, once a decoded latent frame."""
        return sum(self.forwards.values()) + self.commits * self.geometry.latent_frames


def resolve(
    backbone: Backbone,
    *,
    prompt: str = "",
    timeline: str | None = None,
    cues: Sequence[Cue] | None = None,
    seed: int = 0,
    seconds: float | None = None,
    blocks: int | None = None,
    frames: int | None = None,
    width: int | None = None,
    height: int | None = None,
    k: int | None = None,
    schedule: str | None = None,
    max_run: int | None = None,
    time_budget: float | None = None,
    steps: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
    source: Source | None = None,
) -> tuple[Job, list[str]]:
    """The job, and notices for the user about what was adjusted.

    timeline: prompts over time (see timeline.py) instead of `prompt`; cues: those that are snapped to blocks already.
    At most one of seconds, blocks and frames, and at most one of k, schedule (see policies.py), time_budget and
    max_run, of which the last two go together; what is not given is the backbone's default. Raises UsageError, naming
    the value.
    """
    width = backbone.width if width is None else width
    height = backbone.height if height is None else height
    advice = backbone.check_size(width, height)
    if not 0 <= seed < 2**64:  # -1 means "any" in some tools: none is picked here that nobody could name again
        raise UsageError(f"the seed must be from 0 to 2**64 - 1 (64 bits), not {seed}")
    chosen = _options(backbone, options or {})
    if source:
        source, told = checked(source, backbone, width, height)
        advice += told
    geometry = backbone.delivering(chosen, source)
    cues, snapped = _cues(geometry, prompt, timeline, cues)
    advice += snapped
    geometry = replace(geometry, cuts=cuts(cues))
    followed = source if source and source.strength is not None else None
    default = geometry.blocks_for_frames(followed.frames) if followed else backbone.blocks
    count = _blocks(default, geometry, seconds, blocks, frames)
    if followed:
        advice += ends(followed, geometry.frames(count), geometry.fps)
    shown, past = within(cues, geometry, count)
    spec = _spec(k, schedule, max_run, time_budget, shown)
    placed, notices = parse(backbone.default_schedule(count) if spec is None else spec, count)
    walked = _steps(backbone, steps or {})
    job = Job(backbone, shown, seed, width, height, placed, walked, chosen, source=source)
    return job, [*notices, *past, *advice, *backbone.check_options(job)]


def only_one(**asked: Any) -> None:
    """UsageError if more than one of these is given."""
    if len(given := [name.replace("_", "-") for name, value in asked.items() if value is not None]) > 1:
        raise UsageError(f"give only one of {' and '.join(given)}")


def checked(source: Source, backbone: Backbone, width: int, height: int) -> tuple[Source, list[str]]:
    """The source as this backbone uses it, and what to tell of it."""
    notices = source.fitting(width, height)
    strength = source.strength
    if source.kind == "image" or backbone.continues_video:
        if strength is not None:
            what = "an image has no strength" if source.kind == "image" else f"{backbone.name} continues a video"
            raise UsageError(f"{what}: leave out --strength {strength:g}")
        if source.kind == "video" and source.frames < backbone.geometry.later_frames:
            least = backbone.geometry.later_frames
            raise UsageError(f"a video to continue must have at least {least} frames, not {source.frames}")
        return source, notices
    strength = DEFAULT_STRENGTH if strength is None else strength
    if not 0 < strength <= 1:
        raise UsageError(
            f"the strength must be more than 0, which is the source itself, and at most 1, not {strength:g}"
        )
    if strength == 1:
        notices.append("at strength 1 nothing of the source video is left")
    return replace(source, strength=strength), notices


def ends(source: Source, frames: int, fps: int) -> list[str]:
    """What to tell where a source video is shorter or longer than the one that follows it."""
    if source.frames < frames:
        return [f"the source video ends at {source.frames / fps:.2f} s: its last frame is held to {frames / fps:.2f} s"]
    if source.frames > frames:
        return [f"of the source video's {source.frames / fps:.2f} s the first {frames / fps:.2f} s are used"]
    return []


def _options(backbone: Backbone, asked: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the backbone."""
    chosen = dict(backbone.options)
    for name, value in asked.items():
        if name not in chosen:
            raise UsageError(f"'{name.replace('_', '-')}' is not an option of {backbone.name}")
        if not fits(value, type(chosen[name])):
            raise UsageError(f"{name.replace('_', '-')} must be one such as {chosen[name]!r}, not {value!r}")
        chosen[name] = value
    return chosen


def _cues(
    geometry: Geometry, prompt: str, timeline: str | None, cues: Sequence[Cue] | None
) -> tuple[Sequence[Cue], list[str]]:
    """The prompts at their blocks, and what to tell of that."""
    only_one(prompt=prompt or None, timeline=timeline)
    if cues is not None:
        return cues, []
    return ([Cue(0, prompt)], []) if timeline is None else snap(parse_timeline(timeline), geometry)


def _blocks(default: int, geometry: Geometry, seconds: float | None, blocks: int | None, frames: int | None) -> int:
    only_one(seconds=seconds, blocks=blocks, frames=frames)
    count = default if blocks is None else blocks
    if seconds is not None:
        count = geometry.blocks_for_seconds(seconds)
    if frames is not None:
        count = geometry.blocks_for_frames(frames)
    check_blocks(count)
    return count


def _spec(
    k: int | None, schedule: str | None, max_run: int | None, time_budget: float | None, cues: Sequence[Cue]
) -> str | None:
    """The schedule that is asked for, by name; one that is keyed to the prompts gets their blocks."""
    only_one(k=k, schedule=schedule, time_budget=time_budget, max_run=max_run if time_budget is None else None)
    if k is not None:
        return f"spread:{k}"
    if time_budget is not None:
        return f"time-budget:{time_budget}" + ("" if max_run is None else f"@{max_run}")
    if max_run is not None:
        return f"max-run:{max_run}"
    if schedule is not None and schedule.startswith("keyed:") and "@" not in schedule and len(cues) > 1:
        return schedule + "@" + ",".join(str(cue.block) for cue in cues[1:])
    return schedule


def _steps(backbone: Backbone, asked: Mapping[str, Sequence[int]]) -> dict[Role, tuple[int, ...]]:
    """Those of both roles."""
    steps = dict(backbone.steps)
    for role, values in asked.items():
        if role not in steps:
            raise UsageError(f"unknown role '{role}'; the roles are target and drafter")
        steps[role] = tuple(values)  # type: ignore[index]
    return {role: backbone.check_steps(role, values) for role, values in steps.items()}
