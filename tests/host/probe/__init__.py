"""A node pack for tests: odd inputs for SpecAR's nodes, a look at its outputs, and what is alive in the process."""

import gc

import torch
from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from PIL import Image
from server import PromptServer


@PromptServer.instance.routes.get("/probe")
async def alive(request):
    """How many objects of SpecAR's classes exist."""
    names = ("CausalWan", "WanVAE", "KeyValueCache", "TinyText")
    found = [type(thing).__name__ for thing in gc.get_objects() if "specar_core" in str(type(thing).__module__)]
    return web.json_response({name: found.count(name) for name in names})


@PromptServer.instance.routes.post("/probe/fail-previews")
async def fail_previews(request):
    """The next pictures cannot be made: {"times": how many}."""
    times = (await request.json())["times"]
    make = Image.fromarray

    def fail(*arguments, **options):
        nonlocal times
        if times:
            times -= 1
            raise MemoryError("no room for a preview")
        Image.fromarray = make
        return make(*arguments, **options)

    Image.fromarray = fail
    return web.json_response({})


class ProbeConditioning(io.ComfyNode):
    """CONDITIONING of any width and number of prompts."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeConditioning",
            inputs=[io.Int.Input("width", default=4096), io.Int.Input("prompts", default=1)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, width, prompts):
        return io.NodeOutput([[torch.zeros(1, 7, width), {"pooled_output": None}]] * prompts)


class ProbeImages(io.ComfyNode):
    """Shows the shape of an IMAGE and every frame's mean."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeImages", is_output_node=True, inputs=[io.Image.Input("images")], outputs=[io.Image.Output()]
        )

    @classmethod
    def execute(cls, images):
        return io.NodeOutput(images, ui={"shape": list(images.shape), "means": images.mean(dim=(1, 2, 3)).tolist()})


class ProbeExtension(ComfyExtension):
    async def get_node_list(self):
        return [ProbeConditioning, ProbeImages]


async def comfy_entrypoint():
    return ProbeExtension()
