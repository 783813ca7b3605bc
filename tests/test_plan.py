"""What is told before anything is loaded, against what was measured, and what is refused with which advice."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import CPU
from small import small_backbone
from typer.testing import CliRunner

from benchmarks import costs
from specar_core import cli, plan, refusal
from specar_core.backbones import backbone
from specar_core.examples import example
from specar_core.generate import generate
from specar_core.job import resolve
from specar_core.machine import Machine

H200 = Machine(torch.device("cuda"), "bf16")
GB = 10**9
ROOM = {"GPU memory": 150 * GB, "host memory": 64 * GB, "disk space": 500 * GB}


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    for module in (plan, refusal):
        monkeypatch.setattr(module, "card", lambda device: "NVIDIA H200")


def measured():
    for path in sorted(costs.RESULTS.glob("*.json")):
        name = path.name.split("-")[0]
        result = json.loads(path.read_text())
        for video in result["videos"]:
            if not video.get("derived"):
                yield pytest.param(name, result, video, id=f"{path.stem}-k{video['k']}")


@pytest.mark.parametrize("name, result, video", list(measured()))
def test_predictions_are_within_15_percent_of_what_was_measured(name, result, video):
    job, _ = resolve(backbone(name), prompt="", blocks=video["blocks"], k=video["k"], steps=video.get("steps"))
    assert job.forwards == video["forwards"] and job.frames == video["frames"]
    machine = replace(H200, precision=result.get("precision", "bf16"), compile=result.get("compile", False))
    seconds, _ = plan.predict(job, machine)
    assert seconds == pytest.approx(video["seconds"], rel=0.15)
    gpu_bytes = plan.plan(job, machine).gpu_bytes
    if len(job.roles) == 2:  # the benchmark keeps both models even where one is never asked
        assert gpu_bytes == pytest.approx(video["peak_gpu_bytes"], rel=0.15)
        assert gpu_bytes > 0.98 * video["peak_gpu_bytes"]  # rather refused than out of memory


def test_the_table_is_made_of_the_results():
    assert json.loads(costs.TABLE.read_text()) == costs.table()


def test_fp8_of_the_target_takes_its_blocks_from_one_run_and_drafts_from_another():
    job, _ = resolve(backbone("krea"), blocks=36, k=7)
    low, both, full = (plan.predict(job, replace(H200, precision=p))[0] for p in ("fp8", "fp8-target", "bf16"))
    rows = {row["precision"]: row for row in costs.table() if row["backbone"] == "krea"}
    assert low < both < full
    assert full - both == pytest.approx(7 * (rows["bf16"]["target"] - rows["fp8"]["target"]), abs=0.2)


def test_time_follows_steps_size_and_length():
    def seconds(**options):
        return plan.predict(resolve(backbone("krea"), prompt="", **{"blocks": 36, "k": 7, **options})[0], H200)[0]

    assert seconds(width=416) == pytest.approx(seconds() / 2, rel=0.01)
    assert seconds(options={"terminal_step": True}) > 1.1 * seconds()
    assert seconds(blocks=72, k=14) == pytest.approx(2 * seconds(), rel=0.06)
    helios, _ = resolve(backbone("helios"), prompt="", options={"guidance": 1.0})
    assert plan.predict(helios, H200) == (None, "it was measured with guidance, which takes twice the time")


@pytest.mark.parametrize(
    "name, room, advice",
    [
        ("krea", {"GPU memory": 43 * GB}, r"It fits with --width 7\d\d --height \d{3}$"),
        ("krea", {"GPU memory": 24 * GB}, "It fits with --schedule draft-only$"),
        ("krea", {"GPU memory": 10 * GB}, "Nothing smaller fits"),  # not even the text encoder
        ("helios", {"GPU memory": 48 * GB}, "It fits with --schedule draft-only$"),
        ("krea", {"disk space": 90_000_000}, r"It fits with --blocks 2\d$"),
        ("krea", {"host memory": 1 * GB}, "Nothing smaller fits"),
    ],
)
def test_the_smallest_change_that_fits_is_named(name, room, advice):
    job, _ = resolve(backbone(name), prompt="")
    there = {**ROOM, **room}
    assert len(refusal.shortages(plan.plan(job, H200), there)) == 1
    said = refusal.smallest_change(job, H200, there)
    assert re.match(advice, said), said
    if fits := re.search(r"--width (\d+) --height (\d+)|--blocks (\d+)|draft-only", said):
        width, height, blocks = (int(text) if text else None for text in fits.groups())
        schedule = "draft-only" if "draft-only" in said else None
        smaller, _ = resolve(backbone(name), width=width, height=height, blocks=blocks, schedule=schedule)
        assert not refusal.shortages(plan.plan(smaller, H200), there)


class Card:
    """A GPU as far as `refusal` asks for one."""

    def __init__(self, monkeypatch, free: int, total: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(refusal, "host_memory", lambda: 64 * GB)


def test_memory_that_others_hold_is_told_apart(monkeypatch, tmp_path):
    planned = plan.plan(resolve(backbone("krea"), prompt="")[0], H200)
    Card(monkeypatch, 140 * GB, 150 * GB)
    assert refusal.refusal(planned, H200, tmp_path) is None
    Card(monkeypatch, 20 * GB, 150 * GB)
    said = refusal.refusal(planned, H200, tmp_path)
    assert re.search(r"needed, 20\.0 GB there: other programs hold 130\.0 GB of the GPU", said), said
    Card(monkeypatch, 20 * GB, 24 * GB)
    assert "draft-only" in refusal.refusal(planned, H200, tmp_path)


def test_bf16_on_a_card_without_it_is_refused_R54(monkeypatch, tmp_path):
    planned = plan.plan(resolve(backbone("krea"), prompt="")[0], H200)
    Card(monkeypatch, 140 * GB, 150 * GB, capability=(7, 5))
    assert "--precision fp32" in refusal.refusal(planned, H200, tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"blocks": 6, "schedule": "target-only"}, {"blocks": 6, "k": 2, "width": 48, "height": 32}, {"blocks": 1}],
)
def test_the_disk_never_holds_more_than_planned(tmp_path, monkeypatch, options):
    """Looked at whenever a file is whole, when its predecessors are still there."""
    job, _ = resolve(backbone("tiny"), prompt=example("tiny-pair"), **options)
    held, replace_file = [], os.replace

    def replacing(part, target):
        held.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
        replace_file(part, target)

    monkeypatch.setattr(os, "replace", replacing)
    generate(job, CPU, plan.model_files(job, tmp_path, {}), tmp_path / "a.mp4")
    planned = plan.plan(job, CPU).disk_bytes
    assert planned / 3 < max(held) < planned


def test_damaged_files_are_named_before_anything_loads_R57(tmp_path, monkeypatch):
    small = small_backbone(tmp_path)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(small.shipped["drafter"].read_bytes()[:-1])
    page = tmp_path / "page.safetensors"
    page.write_bytes(b"<html></html>")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: small)
    options = ["--prompt", "ball", "--drafter", str(cut), "--vae", str(page), "--text-encoder", str(page)]
    run = CliRunner().invoke(cli.app, ["generate", *options])
    assert run.exit_code == 1 and "cut off" in run.stderr and run.stderr.count("web page") == 2
    told = json.loads(CliRunner().invoke(cli.app, ["plan", *options, "--json"]).stdout)
    assert len(told["damaged_files"]) == 3 and told["refusal"] is None
    assert CliRunner().invoke(cli.app, ["plan", *options]).exit_code == 1
    assert not Path("specar.run").exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_loads_R71(tmp_path, monkeypatch):
    small = small_backbone(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: small)
    monkeypatch.setattr(refusal, "free_bytes", lambda folder: 100_000)
    out = tmp_path / "a.mp4"
    run = CliRunner().invoke(cli.app, ["generate", "--prompt", "ball", "--blocks", "50", "--out", str(out)])
    assert run.exit_code == 1
    assert re.search(r"not enough disk space: .*It fits with --blocks \d+\.", run.stderr), run.stderr
    assert not out.with_suffix(".run").exists()
    assert refusal.refusal(plan.plan(resolve(small, blocks=1)[0], CPU), CPU, tmp_path) is None


def test_what_an_unfinished_run_left_need_not_fit_again(tmp_path, monkeypatch):
    job, _ = resolve(backbone("krea"), prompt="")
    planned = plan.plan(job, CPU)
    monkeypatch.setattr(refusal, "host_memory", lambda: 10**15)
    monkeypatch.setattr(refusal, "free_bytes", lambda folder: planned.disk_bytes - 1000)
    assert "disk space" in refusal.refusal(planned, CPU, tmp_path)
    (tmp_path / "block").write_bytes(bytes(1000))
    assert refusal.refusal(planned, CPU, tmp_path) is None
    assert refusal.refusal(planned, CPU, tmp_path / "not yet") is not None


def test_advice_is_given_in_options_that_the_command_has():
    krea, _ = resolve(backbone("krea"), prompt="")
    disk, memory = {**ROOM, "disk space": 90_000_000}, {**ROOM, "GPU memory": 24 * GB}
    assert refusal.smallest_change(krea, H200, disk, ()) == "Make room for it"
    assert "--schedule" in refusal.smallest_change(krea, H200, memory)
    assert refusal.smallest_change(krea, H200, memory, ("--blocks", "--width")).startswith("Nothing smaller fits")


def test_shortages_are_told_in_a_unit_that_fits():
    planned = replace(plan.plan(resolve(backbone("tiny"))[0], CPU), disk_bytes=182_937)
    (said,) = refusal.shortages(planned, {"disk space": 2000})
    assert said == "not enough disk space: about 182.9 kB needed, 2.0 kB there"
    (said,) = refusal.shortages(replace(planned, disk_bytes=2_500_000_000), {"disk space": 37_400_000})
    assert said == "not enough disk space: about 2.5 GB needed, 37.4 MB there"


def test_a_plan_for_a_cpu_speaks_of_no_gpu():
    planned = plan.plan(resolve(backbone("tiny"), blocks=1)[0], CPU)
    told, text = planned.to_dict(), planned.text()
    assert (told["gpu_bytes"], told["gpu_bytes_by_part"]) == (0, {})
    assert "GPU" not in text and "1 block\n" in text and "1 target," in text
    assert text.splitlines()[0] == "tiny pair: coloured shapes, 96x64"
    on_gpu = plan.plan(resolve(backbone("krea"))[0], H200).to_dict()
    assert on_gpu["gpu_bytes"] == sum(on_gpu["gpu_bytes_by_part"].values()) > 0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--target", "{vae}"], "cannot be the target"),
        (["--text-encoder", "{vae}"], "not the tiny pair's text encoder"),
        (["--target", "nothere"], "nothere"),
        (["--attention", "flash3"], "needs an NVIDIA GPU"),
        (["--out", "o.avi"], "does not end in .mp4"),
        (["--out", "there.mp4"], "there.mp4 exists"),
        (["--out", "told.mp4"], "told.json exists"),
        (["--run-dir", "mine"], "mine holds other files"),
        (["--run-dir", "killed.run"], "killed.run holds an unfinished video"),
        (["--out", "killed.mp4"], "killed.run holds an unfinished video"),
    ],
)
def test_a_plan_fails_where_generate_would_before_it_begins(tmp_path, monkeypatch, options, words):
    small = small_backbone(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: small)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("there.mp4").write_bytes(b"mine")
    Path("told.json").write_text("{}")
    Path("mine").mkdir()
    Path("mine/file").touch()
    Path("killed.run").mkdir()
    for name in (left := ["block-000000-0123456789abcdef.safetensors", "lock"]):  # killed before its first segment
        Path("killed.run", name).touch()
    asked = ["--prompt", "ball", *(option.format(vae=backbone("tiny").shipped["vae"]) for option in options)]
    planned = CliRunner().invoke(cli.app, ["plan", *asked])
    assert planned.exit_code == 1 and words in planned.stdout and "frames" in planned.stdout, planned.output
    made = CliRunner().invoke(cli.app, ["generate", *asked])
    assert made.exit_code in (1, 2) and words in made.stderr
    assert sorted(os.listdir()) == ["killed.run", "mine", "there.mp4", "told.json"]
    assert sorted(os.listdir("killed.run")) == left
    assert CliRunner().invoke(cli.app, ["plan", "--prompt", "ball"]).exit_code == 0


def test_a_plan_for_many_videos_tells_time_and_disk_of_all(tmp_path, monkeypatch):
    one = plan.plan(resolve(backbone("krea"))[0], H200)
    many, told = replace(one, videos=3), replace(one, videos=3).to_dict()
    assert told["predicted_seconds"] == one.seconds and told["disk_bytes"] == one.disk_bytes
    assert told["predicted_seconds_of_all"] == pytest.approx(3 * one.seconds)
    assert told["disk_bytes_of_all"] == 3 * one.disk_bytes
    assert "videos    3, each of them:\n" in many.text() and "videos" not in one.text()
    assert f"time      {one.seconds} s, {3 * one.seconds:.1f} s for all\n" in many.text()
    assert f"{plan.readable(3 * one.disk_bytes)} for all" in many.text()
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a ball\n# not this\nred\n")
    run = CliRunner().invoke(cli.app, ["plan", "--backbone", "tiny", "--prompt-file", "p.txt"])
    assert run.exit_code == 0 and "videos    2, each of them:" in run.stdout, run.output
    one = json.loads(CliRunner().invoke(cli.app, ["plan", "--backbone", "tiny", "--prompt", "a", "--json"]).stdout)
    assert one["videos"] == 1 and one["disk_bytes"] == one["disk_bytes_of_all"]


def test_a_cpu_has_no_cuda_context():
    job, _ = resolve(backbone("tiny"))
    assert plan.plan(job, CPU).host_bytes < 1.5e9 < plan.plan(job, H200).host_bytes
