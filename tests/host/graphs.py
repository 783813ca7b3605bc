"""Graphs in the API's form."""

from typing import Any

Graph = dict[str, dict[str, Any]]
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
PROMPT = "a large red ball bouncing on a plain grey background"


def tiny(**inputs: Any) -> Graph:
    """The tiny pair from loader to file: nodes loader, text, schedule, sampler, video, save.

    An input given here goes to every node that has one of this name.
    """
    graph = {
        "loader": node(
            "SpecARLoader", backbone="tiny", target="auto", drafter="auto", precision="auto", attention="auto"
        ),
        "text": node("CLIPTextEncode", clip=["loader", 1], text=PROMPT),
        "schedule": node(
            "SpecARScheduler",
            models=["loader", 0],
            seconds=1.0,
            blocks=2,
            width=64,
            height=48,
            policy="spread",
            k=1,
            positions="0",
        ),
        "sampler": node(
            "SpecARSpeculativeSampler",
            models=["loader", 0],
            schedule=["schedule", 0],
            positive=["text", 0],
            vae=["loader", 2],
            seed=0,
        ),
        "video": node("SpecARVideoDecode", samples=["sampler", 0], vae=["loader", 2], report=["sampler", 1]),
        "save": node("SaveVideo", video=["video", 0], filename_prefix="video/specar-test", format="auto", codec="auto"),
    }
    for name, value in inputs.items():
        owners = [owner for owner in graph.values() if name in owner["inputs"]]
        assert owners, f"no node has an input {name}"
        for owner in owners:
            owner["inputs"][name] = value
    return graph


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def with_latents(graph: Graph, name: str = "test", sampler: str = "sampler") -> Graph:
    """The graph, with the sampler's latents saved too, by a node `latents NAME`."""
    saved = node("SaveLatent", samples=[sampler, 0], filename_prefix=f"latents/{name}")
    return {**graph, f"latents {name}": saved}


def from_workflow(workflow: dict[str, Any], definitions: dict[str, Any]) -> Graph:
    """What the page would queue for a workflow file: widget values by position, links by number. Widgets that came
    later than the file have their defaults."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph = {}
    for found in workflow["nodes"]:
        if found["type"] == "MarkdownNote":
            continue
        definition = definitions[found["type"]]["input"]
        values, inputs = list(found["widgets_values"]), {}
        for name, (kind, *options) in {**definition["required"], **definition.get("optional", {})}.items():
            widget = isinstance(kind, list) or kind in WIDGETS
            if widget and values:
                inputs[name] = values.pop(0)
                if options and options[0].get("control_after_generate"):
                    values.pop(0)
        assert not values, f"{found['type']}: {values} is left over"
        inputs |= {slot["name"]: sources[slot["link"]] for slot in found["inputs"] if slot["link"] is not None}
        graph[str(found["id"])] = node(found["type"], **inputs)
    return graph
