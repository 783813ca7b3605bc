"""Input that anybody may have made: reports, folders of runs, videos, LoRAs, timelines, prompts.

It works, or it ends in an error of ours, and no more memory is taken than there is to read.
"""

import copy
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from killed import CPU, frames
from safetensors.torch import save, save_file
from test_resume import stopped
from typer.testing import CliRunner

from specar_core import cli
from specar_core.backbones.causal_wan import GEOMETRY
from specar_core.checkpoint import RunFolder, block_name, read_run
from specar_core.earlier import merged, report_in, told_by
from specar_core.errors import SpecarError, UsageError
from specar_core.generate import generate
from specar_core.inputs import Inputs, of_options
from specar_core.job import resolve
from specar_core.mp4 import read_metadata
from specar_core.plan import plan
from specar_core.score import read_video
from specar_core.timeline import cuts, describe, mixture, parse, snap, within

OURS = (SpecarError, UsageError)
JUNK = (None, True, -1, 0, 1, 10**30, float("inf"), float("nan"), -0.5, "", "x", "\ud83d\0", "spread:1", [], [None], {})
GONE = "gone"
quick = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def made(backbone, tmp_path_factory):
    """A video with as much in its report as there can be."""
    folder = tmp_path_factory.mktemp("made")
    from PIL import Image

    Image.new("RGB", (48, 32), "red").save(folder / "i.png")
    save_file({"blocks.0.ffn.0.diff_b": torch.zeros(64)}, folder / "l.safetensors")
    inputs = Inputs(((None, folder / "l.safetensors", 0.5),), "image", folder / "i.png")
    lines = "0s: a red ball\n1s fade 1s: ball\n2s cut: red"
    job, _ = resolve(backbone, timeline=lines, blocks=4, k=2, source=inputs.source(16)[0])
    job, _ = inputs.with_loras(job)
    generate(job, CPU, {**backbone.shipped, **inputs.paths}, folder / "a.mp4")
    return folder / "a.mp4"


