"""Everything that decides the pixels of one video, resolved from what the user asked for and checked in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .backbones.base import Backbone
from .errors import UsageError
from .policies import parse
from .schedule import Role, Schedule


@dataclass(frozen=True)
class Job:
    """One video. `steps` are each role's denoising steps, `options` whatever else changes pixels."""

    backbone: Backbone
    prompt: str
    seed: int
    width: int
    height: int
    schedule: Schedule
    steps: Mapping[Role, tuple[int, ...]]
    options: Mapping[str, Any]

    @property
    def blocks(self) -> int:
        return self.schedule.blocks

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models this job needs: a schedule of one role leaves the other one unloaded."""
        return tuple(role for role, blocks in self.blocks_by_role.items() if blocks)

    @property
    def blocks_by_role(self) -> dict[Role, int]:
        targets = len(self.schedule.targets)
        return {"target": targets, "drafter": self.blocks - targets}

    @property
    def keep_first_frames(self) -> bool:
        return bool(self.options.get("keep_first_frames"))

    @property
    def frames(self) -> int:
        return self.backbone.geometry.frames(self.blocks, self.keep_first_frames)

    @property
    def forwards(self) -> dict[Role, int]:
        """Forwards each model will run."""
        return {role: self.backbone.forwards(self, role, blocks) for role, blocks in self.blocks_by_role.items()}

    @property
    def work(self) -> int:
        """How often `on_step` will be called: once a forward, once a decoded latent frame."""
        return sum(self.forwards.values()) + self.blocks * self.backbone.geometry.latent_frames


def resolve(
    backbone: Backbone,
    *,
    prompt: str = "",
    seed: int = 0,
    seconds: float | None = None,
    blocks: int | None = None,
    frames: int | None = None,
    width: int | None = None,
    height: int | None = None,
    k: int | None = None,
    schedule: str | None = None,
    max_run: int | None = None,
    steps: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Job, list[str]]:
    """The job, and notices for the user about what was adjusted.

    At most one of seconds, blocks and frames, and at most one of k, schedule (see policies.py) and max_run; what is not
    given is the backbone's default. Raises UsageError, naming the value.
    """
    width, height = width or backbone.width, height or backbone.height
    advice = backbone.check_size(width, height)
    if not 0 <= seed < 2**64:  # -1 means "any" in some tools: none is picked here that nobody could name again
        raise UsageError(f"the seed must be from 0 to 2**64 - 1 (64 bits), not {seed}")
    chosen = dict(backbone.options)
    for name, value in (options or {}).items():
        if name not in chosen:
            raise UsageError(f"'{name.replace('_', '-')}' is not an option of {backbone.name}")
        chosen[name] = value
    advice += backbone.check_options(chosen)

    count = _blocks(backbone, seconds, blocks, frames, bool(chosen.get("keep_first_frames")))
    asked = {"k": k, "schedule": schedule, "max-run": max_run}
    if len(given := [name for name, value in asked.items() if value is not None]) > 1:
        raise UsageError(f"give only one of {' and '.join(given)}")
    spec = schedule or (f"spread:{k}" if k is not None else f"max-run:{max_run}" if max_run is not None else None)
    placed, notices = parse(spec or backbone.default_schedule(count), count)

    resolved = dict(backbone.steps)
    for role, values in (steps or {}).items():
        if role not in resolved:
            raise UsageError(f"unknown role '{role}'; the roles are target and drafter")
        resolved[role] = tuple(values)  # type: ignore[index]
    resolved = {role: backbone.check_steps(role, values) for role, values in resolved.items()}
    job = Job(backbone, prompt, seed, width, height, placed, resolved, chosen)
    return job, [*notices, *advice]


def _blocks(
    backbone: Backbone, seconds: float | None, blocks: int | None, frames: int | None, keep_first_frames: bool
) -> int:
    asked = {"seconds": seconds, "blocks": blocks, "frames": frames}
    if len(given := [name for name, value in asked.items() if value is not None]) > 1:
        raise UsageError(f"give only one of {' and '.join(given)}")
    if seconds is not None:
        return backbone.geometry.blocks_for_seconds(seconds, keep_first_frames)
    if frames is not None:
        return backbone.geometry.blocks_for_frames(frames, keep_first_frames)
    if blocks is not None and blocks < 1:
        raise UsageError(f"a video needs at least 1 block, not {blocks}")
    return backbone.blocks if blocks is None else blocks
