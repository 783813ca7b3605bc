"""An unfinished run goes on: the same frames as without the interruption, whatever happened on the way."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from killed import BLOCKS, CPU, frames, make
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

try:
    import resource
except ImportError:
    resource = None

from specar_core import cli
from specar_core.checkpoint import RunFolder, read_run
from specar_core.errors import SpecarError, UsageError
from specar_core.generate import Listener, generate
from specar_core.job import resolve


@pytest.fixture(scope="module")
def whole(backbone, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "a.mp4"
    make(backbone, out)
    return frames(out)


class Stop(Exception):
    pass


def stopped(backbone, out: Path, blocks: int, **options) -> Path:
    """A run that ends after so many blocks; returns its folder."""

    def stop(block, step):
        if block == blocks:
            raise Stop

    with pytest.raises(Stop):
        make(backbone, out, listener=Listener(step=stop), **options)
    return out.with_suffix(".run")


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("block-*.safetensors"))


@pytest.mark.parametrize("blocks", [1, 4, 6])
def test_it_goes_on_with_the_same_frames_R103(backbone, whole, tmp_path, blocks):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, blocks)
    assert len(blocks_in(folder)) == blocks and len(list(folder.glob("segment-*"))) == blocks // 4
    assert (tmp_path / "a.partial.mp4").exists() and not out.exists()
    generated = set()
    report = make(backbone, out, resume=True, listener=Listener(step=lambda b, s: s.role and generated.add(b)))
    assert generated == set(range(blocks, BLOCKS))  # a block on the disk is never generated again
    assert frames(out) == whole
    assert [b["index"] for b in report["blocks"]] == list(range(BLOCKS)) and report["resumed_at"] == blocks
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == report
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_it_may_be_interrupted_again_and_again(backbone, whole, tmp_path):
    out = tmp_path / "a.mp4"
    stopped(backbone, out, 2)
    for blocks in (3, 5, 6):
        stopped(backbone, out, blocks, resume=True)
    make(backbone, out, resume=True)
    assert frames(out) == whole


@pytest.mark.parametrize("damage, damaged", [("one byte", 0), ("half", 2), ("empty", 5), ("gone", 4)])
def test_a_damaged_block_is_generated_again(backbone, whole, tmp_path, damage, damaged):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 6)
    path = blocks_in(folder)[damaged]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"one byte": bytes(data), "half": data[: len(data) // 2], "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    report = make(backbone, out, resume=True)
    assert report["resumed_at"] == (damaged or None)
    assert frames(out) == whole and sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_lost_segments_are_decoded_again(backbone, whole, tmp_path):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 6)
    (folder / "segment-00000.mp4").unlink()
    assert make(backbone, out, resume=True)["resumed_at"] == 6
    assert frames(out) == whole


@pytest.mark.parametrize("options", [{"anchor_first_latent": True}, {"drafter_context": "rolling:9:1"}])
def test_every_context_rule_can_be_resumed(backbone, tmp_path, options):
    def run(out, listener=Listener(), **more):  # noqa: B008
        job, _ = resolve(backbone, prompt="a red ball", blocks=6, k=2, options={"keep_first_frames": True, **options})
        generate(job, CPU, backbone.shipped, tmp_path / out, listener=listener, **more)

    def stop(block, step):
        if block == 5:
            raise Stop

    run("whole.mp4")
    with pytest.raises(Stop):
        run("a.mp4", Listener(step=stop))
    run("a.mp4", resume=True)
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "whole.mp4")


def test_other_models_are_refused(backbone, tmp_path):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 5)
    before = sorted(os.listdir(folder))
    changed = {**load_file(backbone.shipped["drafter"])}
    changed["head.head.bias"] = changed["head.head.bias"] + 1
    save_file(changed, tmp_path / "other.safetensors")
    job, _ = resolve(backbone, prompt="a red ball", blocks=BLOCKS, k=2)
    paths = {**backbone.shipped, "drafter": tmp_path / "other.safetensors"}
    with pytest.raises(SpecarError, match=r"the drafter is not the file .*drafter.safetensors, \w{12}, now \w{12}"):
        generate(job, CPU, paths, out, resume=True)
    with pytest.raises(UsageError, match="the run of another video"):
        generate(resolve(backbone, prompt="a ball", blocks=BLOCKS, k=2)[0], CPU, backbone.shipped, out, resume=True)
    assert sorted(os.listdir(folder)) == before


def test_an_unfinished_run_is_not_thrown_away_unasked(backbone, whole, tmp_path):
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 2)
    with pytest.raises(UsageError, match=rf"unfinished video: .*`specar resume {folder}`.*--overwrite"):
        make(backbone, out)
    assert len(blocks_in(folder)) == 2
    job, _ = resolve(backbone, prompt="a red ball", blocks=BLOCKS, k=2)
    assert generate(job, CPU, backbone.shipped, out, overwrite=True)["resumed_at"] is None
    assert frames(out) == whole and sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_one_that_cannot_be_continued_is_not_to_be_resumed(backbone, tmp_path):
    folder = stopped(backbone, tmp_path / "a.mp4", 2)
    (folder / "run.json").write_text("{")
    with pytest.raises(UsageError, match="damaged.*start again with --overwrite"):
        make(backbone, tmp_path / "a.mp4")
    assert len(blocks_in(folder)) == 2


def test_nothing_is_left_of_a_run_without_a_block(backbone, tmp_path):
    stopped(backbone, tmp_path / "a.mp4", 0)
    assert os.listdir(tmp_path) == []


def test_one_process_at_a_time(backbone, tmp_path):
    folder = stopped(backbone, tmp_path / "a.mp4", 2)
    with RunFolder(folder, resume=True), pytest.raises(SpecarError, match="in use by another process"):
        make(backbone, tmp_path / "a.mp4", resume=True)
    script = (
        "import sys, specar_core.checkpoint as c, pathlib; run = c.RunFolder(pathlib.Path(sys.argv[1]), resume=True);"
    )
    command = [sys.executable, "-c", script + "print('locked', flush=True); sys.stdin.read()", str(folder)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(SpecarError, match="in use by another process"):
            RunFolder(folder, resume=True)
        other.kill()
    make(backbone, tmp_path / "a.mp4", resume=True)  # the lock died with it


def test_a_folder_of_other_things_is_left_alone(backbone, specar, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("block-party.safetensors", "run.json"):
        (tmp_path / "mine" / name).write_text("mine")
    refused = specar("generate", "--prompt", "ball", "--overwrite", "--run-dir", "mine")
    assert refused.exit_code == 2 and "holds other files" in refused.stderr
    assert (tmp_path / "mine" / "run.json").read_text() == "mine" and len(os.listdir(tmp_path / "mine")) == 2


def test_what_is_no_run_is_refused(tmp_path):
    for content, words in (
        (None, "not the folder of an unfinished run .*: name the FILE.run .*, or .* with `specar generate`"),
        ("{", "damaged"),
        ('{"format": 99}', "another"),
    ):
        if content:
            (tmp_path / "run.json").write_text(content)
        with pytest.raises(UsageError, match=words):
            read_run(tmp_path)


def test_a_checkpoint_is_small(backbone, tmp_path):
    """Block, re-encoded context frame and a header: 1.6 MB at 832x480."""
    folder = stopped(backbone, tmp_path / "a.mp4", 3)
    values = 16 * 4 * (32 // 8) * (48 // 8)
    assert all(path.stat().st_size < 4 * values + 1000 for path in blocks_in(folder))


@pytest.mark.skipif(resource is None, reason="no RLIMIT_FSIZE on Windows")
def test_a_full_disk_costs_nothing_finished_R71(backbone, whole, tmp_path):
    """A write falls short in the middle, first of a segment and then of a block, as on a disk that is full."""
    out = tmp_path / "a.mp4"
    folder = stopped(backbone, out, 3)
    size = blocks_in(folder)[0].stat().st_size
    for limit in (size + 100, size - 100):
        with largest_file(limit), pytest.raises(SpecarError, match=r"Cannot write .*a\.run.*File too large.*Make room"):
            make(backbone, out, resume=True)
    assert len(blocks_in(folder)) >= 3 and not list(tmp_path.rglob("*.part")) and not out.exists()
    make(backbone, out, resume=True)
    assert frames(out) == whole


@contextlib.contextmanager
def largest_file(size: int):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_out_of_gpu_memory_is_one_line_and_costs_one_block_R83(backbone, whole, tmp_path):
    """In the decoder, of all places: the blocks before are on the disk already."""

    def full(block, step):
        if block == 5 and step.kind == "decode":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand much more")

    out = tmp_path / "a.mp4"
    with pytest.raises(SpecarError, match="memory ran out .*2 GiB") as failure:
        make(backbone, out, listener=Listener(step=full))
    assert "\n" not in str(failure.value)
    assert len(blocks_in(out.with_suffix(".run"))) == 5
    make(backbone, out, resume=True)
    assert frames(out) == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_twenty_kills_lose_nothing_R111(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 20 and all(run["killed"] for run in runs)
    assert len({run["blocks"] for run in runs}) > BLOCKS // 2  # all over the run
    assert all(run["same frames"] and run["same blocks"] for run in runs), runs
    assert all(set(run["files"]) <= {"a.mp4", "a.json", "a.run"} for run in runs), runs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_kills_lose_nothing_of_what_steers_a_run_R111(tmp_path):
    """A router's decisions, prompts over time with a fade and a cut, LoRAs, a start image, a source video."""
    kinds = ("router", "timeline", "lora", "image", "video")
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), "1", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["kind"] for run in runs] == list(kinds)
    assert all(run["killed"] and run["same frames"] and run["same blocks"] for run in runs), runs
    assert all(0 < run["blocks"] < BLOCKS for run in runs)


