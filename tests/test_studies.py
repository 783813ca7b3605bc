"""The studies of schedules and routers: their statistics on scores that are known, and the whole way once."""

import json
import math

import numpy as np
import pytest
import torch
from test_rollout import PROMPT, SIZE, make_pair

from benchmarks import costs, keyed_study, policies, policy_times, precision_study, schedule_study
from benchmarks.common import compact
from benchmarks.paired import interval, share
from benchmarks.study import Chunk
from specar_core.backbones.tiny import FOLDER
from specar_core.policies import parse
from training.evaluate import Stage
from training.shapes import sample_scene

PROMPTS = 40


def test_results_take_a_line_for_a_list_of_numbers():
    told = {"means": [1, 2.5, None], "by k": {"2": [[0.1], [], {}], 'a "b" [': "[{,"}, "none": {}}
    assert json.loads(compact(told)) == told
    assert compact(told).splitlines()[1] == ' "means": [1, 2.5, null],' and compact(told).count("\n") == 11
    for path in [*costs.RESULTS.rglob("*.json"), costs.TABLE]:
        assert path.read_text() == compact(json.loads(path.read_text())) + "\n", path


def test_intervals_hold_the_mean_and_narrow_with_prompts():
    chance = np.random.default_rng(1)
    few, many = (interval(chance.normal(0.3, 1.0, n)) for n in (50, 1000))
    for found in (few, many):
        assert found["low"] < found["mean"] < found["high"] and found["low"] < 0.3 < found["high"]
    assert many["high"] - many["low"] == pytest.approx(2 * 1.96 / math.sqrt(1000), rel=0.1)
    assert interval([math.nan, 1.0])["n"] == 1 and interval([])["mean"] is None
    lost = chance.normal(1.0, 0.3, 200)
    assert share(0.25 * lost, lost)["mean"] == pytest.approx(0.25)
    assert share(lost, chance.normal(0.0, 1.0, 200))["mean"] is None  # nothing that is surely lost


def made_up(blocks: int, kept: float) -> dict[str, dict[str, np.ndarray]]:
    """Scores by the toy model: each draft block loses 0.02, a target block keeps a share of what was lost."""
    chance = np.random.default_rng(0).normal(0, 0.05, (PROMPTS, 1))
    found = {}
    for name in schedule_study.schedules(blocks, 2):
        lost, targets, by_block = 0.0, set(parse(name, blocks)[0].targets), []
        for block in range(blocks):
            lost = lost * kept if block in targets else lost + 0.02
            by_block.append(1 - lost)
        by = np.array(by_block) + chance
        plain = dict.fromkeys((*schedule_study.SHOWN, *schedule_study.PER_CLIP), np.zeros(PROMPTS))
        found[name] = {**plain, "agreement": by.mean(1), "agreement by block": by}
    return found


def test_the_study_finds_what_it_was_given():
    healed = schedule_study.analyse(made_up(12, 0.0), 12)
    for against in healed["spread_minus"].values():
        assert all(other["agreement"]["low"] >= 0 for other in against.values())
    assert healed["spread_minus"]["3"]["front"]["agreement"]["low"] > 0.01
    assert healed["recovery"]["block"] == 6 and healed["recovery"]["share"][0]["mean"] == pytest.approx(1)
    curve = healed["run_position"]["minus_last_target"]
    assert [round(curve[str(run)]["mean"], 4) for run in range(4)] == [0, -0.02, -0.04, -0.06]
    assert healed["drift"]["draft-only"]["low"] > 0.1 and healed["drift"]["target-only"]["mean"] == 0
    stuck = schedule_study.analyse(made_up(12, 1.0), 12)
    assert stuck["spread_minus"]["3"]["front"]["agreement"]["high"] < 0  # where nothing heals, front is best
    assert stuck["recovery"]["share"][0]["mean"] == pytest.approx(1 / 6)  # it has only not lost that block
    assert "| spread:3 | 3 | 3 |" in schedule_study.markdown({"12": stuck})


def test_useful_budgets_are_those_of_the_specification():
    assert schedule_study.useful(36) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 18, 36]


def test_a_chunk_that_not_all_schedules_were_made_for_does_not_count():
    parts = [Chunk(first, 1, first, FOLDER, "cpu") for first in range(2)]
    tasks = [schedule_study.Task(part, 3, name) for part in parts for name in ("first", "draft-only")]
    results = [{"agreement": np.array([float(index)])} for index in range(4)]

    def found(count):
        by_length = schedule_study.by_length(tasks, results[:count])
        return {name: scores["agreement"].tolist() for name, scores in by_length[3].items()} if by_length else {}

    assert found(4) == {"first": [0, 2], "draft-only": [1, 3]}
    assert found(3) == {"first": [0], "draft-only": [1]} and found(1) == {}


