"""A disk that is full or must not be written: every file that a command makes, one after another."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from killed import CPU, frames, leave
from test_cli import refused, specar

from specar_core.errors import SpecarError
from specar_core.generate import generate
from specar_core.job import resolve

RACE = (
    "race",
    "--backbone",
    "tiny",
    "--prompt",
    "a ball",
    "--blocks",
    2,
    "--policy",
    "first",
    "--policy",
    "draft-only",
)


@contextlib.contextmanager
def full(monkeypatch, *names: str):
    """No byte of these files gets to the disk."""
    fsync = os.fsync

    def failing(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.removesuffix(".part")
        if target in names:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        yield


linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")


def job(backbone, blocks=5):
    return resolve(backbone, prompt="a red ball", blocks=blocks, k=2)[0]


@linux
def test_no_room_for_the_report_keeps_the_video_and_its_folder_R71(backbone, here, monkeypatch):
    generate(job(backbone), CPU, backbone.shipped, here / "whole.mp4")
    with full(monkeypatch, "a.json"), pytest.raises(SpecarError, match=r"Cannot write .*a\.json .*No space left.*room"):
        generate(job(backbone), CPU, backbone.shipped, here / "a.mp4")
    assert frames(here / "a.mp4") == frames(here / "whole.mp4") and (here / "a.run").is_dir()
    assert specar("resume", "a.run").exit_code == 0
    assert {"a.json", "a.mp4"} == {path.name for path in here.glob("a.*")}


@linux
@pytest.mark.parametrize("names", [("a.partial.mp4",), ("a.partial.json",), ("a.partial.mp4", "a.partial.json")])
def test_no_room_for_what_is_finished_keeps_the_first_error_and_the_blocks_R71(backbone, here, monkeypatch, names):
    with full(monkeypatch, *names):
        leave(job(backbone), backbone.shipped, here / "a.mp4", at=3)
    assert not [name for name in names if (here / name).exists()] and not list(here.rglob("*.part"))
    assert len(list((here / "a.run").glob("block-*"))) == 3
    assert generate(job(backbone), CPU, backbone.shipped, here / "a.mp4", resume=True)["resumed_at"] == 3
    assert sorted(os.listdir(here)) == ["a.json", "a.mp4"]


@linux
@pytest.mark.parametrize("name", ["race.html", "race.json", "race-2-draft-only.mp4", "race-2-draft-only.json"])
def test_no_room_in_a_race_keeps_whole_videos_R71(here, monkeypatch, name):
    with full(monkeypatch, name):
        result = specar(*RACE)
    assert result.exit_code == 1 and f"{name} (" in result.stderr and "No space left" in result.stderr
    assert result.stdout == "" and not (here / name).exists() and not list(here.rglob("*.part"))
    assert (here / "race-1-first.mp4").exists()
    assert specar(*RACE, "--overwrite").exit_code == 0
    assert len(list(here.glob("race*.mp4"))) == 2 and not list(here.glob("*.run"))


@linux
def test_no_room_for_one_video_of_a_prompt_file_leaves_the_others_R71(here, monkeypatch):
    Path("p.txt").write_text("a ball\na red ball\nred\n")
    many = ("generate", "--backbone", "tiny", "--prompt-file", "p.txt", "--blocks", 2, "--out", "v.mp4")
    with full(monkeypatch, "v-0002.mp4"):
        result = specar(*many)
    assert result.exit_code == 1 and "1 of 3 videos failed" in result.stderr and "v-0002.mp4" in result.stderr
    assert result.stdout.split() == ["v-0001.mp4", "v-0003.mp4"]
    assert {path.name for path in here.glob("*.json")} == {"v-0001.json", "v-0002.partial.json", "v-0003.json"}
    assert specar("resume", "v-0002.run").exit_code == 0
    assert json.loads(Path("v-0002.json").read_text())["prompts"][0]["text"] == "a red ball"


@pytest.fixture
def locked(here):
    """A folder that must not be written; root writes everywhere, so a file stands where the folder should be."""
    folder = here / "locked"
    if hasattr(os, "geteuid") and os.geteuid():
        folder.mkdir()
        folder.chmod(0o500)
        yield "locked"
        folder.chmod(0o700)
    else:
        folder.write_text("")
        yield "locked"


def test_places_that_must_not_be_written_are_told_before_anything_loads_R71(backbone, here, locked, monkeypatch):
    def loads(*_, **__):
        raise AssertionError("something was loaded")

    Path("p.txt").write_text("a ball\nred\n")
    with monkeypatch.context() as patched:
        for what in ("load_text_encoder", "load_models"):
            patched.setattr(type(backbone), what, loads)
        video = ("generate", "--backbone", "tiny", "--blocks", 2)
        refused(1, "Cannot write", *video, "--prompt", "a ball", "--out", f"{locked}/a.mp4")
        plan = specar("plan", *video[1:], "--prompt", "a ball", "--out", f"{locked}/new/a.mp4")
        assert plan.exit_code == 1 and f"Cannot write in {here / locked}" in plan.stdout
        refused(1, "Cannot write", *video, "--prompt", "a ball", "--run-dir", f"{locked}/run")
        refused(1, "Cannot write", *RACE, "--out", f"{locked}/race.html")
        result = specar(*video, "--prompt-file", "p.txt", "--out", f"{locked}/v.mp4")
        assert result.exit_code == 1 and result.stderr.count("Cannot write") == 2
    assert sorted(os.listdir(here)) == ["locked", "p.txt"]


@pytest.mark.parametrize("name", ["v.json", "v.partial.json", "v.partial.mp4"])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_a_folder_in_the_place_of_a_file_is_told_before_anything_loads(here, backbone, monkeypatch, name, overwrite):
    def loads(*_, **__):
        raise AssertionError("something was loaded")

    Path(name).mkdir()
    monkeypatch.setattr(type(backbone), "load_text_encoder", loads)
    video = ("--backbone", "tiny", "--blocks", 1, "--prompt", "a ball", "--out", "v.mp4", *overwrite)
    refused(2, f"{name} is a folder: choose another name.", "generate", *video)
    assert f"{name} is a folder" in specar("plan", *video).stdout
    assert os.listdir(here) == [name]


@pytest.mark.parametrize("out", [".", "/", ""])
def test_a_folder_is_no_name(here, out):
    refused(2, "is a folder", "generate", "--backbone", "tiny", "--prompt", "a ball", "--out", out)
    assert os.listdir(here) == []