# The command line


@pytest.fixture
def specar(backbone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: backbone)

    def run(*arguments):
        return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])

    return run


GENERATE = ("generate", "--prompt", "a red ball", "--blocks", BLOCKS, "--k", 2)


def test_resume_command(backbone, whole, specar, tmp_path, monkeypatch):
    folder = stopped(backbone, tmp_path / "a.mp4", 5)
    refused = specar(*GENERATE, "--out", "a.mp4")
    assert refused.exit_code == 2 and f"specar resume {folder}" in refused.stderr
    moved = tmp_path / "another machine"
    moved.mkdir()
    folder.rename(moved / "a.run")
    monkeypatch.chdir(moved)
    done = specar("resume", "a.run")
    assert (done.exit_code, done.stdout) == (0, "a.mp4\n"), done.output
    assert frames(moved / "a.mp4") == whole and sorted(os.listdir(moved)) == ["a.json", "a.mp4"]
    assert specar("resume", "a.run").exit_code == 2


def test_interrupt_tells_how_to_go_on(specar, whole, tmp_path, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("specar_core.forecast.Forecast.learn", ctrl_c)
        stopped = specar(*GENERATE, "--out", "a.mp4", "--run-dir", "kept")
    assert stopped.exit_code == 130 and f"specar resume {tmp_path / 'kept'}" in stopped.stderr
    assert specar("resume", "kept").exit_code == 0
    assert frames(tmp_path / "a.mp4") == whole and sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_a_finished_video_only_loses_its_folder(backbone, specar, whole, tmp_path):
    """Killed between the video and the removal of its folder."""
    folder = stopped(backbone, tmp_path / "a.mp4", 5)
    run = (folder / "run.json").read_bytes()
    specar("resume", "a.run")
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "run.json").write_bytes(run)
    (tmp_path / "a.json").unlink()
    assert specar("resume", "a.run").exit_code == 0
    assert frames(tmp_path / "a.mp4") == whole and sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_a_run_that_was_to_overwrite_does(backbone, specar, whole, tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"old")
    stopped(backbone, tmp_path / "a.mp4", 2, overwrite=True)
    assert (tmp_path / "a.mp4").read_bytes() == b"old"
    assert specar("resume", "a.run").exit_code == 0
    assert frames(tmp_path / "a.mp4") == whole


def test_what_a_run_left_goes_with_it_if_the_video_is_there(backbone, specar, tmp_path):
    make(backbone, tmp_path / "a.mp4")
    stopped(backbone, tmp_path / "a.mp4", 2, overwrite=True)
    assert (tmp_path / "a.partial.mp4").exists()
    assert specar("resume", "a.run").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4"]


def test_two_runs_at_once_do_not_meet(backbone, whole, tmp_path):
    threads = [threading.Thread(target=make, args=(backbone, tmp_path / f"{name}.mp4")) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "b.mp4") == whole
