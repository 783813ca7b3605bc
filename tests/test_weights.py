"""Checkpoints: every layout, every kind of damage, and how they get into a network."""

import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from specar_core.check import check_file
from specar_core.errors import SpecarError, UsageError
from specar_core.identity import canonical_name, canonical_names, identify
from specar_core.tensor_files import open_checkpoint
from specar_core.weights import load_into

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def net(seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        return Net()


def on_meta():
    with torch.device("meta"):
        return Net()


def write_header(path: Path, shapes: dict, dtype="BF16", metadata=None, size=None):
    """A safetensors file of the given shapes whose data is a hole: full-size layouts cost no disk."""
    header, end = ({"__metadata__": metadata} if metadata else {}), 0
    for name, shape in shapes.items():
        kind, shape = shape if isinstance(shape[0], str) else (dtype, shape)
        begin, end = end, end + BYTES[kind] * torch.Size(shape).numel()
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end if size is None else size)
    return path


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def wan_shapes(dim, ffn, layers, text=4096, channels=16):
    shapes = {"patch_embedding.weight": (dim, channels, 1, 2, 2), "patch_embedding.bias": (dim,)}
    for name, rows, columns in (("text_embedding.0", dim, text), ("text_embedding.2", dim, dim),
                                ("time_embedding.0", dim, 256), ("time_embedding.2", dim, dim),
                                ("time_projection.1", 6 * dim, dim), ("head.head", 64, dim)):  # fmt: skip
        shapes |= linear(name, rows, columns)
    for i in range(layers):
        shapes[f"blocks.{i}.modulation"] = (1, 6, dim)
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                shapes |= linear(f"blocks.{i}.{attention}.{part}", dim, dim)
            shapes |= {f"blocks.{i}.{attention}.norm_{part}.weight": (dim,) for part in "qk"}
        shapes |= {f"blocks.{i}.norm3.weight": (dim,), f"blocks.{i}.norm3.bias": (dim,)}
        shapes |= linear(f"blocks.{i}.ffn.0", ffn, dim) | linear(f"blocks.{i}.ffn.2", dim, ffn)
    return shapes | {"head.modulation": (1, 2, dim)}


WAN_1_3B, WAN_14B = (1536, 8960, 30), (5120, 13824, 40)


def prefixed(prefix, shapes):
    return {prefix + name: shape for name, shape in shapes.items()}


# ------------------------------------------------------------------------------------------------ layouts


def stored_as(layout: str, tensors: dict, folder: Path) -> Path:
    """The same tensors in each layout that published checkpoints use."""
    wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    path = folder / f"{layout}.safetensors"
    match layout:
        case "raw":
            save_file(tensors, path)
        case "krea":
            save_file(wrapped, path)
        case "fsdp":
            save_file({f"model._fsdp_wrapped_module._orig_mod.{name}": t for name, t in tensors.items()}, path)
        case "sharded" | "folder":
            names = sorted(tensors)
            shards = {"m-00001-of-00002.safetensors": names[:2], "m-00002-of-00002.safetensors": names[2:]}
            for shard, part in shards.items():
                save_file({name: tensors[name] for name in part}, folder / shard)
            path = folder / "m.safetensors.index.json"
            path.write_text(json.dumps({"weight_map": {name: s for s, part in shards.items() for name in part}}))
        case "self-forcing":
            path = folder / "x.pt"
            torch.save({"generator_ema": OrderedDict(wrapped), "generator": {"model.a.weight": torch.zeros(1)}}, path)
        case "generator" | "model":
            path = folder / "x.pt"
            torch.save({layout: wrapped, "step": 3}, path)
        case "pth":
            path = folder / "x.pth"
            torch.save(OrderedDict(tensors), path)
        case "safetensors named pth":
            path = folder / "renamed.pth"
            save_file(tensors, path)
    return folder if layout == "folder" else path


