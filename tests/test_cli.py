"""The command line as a user meets it: real files, exit codes, one-line errors, nothing half written."""

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specar_core import console, generate, video
from specar_core.backbones import base
from specar_core.backbones.tiny import TINY
from specar_core.checkpoint import FORMAT
from specar_core.cli import app
from specar_core.command import interrupt
from specar_core.models import attention, compiled
from specar_core.models.wan import sdpa
from specar_core.video import VideoWriter

ROOT = Path(__file__).parents[1]
TINY_VIDEO = ["generate", "--backbone", "tiny", "--prompt", "a red ball", "--width", "48", "--height", "32"]


def specar(*arguments, **environment):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(code, words, *arguments, **environment):
    """One or two lines on standard error, nothing on standard output."""
    result = specar(*arguments, **environment)
    said = [line for line in result.stderr.splitlines() if not line.startswith(("notice:", "attention:"))]
    assert result.exit_code == code, result.output
    assert words in " ".join(said), said
    assert len(said) <= 2 and result.stdout == ""


def frames_of(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECAR_MODELS", str(tmp_path / "models"))
    return tmp_path


def test_a_video_and_its_report(here):
    result = specar(*TINY_VIDEO, "--blocks", 3, "--k", 2, "--out", "t.mp4")
    assert (result.exit_code, result.stdout) == (0, "t.mp4\n")
    frames = frames_of("t.mp4")
    report = json.loads(Path("t.json").read_text())
    with av.open("t.mp4") as container:
        assert json.loads(container.metadata["specar"]) == report
        assert container.streams.video[0].average_rate == 16
    assert len(frames) == report["frames"] == 30 and frames[0].shape == (32, 48, 3)
    assert report["schedule"]["targets"] == [0, 1]
    assert [block["role"] for block in report["blocks"]] == ["target", "target", "drafter"]
    assert [block["forwards"] for block in report["blocks"]] == [4, 4, 4]
    assert report["prompts"] == [{"block": 0, "text": "a red ball"}]
    assert report["environment"]["precision"] == "fp32" and report["environment"]["attention"] == "sdpa"
    assert {model["role"] for model in report["models"]} == {"target", "drafter", "text encoder", "vae"}
    assert sum(report["timings"][part] for part in ("text", "load", "rollout", "decode")) <= report["timings"]["total"]
    assert sorted(path.name for path in here.iterdir()) == ["t.json", "t.mp4"]


def test_a_report_makes_the_same_video_again(here):
    options = ["--schedule", "list:0,2", "--seed", 5, "--terminal-step", "--keep-first-frames", "--blocks", 3]
    assert specar(*TINY_VIDEO, *options, "--steps", "drafter=1000,500", "--out", "a.mp4").exit_code == 0
    assert specar("generate", "--from", "a.json", "--out", "b.mp4").exit_code == 0
    a, b = json.loads(Path("a.json").read_text()), json.loads(Path("b.json").read_text())
    assert [block["forwards"] for block in a["blocks"]] == [5, 3, 5]
    for same in ("frames", "seed", "schedule", "sampling", "options", "prompts", "models"):
        assert a[same] == b[same]
    assert len(frames_of("a.mp4")) == 33
    assert all((x == y).all() for x, y in zip(frames_of("a.mp4"), frames_of("b.mp4"), strict=True))
    assert specar("generate", "--from", "a.json", "--k", 1, "--seconds", 1, "--out", "c.mp4").exit_code == 0
    assert json.loads(Path("c.json").read_text())["schedule"]["policy"] == "spread:1"


def test_the_report_of_a_graph_names_no_file_for_the_vae(here):
    specar(*TINY_VIDEO, "--blocks", 1, "--out", "a.mp4")
    report = json.loads(Path("a.json").read_text())
    models = [
        {**model, **({"file": None, "digest": "0"} if model["role"] == "vae" else {})} for model in report["models"]
    ]
    Path("graph.json").write_text(json.dumps({**report, "models": models}))
    again = specar("generate", "--from", "graph.json", "--out", "b.mp4")
    assert again.exit_code == 0 and "is not the file" not in again.stderr
    Path("g.run").mkdir()
    Path("g.run", "run.json").write_text(json.dumps({"format": FORMAT, "report": {**report, "models": models}}))
    refused(2, "g.run is the run of a ComfyUI graph: queue the same graph again", "resume", "g.run")


def test_json_on_standard_output(here):
    result = specar(*TINY_VIDEO, "--blocks", 1, "--json")
    assert json.loads(result.stdout) == json.loads(Path("specar.json").read_text())


def test_encoding_is_over_when_the_report_tells_how_long_it_took(here, monkeypatch):
    """On a clock that ticks when it is looked at: five blocks, and what x264 held back of the last segment."""
    writers = []

    class Writer(VideoWriter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            writers.append(self)

    monkeypatch.setattr(generate, "VideoWriter", Writer)
    monkeypatch.setattr(video, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert specar(*TINY_VIDEO, "--blocks", 5).exit_code == 0
    assert json.loads(Path("specar.json").read_text())["timings"]["encode"] == writers[0].encode_seconds == 6


def test_a_console_of_few_characters(here):
    prompt = "a red ball \u89c6 \U0001f98a \xe9"
    command = [sys.executable, "-m", "specar_core.cli", *TINY_VIDEO[:3], "--prompt", prompt, "--blocks", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "cp1252", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, "--out", "\u89c6.mp4"], env=environment, capture_output=True)
    assert (run.returncode, run.stdout.strip()) == (0, b"\\u89c6.mp4"), run.stderr
    assert b"does not know: \xe9, \\u89c6" in run.stderr
    assert json.loads(Path("\u89c6.json").read_text("utf-8"))["prompts"][0]["text"] == prompt


def test_the_lines_of_the_readme_run(here):
    (lines,) = re.findall(r"## As a library\n\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    lines += "import sys\nassert 'torch._dynamo' not in sys.modules, 'it takes seconds to import'\n"
    run = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split()[1] for line in run.stdout.splitlines()] == ["target", "drafter", "target", "drafter"]
    assert len(frames_of("ball.mp4")) == 42


def test_rolling_context_for_the_drafter(here):
    assert specar(*TINY_VIDEO, "--blocks", 3, "--drafter-context", "rolling:9:1").exit_code == 0
    report = json.loads(Path("specar.json").read_text())
    assert [block["forwards"] for block in report["blocks"]] == [5, 5, 5]
    plan = json.loads(specar("plan", "--from", "specar.json", "--json").stdout)
    assert sum(plan["forwards"].values()) == sum(block["forwards"] for block in report["blocks"])


@pytest.mark.parametrize("name", ["t.mp4", "t.json", "t.partial.mp4", "t.partial.json"])
def test_an_existing_file_is_kept(here, name):
    Path(name).write_bytes(b"mine")
    refused(2, f"{name} exists", *TINY_VIDEO, "--blocks", 1, "--out", "t.mp4")
    assert Path(name).read_bytes() == b"mine" and os.listdir(here) == [name]
    assert specar(*TINY_VIDEO, "--blocks", 1, "--out", "t.mp4", "--overwrite").exit_code == 0
    assert len(frames_of("t.mp4")) == 6 and sorted(os.listdir(here)) == ["t.json", "t.mp4"]


LONG = [*TINY_VIDEO, "--blocks", 5, "--schedule", "first"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The frames of a video for the options below to be compared with, and what its report says."""
    return video_with(tmp_path_factory.mktemp("plain") / "t.mp4")


def video_with(out, *options):
    assert specar(*LONG, *options, "--out", out).exit_code == 0
    return frames_of(out), json.loads(out.with_suffix(".json").read_text())


@pytest.mark.parametrize(
    "options, told, value",
    [
        (["--seed", 1], ("seed",), 1),
        (["--anchor-first-latent"], ("options", "anchor_first_latent"), True),
        (["--drafter-context", "rolling:9"], ("options", "drafter_context"), "rolling:9"),
        (["--terminal-step"], ("options", "terminal_step"), True),
        (["--steps", "drafter=1000,500"], ("sampling", "drafter", "steps"), [1000, 500]),
        (["--precision", "bf16"], ("environment", "precision"), "bf16"),
        (["--attention", "nearly"], ("environment", "attention"), "nearly"),
    ],
)
def test_an_option_changes_the_video_and_the_report(plain, tmp_path, monkeypatch, options, told, value):
    nearly = attention.Backend("nearly", None, None, lambda: lambda q, k, v: 0.99 * sdpa(q, k, v))
    monkeypatch.setattr(attention, "BACKENDS", (*attention.BACKENDS, nearly))
    monkeypatch.setattr(attention, "NAMES", (*attention.NAMES, "nearly"))
    monkeypatch.setattr(attention, "FEW_KEYS", 0)
    frames, report = video_with(tmp_path / "t.mp4", *options)
    before = plain[1]
    for key in told:
        before, report = before[key], report[key]
    assert report == value != before
    assert any((x != y).any() for x, y in zip(frames, plain[0], strict=True))


def test_sink_frames_change_what_comes_after_the_window(tmp_path):
    without, _ = video_with(tmp_path / "a.mp4", "--drafter-context", "rolling:9")
    sunk, _ = video_with(tmp_path / "b.mp4", "--drafter-context", "rolling:9:3")
    same = [bool((x == y).all()) for x, y in zip(without, sunk, strict=True)]
    assert all(same[:24]) and not any(same[42:])  # full with the third block; x264 looks ahead over its last frames


@pytest.mark.parametrize("reason, count", [(None, 2), ("no C++ compiler", 0)])
def test_compile_compiles_both_models_and_is_recorded(plain, tmp_path, monkeypatch, reason, count):
    """As far as the command line goes: to compile them takes two minutes on a CPU."""
    networks = []
    monkeypatch.setattr(base, "compile_blocks", networks.append)
    monkeypatch.setattr(compiled, "no_compiler", lambda device: reason)
    _, report = video_with(tmp_path / "t.mp4", "--compile")
    assert len(networks) == count and report["environment"]["compile"] == bool(count)
    assert not plain[1]["environment"]["compile"]


REPORT = (  # design.md, section 8
    "schema version backbone prompts conditioning seed width height fps frames schedule blocks timings peak_gpu_bytes "
    "environment sampling options models"
)


def test_a_report_has_every_key(plain):
    _, report = plain
    assert set(REPORT.split()) <= report.keys()
    assert set(report["schedule"]) >= {"blocks", "targets", "draft_runs", "max_draft_run", "policy"}
    assert all(block.keys() >= {"index", "role", "seconds", "forwards", "rejected"} for block in report["blocks"])
    assert report["timings"].keys() == {"load", "text", "rollout", "decode", "encode", "total"}
    assert all(seconds > 0 for seconds in report["timings"].values())
    assert report["environment"].keys() >= {"device", "torch", "attention", "precision"}
    assert {role: set(sampling) for role, sampling in report["sampling"].items()} == {
        "target": {"steps", "guidance"},
        "drafter": {"steps", "guidance"},
    }
    options = {"terminal_step", "anchor_first_latent", "keep_first_frames", "drafter_context"}
    assert report["options"].keys() >= options
    assert all(model.keys() == {"role", "file", "bytes", "digest"} for model in report["models"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--width", "0"], "width 0 is too small; the least is 16"),
        (["--schedule", ""], "unknown schedule ''"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["--blocks", "few"], "Invalid value for '--blocks'"),
        (["--out"], "requires an argument"),
        (["--width", "50"], "width 50 is not a multiple of 16; use 48 or 64"),
        (["--seconds", "0"], "more than 0 seconds, not 0"),
        (["--seconds", "-3"], "more than 0 seconds, not -3"),
        (["--blocks", "0"], "at least 1 block, not 0"),
        (["--blocks", "100001"], "at most 100,000 blocks, not 100,001"),
        (["--frames", "0"], "at least 1 frame, not 0"),
        (["--k", "-1"], "at least 0, not -1"),
        (["--k", "2.5"], "whole number, not '2.5'"),
        (["--k", "1_0"], "whole number, not '1_0'"),
        (["--k", ""], "whole number, not ''"),
        (["--max-run", "\u0663"], "whole number, not '\u0663'"),
        (["--k", "2", "--schedule", "first"], "only one of k and schedule"),
        (["--seconds", "1", "--blocks", "2"], "only one of seconds and blocks"),
        (["--schedule", "evenly"], "unknown schedule 'evenly'"),
        (["--schedule", "list:0,99"], "block 99 lies outside"),
        (["--steps", "target=900,100"], "the target's steps must begin with 1000 and fall"),
        (["--stitch", "2", "--steps", "drafter=1000,500"], "not 1000,500 for the drafter and 1000,750,500,250"),
        (["--steps", "target=1000,x"], "whole number, not 'x'"),
        (["--steps", "1000"], "--steps is ROLE=LIST, e.g. drafter=1000,750,500,250, not '1000'"),
        (["--steps", "helper=1000"], "unknown role 'helper'"),
        (["--precision", "fp7"], "unknown precision 'fp7'"),
        (["--attention", "flash9"], "unknown attention 'flash9'"),
        (["--drafter-context", "rolling:2"], "too small"),
        (["--drafter-context", "whole"], "unknown drafter context 'whole'"),
        (["--example", "reef"], "only one of prompt and example"),
        (["--backbone", "wan9"], "unknown backbone 'wan9'"),
        (["--out", "t.avi"], "does not end in .mp4"),
        (["--from", "none.json"], "cannot read none.json"),
        (["--seed", str(2**64)], "64 bits"),
    ],
)
def test_wrong_usage(here, options, words):
    refused(2, words, *TINY_VIDEO, *options)
    assert list(here.iterdir()) == []


def test_missing_parts(here):
    assert specar().exit_code == 2
    refused(2, "No such command 'frob'; see `specar --help`", "frob")
    refused(2, "Missing option '--blocks'; see `specar schedule --help`", "schedule")
    refused(2, "what should the video show?", "generate", "--backbone", "tiny")


def test_a_foreign_report_is_refused(here):
    Path("x.json").write_text('{"schedule": 3}')
    refused(2, "not the report of a SpecAR video", "generate", "--from", "x.json")
    assert specar(*TINY_VIDEO, "--blocks", 1).exit_code == 0
    Path("x.json").write_text(json.dumps({**json.loads(Path("specar.json").read_text()), "schema": 99}))
    refused(2, "of another version of SpecAR: schema 99, not 1", "generate", "--from", "x.json", "--out", "b.mp4")


@pytest.mark.parametrize(
    "options, notice",
    [
        (["--k", "0"], "the drafter generates everything"),
        (["--k", "9"], "9 target blocks asked for, but the video has 2"),
        (["--schedule", "list:1"], "block 0 is a drafter block"),
    ],
)
def test_notices(here, options, notice):
    result = specar("plan", "--backbone", "tiny", "--prompt", "", "--blocks", 2, *options)
    assert result.exit_code == 0 and notice in result.stderr


def test_an_empty_prompt_is_a_prompt(here):
    assert specar("generate", "--backbone", "tiny", "--prompt", "", "--blocks", 1).exit_code == 0


def test_a_long_prompt_is_clipped_with_a_notice_that_says_where(here):
    words = ["red", "ball"] * 15 + ["large", "star", "blue"]
    result = specar("generate", "--backbone", "tiny", "--prompt", " ".join(words), "--blocks", 1)
    assert result.exit_code == 0
    assert "clipped" in result.stderr and "ball large star" in " ".join(result.stderr.split())


def test_missing_models_are_named_before_anything_loads_R02(here):
    result = specar("generate", "--backbone", "krea", "--prompt", "x")
    assert result.exit_code == 1
    for words in ("krea-realtime-video-14b.safetensors", "specar download --backbone krea", str(here / "models")):
        assert words in result.stderr
    assert list(here.iterdir()) == []
    plan = json.loads(specar("plan", "--backbone", "krea", "--prompt", "x", "--json").stdout)
    assert len(plan["missing_files"]) == 4 and plan["frames"] == 426
    assert plan["schedule"]["targets"] == [0, 5, 10, 15, 20, 25, 30]
    assert plan["predicted_seconds"] is None and "not measured" in plan["unmeasured"]


def test_a_model_that_no_block_needs_is_not_asked_for(here):
    plan = specar("plan", "--backbone", "krea", "--prompt", "x", "--schedule", "draft-only", "--json").stdout
    assert len(json.loads(plan)["missing_files"]) == 3


def test_wrong_model_for_the_role_R19(here):
    shipped = TINY.shipped
    refused(1, "it is the target's", *TINY_VIDEO, "--drafter", shipped["target"])
    refused(1, "cannot be the target: it is a Wan 2.1 VAE", *TINY_VIDEO, "--target", shipped["vae"])
    refused(1, "cannot be the VAE", *TINY_VIDEO, "--vae", shipped["target"])
    refused(1, "not the tiny pair's text encoder", *TINY_VIDEO, "--text-encoder", shipped["vae"])
    for config in ("{", "[]", "{}", '{"text": {}}', '{"text": {"words": 3, "length": 8, "dim": 16}}'):
        save_file({"x": torch.zeros(1)}, "other.safetensors", {"config": config})
        refused(1, "not the tiny pair's text encoder", *TINY_VIDEO, "--text-encoder", "other.safetensors")
    Path("other.safetensors").unlink()
    refused(2, "no drafter at gone.safetensors", *TINY_VIDEO, "--drafter", "gone.safetensors")
    assert [path.name for path in here.iterdir()] == []


def test_a_truncated_file(here):
    whole = TINY.shipped["drafter"].read_bytes()
    Path("cut.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(1, f"of {len(whole):,} declared", *TINY_VIDEO, "--drafter", "cut.safetensors")
    result = specar("check", "cut.safetensors", TINY.shipped["vae"])
    assert result.exit_code == 1 and f"of {len(whole):,} declared" in result.stdout
    assert "Wan 2.1 VAE" in result.stdout and "1 of 2 files cannot be used" in result.stderr


def test_what_is_shipped_is_known():
    told = specar("check", *TINY.shipped.values())
    assert told.exit_code == 0 and "text encoder of the tiny pair, width" in told.stdout


def test_nan_in_a_block_keeps_the_blocks_before_it(here):
    """A drafter with a damaged head: block 1 is the first one that it generates."""
    weights = load_file(TINY.shipped["drafter"])
    weights["head.head.bias"] = torch.full_like(weights["head.head.bias"], float("nan"))
    save_file(weights, "damaged.safetensors")
    result = specar(*TINY_VIDEO, "--blocks", 3, "--k", 1, "--drafter", "damaged.safetensors", "--out", "t.mp4")
    assert result.exit_code == 1
    for words in ("block 1 (drafter)", "NaN", "float32", "attention sdpa", "t.partial.mp4"):
        assert words in " ".join(result.stderr.split())
    assert len(frames_of("t.partial.mp4")) == 6 and not Path("t.mp4").exists()
    assert len(json.loads(Path("t.partial.json").read_text())["blocks"]) == 1


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_the_finished_blocks(here, kind):
    command = [sys.executable, "-m", "specar_core.command", *TINY_VIDEO, "--blocks", "500", "--out", "t.mp4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(here.glob("t.run/segment-*.mp4")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said, said
    blocks = len(json.loads(Path("t.partial.json").read_text())["blocks"])
    assert blocks >= 4 and not Path("t.mp4").exists()
    assert len(frames_of("t.partial.mp4")) == 6 + 12 * (blocks - 1)


def test_a_disk_that_cannot_be_written(here):
    Path("file").write_text("")
    refused(1, f"Cannot write {here}/file/t.run: Not a dir", *TINY_VIDEO, "--blocks", 1, "--out", "file/t.mp4")


def test_schedule_command():
    schedule = json.loads(specar("schedule", "--blocks", 36, "--k", 7, "--json").stdout)
    assert schedule == {
        "blocks": 36,
        "targets": [0, 5, 10, 15, 20, 25, 30],
        "draft_runs": [4, 4, 4, 4, 4, 4, 5],
        "max_draft_run": 5,
        "policy": "spread:7",
    }
    assert "the longest is 5" in specar("schedule", "--blocks", 36, "--max-run", 5).stdout
    refused(2, "give one of", "schedule", "--blocks", 36)
    refused(2, "at least 1 block, not 0", "schedule", "--blocks", 0, "--k", 1)
    refused(2, "at most 100,000 blocks, not 10,000,000,000", "schedule", "--blocks", 10**10, "--k", 1)


def test_download_dry_run_lists_files_sizes_and_licences(here):
    result = specar("download", "--backbone", "krea", "--dry-run")
    assert result.exit_code == 0
    for words in ("krea/krea-realtime-video", "28.58 GB", "Apache-2.0", "gdhe17/Self-Forcing", "missing"):
        assert words in result.stdout
    assert list(here.iterdir()) == []
    assert "nothing to download" in specar("download", "--backbone", "tiny").stdout


def test_doctor_and_examples(here):
    doctor = json.loads(specar("doctor", "--json").stdout)
    assert doctor["attention"]["sdpa"] == "yes" and "libx264" in doctor["machine"]["video encoder"]
    assert doctor["models"]["krea target"].startswith("missing: ")
    assert specar("doctor").stdout.startswith("machine\n")
    examples = json.loads(specar("examples", "--json").stdout)
    assert "reef" in examples and "tiny-ball" in specar("examples").stdout
    assert "missing" in specar("plan", "--backbone", "krea", "--example", "reef").stdout
    refused(2, "unknown example 'none'", "plan", "--example", "none")


def test_version():
    assert specar("--version").stdout.startswith("specar 0.")


def test_a_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specar_core.command", "examples"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "specar: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_nobodys(closed):
    command = f"{sys.executable} -m specar_core.command examples {closed}>&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and bool(done.stdout) == (closed == "2")


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.5])
def test_ctrl_c_while_modules_are_imported_is_one_line(delay):
    script = "import specar_core.command as command; import sys; print('begun', flush=True); sys.argv[1:] = ['doctor']"
    run = subprocess.Popen(
        [sys.executable, "-c", f"{script}; command.main()"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run.stdout.readline()
    time.sleep(delay)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate()
    assert (run.returncode, said) == (130, "specar: interrupted\n")


@pytest.mark.parametrize("ending, code, told", [("sys.exit", 0, ""), ("interrupt", 130, "specar: interrupted\n")])
def test_ctrl_c_while_it_ends_is_nothing(ending, code, told):
    script = f"""
import atexit, signal, sys
from specar_core import cli, command

def interrupt():
    raise KeyboardInterrupt

atexit.register(signal.raise_signal, signal.SIGINT)
atexit.register(signal.raise_signal, signal.SIGTERM)
cli.main = {ending}
command.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, told)


def test_ctrl_c_comes_when_an_import_is_over_that_would_swallow_it(here, monkeypatch):
    tried = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n    whole = True\n"
    Path("greedy.py").write_text(tried + "except KeyboardInterrupt:\n    whole = False\n")
    monkeypatch.syspath_prepend(here)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module("greedy")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.modules.pop("greedy").whole


def test_ctrl_c_while_options_are_read_is_told(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(console.Guarded, "make_context", interrupted)
    result = specar("examples")
    assert (result.exit_code, result.stderr) == (130, "specar: interrupted\n")


def test_a_video_is_made_again_from_the_mp4_with_as_many_threads(here):
    assert specar(*TINY_VIDEO, "--blocks", 1, "--out", "a.mp4").exit_code == 0
    threads = torch.get_num_threads()
    assert json.loads(Path("a.json").read_text())["environment"]["threads"] == threads
    torch.set_num_threads(threads + 1)
    try:
        assert specar("generate", "--from", "a.mp4", "--out", "b.mp4").exit_code == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    assert all((a == b).all() for a, b in zip(frames_of("a.mp4"), frames_of("b.mp4"), strict=True))
    refused(2, "x.mp4 has no report of SpecAR in it", "generate", "--from", "x.mp4")
