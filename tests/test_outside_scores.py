"""VBench and VisionReward through the whole path, with stand-ins that answer in the published formats."""

import sys

import pytest
from clips import layout, video

from specar_core.errors import SpecarError, UsageError
from specar_core.scorers.vbench import DIMENSIONS, averaged, parse, vbench
from specar_core.scorers.vbench import table as vbench_table
from specar_core.scorers.vision_reward import table as reward_table
from specar_core.scorers.vision_reward import vision_reward

# As vbench 0.1.5 writes it: {dimension: [mean, [{"video_path", "video_results"}]]}, each in its own unit.
RESULTS = {
    "subject_consistency": [0.95, [("0", 0.97), ("1", 0.93)]],
    "background_consistency": [0.96, [("0", 0.98), ("1", 0.94)]],
    "motion_smoothness": [0.98, [("0", 0.99), ("1", 0.97)]],
    "dynamic_degree": [0.5, [("0", False), ("1", True)]],
    "aesthetic_quality": [0.5, [("0", 0.6), ("1", 0.4)]],
    "imaging_quality": [0.7, [("0", 80.0), ("1", 60.0)]],
}
PUBLISHED = {
    name: [mean, [{"video_path": f"/somewhere/{stem}.mp4", "video_results": value} for stem, value in values]]
    for name, (mean, values) in RESULTS.items()
}
STAND_IN_VBENCH = """
import json, os, pathlib

class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.output_path = output_path
        os.makedirs(output_path, exist_ok=True)

    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, mode="vbench_standard", **options):
        assert mode == "custom_input"
        print("evaluating")
        results = {}
        for dimension in dimension_list:
            videos = sorted(pathlib.Path(videos_path).iterdir(), reverse=True)
            of_videos = [{"video_path": str(v), "video_results": v.stat().st_size / 1e6} for v in videos]
            results[dimension] = [0.5, of_videos]
        with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
            json.dump(results, file)
"""
STAND_IN_REWARD = """
import os

import decord_stand_in

def score(video_path, prompt):
    print("scoring video")
    os.write(1, b"words of a library\\n")
    return decord_stand_in.frames(video_path) / 1e4 + len(prompt) / 1e6

if __name__ == "__main__":
    raise SystemExit("not this way")
"""


def test_published_results_are_read():
    told = parse(PUBLISHED, ["a.mp4", "b.mp4"])
    first, second = told["clips"]
    assert first["video"] == "a.mp4" and first["imaging_quality"] == 0.8 and first["dynamic_degree"] == 0
    assert second["imaging_quality"] == 0.6 and second["dynamic_degree"] == 1
    for name, (mean, _) in PUBLISHED.items():
        assert told["mean"][name] == pytest.approx(mean)
    assert told["n"] == 2
    assert vbench_table(told).splitlines()[1].split()[:2] == ["a.mp4", "0.9700"]


def test_averages_by_hand():
    """The example of the bounds: every dimension at its bound is 0 or 1; half of the weight of 5.5 is dynamic's 0.5."""
    highest = averaged({name: high for name, (_, high, _) in DIMENSIONS.items()})
    lowest = averaged({name: low for name, (low, _, _) in DIMENSIONS.items()})
    assert (highest["Q6w"], highest["Q6m"], lowest["Q6w"], lowest["Q6m"]) == pytest.approx((1, 1, 0, 0))
    still = averaged({**{name: high for name, (_, high, _) in DIMENSIONS.items()}, "dynamic_degree": 0.0})
    assert (still["Q6w"], still["Q6m"]) == pytest.approx((5 / 5.5, 5 / 6))


@pytest.mark.parametrize(
    "broken", [{}, {**PUBLISHED, "imaging_quality": [0.7, []]}, {**PUBLISHED, "dynamic_degree": 1}]
)
def test_results_with_a_hole_are_refused(broken):
    with pytest.raises(SpecarError, match="told nothing of"):
        parse(broken, ["a.mp4", "b.mp4"])


def test_vbench_runs_in_its_own_environment(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN_VBENCH)
    (package.parent / "torch.py").write_text("class cuda:\n    is_available = bool\n\ndevice = str\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("SPECAR_VBENCH", sys.executable)
    paths = []
    for name, size in (("x", 100_000), ("y", 300_000)):  # of the same name
        paths.append(tmp_path / name / "clip.mp4")
        paths[-1].parent.mkdir()
        paths[-1].write_bytes(bytes(size))
    told = vbench(paths)
    assert [clip["subject_consistency"] for clip in told["clips"]] == [0.1, 0.3]


def test_vision_reward_runs_in_its_own_folder(tmp_path, monkeypatch):
    home = tmp_path / "VisionReward"
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "venv" / "bin" / "python").symlink_to(sys.executable)
    (home / "inference-video.py").write_text(STAND_IN_REWARD)
    code = "import av\ndef frames(path):\n    return sum(1 for _ in av.open(path).decode(video=0))\n"
    (tmp_path / "decord_stand_in.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("SPECAR_VISION_REWARD", str(home / "venv" / "bin" / "python"))
    count = layout("Tdddddd").frames
    long = video(tmp_path / "long.mp4", "Tdddddd", [index % 7 for index in range(count)], fps=2)
    short = video(tmp_path / "short.mp4", "Td", range(18), fps=2)
    told = vision_reward([long, short])
    prompt = len("waves") / 1e6
    assert told["clips"] == [
        {"video": "long.mp4", "first": pytest.approx(count / 1e4 + prompt), "last": pytest.approx(48 / 1e4 + prompt)},
        {"video": "short.mp4", "first": pytest.approx(18 / 1e4 + prompt), "last": None},
    ]
    assert "short.mp4" in reward_table(told)


def test_what_to_install_is_told(tmp_path, monkeypatch):
    for variable, call, package in (
        ("SPECAR_VBENCH", vbench, "vbench==0.1.5"),
        ("SPECAR_VISION_REWARD", vision_reward, "git clone https://github.com/THUDM/VisionReward"),
    ):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(SpecarError) as told:
            call([video(tmp_path / f"{variable}.mp4", "T", range(6))])
        assert package in str(told.value) and f"export {variable}=" in str(told.value)
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
        with pytest.raises(SpecarError, match="To install it"):
            call([tmp_path / f"{variable}.mp4"])


def test_vision_reward_needs_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECAR_VISION_REWARD", str(tmp_path))
    with pytest.raises(UsageError, match="does not tell its own"):
        vision_reward([video(tmp_path / "a.mp4", "T", range(6), prompts=None)])