LAYOUTS = ["raw", "krea", "fsdp", "sharded", "folder", "self-forcing", "generator", "model", "pth",
           "safetensors named pth"]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_network(layout, tmp_path):
    source = net()
    (folder := tmp_path / "\u89c6\u9891 \u0442\u0435\u0441\u0442 \u00e9").mkdir()
    checkpoint = open_checkpoint(stored_as(layout, source.state_dict(), folder))
    assert sum(info.bytes for info in checkpoint.names.values()) < checkpoint.bytes == checkpoint.declared
    module = on_meta()
    load_into(module, checkpoint, dtype=torch.float32)
    for name, tensor in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_header_tells_types_shapes_and_metadata(tmp_path):
    tensors = {"x": torch.ones(2, 3, dtype=torch.bfloat16), "none": torch.zeros(0, 4), "s": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"config": "{}"})
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.metadata == {"config": "{}"}
    assert {name: (i.dtype, i.shape, i.bytes) for name, i in checkpoint.names.items()} == {
        "x": (torch.bfloat16, (2, 3), 12), "none": (torch.float32, (0, 4), 0), "s": (torch.float32, (), 4)
    }  # fmt: skip
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_what_happens_to_a_mapped_tensor_does_not_reach_the_file(tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    open_checkpoint(tmp_path / "x.safetensors").tensor("x").fill_(7)
    assert open_checkpoint(tmp_path / "x.safetensors").tensor("x").sum() == 0


WRAPPERS = st.lists(
    st.sampled_from(["_fsdp_wrapped_module.", "module.", "model.diffusion_model.", "model."]), max_size=4
)
INFIXES = st.sampled_from(["", "_orig_mod.", "_checkpoint_wrapped_module.", "_orig_mod._checkpoint_wrapped_module."])


@given(WRAPPERS, INFIXES, INFIXES, INFIXES)
def test_wrappers_come_off_in_any_order_and_number(wrappers, first, second, third):
    stored = f"{''.join(first + w for w in wrappers)}{second}blocks.0.{third}self_attn.q.weight"
    assert canonical_name(stored) == "blocks.0.self_attn.q.weight"


def test_fused_copies_are_dropped_and_the_vae_keeps_its_own():
    assert canonical_name("model.blocks.3.self_attn.to_qkv.weight") is None
    assert canonical_name("decoder.middle.1.to_qkv.weight") == "decoder.middle.1.to_qkv.weight"


def test_one_tensor_under_two_names_is_refused():
    with pytest.raises(SpecarError, match="model.x"):
        canonical_names(["x", "model.x"])


# ----------------------------------------------------------------------------------------------- identity

VAE = {
    "encoder.conv1.weight": (96, 3, 3, 3, 3),
    "decoder.head.0.gamma": (96, 1, 1, 1),
    "conv2.weight": (16, 16, 1, 1, 1),
}
HELIOS = {
    "patch_embedding.weight": (5120, 16, 1, 2, 2), "condition_embedder.time_proj.weight": (30720, 5120),
    "blocks.0.attn1.to_q.weight": (5120, 5120), "patch_short.weight": (5120, 16, 1, 2, 2),
    "patch_mid.weight": (5120, 16, 2, 4, 4), "patch_long.weight": (5120, 16, 4, 8, 8),
}  # fmt: skip
RAW_UMT5 = {"token_embedding.weight": (256384, 4096), "blocks.0.pos_embedding.embedding.weight": (32, 64)}
ATTENTION = "encoder.block.{}.layer.0.SelfAttention.{}"
HF_UMT5 = {"shared.weight": (256384, 4096)} | {
    ATTENTION.format(i, name): shape
    for i in range(2)
    for name, shape in (("q.weight", (4096, 4096)), ("relative_attention_bias.weight", (32, 64)))
}
T5 = {name: shape for name, shape in HF_UMT5.items() if "block.1.layer.0.SelfAttention.rel" not in name}

MODELS = {
    "krea": (prefixed("model.", wan_shapes(*WAN_14B)), "Wan 2.1 text-to-video transformer, 14B"),
    "1.3B": (wan_shapes(*WAN_1_3B), "Wan 2.1 text-to-video transformer, 1.3B"),
    "tiny": (wan_shapes(64, 128, 2, text=24), "Wan 2.1 text-to-video transformer, width 64, 2 layers"),
    "i2v": (wan_shapes(*WAN_14B, channels=36), "Wan image-to-video transformer, 14B (not usable here)"),
    "5B": (wan_shapes(3072, 14336, 30, channels=48), "Wan transformer of 48 instead of 16 input channels, "
           "width 3072, 30 layers (not usable here)"),
    "vae": (VAE, "Wan 2.1 VAE"),
    "vae 2.2": (VAE | {"conv2.weight": (48, 48, 1, 1, 1)}, "VAE of 48 instead of 16 latent channels (not usable here)"),
    "helios": (HELIOS, "Helios transformer, 14B"),
    "helios, Wan's names": (wan_shapes(*WAN_14B) | {k: v for k, v in HELIOS.items() if k.startswith("patch_")},
                            "Helios transformer, 14B"),
    "diffusers": ({k: v for k, v in HELIOS.items() if "patch_mid" not in k},
                  "Wan transformer under diffusers' names, 14B (not usable here)"),
    "umt5": (RAW_UMT5, "UMT5 encoder, Wan's names, XXL"),
    "umt5 hf": (HF_UMT5, "UMT5 encoder, Hugging Face names, XXL"),
    "umt5 fp8": (HF_UMT5 | {"scaled_fp8": ("U8", (0,))} | {ATTENTION.format(0, "q.weight"): ("F8_E4M3", (4096, 4096)),
                 ATTENTION.format(0, "q.scale_weight"): ("F32", (1,))},
                 "UMT5 encoder, Hugging Face names, fp8 scaled, XXL"),
    "t5": (T5, "T5 encoder, where UMT5 is needed (not usable here)"),
    "other": ({"x": (1,)}, "no model that SpecAR knows (not usable here)"),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_models_are_recognised_by_their_shapes_whatever_the_file_is_called(model, tmp_path):
    shapes, label = MODELS[model]
    checkpoint = open_checkpoint(write_header(tmp_path / "wan2.1_i2v_720p_9B.safetensors", shapes))
    assert str(identify(checkpoint)) == label
    assert identify(checkpoint).usable == ("not usable" not in label)


def test_the_published_checkpoints_have_the_published_size(tmp_path):
    for config, dtype, tensors, size in (
        (WAN_1_3B, "F32", 825, 5_675_987_200),
        (WAN_14B, "BF16", 1095, 28_576_983_168),
    ):
        checkpoint = open_checkpoint(write_header(tmp_path / "x.safetensors", wan_shapes(*config), dtype))
        assert (len(checkpoint.names), sum(info.bytes for info in checkpoint.names.values())) == (tensors, size)


# ------------------------------------------------------------------------------------------------- loading


def test_weights_are_cast_and_named_parts_stay_float32(tmp_path):
    save_file(net().state_dict(), tmp_path / "x.safetensors")
    module, seen = on_meta(), []
    load_into(
        module,
        open_checkpoint(tmp_path / "x.safetensors"),
        dtype=torch.bfloat16,
        keep_fp32=["norm"],
        progress=lambda done, total: seen.append(done / total),
    )
    assert module.a.weight.dtype == module.a.bias.dtype == torch.bfloat16
    assert module.norm.weight.dtype == torch.float32
    assert module.count.dtype == torch.int64 and isinstance(module.a.weight, nn.Parameter)
    assert seen == sorted(seen) and len(seen) == 5


def test_raising_in_progress_aborts(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    save_file(net().state_dict(), tmp_path / "x.safetensors")
    with pytest.raises(KeyboardInterrupt):
        load_into(on_meta(), open_checkpoint(tmp_path / "x.safetensors"), dtype=torch.float32, progress=stop)


def test_leftovers_are_counted_and_the_first_three_named(tmp_path):
    state = net().state_dict()
    del state["norm.bias"]
    state |= {f"z{i}": torch.zeros(1) for i in range(9)} | {"a.weight": torch.zeros(5, 4), "count": torch.zeros(2)}
    save_file(state, tmp_path / "x.safetensors")
    module = on_meta()
    with pytest.raises(SpecarError) as error:
        load_into(module, open_checkpoint(tmp_path / "x.safetensors"), dtype=torch.float32)
    assert str(error.value) == (
        f"{tmp_path / 'x.safetensors'} (no model that SpecAR knows (not usable here)) does not fit Net: "
        "missing: 1 (norm.bias); unexpected: 9 (z0, z1, z2, ...); wrong shape or type: 2 "
        "(a.weight float32 [5, 4] in the file, [5, 3] in the model; count float32 [2] in the file, [2] in the model)."
    )
    assert all(parameter.is_meta for parameter in module.parameters())


def test_listed_leftovers_are_ignored_and_tied_weights_stay_one(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.out = nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
            self.out.weight = self.shared.weight

    harmless = {"mean": torch.zeros(16), "spiece_model": torch.zeros(9, dtype=torch.uint8)}
    save_file({"out.weight": torch.ones(7, 4)} | harmless, tmp_path / "x.safetensors")
    with torch.device("meta"):
        module = Tied()
    load_into(module, open_checkpoint(tmp_path / "x.safetensors"), dtype=torch.float32)
    assert module.shared.weight is module.out.weight and module.out.weight.sum() == 28


@pytest.mark.parametrize("name, shape", [("scale_weight", ()), ("scale_weight", (1,)), ("weight_scale", (5, 1))])
def test_fp8_weights_are_multiplied_by_their_scale(name, shape, tmp_path):
    state = net().state_dict()
    values = torch.randn(5, 3).to(torch.float8_e4m3fn)
    scale = torch.full(shape, 0.25)
    state |= {"a.weight": values, f"a.{name}": scale, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    save_file(state, tmp_path / "x.safetensors")
    module = on_meta()
    load_into(module, open_checkpoint(tmp_path / "x.safetensors"), dtype=torch.float32)
    assert torch.equal(module.a.weight, values.float() * 0.25)


def test_a_block_scaled_or_packed_weight_is_refused(tmp_path):
    state = net().state_dict()
    for change in ({"a.weight": torch.zeros(5, 3, dtype=torch.float8_e4m3fn), "a.weight_scale": torch.ones(5, 3)},
                   {"a.weight": torch.zeros(5, 3, dtype=torch.uint8)}):  # fmt: skip
        save_file(state | change, tmp_path / "x.safetensors")
        with pytest.raises(SpecarError, match="a.weight"):
            load_into(on_meta(), open_checkpoint(tmp_path / "x.safetensors"), dtype=torch.float32)


MEMORY = """
    import re, sys, torch
    from specar_core.tensor_files import open_checkpoint
    from specar_core.weights import load_into

    def anonymous():
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        checkpoint = open_checkpoint(path)
        with torch.device("meta"):
            module = torch.nn.ModuleList(torch.nn.Linear(2048, 3200, bias=False) for _ in checkpoint.names)
        cast = checkpoint.names["0.weight"].dtype != torch.bfloat16
        before, beyond = anonymous(), 0
        def step(done, total):
            global beyond
            result = cast * sum(p.nbytes for p in module.parameters() if not p.is_meta)
            beyond = max(beyond, anonymous() - before - result)
        load_into(module, checkpoint, dtype=torch.bfloat16, progress=step)
        assert all(p.max() == 1 for p in module.parameters())
        step(0, 0)
        print(beyond / checkpoint.bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_host_memory_beyond_the_result_stays_below_a_quarter_of_the_file_R22(tmp_path):
    """210 MB that stay mapped in their own type, and 210 MB that are cast while streaming."""
    for name, dtype, count in (("bf16", torch.bfloat16, 16), ("fp32", torch.float32, 8)):
        tensor = torch.ones(3200, 2048, dtype=dtype)
        save_file({f"{i}.weight": tensor.clone() for i in range(count)}, tmp_path / name)
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), tmp_path / "bf16", tmp_path / "fp32"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr
    shares = [float(line) for line in ran.stdout.split()]
    assert len(shares) == 2 and max(shares) < 1 / 4


# -------------------------------------------------------------------------------------------------- damage


def whole(folder: Path) -> bytes:
    path = write_header(folder / "whole.safetensors", wan_shapes(64, 128, 2, text=24))
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99, 1])
def test_a_cut_off_file_is_named_with_its_bytes_and_its_model_R57(share, tmp_path):
    data = whole(tmp_path)
    size = min(int(len(data) * share), len(data) - 1)
    (path := tmp_path / "x.safetensors").write_bytes(data[:size])
    with pytest.raises(SpecarError, match=f"cut off: {size:,} bytes present of .*{len(data):,}|of at least"):
        open_checkpoint(path)
    report = check_file(path)
    assert "cut off" in report.problem and report.bytes == size
    if share > 0.1:  # the header is there
        assert report.identity.kind == "wan" and f"{len(data):,} declared" in report.problem


def archive(path, entries, **options):
    with zipfile.ZipFile(path, "w", **options) as out:
        for name, content in entries.items():
            out.writestr(name, content)
    return path.read_bytes()


STRANGERS = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 28577000000\n",
            "git-lfs pointer to 28,577,000,000 bytes"),
    "html": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page"),
    "text": (b"Entry not found", "is not a safetensors file"),
    "short": (b"abc", "cut off: 3 bytes present of at least 8"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(64), "is a GGUF file"),
    "legacy": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "is not a zip-based torch file"),
    "cut zip": (b"PK\x03\x04" + bytes(100), "is cut off"),
    "no json": ((20).to_bytes(8, "little") + b"{" + bytes(40), "its header is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("what", STRANGERS)
def test_what_is_no_checkpoint_is_named_for_what_it_is_R58(what, suffix, tmp_path):
    data, message = STRANGERS[what]
    (path := tmp_path / f"x{suffix}").write_bytes(data)
    if suffix == ".pt" and what in ("text", "short"):
        message = "is not a zip-based torch file"
    with pytest.raises(SpecarError, match=message):
        open_checkpoint(path)
    report = check_file(path)
    assert message in report.problem and str(report) == report.problem and report.bytes == len(data)


def test_a_zip_of_something_else(tmp_path):
    archive(tmp_path / "x.pt", {"readme.txt": "hello"})
    assert "zip archive, but not a torch file" in check_file(tmp_path / "x.pt").problem


def test_a_torch_file_under_the_wrong_name(tmp_path):
    torch.save(net().state_dict(), path := tmp_path / "x.safetensors")
    assert "Rename it to x.pt" in check_file(path).problem


def test_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "gone.pt")
    (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link.pt").symlink_to(stored_as("pth", net().state_dict(), tmp_path))
    for name, message in (("gone.pt", "No such file"), ("dangling.pt", "link to a missing file"), ("loop.pt", "link"),
                          ("empty", "folder with 0 files"), ("x.pth/below", "Not a directory")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            open_checkpoint(tmp_path / name)
        assert message in check_file(tmp_path / name).problem
    assert len(open_checkpoint(tmp_path / "link.pt").names) == 5


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root reads everything")
def test_an_unreadable_file(tmp_path):
    (path := tmp_path / "x.pt").write_bytes(b"x")
    path.chmod(0)
    assert "Permission denied" in check_file(path).problem


@pytest.mark.parametrize(
    "index, message",
    [
        ("[]", "not a JSON object"),
        ("{}", "no table"),
        ('{"weight_map": {"x": "../x.safetensors"}}', "no table"),
        ('{"weight_map": {"x": "/etc/passwd"}}', "no table"),
        ('{"weight_map": {"x": 3}}', "no table"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "lacks 1 of 1 shards: gone.safetensors"),
        ('{"weight_map": {"y": "x.safetensors"}}', "1 tensors are not in the shard"),
    ],
)
def test_an_index_that_does_not_hold(index, message, tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(index)
    with pytest.raises(SpecarError, match=message):
        open_checkpoint(tmp_path)


def test_a_cut_off_shard_is_named(tmp_path):
    path = stored_as("sharded", net().state_dict(), tmp_path)
    os.truncate(shard := tmp_path / "m-00002-of-00002.safetensors", shard.stat().st_size - 1)
    assert "m-00002-of-00002.safetensors is cut off" in check_file(path).problem


def test_check_tells_model_types_and_the_tensors_that_are_not_finite(tmp_path):
    (path := tmp_path / "good.safetensors").write_bytes(whole(tmp_path))
    report = check_file(path)
    assert report.problem is None
    assert str(report) == (
        f"{path} is whole and finite.\n  Wan 2.1 text-to-video transformer, width 64, 2 layers; 69 tensors "
        f"(69 bfloat16); {path.stat().st_size:,} bytes"
    )
    checkpoint = open_checkpoint(path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    tensors["head.modulation"][0, 1, 5] = torch.nan
    tensors["blocks.1.ffn.0.bias"][-1] = torch.inf
    tensors["blocks.1.ffn.2.bias"] = tensors["blocks.1.ffn.2.bias"].float()
    seen = []
    for suffix, write in (("safetensors", save_file), ("pt", torch.save)):
        write(tensors, path := tmp_path / f"bad.{suffix}")
        report = check_file(path, lambda done, total: seen.append(done))
        assert "NaN or infinity in 2 tensors: blocks.1.ffn.0.bias, head.modulation" in report.problem
        assert report.dtypes == {"bfloat16": 68, "float32": 1} and seen[-1] <= report.bytes


def test_a_model_of_no_use_here_is_a_problem(tmp_path):
    path = write_header(tmp_path / "x.safetensors", {"x": (1,)})
    assert check_file(path).problem == f"{path} is whole and finite, but not usable here."


# ------------------------------------------------------------------------------------------- hostile files


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "huge shape": {"x": entry(shape=(2**39, 2**39))},
    "huge offsets": {"x": entry(shape=(2**39,), offsets=(0, 2**41))},
    "negative": {"x": entry(shape=(-1,), offsets=(0, -4))},
    "true": {"x": entry(shape=(True,))},
    "float": {"x": entry(shape=(1.0,))},
    "rank": {"x": entry(shape=(1,) * 100_000)},
    "overlap": {"x": entry(), "y": entry()},
    "gap": {"x": entry(offsets=(4, 8))},
    "unknown type": {"x": entry(dtype="F4")},
    "no entry": {"x": 3},
    "metadata": {"__metadata__": {"a": {}}, "x": entry()},
    "nothing": {"__metadata__": {}},
    "name": {"\x1b[2J\n" * 1000: 1},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_lies(what, tmp_path):
    text = json.dumps(HOSTILE[what]).encode()
    (path := tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(SpecarError) as error:
        open_checkpoint(path)
    message = str(error.value)
    assert "\x1b" not in message and "\n" not in message and len(message) < 300 + len(str(path))


def test_a_header_nested_without_end(tmp_path):
    text = b'{"x":' + b"[" * 200_000
    (path := tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SpecarError, match="not JSON"):
        open_checkpoint(path)


def opened_or_refused(path):
    """Open, look, read: only our errors escape, and no more is allocated than a small multiple of the file."""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        identify(checkpoint)
        for name, info in checkpoint.names.items():
            assert checkpoint.tensor(name).shape == info.shape
    except (SpecarError, UsageError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4_000_000


def mutations(size):
    return st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), min_size=1, max_size=6)


SAMPLE = save({"a.weight": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, metadata={"k": "v"})
HEADER = 8 + int.from_bytes(SAMPLE[:8], "little")
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(mutations(HEADER), st.integers(0, len(SAMPLE)) | st.none())
def test_safetensors_with_bent_bytes(tmp_path, changes, cut):
    data = bytearray(SAMPLE)
    for position, value in changes:
        data[position] = value
    (path := tmp_path / "x.safetensors").write_bytes(data[:cut])
    opened_or_refused(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "BF16", "dtype", "shape"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8"]) | JSON, "shape": st.lists(st.integers(-3, 2**70), max_size=3) | JSON,
     "data_offsets": st.lists(st.integers(-3, 2**70), min_size=2, max_size=2) | JSON}
)  # fmt: skip


@fuzz
@given(st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), ENTRIES | JSON, max_size=4) | JSON)
def test_safetensors_with_invented_headers(tmp_path, header):
    text = json.dumps(header).encode()
    (path := tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    opened_or_refused(path)


def torch_file(**tensors) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    with zipfile.ZipFile(buffer) as read:
        return {name: read.read(name) for name in read.namelist()}


TORCH = torch_file(a=torch.zeros(2, 3), b=torch.zeros(4, dtype=torch.bfloat16))
PICKLE = next(name for name in TORCH if name.endswith("data.pkl"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@fuzz
@given(mutations(len(TORCH[PICKLE])))
def test_torch_files_with_bent_pickles(tmp_path, changes):
    """The archive is sound again after the change, so that torch's unpickler gets to see it."""
    data = bytearray(TORCH[PICKLE])
    for position, value in changes:
        data[position] = value
    archive(path := tmp_path / "x.pt", TORCH | {PICKLE: bytes(data)})
    opened_or_refused(path)


@fuzz
@given(st.data())
def test_torch_files_with_bent_bytes(tmp_path, data):
    content = bytearray(archive(path := tmp_path / "x.pt", TORCH))
    for position, value in data.draw(mutations(len(content))):
        content[position] = value
    path.write_bytes(content)
    opened_or_refused(path)


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function, arguments", [(os.system, ("true",)), (bytearray, (10**12,)), (torch.Tensor, (10**12,))]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_asks_for_more_than_tensors_is_not_unpickled(function, arguments, protocol, tmp_path):
    archive(path := tmp_path / "x.pt", TORCH | {PICKLE: pickle.dumps(Call(function, *arguments), protocol)})
    with pytest.raises(SpecarError, match="not only for tensors, and is not unpickled"):
        open_checkpoint(path)


def test_a_torch_file_that_unpacks_to_more_than_it_is(tmp_path):
    archive(path := tmp_path / "x.pt", TORCH | {PICKLE: bytes(10**7)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(SpecarError, match="packed or lies about its size"):
        open_checkpoint(path)


@pytest.mark.parametrize("field", [20, 24])  # compressed and real size of an entry in the table at the end
def test_a_torch_file_that_lies_about_its_sizes(field, tmp_path):
    content = bytearray(archive(path := tmp_path / "x.pt", TORCH))
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(PICKLE.encode()))
    content[entry + field : entry + field + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    opened_or_refused(path)
    assert "lies about its size" in check_file(path).problem


def test_a_tensor_larger_than_its_file(tmp_path):
    torch.save({"x": torch.zeros(1).expand(2**40)}, path := tmp_path / "x.pt")
    with pytest.raises(SpecarError, match="x is larger than the file"):
        open_checkpoint(path)


def test_a_torch_file_without_tensors(tmp_path):
    for content in ({"step": 3}, [torch.zeros(1)], torch.zeros(1), {}, {3: torch.zeros(1)}):
        torch.save(content, path := tmp_path / "x.pt")
        with pytest.raises(SpecarError, match="no table of named tensors"):
            open_checkpoint(path)
