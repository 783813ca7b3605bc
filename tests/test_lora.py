"""LoRA: every naming style, exact arithmetic, an exact way back, and one line that says what happened."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_musubi_wan_lora_to_diffusers,
    _convert_non_diffusers_wan_lora_to_diffusers,
)
from killed import frames, leave
from PIL import Image
from safetensors.torch import save_file
from test_cli import refused, specar

from specar_core.backbones.helios import HELIOS
from specar_core.errors import SpecarError, UsageError
from specar_core.generate import generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.lora import Lora, fit, fitted, lacking, merge, parse
from specar_core.machine import Machine
from specar_core.models.helios import HeliosConfig, HeliosTransformer
from specar_core.models.low_precision import quantised
from specar_core.models.wan import sdpa
from specar_core.schedule import spread
from specar_core.tensor_files import open_checkpoint
from specar_core.weights import in_fp8

RANK = 2
MACHINES = {precision: Machine(torch.device("cpu"), precision) for precision in ("fp32", "bf16", "fp8")}


def load(backbone, role="target", machine=MACHINES["fp32"]):
    return backbone.load_network(role, backbone.shipped[role], machine, sdpa, lambda *_: None)


def layers(network) -> list[str]:
    return [name for name, layer in network.named_modules() if isinstance(layer, torch.nn.Linear)]


def random_lora(network, seed=0, names=None) -> dict[str, torch.Tensor]:
    """Changes under Wan's own names, as ComfyUI's files have them: up, down and an alpha that is not the rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in layers(network) if names is None else names:
        rows, columns = network.get_submodule(name).weight.shape
        tensors[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(RANK, columns, generator=generator)
        tensors[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(rows, RANK, generator=generator)
        tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(1.5)
    return tensors


def delta(tensors, name) -> torch.Tensor:
    up, down, alpha = (
        tensors[f"diffusion_model.{name}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha")
    )
    return alpha / RANK * (up @ down)


def saved(tensors, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def without_alpha(tensors):
    """The same changes, the factor inside: PEFT's files carry no alpha."""
    scaled = {name: tensor * (1.5 / RANK if ".lora_up" in name else 1) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in scaled.items() if not name.endswith(".alpha")}


def peft(name):
    return name.replace("lora_down", "lora_A").replace("lora_up", "lora_B")


def kohya(name):
    module, _, part = name.removeprefix("diffusion_model.").partition(".lora_")
    module, part = (module, f".lora_{part}") if part else (module.removesuffix(".alpha"), ".alpha")
    return f"lora_unet_{module.replace('.', '_')}{part}"


STYLES = {
    "comfyui": lambda tensors: tensors,
    "wan": lambda tensors: {name.removeprefix("diffusion_model."): tensor for name, tensor in tensors.items()},
    "wan, peft": lambda tensors: {peft(name): tensor for name, tensor in without_alpha(tensors).items()},
    "peft": lambda tensors: {
        "base_model.model." + peft(name).removeprefix("diffusion_model."): tensor
        for name, tensor in without_alpha(tensors).items()
    },
    "peft, adapter": lambda tensors: {
        peft(name).replace(".weight", ".default.weight"): tensor for name, tensor in without_alpha(tensors).items()
    },
    "musubi": lambda tensors: {kohya(name): tensor for name, tensor in tensors.items()},
    # Converted by diffusers itself, from what it knows of the others.
    "diffusers": lambda tensors: {
        f"transformer.{name.removeprefix('transformer.')}": tensor
        for name, tensor in _convert_non_diffusers_wan_lora_to_diffusers(
            {peft(name): tensor for name, tensor in without_alpha(tensors).items()}
        ).items()
    },
    "diffusers, of musubi": lambda tensors: _convert_musubi_wan_lora_to_diffusers(
        {kohya(name): tensor for name, tensor in tensors.items()}
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_every_naming_style_changes_the_same_weights_R75(backbone, tmp_path, style):
    network, before = load(backbone), dict(load(backbone).named_parameters())
    # diffusers' own converters know the attention and feed-forward layers of blocks only.
    inside = [name for name in layers(network) if name.startswith("blocks.")]
    tensors = random_lora(network, names=inside if style.startswith("diffusers") else None)
    path = saved(STYLES[style](dict(tensors)), tmp_path / "style.safetensors")
    found = fit(open_checkpoint(path), network)
    assert not found.unmatched and not found.wrong_sizes
    changed = merge(network, backbone.shipped["target"], [(open_checkpoint(path), 0.5)])
    assert changed == {name.removeprefix("diffusion_model.").removesuffix(".lora_down.weight") + ".weight"
                       for name in tensors if "down" in name}  # fmt: skip
    for name, weight in network.named_parameters():
        wanted = before[name] + 0.5 * delta(tensors, name.removesuffix(".weight")) if name in changed else before[name]
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-5)
        assert (name in changed) == (not torch.equal(weight, before[name]))


def values(network) -> dict[str, torch.Tensor]:
    """Every parameter as it counts."""
    return {
        name: weight.float() * layer.scale.unsqueeze(1) if (layer := in_fp8(network, name)) else weight.clone()
        for name, weight in network.named_parameters()
    }


@pytest.mark.parametrize("precision", MACHINES)
def test_several_at_once_and_the_exact_way_back(backbone, tmp_path, precision):
    network, whole = load(backbone, machine=MACHINES[precision]), load(backbone)
    names, before = layers(whole), values(network)
    lowered = {name for name in before if in_fp8(network, name)}
    assert bool(lowered) == (precision == "fp8")
    first, second = random_lora(whole, 1), random_lora(whole, 2, names[:3])
    files = [
        open_checkpoint(saved(tensors, tmp_path / f"{n}.safetensors")) for n, tensors in enumerate((first, second))
    ]
    places = {name: weight.data_ptr() for name, weight in network.named_parameters()}
    path = backbone.shipped["target"]
    stored = path.read_bytes()
    changed = merge(network, path, [(files[0], 0.7), (files[1], -1.0)])
    assert changed == {f"{name}.weight" for name in names}
    for name, value in values(network).items():
        assert network.get_parameter(name).data_ptr() == places[name]  # in place: no second copy
        wanted = (whole.get_parameter(name) if name in lowered else before[name]).float()
        for strength, tensors in ((0.7, first), (-1.0, second)):
            if f"diffusion_model.{name.removesuffix('.weight')}.alpha" in tensors:
                wanted = wanted + strength * delta(tensors, name.removesuffix(".weight"))
        if name in lowered:
            rows, scale = quantised(wanted)
            assert torch.equal(value, rows.float() * scale)
        else:
            torch.testing.assert_close(value, wanted.to(value.dtype), rtol=1e-5, atol=1e-5)
    again = values(load(backbone, machine=MACHINES[precision]))  # though the file's pages were written to
    assert all(torch.equal(value, before[name]) for name, value in again.items())
    assert path.read_bytes() == stored


@pytest.mark.parametrize("part", ["lora_up.weight", "alpha"])
def test_one_that_is_not_finite_is_named(backbone, tmp_path, part):
    network = load(backbone)
    name = f"diffusion_model.{layers(network)[-1]}.{part}"
    tensors = random_lora(network)
    tensors[name].view(-1)[0] = float("nan")
    file = open_checkpoint(saved(tensors, tmp_path / "a.safetensors"))
    with pytest.raises(SpecarError, match=rf"LoRA .*a\.safetensors holds NaN or infinity in {name}: leave it out"):
        merge(network, backbone.shipped["target"], [(file, 0.5)])


def test_whole_differences_of_weights_and_biases(backbone, tmp_path):
    network, before = load(backbone), dict(load(backbone).named_parameters())
    path = saved(
        {
            "diffusion_model.blocks.0.norm3.diff": torch.full((48,), 2.0),
            "diffusion_model.blocks.0.self_attn.q.diff_b": torch.full((48,), 3.0),
            "diffusion_model.patch_embedding.lora_down.weight": torch.ones(1, 16, 1, 2, 2),
            "diffusion_model.patch_embedding.lora_up.weight": torch.ones(48, 1, 1, 1, 1),
        },
        tmp_path / "a.safetensors",
    )
    merge(network, backbone.shipped["target"], [(open_checkpoint(path), 0.5)])
    for name, added in (
        ("blocks.0.norm3.weight", 1),
        ("blocks.0.self_attn.q.bias", 1.5),
        ("patch_embedding.weight", 0.5),
    ):
        torch.testing.assert_close(network.get_parameter(name), before[name] + added)


def test_wan_and_diffusers_names_on_helios(tmp_path):
    config = HeliosConfig(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, freq_dim=8, text_dim=8
    )
    with torch.device("meta"):
        network = HeliosTransformer(config)
    assert type(replace(HELIOS, config=config).outline("target")) is HeliosTransformer
    for names in (("self_attn.q", "cross_attn.o", "ffn.0"), ("attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj")):
        tensors = {}
        for name, rows, columns in zip(names, (24, 24, 32), (24, 24, 24), strict=True):
            for prefix in (f"transformer.blocks.0.{name}", f"lora_unet_blocks_0_{name.replace('.', '_')}"):
                ends = ("lora_A", "lora_B") if prefix.startswith("transformer") else ("lora_down", "lora_up")
                tensors[f"{prefix}.{ends[0]}.weight"] = torch.zeros(RANK, columns)
                tensors[f"{prefix}.{ends[1]}.weight"] = torch.zeros(rows, RANK)
        for style in ("transformer", "lora_unet"):
            chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(style)}
            path = saved(chosen, tmp_path / "helios.safetensors")
            found = fit(open_checkpoint(path), network)
            assert found.parts.keys() == {
                "blocks.0.attn1.to_q.weight", "blocks.0.attn2.to_out.0.weight", "blocks.0.ffn.net.0.proj.weight"
            }  # fmt: skip


def networks(backbone):
    return {role: backbone.outline(role) for role in ("target", "drafter")}


def test_one_line_tells_what_matched_R75(backbone, tmp_path):
    tensors = random_lora(load(backbone)) | {f"lora_te_{n}.lora_up.weight": torch.ones(1) for n in range(5)}
    path = saved(tensors, tmp_path / "a.safetensors")
    lora, told = fitted(Lora("a.safetensors", "", asked="target"), path, networks(backbone))
    assert lora.roles == ("target",) and len(told) == 1
    count = len(tensors)
    assert f"{count - 5} of {count} keys matched in the target; 5 not: lora_te_0.lora_up.weight, lora_te_1" in told[0]
    assert told[0].endswith("lora_te_2.lora_up.weight, ...")


def test_what_does_not_fit_is_an_error_R75(backbone, tmp_path):
    def refusal(tensors, asked=None):
        path = saved(tensors, tmp_path / "a.safetensors")
        with pytest.raises(SpecarError) as error:
            fitted(Lora("a.safetensors", "", asked=asked), path, networks(backbone))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "none of its 1 keys matched: some.other" in refusal({"some.other.lora_up.weight": torch.ones(2, 2)})
    small = random_lora(load(backbone, "drafter"))
    text = refusal(small, "target")
    assert "does not fit the target: it was made for another size" in text
    assert "is [48, " in text and "in the model, [24, " in text
    name = "diffusion_model.blocks.0.self_attn.q"
    assert "a kind not supported" in refusal(small | {f"{name}.dora_scale": torch.ones(24)})
    lone = {f"{name}.lora_up.weight": torch.ones(48, RANK), f"{name}.alpha": torch.tensor(1.0)}
    assert "none of its 2 keys matched" in refusal(lone)
    other_rank = {f"{name}.lora_up.weight": torch.ones(48, 3), f"{name}.lora_down.weight": torch.ones(2, 48)}
    assert "another size" in refusal(other_rank)


def test_on_one_model_only_the_blocks_that_lack_it_are_named_R75b(backbone, tmp_path):
    path = saved(random_lora(load(backbone)), tmp_path / "a.safetensors")
    lora, told = fitted(Lora("a.safetensors", ""), path, networks(backbone))
    assert lora.roles == ("target",) and "is not for the drafter: it was made for another size" in told[1]
    both = ("target", "drafter")
    (notice,) = lacking([lora], both, spread(9, 3))
    assert "on the target only: the drafter's blocks lack it (1-2, 4-5, 7-8)" in notice
    assert lacking([lora], both, None)[0].endswith("the drafter's blocks lack it")  # not settled which
    assert not lacking([lora], ("target",), spread(9, 9)) and not lacking([replace(lora, roles=both)], both, None)
    with pytest.raises(UsageError, match="is for the drafter, which generates no block"):
        fitted(Lora("a.safetensors", "", asked="drafter"), path, {"target": backbone.outline("target")})


@pytest.mark.parametrize(
    "text, parsed",
    [
        ("a.safetensors", (None, "a.safetensors", 1.0)),
        ("a.safetensors:0.8", (None, "a.safetensors", 0.8)),
        ("target=a.safetensors:-1", ("target", "a.safetensors", -1.0)),
        (r"drafter=C:\loras\a.safetensors", ("drafter", r"C:\loras\a.safetensors", 1.0)),
        ("x=y.safetensors:2", (None, "x=y.safetensors", 2.0)),
    ],
)
def test_how_it_is_written(text, parsed):
    assert parse(text) == parsed


@pytest.mark.parametrize("text", ["", ":1", "a.safetensors:nan", "target=", "a.safetensors:inf"])
def test_how_it_is_not_written(text):
    with pytest.raises(UsageError, match="ROLE="):
        parse(text)


@pytest.fixture
def here(here, monkeypatch):
    monkeypatch.setenv("SPECAR_MODELS", str(here / "models"))
    (here / "models" / "loras").mkdir(parents=True)
    return here


VIDEO = ["generate", "--backbone", "tiny", "--prompt", "a red ball", "--blocks", "3", "--k", "1"]


def test_from_the_command_line(here, backbone):
    saved(random_lora(load(backbone)), here / "models" / "loras" / "style.safetensors")
    saved(random_lora(load(backbone, "drafter")), here / "fast.safetensors")
    assert specar(*VIDEO, "--out", "plain.mp4").exit_code == 0
    result = specar(*VIDEO, "--out", "a.mp4", "--lora", "style.safetensors:0.5", "--lora", "drafter=fast.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "style.safetensors is on the target only: the drafter's blocks lack it (1-2)" in result.stderr
    told = json.loads(Path("a.json").read_text())["options"]["lora"]
    assert [(lora["file"], lora["strength"], lora["roles"]) for lora in told] == [
        ("style.safetensors", 0.5, ["target"]),
        ("fast.safetensors", 1.0, ["drafter"]),
    ]
    assert all(lora["digest"].startswith("sampled-sha256:") for lora in told)
    plain, changed = frames(Path("plain.mp4")), frames(Path("a.mp4"))
    assert plain[0] != changed[0] and plain[-1] != changed[-1]

    again = specar("generate", "--from", "a.json", "--out", "b.mp4")
    assert again.exit_code == 0 and "not the file it was made with" not in again.stderr
    assert frames(Path("b.mp4")) == changed
    saved(random_lora(load(backbone, "drafter"), seed=7), here / "fast.safetensors")
    assert (
        "notice: the LoRA fast.safetensors is not the file it was made with"
        in specar("plan", "--from", "a.json").stderr
    )
    Path("fast.safetensors").unlink()
    refused(2, "there is no lora 2 fast.safetensors in", "generate", "--from", "a.json", "--out", "c.mp4")
    refused(2, "there is no LoRA x.safetensors in", *VIDEO, "--lora", "x.safetensors")
    twice = specar("plan", *VIDEO[1:], *["--lora", "style.safetensors"] * 2).stderr
    assert twice.count("is on the target only") == twice.count("keys matched in the target") == 1


def test_resume_has_what_went_into_it(here, backbone):
    """The files are found where they were, and must be the same."""
    saved(random_lora(load(backbone)), here / "style.safetensors")
    Image.new("RGB", (48, 32), "red").save("i.png")
    inputs = Inputs(((None, here / "style.safetensors", 0.5),), "image", here / "i.png")
    job, _ = resolve(backbone, prompt="a red ball", blocks=3, k=2, source=inputs.source(16)[0])
    job, _ = inputs.with_loras(job)
    paths = {**backbone.shipped, **inputs.paths}
    generate(job, MACHINES["fp32"], paths, here / "whole.mp4")

    leave(job, paths, here / "a.mp4", at=2)
    kept = Path("style.safetensors").read_bytes()
    saved(random_lora(load(backbone), seed=9), here / "style.safetensors")
    refused(1, "the LoRA style.safetensors is not the file it was made with. Put that file back", "resume", "a.run")
    Path("style.safetensors").unlink()
    refused(2, "there is no LoRA", "resume", "a.run")
    Path("style.safetensors").write_bytes(kept)
    assert specar("resume", "a.run").exit_code == 0
    assert frames(Path("a.mp4")) == frames(Path("whole.mp4"))