def test_the_schedule_study_runs_on_a_processor(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(schedule_study, "schedules", lambda *_: ["target-only", "draft-only", "first", "spread:2",
                                                                 "front:2", "back:2", "random:2@0"])  # fmt: skip
    arguments = "--device cpu --prompts 1 --blocks 3 --seeds 1 --workers 1 --folder"
    schedule_study.main([*arguments.split(), str(tmp_path)])
    told = json.loads((tmp_path / "schedule_study.json").read_text())
    scores = told["studies"]["3"]["schedules"]
    assert {name: len(row["by_block"]) for name, row in scores.items()}.keys() >= {"spread:2", "front:2", "draft-only"}
    assert scores["spread:2"]["by_block"][0] == scores["target-only"]["by_block"][0]  # paired noise
    assert scores["front:2"]["per_prompt"] != scores["first"]["per_prompt"]
    assert (tmp_path / "schedule_study_3.png").stat().st_size > 10_000 and "| spread:2 | 2 |" in capsys.readouterr().out


def test_a_study_of_changes_finds_what_it_was_given():
    """Two cases, of which one has a target block at the change in either placement."""
    chance = np.random.default_rng(0).normal(0.5, 0.05, (PROMPTS, 12))

    def told(changes, gain):
        scores = {name: chance.copy() for name in keyed_study.SHOWN}
        scores["agreement"][:, [changes[0], changes[0] + 1]] += np.array(gain)
        return keyed_study.told(scores, changes)

    played = {
        "5": {"keyed:2": told([5], [0.2, 0.1]), "spread:2": told([5], [0, 0])},
        "6": dict.fromkeys(("keyed:2", "spread:2"), told([6], [0, 0])),
        "3,8": {"spread:2": told([3, 8], [0, 0])},
    }
    found = keyed_study.analyse(played, [2])
    one, every = (found["keyed_minus_spread"][case]["2"] for case in ("5", "all"))
    assert [round(one[f"+{i}"]["mean"], 6) for i in range(4)] == [0.2, 0.1, 0, 0]
    assert one["whole video"]["mean"] == pytest.approx(0.3 / 12) and one["after"]["mean"] == pytest.approx(0.3 / 7)
    assert every["+0"]["mean"] == pytest.approx(0.1) and every["background"]["mean"] == 0
    assert found["keyed_minus_spread"]["3,8"] == {} and "spread:2" in found["levels"]["3,8"]


def test_the_study_of_changes_runs_on_a_processor(tmp_path, capsys):
    arguments = "--device cpu --prompts 1 --blocks 4 --changes 3 --k 2 --workers 1 --folder"
    keyed_study.main([*arguments.split(), str(tmp_path)])
    told = json.loads((tmp_path / "keyed_study.json").read_text())
    levels = told["levels"]["3"]
    before = [[levels[name][f"block {block}"]["mean"] for block in range(3)] for name in levels]
    assert before[0][0] == before[1][0] == before[2][0] and before[1][1] == before[2][1]  # paired noise
    assert levels["keyed:2"]["block 3"]["mean"] > levels["spread:2"]["block 3"]["mean"]
    assert "| 3 | keyed:2 |" in capsys.readouterr().out


def test_two_workers_find_what_one_finds(tmp_path):
    arguments = "--device cpu --prompts 1 --blocks 3 --changes 1 2 --k --workers"
    found = []
    for workers in ("1", "2"):
        keyed_study.main([*arguments.split(), workers, "--folder", str(tmp_path)])
        found.append(json.loads((tmp_path / "keyed_study.json").read_text())["levels"])
    assert found[0] == found[1] and found[0]["1"] != found[0]["2"]


def test_the_study_of_precision_runs_on_a_processor(tmp_path, capsys):
    arguments = "--device cpu --prompts 1 --blocks 2 --precisions fp8-target fp8 --schedules first draft-only --folder"
    precision_study.main([*arguments.split(), str(tmp_path)])
    told = json.loads((tmp_path / "precision_study.json").read_text())["schedules"]
    first, draft = (
        {precision: of["latents_apart_by_block"] for precision, of in by_precision.items()}
        for by_precision in told.values()
    )
    assert first["full"] == draft["full"] == [0, 0]
    assert 0 < first["fp8"][0] == first["fp8-target"][0] < 0.3  # the same noise, prompt and weights
    assert first["fp8"][1] > first["fp8-target"][1] and draft["fp8"][0] > draft["fp8-target"][0]
    assert all(abs(of["minus_full"]["mean"]) < 0.05 for of in told["first"].values())
    assert "| draft-only | fp8 |" in capsys.readouterr().out


def test_another_scene_differs_in_all_but_its_background():
    for seed in range(50):
        before = sample_scene(seed).description
        after = keyed_study.another(before, seed)
        assert (after.pattern, after.tint) == (before.pattern, before.tint) and after.motion != before.motion
        for old, new in zip(before.figures, after.figures, strict=True):
            assert old.size == new.size and old.colour != new.colour and old.shape != new.shape


def test_routers_decide_row_by_row_as_they_do_alone(monkeypatch):
    """A batch of two videos, each with its own router, against the same videos by themselves."""
    scenes = [sample_scene(seed) for seed in (1, 2)]

    def judge(scene, frames):
        """By the caption, so that one router keeps its drafts and the other does not; a little by the frames."""
        return frames.mean((0, 1, 3, 4)) + (10 if scene == scenes[0] else -10)

    def study(shown):
        stage = Stage(FOLDER, "cpu", len(shown))
        noise = stage.noise
        stage.noise = lambda block, index: torch.cat([noise(block, index)[:1]] * len(shown))
        return policies.Study(stage, shown).play(parse("sdvg:0", 3)[0], "by hand")

    monkeypatch.setattr(policies, "JUDGES", {"by hand": judge})
    both = study(scenes)
    assert both["kinds"] == [["target", "accepted", "accepted"], ["target", "rejected", "rejected"]]
    judged = [[decision.score for decision in router.decisions[1:]] for router in both["routers"]]
    assert abs(judged[0][0] - judged[1][0] - 20) > 0.005  # each saw frames of its own
    for row, scene in enumerate(scenes):
        alone = study([scene])
        assert alone["kinds"] == [both["kinds"][row]]
        assert judged[row] == pytest.approx([d.score for d in alone["routers"][0].decisions[1:]], abs=0.002)
        assert np.allclose(alone["scores"], both["scores"][row], atol=0.02)


def test_policies_are_compared_at_equal_count_and_equal_time():
    costs = {"target": 2.0, "draft": 0.5, "accepted": 1.0, "rejected": 3.0}

    def one(kinds, score):
        return {"scores": np.full((PROMPTS, 4), score), "kinds": [kinds] * PROMPTS}

    played = {f"spread:{k}": one(["target"] * k + ["draft"] * (4 - k), 0.5 + k / 10) for k in range(1, 5)}
    played["sdvg, agreement at k=2"] = one(["target", "rejected", "accepted", "accepted"], 0.75)
    found = policies.analyse(played, 4, [2], costs)
    row = found["policies"]["sdvg, agreement at k=2"]
    assert row["seconds"]["mean"] == 7 and row["targets"]["mean"] == 2 and row["rejected_by_block"] == [0, 1, 0, 0]
    count, in_time = row["spread_minus_this"]["equal count"], row["spread_minus_this"]["equal time"]
    assert count["k"] == 2 and count["mean"] == pytest.approx(-0.05)
    assert in_time["k"] == 4 - 1 and in_time["mean"] == pytest.approx(0.05)  # 3 x 2 + 0.5 s fit into 7
    assert set(found["policies"]) == {"spread:2", "sdvg, agreement at k=2"}


def test_a_router_takes_what_the_authors_of_sdvg_spend():
    reward = policy_times.RewardSized(small=True).eval()
    size = SIZE["width"], SIZE["height"]
    (row,) = policy_times.compare(make_pair(), reward, [2], 5, size, PROMPT)
    forwards = {name: row[name]["forwards"] for name in ("spread", "random", "sdvg lazy", "sdvg eager")}
    assert forwards["spread"] == forwards["random"] == {"target": 8, "drafter": 12}
    assert forwards["sdvg lazy"] == {"target": 8, "drafter": 16}
    assert forwards["sdvg eager"] == {"target": 8 + 3, "drafter": 16}  # a context pass for each kept draft
    assert row["sdvg lazy"]["targets"] == 2 and row["sdvg lazy"]["rejected"] == 1
    assert row["sdvg lazy"]["judging_seconds"] > 0
    with torch.device("meta"):
        assert 4.3e8 < sum(weight.numel() for weight in policy_times.RewardSized().parameters()) < 4.6e8
