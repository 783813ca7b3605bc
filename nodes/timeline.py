"""SpecARPromptTimeline and SpecARPromptList: several prompts, one after another or each for a video of its own."""

from dataclasses import replace

from comfy_api.latest import io

from ..specar_core.errors import UsageError
from ..specar_core.timeline import Cue, cuts, describe, parse, prompt_lines, snap
from . import host
from .models import Models
from .prompts import encode
from .sockets import ModelsSocket

EXAMPLE = "0s: a fox in snow\n4.5s fade 1s: the fox runs\n9s cut: night"


class SpecARPromptTimeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARPromptTimeline",
            display_name="SpecAR Prompt Timeline",
            search_aliases=["prompt schedule", "prompt travel", "multi shot"],
            description="Prompts that change while the video grows, at times in seconds. Each begins with the block "
            "whose beginning is nearest.",
            inputs=[
                ModelsSocket.Input("models"),
                io.Clip.Input("clip"),
                io.String.Input(
                    "timeline",
                    default=EXAMPLE,
                    multiline=True,
                    tooltip="A line a prompt: `4.5s: the fox runs`, `4.5s fade 1s: the fox runs`, `9s cut: night`. The "
                    "first begins at 0s. A fade goes from one prompt to the next; a cut begins a new clip.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="CONDITIONING")],
        )

    @classmethod
    def execute(cls, models: Models, clip, timeline) -> io.NodeOutput:
        geometry = models.backbone.geometry
        cues, notices = snap(parse(timeline), geometry)
        lines = describe(cues, replace(geometry, cuts=cuts(cues)))
        host.say("; ".join([*lines, *notices]))
        told = {"cues": [cue.to_dict() for cue in cues], "lines": lines, "notices": notices}
        return io.NodeOutput(encode(clip, cues, models.backbone), ui={"specar_timeline": [told]})


class SpecARPromptList(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARPromptList",
            display_name="SpecAR Prompt List",
            search_aliases=["prompt batch", "prompts from lines"],
            description="A video for each line: whatever this is connected to runs once for every prompt, with the "
            "models loaded once.",
            inputs=[
                io.Clip.Input("clip"),
                io.String.Input(
                    "prompts",
                    default="a fox in snow\na lighthouse at night",
                    multiline=True,
                    tooltip="A line a prompt. Empty lines and lines that begin with # are left out.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="CONDITIONING", is_output_list=True)],
        )

    @classmethod
    def execute(cls, clip, prompts) -> io.NodeOutput:
        texts = [line for _, line in prompt_lines(prompts)]
        if not texts:
            raise UsageError("`prompts` holds no prompt: write one a line")
        return io.NodeOutput([encode(clip, [Cue(0, text)]) for text in texts])
