"""SpecAR as a ComfyUI node pack. Nothing is imported here: tests and tools import this file outside ComfyUI too."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import SpecARExtension

    return SpecARExtension()