def places(value, place=()):
    """Of every value inside a JSON value."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*place, name))


def changed(value, place, new):
    value = copy.deepcopy(value)
    owner = value
    for name in place[:-1]:
        owner = owner[name]
    if new == GONE:
        del owner[place[-1]]
    else:
        owner[place[-1]] = copy.deepcopy(new)
    return value


def bent(value):
    """The same JSON with something else in one or two places."""
    place = st.sampled_from([place for place in places(value) if place])

    def twice(changes):
        bent = value
        for place, new in changes:
            try:
                bent = changed(bent, place, new)
            except (KeyError, IndexError, TypeError):  # its owner has gone
                pass
        return bent

    return st.lists(st.tuples(place, st.sampled_from((*JUNK, GONE))), min_size=1, max_size=2).map(twice)


def box(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """Of an mp4 file; with a size, one that says that it is so large."""
    if size:
        return b"\0\0\0\1" + name + size.to_bytes(8, "big") + content
    return (8 + len(content)).to_bytes(4, "big") + name + content


def told(path: Path):
    return json.loads(path.with_suffix(".json").read_text("utf-8"))


# Reports


def test_a_report_with_anything_in_any_place(backbone, made, tmp_path):
    report, path, taken = told(made), tmp_path / "x.json", []

    @quick
    @given(bent(report) | st.sampled_from(JUNK))
    @example(changed(report, ("schedule", "blocks"), 10**12))
    @example(changed(report, ("width",), 10**12))
    @example(changed(changed(report, ("width",), 16384), ("height",), 16384))
    def check(bent):
        path.write_text(json.dumps(bent))
        try:
            found = told_by(path, report_in(path))
            inputs = of_options(found["inputs"], {}, [made.parent])
            job, _ = resolve(backbone, **merged(found, {}), source=inputs.source(16)[0])
            plan(inputs.with_loras(job)[0], CPU).text()
            taken.append(job)
        except OURS as error:
            assert len(str(error)) < 500

    check()
    assert len(taken) > 20  # much of a report is not needed


def test_a_video_whose_report_has_anything_in_any_place(made, tmp_path):
    path, taken = tmp_path / "a.mp4", []
    keys = box(b"keys", bytes(8) + box(b"mdta", b"specar"))

    @quick
    @given(bent(told(made)) | st.sampled_from(JUNK))
    def check(bent):
        item = box(b"ilst", box(b"\0\0\0\1", box(b"data", bytes(8) + json.dumps(bent).encode())))
        path.write_bytes(box(b"moov", box(b"udta", box(b"meta", bytes(4) + keys + item))))
        try:
            layout = read_video(path).layout
            taken.append(layout)
            assert list(layout.starts) == sorted(set(layout.starts))
        except OURS as error:
            assert "has no report of SpecAR" in str(error) or "backbone" in str(error)

    check()
    assert len(taken) > 20


def test_the_json_of_a_run_has_anything_in_any_place(backbone, made, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "backbone", lambda name: backbone)
    folder = stopped(backbone, tmp_path / "a.mp4", 2)
    run = json.loads((folder / "run.json").read_text("utf-8"))
    blocks = sorted(folder.glob("block-*"))
    del run["report"]["blocks"], run["report"]["timings"]  # of which nothing is asked
    run["report"]["blocks"] = []
    before = {path: path.read_bytes() for path in folder.iterdir()}

    @settings(quick, max_examples=25)
    @given(bent(run) | st.sampled_from(JUNK))
    @example(changed(run, ("out",), "\0.mp4"))
    @example(changed(run, ("out",), "."))
    def check(bent):
        for path, data in before.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        (folder / "run.json").write_text(json.dumps(bent))
        done = CliRunner().invoke(cli.app, ["resume", str(folder)])
        assert done.exit_code in (0, 1, 2), done.exception
        if done.exit_code:
            assert len(done.stderr.splitlines()) < 12 and all(path.exists() for path in blocks)
        for path in tmp_path.rglob("*.mp4"):
            path.unlink()
        (tmp_path / "a.json").unlink(missing_ok=True)

    check()


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe{}", b"", b"NaN"])
def test_what_is_no_json(tmp_path, text):
    for name in ("x.json", "run.json"):
        (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError, match="not the report"):
        told_by(tmp_path / "x.json", report_in(tmp_path / "x.json"))
    with pytest.raises(UsageError, match="damaged, or another version"):
        read_run(tmp_path)


# Files that are larger than anything that is needed of them


def allocated(function) -> int:
    tracemalloc.start()
    try:
        function()
    except OURS:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def sparse(path: Path, head: bytes) -> Path:
    """A file of a terabyte that takes no place on the disk."""
    path.write_bytes(head)
    os.truncate(path, 10**12)
    return path


@pytest.mark.skipif(os.name == "nt", reason="sparse files")
def test_a_terabyte_is_not_read(backbone, tmp_path):
    size = 10**12
    keys = box(b"keys", bytes(8) + box(b"mdta", b"specar"))
    head = b""
    for left, name in ((0, b"moov"), (16, b"udta"), (32, b"meta")):
        head += box(name, b"", size - left)
    head += bytes(4) + keys
    head += box(b"ilst", b"", size - len(head))
    head += box((1).to_bytes(4, "big"), b"", size - len(head))
    head += box(b"data", bytes(8), size - len(head))
    video = sparse(tmp_path / "a.mp4", head)
    assert allocated(lambda: read_metadata(video)) < 1e6
    with pytest.raises(SpecarError, match="a text in it is too large"):
        read_metadata(video)
    report = sparse(tmp_path / "x.json", b"{")
    assert allocated(lambda: report_in(report)) < 1e6
    folder = stopped(backbone, tmp_path / "b.mp4", 2)
    sparse(folder / "block-000000-0000000000000000.safetensors", b"{")
    (folder / "run.json").unlink()
    sparse(folder / "run.json", b"{")
    assert allocated(lambda: read_run(folder)) < 1e6

    def opened():
        with RunFolder(folder, resume=True) as run:
            assert run.blocks == 2

    assert allocated(opened) < 1e6


# Blocks of a run


def test_blocks_with_a_true_checksum_and_a_false_content(backbone, tmp_path):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 2)
    first = sorted(folder.glob("block-*"))[0]
    kept = first.read_bytes()
    first.unlink()
    block = json.dumps({"index": 0, "role": "target", "seconds": 1, "forwards": 1, "rejected": 0})
    contents = [
        b"",
        b"{}" * 50,
        save({"other": torch.zeros(1)}, {"block": block}),
        save({"latents": torch.zeros(1)}),
        save({"latents": torch.zeros(1)}, {"block": "[" * 100_000}),
        save({"latents": torch.zeros(1)}, {"block": "{}"}),
        (10**6).to_bytes(8, "little") + b"{",
    ]
    for content in contents:
        place = folder / block_name(0, content)
        place.write_bytes(content)
        with RunFolder(folder, resume=True) as run:
            assert run.blocks == 0
        place.unlink()
    place = folder / block_name(0, content := save({"latents": torch.zeros(1)}, {"block": block}))
    place.write_bytes(content)
    job, _ = resolve(backbone, prompt="a red ball", blocks=7, k=2)
    with pytest.raises(SpecarError, match="holds blocks of another video"):
        generate(job, CPU, backbone.shipped, out, resume=True)
    place.unlink()
    first.write_bytes(kept)
    assert generate(job, CPU, backbone.shipped, out, resume=True)["resumed_at"]


# LoRA files

NAMES = st.sampled_from(["blocks.0.ffn.0", "blocks.0.self_attn.q", "lora_unet_blocks_0_ffn_0", "", "\0", "head.head"])
ENDS = st.sampled_from(["lora_up.weight", "lora_down.weight", "alpha", "diff", "diff_b", "lora_A.default.weight"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 24, 48, 64]), max_size=3)


@settings(quick, max_examples=60)
@given(st.dictionaries(st.tuples(NAMES, ENDS).map(".".join), SHAPES, max_size=5), st.floats(allow_nan=False, width=32))
def test_lora_files_with_any_names_and_shapes(tmp_path, backbone, shapes, strength):
    """What is taken is taken whole: it merges into the model without an error."""
    from specar_core.lora import merge
    from specar_core.tensor_files import open_checkpoint

    path = tmp_path / "l.safetensors"
    path.write_bytes(save({name: torch.ones(shape) for name, shape in shapes.items()}))
    job, _ = resolve(backbone, prompt="a red ball", blocks=2, k=1)
    try:
        fitted, _ = Inputs(((None, path, strength),)).with_loras(job)
    except OURS as error:
        assert "\0" not in str(error) and len(str(error)) < 1000
        return
    for role in fitted.loras[0].roles:
        network = backbone.outline(role).to_empty(device="cpu")
        merge(network, backbone.shipped[role], [(open_checkpoint(path), strength)])


# Timelines and prompts

WORDS = st.sampled_from(["0s", "1", "2.5s", "999999999s", "fade", "cut", ":", "\n", "#", "a", " ", "\0", "\ud83d", "-"])


@quick
@given(
    st.text(max_size=60) | st.lists(WORDS, max_size=16).map(" ".join) | st.lists(WORDS, max_size=9).map("0s:a\n".join)
)
def test_any_text_is_a_timeline_or_a_usage_error(text):
    try:
        cues, _ = snap(parse(text), GEOMETRY)
    except UsageError as error:
        assert len(str(error)) < 250
        return
    shown, past = within(cues, GEOMETRY, 30)
    assert shown[0].block == 0 and len(shown) + len(past) == len(cues)
    assert list(cuts(cues)) == sorted(set(cuts(cues))) and len(describe(shown, GEOMETRY)) == len(shown)
    for block in range(30):
        assert sum(mixture(shown, block).values()) == pytest.approx(1)


PROMPTS = {
    "control characters": "".join(map(chr, range(32))) + "\x7f\u2028\u2029\ufeff",
    "a megabyte": "a red ball " * 100_000,
    "a megabyte without a space": "\u4f60" * 400_000,
    "a half of a pair": "red \ud83d\ud83d ball",
    "nothing": "",
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts(backbone, tmp_path, what):
    prompt = PROMPTS[what]
    job, _ = resolve(backbone, prompt=prompt, blocks=1)
    generate(job, CPU, backbone.shipped, tmp_path / "a.mp4")
    assert json.loads(read_metadata(tmp_path / "a.mp4")["specar"])["prompts"][0]["text"] == prompt
    again = told_by(tmp_path / "a.json", report_in(tmp_path / "a.json"))
    written = prompt.encode("utf-8", "replace").decode()
    assert again["settings"]["cues"][0].text == written
    job, _ = resolve(backbone, **merged(again, {}))
    generate(job, CPU, backbone.shipped, tmp_path / "b.mp4")
    if prompt == written:
        assert frames(tmp_path / "a.mp4") == frames(tmp_path / "b.mp4")
