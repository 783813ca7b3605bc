"""The workflow `helios` on random weights of Helios's shape, in the published layout, and a Wan VAE of full size."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from conftest import CHECKOUT
from graphs import from_workflow, node
from safetensors.torch import save_file
from test_running import frames

from specar_core.backbones.helios import HELIOS
from specar_core.backbones.helios_published import PUBLISHED
from specar_core.models.helios import HeliosTransformer
from specar_core.models.vae import VaeConfig, WanVAE

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "rope_dim": (8, 4, 4), "ffn_dim": 48, "freq_dim": 32}
CONFIG = replace(HELIOS.config, num_layers=2, **SIZES)


def publish(folder, model):
    """A transformer and the settings of its scheduler, as a repository on Hugging Face holds them."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    state = HeliosTransformer(CONFIG).state_dict()
    state = {name: torch.randn(value.shape) / 4 if "table" in name else value for name, value in state.items()}
    save_file(state, folder / "transformer" / "diffusion_pytorch_model-00001-of-00001.safetensors")
    where = dict.fromkeys(state, "diffusion_pytorch_model-00001-of-00001.safetensors")
    (folder / "transformer" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    told = {"_class_name": "HeliosTransformer3DModel", **asdict(CONFIG)}
    (folder / "transformer" / "config.json").write_text(json.dumps(told))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(PUBLISHED[model].scheduler))


def random_vae():
    """Half-precision weights of a Wan VAE of full size, that neither grow nor fade."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in WanVAE(VaeConfig()).state_dict().items()}
    state = {}
    for name, shape in shapes.items():
        flat = len(shape) == 1 or name.endswith("gamma")
        state[name] = (
            torch.full(shape, name.endswith("gamma")) if flat else torch.randn(shape) / shape[1:].numel() ** 0.5
        )
    return {name: value.half() for name, value in state.items()}


@pytest.fixture
def models(host):
    """Gone after the test: others expect that there are none."""
    made, folder = [], host.base / "models"
    torch.manual_seed(0)
    for model in ("Helios-Base", "Helios-Distilled"):
        publish(folder / "diffusion_models" / model, model)
        made += (folder / "diffusion_models" / model).rglob("*.*")
    vae = folder / "vae" / "wan_2.1_vae.safetensors"
    save_file(random_vae(), vae)
    yield
    for file in (*made, vae):
        file.unlink()


def test_helios(host, fresh, models):
    workflow = json.loads((CHECKOUT / "workflows" / "helios.json").read_text("utf-8"))
    graph = from_workflow(workflow, fresh.get("/object_info"))
    (loader,) = (name for name, told in graph.items() if told["class_type"] == "SpecARLoader")
    graph[loader]["inputs"]["text_encoder"] = "auto"
    for name, told in graph.items():
        if told["class_type"] == "CLIPTextEncode":  # the text encoder has 5.7 billion parameters
            graph[name] = node("ProbeConditioning", width=4096, prompts=1)
        elif told["class_type"] == "SpecARScheduler":
            told["inputs"] |= {"blocks": 2, "width": 64, "height": 64, "k": 1}
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    (report,) = next(shown["specar"] for shown in run.outputs.values() if "specar" in shown)
    assert [(block["role"], block["forwards"]) for block in report["blocks"]] == [("target", 50), ("drafter", 6)]
    assert report["sampling"]["target"] == {"steps": [50], "guidance": 5.0}
    (saved,) = (host.output(shown) for shown in run.outputs.values() if "images" in shown)
    assert frames(saved).shape == (66, 64, 64, 3) and report["fps"] == 24

    (sampler,) = (told for told in graph.values() if told["class_type"] == "SpecARSpeculativeSampler")
    del sampler["inputs"]["negative"]
    assert "helios runs with guidance: connect a negative prompt" in fresh.run(graph).error

    (place,) = (name for name, told in graph.items() if told is sampler)
    (scheduler,) = (told for told in graph.values() if told["class_type"] == "SpecARScheduler")
    scheduler["inputs"] |= {"blocks": 1, "policy": "draft-only"}  # which has no guidance
    graph["stills"] = node("EmptyImage", width=64, height=64, batch_size=33, color=0x3366CC)
    graph["still"] = node("ImageFromBatch", image=["stills", 0], batch_index=0, length=1)
    graph["clip"] = node("CreateVideo", images=["stills", 0], fps=24.0)
    for begins_with in ({"start_image": ["still", 0]}, {"source_video": ["clip", 0]}):
        run = fresh.run(graph | {place: sampler | {"inputs": sampler["inputs"] | begins_with}})
        assert run.end == "execution_success", run.error
        (report,) = next(shown["specar"] for shown in run.outputs.values() if "specar" in shown)
        assert report["options"].keys() & {"image", "video"} and report["frames"] == 33
