"""SpecARLora: a LoRA on the target, the drafter or both."""

from dataclasses import replace

from comfy_api.latest import io

from . import host
from .models import Models
from .sockets import ModelsSocket

NONE = "none"
ROLES = ("auto", "target", "drafter")


class SpecARLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return host.schema(
            node_id="SpecARLora",
            display_name="SpecAR LoRA",
            search_aliases=["lora", "load lora", "style"],
            description="Puts a LoRA on the models. Several in a row add up. What matched is told when the sampler "
            "runs; a LoRA that fits neither model is an error.",
            inputs=[
                ModelsSocket.Input("models"),
                io.Combo.Input(
                    "lora",
                    options=[NONE, *host.listed("loras")],
                    tooltip="From your loras folders, in the naming of diffusers, Wan, musubi, kohya or ComfyUI.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    tooltip="0 leaves the models as they are; below 0 does the opposite.",
                ),
                io.Combo.Input(
                    "role",
                    options=list(ROLES),
                    tooltip="Which model it is for. auto: each that it fits. One that changes the target only lets the "
                    "drafter's blocks look different.",
                ),
            ],
            outputs=[ModelsSocket.Output(display_name="models")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora, strength, role, models=None) -> tuple[int, int] | None:
        """A file that was exchanged is loaded anew."""
        if lora == NONE:
            return None
        told = host.chosen("loras", lora).stat()
        return told.st_size, told.st_mtime_ns

    @classmethod
    def execute(cls, models: Models, lora, strength, role) -> io.NodeOutput:
        if lora == NONE or not strength:
            return io.NodeOutput(models)
        one = (None if role == "auto" else role, host.chosen("loras", lora), float(strength))
        return io.NodeOutput(replace(models, loras=(*models.loras, one)))
