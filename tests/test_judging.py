"""Scorers, and whole videos by a router: report, resume, and the same video again."""

import json
import re
import sys

import pytest
import torch
from killed import CPU, frames
from typer.testing import CliRunner

from specar_core import cli
from specar_core.backbones.tiny import TINY
from specar_core.errors import SpecarError, UsageError
from specar_core.examples import EXAMPLES
from specar_core.generate import Listener, generate
from specar_core.job import resolve
from specar_core.plan import plan
from specar_core.refusal import refusal
from specar_core.report import identity
from specar_core.scorers import SCORERS, unjudged
from specar_core.scorers.agreement import agreement
from specar_core.scorers.image_reward import IMAGE_REWARD, image_reward
from training.shapes import render, sample_scene

PROMPT = "a large white ball bouncing on a plain grey background"


@pytest.fixture(scope="module")
def threshold(backbone, tmp_path_factory):
    """One that about half of the drafts reach."""
    report = make(backbone, tmp_path_factory.mktemp("all") / "a.mp4", "sdvg:-inf")
    return sorted(block["score"] for block in report["blocks"][1:])[3]


def make(backbone, out, spec, resume=False, listener=Listener(), **options):  # noqa: B008
    job, _ = resolve(backbone, prompt=PROMPT, blocks=7, schedule=spec, **options)
    return generate(job, CPU, backbone.shipped, out, resume=resume, listener=listener)


# Agreement with a caption


def shown(scene, size=4):
    return (render([scene], 0, size)[0] + 1) / 2


@pytest.mark.parametrize("seed", range(12))
def test_a_true_clip_agrees_with_its_caption_and_another_one_less(seed):
    scene, other = sample_scene(seed), sample_scene(seed + 100)
    scores = agreement(scene.caption, shown(scene))
    assert scores.shape == (4,) and scores.min() > 0.9
    assert agreement(scene.caption, shown(other)).max() < scores.min() - 0.1


def test_every_frame_is_judged_by_itself():
    clip = shown(sample_scene(1))
    clip[:, 2] = 0.0
    scores = agreement(sample_scene(1).caption, clip)
    assert scores.argmin() == 2 and scores[2] < scores[0] - 0.3
    assert agreement(sample_scene(1).caption, clip[:, 2:3]).item() == pytest.approx(scores[2].item())


def test_agreement_reads_what_a_caption_tells():
    red = torch.zeros(3, 1, 64, 96) + torch.tensor([92, 92, 98])[:, None, None, None] / 255
    assert agreement("something on grey", red).item() == pytest.approx(1)
    assert agreement("a large red ball", red).item() == 0
    assert [unjudged(resolve_tiny(text)) for text in EXAMPLES.values() if "backdrop" in text] == [None]
    assert "cannot be judged" in unjudged(resolve_tiny("a fox in snow"))


def resolve_tiny(prompt):
    return resolve(TINY, prompt=prompt, schedule="sdvg:0")[0]


# ImageReward, in a process of its own


