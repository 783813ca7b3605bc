"""SpecARScheduler: how long, how large, and which blocks the target generates."""

from typing import Any

from comfy_api.latest import io

from ..specar_core import backbones
from ..specar_core.errors import SpecarError
from ..specar_core.geometry import MOST_BLOCKS
from ..specar_core.job import resolve
from ..specar_core.plan import predict
from ..specar_core.scorers import scorer_of
from . import host
from .models import Models
from .prompts import cues_of
from .sockets import ModelsSocket, ScheduleSocket

AUTO = "auto"
WITH_K = ("spread", "front", "back", "random", "keyed", "stride", "max-run")
CUSTOM = "custom"
POLICIES = (AUTO, "list", "target-only", "draft-only", "first", *WITH_K, CUSTOM)
DRAWN = 300  # blocks, up to which the page draws `auto` before a run


class SpecARScheduler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARScheduler",
            display_name="SpecAR Scheduler",
            search_aliases=["speculative schedule", "target blocks"],
            description="Says beforehand which blocks the target generates; the drafter generates the others.",
            inputs=[
                ModelsSocket.Input("models", extra_dict={"pairs": {name: drawn(name) for name in backbones.NAMES}}),
                io.Float.Input(
                    "seconds", default=5.0, min=0.1, max=86400.0, step=0.1, tooltip="Rounded up to whole blocks."
                ),
                io.Int.Input(
                    "blocks", default=0, min=0, max=MOST_BLOCKS, tooltip="The length in blocks; 0 takes the seconds."
                ),
                io.Int.Input(
                    "width", default=832, min=0, max=8192, step=16, tooltip="In pixels; 0 takes the size of the pair."
                ),
                io.Int.Input(
                    "height", default=480, min=0, max=8192, step=16, tooltip="In pixels; 0 takes the size of the pair."
                ),
                io.Combo.Input(
                    "policy",
                    options=list(POLICIES),
                    tooltip="Where the target blocks go. auto: the pair's default. list: at the positions below. "
                    "spread: k of them at even distances, which keeps the longest draft run as short as k allows. "
                    "keyed: one at each change of the connected prompts, and the others evenly. custom: as written "
                    "below.",
                ),
                io.Int.Input(
                    "k",
                    default=7,
                    min=0,
                    max=1_000_000,
                    tooltip="How many blocks the target generates (spread, front, back, random, keyed), every how many "
                    "blocks (stride), or the longest draft run (max-run).",
                ),
                io.String.Input(
                    "positions",
                    default="0",
                    tooltip="Target blocks for the policy list, counted from 0: 0,5,10. Block 0 should be among them.",
                ),
                io.Conditioning.Input(
                    "prompts",
                    optional=True,
                    tooltip="A SpecAR Prompt Timeline, for the policy keyed and for the length of videos with cuts.",
                ),
                io.String.Input(
                    "custom",
                    default="",
                    optional=True,
                    tooltip="For the policy custom, as the command line's --schedule takes it. Routers judge drafts: "
                    "sdvg:0.7 (the least score), sdvg-quantile:7 (target blocks on average). time-budget:30 (seconds). "
                    "With @5 behind any of them no draft run is longer. random:7@3 (a seed).",
                ),
                io.Int.Input(
                    "stitch",
                    default=0,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="The drafter does the first steps of every target block except block 0, as many as this. "
                    "krea and tiny.",
                ),
            ],
            outputs=[ScheduleSocket.Output(display_name="schedule")],
        )

    @classmethod
    def execute(
        cls, models: Models, seconds, blocks, width, height, policy, k, positions, prompts=None, custom="", stitch=0
    ) -> io.NodeOutput:
        job, notices = resolve(
            models.backbone,
            cues=cues_of(prompts, models.backbone) if prompts else None,
            seconds=None if blocks else seconds,
            blocks=blocks or None,
            width=width or None,
            height=height or None,
            schedule=custom if policy == CUSTOM else specification(policy, k, positions),
            options={"stitch": stitch} if stitch else None,
        )
        if (known := scorer_of(job)) and (reason := known.missing()):
            raise SpecarError(f"{reason}\nThen start ComfyUI again, where that is set.")
        models.check(job.roles)
        predicted, unmeasured = predict(job, models.machine)
        length = job.frames / job.backbone.geometry.fps
        schedule = job.schedule.to_dict()
        told = {
            **schedule,
            "frames": job.frames,
            "fps": job.backbone.geometry.fps,
            "seconds": length,
            "width": job.width,
            "height": job.height,
            "predicted_seconds": predicted,
            "unmeasured": unmeasured,
            "notices": notices,
        }
        time = "" if predicted is None else f", about {predicted:.0f} s"
        least, most = ("at least ", "at most ") if job.is_open else ("", "")
        host.say(
            f"{job.frames} frames, {length:.2f} s: {job.blocks} blocks, {least}{len(job.schedule.targets)} by the "
            f"target, longest draft run {most}{job.schedule.max_draft_run}{time}"
            + "".join(f"\n{notice}" for notice in notices)
        )
        return io.NodeOutput(job, ui={"specar_schedule": [told]})


def drawn(name: str) -> dict[str, Any]:
    """What the page must know of a pair to draw its schedules before a run; the node itself does not need it."""
    backbone = backbones.backbone(name)
    return {
        "fps": backbone.geometry.fps,
        "first_frames": backbone.geometry.frames(1),
        "later_frames": backbone.geometry.later_frames,
        "clip_frames": backbone.geometry.clip_start,
        "auto": [backbone.default_schedule(blocks) for blocks in range(1, DRAWN + 1)],
    }


def specification(policy: str, k: int, positions: str) -> str | None:
    """The schedule's name as the library and the command line write it."""
    if policy == AUTO:
        return None
    if policy == "list":
        return f"list:{positions}"
    return f"{policy}:{k}" if policy in WITH_K else policy
