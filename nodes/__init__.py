"""The nodes, as ComfyUI asks for them."""

import logging

from comfy_api.latest import ComfyExtension, io

from .host import refusal


class SpecARExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        if reason := refusal():
            logging.getLogger("specar").error(reason)
            return []

        from .decode import SpecARVideoDecode
        from .loader import SpecARLoader
        from .lora import SpecARLora
        from .race import SpecARRace
        from .sampler import SpecARSpeculativeSampler
        from .scheduler import SpecARScheduler
        from .timeline import SpecARPromptList, SpecARPromptTimeline

        return [
            SpecARLoader,
            SpecARScheduler,
            SpecARSpeculativeSampler,
            SpecARVideoDecode,
            SpecARPromptTimeline,
            SpecARPromptList,
            SpecARLora,
            SpecARRace,
        ]