STAND_IN = """
def load(name, device):
    print("load checkpoint")
    if device == "meta":
        raise SystemExit("no such device")
    return Model()
class Model:
    def score(self, prompt, image):
        red, green, blue = image.getpixel((1, 0))
        if prompt == "die":
            raise SystemExit("it died")
        return len(prompt) + red / 1000 + image.width * 10
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "ImageReward.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(IMAGE_REWARD.variable, sys.executable)


def test_frames_go_to_image_reward_and_scores_come_back(installed):
    clip = torch.rand(3, 5, 4, 6)
    with image_reward(torch.device("cpu")) as score:
        for prompt in ("ball", "a \u00e9\n"):
            due = len(prompt) + (clip[0, :, 0, 1] * 255).round() / 1000 + 60
            assert score(prompt, clip).tolist() == pytest.approx(due.tolist())


def test_image_reward_that_dies_ends_the_run_with_one_sentence(installed):
    with pytest.raises(SpecarError, match="ended; its own words are above"):
        with image_reward(torch.device("cpu")) as score:
            score("die", torch.rand(3, 5, 4, 6))
    with pytest.raises(SpecarError, match="ended.*pip install"):
        with image_reward(torch.device("meta")):
            pass


def test_what_is_not_installed_is_told_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv(IMAGE_REWARD.variable, raising=False)
    known = SCORERS["image-reward"]
    said = known.missing()
    assert "pip install" in said and IMAGE_REWARD.variable in said and said.count("\n") == 1
    monkeypatch.setenv(IMAGE_REWARD.variable, str(tmp_path / "nothing"))
    assert known.missing() is None
    assert known.unreadable("a fox") is None and "text of the prompt" in known.unreadable("")
    with pytest.raises(SpecarError, match="cannot be run"):
        with image_reward(torch.device("cpu")):
            pass


# Whole videos


def test_a_router_makes_the_video_of_the_schedule_it_came_to(backbone, threshold, tmp_path):
    report = make(backbone, tmp_path / "a.mp4", f"sdvg:{threshold}")
    blocks, schedule = report["blocks"], report["schedule"]
    assert 0 < sum(block["rejected"] for block in blocks) < 6
    assert schedule["targets"] == [block["index"] for block in blocks if block["role"] == "target"]
    assert schedule["policy"] == f"sdvg:{threshold}" and schedule["blocks"] == 7 and not schedule["planned"]
    for block in blocks[1:]:
        assert (block["score"] >= block["threshold"]) == (block["role"] == "drafter") == (not block["rejected"])
        assert block["forwards"] == 4 + 4 * block["rejected"] and block["score_seconds"] > 0
    planned = make(backbone, tmp_path / "b.mp4", "list:" + ",".join(map(str, schedule["targets"])))
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "b.mp4")
    other = {**schedule, "targets": [0]}
    assert identity({**report, "schedule": other}) == identity(report)  # another outcome of the same wish
    assert identity({**report, "schedule": {**other, "policy": "sdvg:9"}}) != identity(report)
    assert planned["schedule"].keys() == {"blocks", "targets", "draft_runs", "max_draft_run", "policy"}


class Stop(Exception):
    pass


@pytest.mark.parametrize("spec", ["sdvg", "time-budget"])
@pytest.mark.parametrize("blocks", [1, 5])
def test_an_unfinished_run_keeps_its_decisions(backbone, threshold, tmp_path, blocks, spec):
    spec = f"sdvg:{threshold}" if spec == "sdvg" else "time-budget:1"
    out, begun = tmp_path / "a.mp4", []

    def stop(block, step):
        if block == blocks:
            raise Stop

    with pytest.raises(Stop):
        make(backbone, out, spec, listener=Listener(step=stop, block=lambda result: begun.append(result.role)))
    with pytest.raises(UsageError, match="another video"):
        make(backbone, out, "sdvg:0.123", resume=True)
    report = make(backbone, out, spec, resume=True)
    assert [block["role"] for block in report["blocks"]][:blocks] == begun and report["resumed_at"] == blocks
    make(backbone, tmp_path / "b.mp4", "list:" + ",".join(map(str, report["schedule"]["targets"])))
    assert frames(out) == frames(tmp_path / "b.mp4")
    if spec.startswith("sdvg"):
        make(backbone, tmp_path / "c.mp4", spec)
        assert frames(out) == frames(tmp_path / "c.mp4")


def test_the_command_line_makes_it_again_and_tells_what_it_takes(backbone, threshold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: backbone)

    def specar(*arguments):
        run = CliRunner().invoke(cli.app, list(map(str, arguments)))
        assert run.exit_code == 0, run.stderr
        return run.stdout

    options = ["--prompt", PROMPT, "--blocks", 7, "--stitch", 2, "--schedule", f"sdvg:{threshold}@3"]
    told = json.loads(specar("plan", *options, "--json"))
    assert told["forwards"] == {"target": 4 + 6 * 2, "drafter": 24} and told["predicted_seconds"] is None
    assert told["forwards_at_least"] == {"target": 4 + 2, "drafter": 20 + 2} and told["schedule"]["max_draft_run"] == 3
    assert re.search(r"schedule  T\?{6}\n", specar("plan", *options))
    specar("generate", *options, "--out", "a.mp4")
    report = json.loads((tmp_path / "a.json").read_text())
    specar("generate", "--from", "a.json", "--out", "b.mp4")
    again = json.loads((tmp_path / "b.json").read_text())
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "b.mp4")
    assert again["schedule"]["policy"].startswith("list:")  # nothing is judged again
    assert again["schedule"]["targets"] == report["schedule"]["targets"] and again["options"] == report["options"]
    assert "T??????" in specar("schedule", "--blocks", 7, "--schedule", "sdvg:0")
    specar("generate", "--prompt", PROMPT, "--blocks", 4, "--time-budget", 60, "--max-run", 2, "--out", "c.mp4")
    schedule = json.loads((tmp_path / "c.json").read_text())["schedule"]
    assert schedule["policy"] == "time-budget:60.0@2" and schedule["max_draft_run"] <= 2


def test_a_prompt_that_cannot_be_judged_is_refused_before_anything_loads(backbone, tmp_path):
    job, _ = resolve(backbone, prompt="a fox in snow", schedule="sdvg:0.5")
    assert "cannot be judged" in refusal(plan(job, CPU), CPU, tmp_path)
    job, _ = resolve(backbone, prompt="a fox in snow", schedule="spread:2")
    assert refusal(plan(job, CPU), CPU, tmp_path) is None
