"""What ComfyUI offers once the pack is installed."""

import json

import av
import pytest
from conftest import CHECKOUT, PACK_NAME, installed
from graphs import from_workflow

from specar_core.mp4 import read_metadata

# Published: graphs in the world hold widget values by position, so this only ever grows, at each node's end.
INPUTS = {
    "SpecARLoader": "backbone target drafter precision attention text_encoder vae",
    "SpecARScheduler": "models seconds blocks width height policy k positions prompts custom stitch",
    "SpecARSpeculativeSampler": "models schedule positive vae seed negative start_image source_video strength",
    "SpecARVideoDecode": "samples vae report images",
    "SpecARPromptTimeline": "models clip timeline",
    "SpecARPromptList": "clip prompts",
    "SpecARLora": "models lora strength role",
    "SpecARRace": "video_1 report_1 video_2 report_2 video_3 report_3 scores",
}
OPTIONAL = {
    "SpecARLoader": "text_encoder vae",
    "SpecARScheduler": "prompts custom stitch",
    "SpecARSpeculativeSampler": "negative start_image source_video strength",
    "SpecARVideoDecode": "report images",
    "SpecARRace": "video_3 report_3 scores",
}
OUTPUTS = {
    "SpecARLoader": ["SPECAR_MODELS", "CLIP", "VAE"],
    "SpecARScheduler": ["SPECAR_SCHEDULE"],
    "SpecARSpeculativeSampler": ["LATENT", "SPECAR_REPORT"],
    "SpecARVideoDecode": ["VIDEO", "IMAGE"],
    "SpecARPromptTimeline": ["CONDITIONING"],
    "SpecARPromptList": ["CONDITIONING"],
    "SpecARLora": ["SPECAR_MODELS"],
    "SpecARRace": ["VIDEO"],
}
WORKFLOWS = sorted(path.stem for path in (CHECKOUT / "workflows").glob("*.json"))
PAGE_ONLY = {"MarkdownNote"}


@pytest.fixture(scope="module")
def definitions(host):
    return host.client.get("/object_info")


@pytest.fixture(scope="module")
def ours(definitions):
    return {name: node for name, node in definitions.items() if name.startswith("SpecAR")}


def inputs(node):
    return {**node["input"]["required"], **node["input"].get("optional", {})}


def test_node_ids_inputs_and_outputs_are_frozen(ours):
    assert {name: " ".join(inputs(node)) for name, node in ours.items()} == INPUTS
    optional = {name: " ".join(node["input"].get("optional", {})) for name, node in ours.items()}
    assert {name: inputs for name, inputs in optional.items() if inputs} == OPTIONAL
    assert {name: node["output"] for name, node in ours.items()} == OUTPUTS


def test_a_named_choice_stands_first_in_every_list(ours):
    """So that no empty folder refuses anything."""
    for node in ours.values():
        for name, (kind, *options) in inputs(node).items():
            if kind == "COMBO":
                first = options[0]["options"][0]
                assert first == {"backbone": "krea", "lora": "none"}.get(name, "auto"), name


def test_our_nodes_are_ours(ours):
    assert {node["python_module"] for node in ours.values()} == {f"custom_nodes.{PACK_NAME}"}


def test_no_id_is_taken_by_another_pack(ours):
    (known,) = installed("SPECAR_HOST", "").glob(
        "venv/lib/python*/site-packages/comfyui_manager/**/extension-node-map.json"
    )
    taken = {name for names, _ in json.loads(known.read_text("utf-8")).values() for name in names}
    assert len(taken) > 10_000
    assert not {name for name in taken if name.startswith("SpecAR")}


def test_everything_is_explained(client, ours):
    for name, node in ours.items():
        page = client.get(f"/extensions/{PACK_NAME}/docs/{name}.md").decode()
        assert page.startswith(f"# {node['display_name']}\n")
        assert node["description"]
        for title, (kind, *options) in inputs(node).items():
            widget = kind in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")
            assert not widget or options[0].get("tooltip"), f"{name}: {title}"


def test_translations_say_what_the_nodes_say(client, ours):
    translated = client.get("/i18n")["en"]["nodeDefs"]
    for name, node in ours.items():
        told = translated[name]
        assert (told["display_name"], told["description"]) == (node["display_name"], node["description"])
        tooltips = {
            title: options[0]["tooltip"] for title, (_, *options) in inputs(node).items() if "tooltip" in options[0]
        }
        assert {title: entry["tooltip"] for title, entry in told["inputs"].items()} == tooltips


def test_workflows_are_offered(client):
    offered = client.get("/workflow_templates")
    assert offered[PACK_NAME] and set(offered[PACK_NAME]) == set(WORKFLOWS)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_fits_its_nodes(definitions, name):
    workflow = json.loads((CHECKOUT / "workflows" / f"{name}.json").read_text("utf-8"))
    assert {node["type"] for node in workflow["nodes"]} <= definitions.keys() | PAGE_ONLY
    graph = from_workflow(workflow, definitions)
    slots = {node["id"]: node for node in workflow["nodes"]}
    for number, source, output, target, slot, kind in workflow["links"]:
        assert number in slots[source]["outputs"][output]["links"]
        assert slots[target]["inputs"][slot]["link"] == number
        assert definitions[slots[source]["type"]]["output"][output] == kind
    for node in graph.values():
        assert definitions[node["class_type"]]["input"]["required"].keys() <= node["inputs"].keys()
    if loads(workflow) != "tiny":
        models = {model["name"]: model for node in workflow["nodes"] for model in node["properties"].get("models", [])}
        chosen = {value for node in workflow["nodes"] for value in node["widgets_values"]}
        assert models and models.keys() <= chosen, "the page asks for missing models only if a widget names them"
        assert all(model["url"].endswith(name) and model["directory"] for name, model in models.items())


FRAMES = {"tiny": 90, "image to video": 37, "video to video": 30, "prompt timeline": 99, "race": 18}
SHORTER = {"image to video": 3, "video to video": 3, "race": 2}


def test_every_workflow_of_the_tiny_pair_is_run():
    workflows = {name: json.loads((CHECKOUT / "workflows" / f"{name}.json").read_text("utf-8")) for name in WORKFLOWS}
    assert {name for name, workflow in workflows.items() if loads(workflow) == "tiny"} == FRAMES.keys()


@pytest.mark.parametrize("name", FRAMES)
def test_a_workflow_of_the_tiny_pair_runs_as_it_is(host, definitions, name):
    """But for the length of some."""
    workflow = json.loads((CHECKOUT / "workflows" / f"{name}.json").read_text("utf-8"))
    graph = from_workflow(workflow, definitions)
    for node in graph.values():
        if node["class_type"] == "SpecARScheduler" and name in SHORTER:
            node["inputs"]["blocks"] = SHORTER[name]
    run = host.client.run(graph, workflow=workflow)
    assert run.end == "execution_success", run.error
    (saved,) = (host.output(shown) for shown in run.outputs.values() if "images" in shown)
    with av.open(str(saved)) as video:
        assert video.streams.video[0].frames == FRAMES[name]
    inside = read_metadata(saved)
    assert json.loads(inside["workflow"]) == workflow
    assert name == "race" or json.loads(inside["specar"])["frames"] == FRAMES[name]


def loads(workflow):
    """The pair of a workflow."""
    (loader,) = (node for node in workflow["nodes"] if node["type"] == "SpecARLoader")
    return loader["widgets_values"][0]
