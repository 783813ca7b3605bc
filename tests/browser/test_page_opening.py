"""The bundled workflows, opened in both renderers."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

WORKFLOWS = sorted((Path(__file__).parents[2] / "workflows").glob("*.json"))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request):
    return request.param


def test_every_node_is_there(comfy, workflow):
    told = json.loads(workflow.read_text("utf-8"))
    comfy.load(told)
    shown = comfy.page.evaluate("() => app.graph.nodes.map(node => [node.type, !!node.has_errors])")
    missing = [[node["type"], "models" in node["properties"]] for node in told["nodes"]]  # their files are not here
    assert sorted(shown) == sorted(missing)
    expect(comfy.timeline.first).to_be_visible()
    comfy.picture(workflow.stem)


def test_nodes_do_not_overlap(comfy, workflow):
    """In either renderer, whose nodes are not equally high."""
    comfy.load(json.loads(workflow.read_text("utf-8")))
    boxes = comfy.page.evaluate("() => app.graph.nodes.map(node => [node.type, ...node.pos, ...node.size])")
    for name, x, y, width, height in boxes:
        for other, left, top, *_ in boxes:
            inside = x <= left < x + width and y <= top - 30 < y + height  # a title is 30 high
            assert name == other or not inside, f"{other} lies on {name}"


def test_saving_and_loading_again_changes_nothing(comfy, workflow):
    told = json.loads(workflow.read_text("utf-8"))
    comfy.load(told)
    saved, prompt = comfy.saved()
    values = {node["id"]: node.get("widgets_values") for node in told["nodes"]}
    assert {node["id"]: node.get("widgets_values") for node in saved["nodes"]} == values
    comfy.load(saved)
    again, same_prompt = comfy.saved()
    assert same_prompt == prompt and prompt
    for which in (saved, again):
        which.pop("revision", None)
        which["extra"].pop("ds", None)  # where the canvas is scrolled to
    assert again == saved


def test_a_file_from_before_an_input_has_its_default(comfy):
    told = json.loads(next(path for path in WORKFLOWS if path.stem == "tiny").read_text("utf-8"))
    (scheduler,) = (node for node in told["nodes"] if node["type"] == "SpecARScheduler")
    del scheduler["widgets_values"][7:]
    comfy.load(told)
    inputs = comfy.inputs("SpecARScheduler")
    assert (inputs["positions"], inputs["custom"], inputs["stitch"]) == ("0", "", 0)


def test_missing_models_are_named_with_their_origin(comfy, workflow):
    told = json.loads(workflow.read_text("utf-8"))
    models = [model for node in told["nodes"] for model in node["properties"].get("models", [])]
    comfy.load(told)
    if not models:
        assert comfy.page.get_by_text("errors found").count() == 0
        return
    comfy.page.get_by_role("button", name="View details").click()
    for model in models:
        expect(comfy.page.get_by_text(model["name"]).last).to_be_visible()
    comfy.picture(f"{workflow.stem}-missing-models")
    comfy.page.get_by_role("button", name="Toggle properties panel").last.click()


def test_its_thumbnail_is_offered(comfy, workflow):
    kind = comfy.page.evaluate(
        """async name => {
            const packs = await (await fetch("/api/workflow_templates")).json();
            const pack = Object.keys(packs).find(pack => packs[pack].includes(name));
            return (await fetch(`/api/workflow_templates/${pack}/${name}.jpg`)).headers.get("content-type");
        }""",
        workflow.stem,
    )
    assert kind == "image/jpeg"
