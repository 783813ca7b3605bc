"""Prompts over time: snapped to blocks, faded, cut, told, and never the ones from before (cases R06, R07, R110)."""

import itertools
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killed import CPU, frames, leave
from test_cli import refused, specar

from specar_core import making
from specar_core.backbones import backbone as named_backbone
from specar_core.backbones.causal_wan import GEOMETRY
from specar_core.backbones.helios_pair import GEOMETRY as HELIOS_GEOMETRY
from specar_core.errors import UsageError
from specar_core.generate import Listener, generate
from specar_core.job import resolve
from specar_core.noise import noise
from specar_core.policies import parse as parse_schedule
from specar_core.rollout import rollout
from specar_core.schedule import spread
from specar_core.timeline import BlockPrompts, Cue, Shot, mixture, parse, snap

TIMELINE = "0s: a red ball\n1.2s: a ball\n2.6s cut: red\n"


def test_text():
    text = "# shots\n0s: a fox: in snow\n\n4.5s fade 1s: the fox runs\n9 CUT: night\n12.25s cut fade 2s: end"
    assert parse(text) == [
        Shot(0, "a fox: in snow"),
        Shot(4.5, "the fox runs", fade=1),
        Shot(9, "night", cut=True),
        Shot(12.25, "end", fade=2, cut=True),
    ]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "begins with a prompt at 0s"),
        ("1s: a", "begins with a prompt at 0s"),
        ("0s: a\n2s b", "line 2 of the timeline is not"),
        ("0s: a\n1:30: b", "line 2 of the timeline is not .* in seconds: '1:30: b'"),
        ("0s: a\n2s jump: b", "line 2 of the timeline is not"),
        ("0s: a\n-2s: b", "line 2 of the timeline is not"),
        ("0s: a\n2s:", "line 2 of the timeline is not"),
        ("0s: a\n" + "9" * 400 + ": b", "line 2 of the timeline is not"),
        ("0s: a\n3s: b\n2s: c", "line 3 of the timeline is not after the one above: 2 s"),
    ],
)
def test_what_is_no_timeline(text, words):
    with pytest.raises(UsageError, match=words):
        parse(text)


TIMES = st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.integers(0, 3)), max_size=8)


@given(times=TIMES, geometry=st.sampled_from([GEOMETRY, HELIOS_GEOMETRY]))
def test_a_prompt_begins_with_the_nearest_block_R110(times, geometry):
    seconds = itertools.accumulate(tenths for tenths, _, _ in times)
    shots = [Shot(0, "0")] + [
        Shot(tenths / 10, str(n), fade, cut)
        for n, (tenths, (_, cut, fade)) in enumerate(zip(seconds, times, strict=True), 1)
    ]
    cues, _ = snap(shots, geometry)
    assert [cue.block for cue in cues] == sorted({cue.block for cue in cues})
    for cue in cues:
        asked = shots[int(cue.text)].seconds
        around = replace(geometry, cuts=tuple(c.block for c in cues if c.cut and c.block < cue.block))
        off = [abs(around.seconds(block) - asked) for block in range(cue.block + 3)]
        assert off[cue.block] == pytest.approx(min(off)) and off.index(min(off)) == cue.block


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans()), max_size=6))
def test_every_block_shows_texts_whose_weights_sum_to_one(blocks, changes):
    places = itertools.accumulate(step for step, _, _ in changes)
    cues = [Cue(0, "0")] + [
        Cue(block, str(n % 3), fade, cut) for n, (block, (_, fade, cut)) in enumerate(zip(places, changes, strict=True))
    ]
    for block in range(blocks):
        mixed = mixture(cues, block)
        assert sum(mixed.values()) == pytest.approx(1) and all(weight > 0 for weight in mixed.values())
        last = [cue for cue in cues if cue.block <= block][-1]
        if last.cut or block >= last.block + last.fade:
            assert mixed == {last.text: 1.0}  # complete: nothing of earlier prompts is left


def test_a_fade_goes_in_equal_steps():
    cues = [Cue(0, "a"), Cue(2, "b", fade=3)]
    assert [mixture(cues, block).get("b", 0) for block in range(7)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    embeddings = torch.randn(3, 4, 5)  # a, b, and a negative prompt
    prompts = BlockPrompts(cues, embeddings)
    shown = [prompts(block) for block in range(7)]
    assert torch.equal(shown[0], embeddings[[0, 2]]) and torch.equal(shown[5], embeddings[[1, 2]])
    torch.testing.assert_close(shown[3], torch.stack([embeddings[:2].mean(0), embeddings[2]]))
    # The same tensor while nothing changes, another one where it does: how models know that text keys are stale.
    assert shown[0] is shown[1] and shown[5] is shown[6]
    assert len({id(tensor) for tensor in shown}) == 5


def test_the_block_after_a_cut_has_the_new_prompt_R06():
    cues, notices = snap(parse("0s: A\n4s: B\n6s cut: C"), GEOMETRY)
    assert not notices
    shown = ["".join(mixture(cues, block)) for block in range(12)]
    assert shown == ["A"] * cues[1].block + ["B"] * (cues[2].block - cues[1].block) + ["C"] * (12 - cues[2].block)


def test_a_cut_wins_over_a_fade_R07():
    cues, notices = snap(parse("0s: A\n2s fade 3s: B\n3s cut: C"), GEOMETRY)
    assert cues[2].cut and mixture(cues, cues[2].block) == {"C": 1.0}
    assert notices == ["the cut at 3 s ends the fade to 'B' early"]
    cues, notices = snap(parse("0s: A\n2s cut fade 3s: B"), GEOMETRY)
    assert cues[1] == Cue(cues[1].block, "B", fade=0, cut=True)
    assert notices == ["the prompt at 2 s is a cut: its fade is ignored"]
    cues, notices = snap(parse("0s: A\n2s cut: B\n2.1s: C"), GEOMETRY)
    assert [cue.text for cue in cues] == ["A", "C"] and cues[1].cut
    assert notices == [f"two prompts begin with block {cues[1].block}: 'B' is not shown"]
    cues, notices = snap(parse("0s: A\n2s cut: B\n2.1s fade 3s: C\n4s cut: D"), GEOMETRY)
    assert cues[1] == Cue(cues[1].block, "C", fade=0, cut=True)
    assert notices[1:] == ["the prompt at 2.1 s is a cut: its fade is ignored"]


def test_prompts_past_the_end_are_reported_R110(backbone):
    job, notices = resolve(backbone, timeline="0s: a\n40s: never", blocks=4)
    assert [cue.text for cue in job.cues] == ["a"]
    assert any("'never' is past the end (2.62 s): not used" in notice for notice in notices)
    assert backbone.texts(job) == ["a"]  # not encoded either


@given(st.integers(1, 80), st.lists(st.integers(1, 60), max_size=5, unique=True))
def test_lengths_with_cuts(frames, cuts):
    geometry = replace(GEOMETRY, cuts=tuple(sorted(cuts)))
    blocks = geometry.blocks_for_frames(frames)
    assert geometry.frames(blocks) >= frames > geometry.frames(blocks - 1)


@pytest.mark.parametrize("context", ["session", "rolling:9:1"])
def test_cut_and_change_in_a_rollout_R06(backbone, context):
    """A cut is the beginning of a new video; a change computes text keys again, and nothing else does."""
    job, _ = resolve(backbone, timeline=TIMELINE, blocks=6, k=2, options={"drafter_context": context})
    assert [(cue.block, cue.cut) for cue in job.cues] == [(0, False), (2, False), (4, True)]
    assert job.frames == 12 * 6 - 6 - 3
    pair = backbone.load_pair(backbone.shipped, job, CPU, lambda *_: None)
    encoded = []
    pair.models["drafter"].text_embedding.register_forward_hook(
        lambda layer, args, out: encoded.append(args[0].clone())
    )
    encoder = backbone.load_text_encoder(backbone.shipped["text encoder"], CPU, lambda *_: None)
    embeddings = encoder.encode(backbone.texts(job))
    shape = job.geometry.latent_shape(job.width, job.height)
    size = {"height": job.height, "width": job.width}
    prompts = BlockPrompts(job.cues, embeddings)
    results = list(rollout(pair, spread(6, 1), prompts, lambda block, j: noise(0, block, j, shape), **size))
    assert [result.frames.shape[2] for result in results] == [6, 12, 12, 12, 9, 12]
    assert len(encoded) == 3 and torch.equal(torch.cat(encoded), embeddings)  # each prompt once
    # What follows the cut is a video of that prompt alone.
    red = embeddings[2:3]
    with pair.lease(job.height, job.width, 1, lambda step: None) as run:
        context_, expected = run.begin(), []
        for block in (4, 5):
            latents = run.generate("drafter", context_, red, lambda j, block=block: noise(0, block, j, shape))
            shown, context_ = run.commit(context_, latents, red)
            expected.append((latents, shown))
    for (latents, shown), result in zip(expected, results[4:], strict=True):
        assert torch.equal(latents, result.latents) and torch.equal(shown, result.frames)


def test_helios_begins_anew_at_a_cut():
    job, _ = resolve(named_backbone("helios"), timeline="0s: a\n3s cut: b", blocks=5)
    assert job.cues[1].block == 2 and job.frames == 5 * 33 and job.geometry.cuts == (2,)
    assert job.backbone.texts(job)[:2] == ["a", "b"] and len(job.backbone.texts(job)) == 3


@pytest.mark.parametrize("cut, stop", [("1.2s", 5), ("2.6s", 4), ("2.6s", 5)])  # whole segments are 4 blocks
@pytest.mark.parametrize("context", ["session", "rolling:9:1"])
def test_it_goes_on_behind_and_at_a_cut(backbone, tmp_path, cut, stop, context):
    lines = f"0s: a red ball\n{cut} cut: a ball\n3.6s: red"
    job, _ = resolve(backbone, timeline=lines, blocks=6, k=2, options={"drafter_context": context})

    generate(job, CPU, backbone.shipped, tmp_path / "whole.mp4")
    leave(job, backbone.shipped, tmp_path / "a.mp4", at=stop)
    generate(job, CPU, backbone.shipped, tmp_path / "a.mp4", resume=True)
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "whole.mp4")
    assert len(frames(tmp_path / "a.mp4")) == job.frames


@pytest.mark.parametrize(
    "spec, targets",
    [  # spec/policies: k=7 with marks {12} and {12, 13}, k=5 with {30}, and none
        ("keyed:7@12", [0, 4, 8, 12, 18, 24, 30]),
        ("keyed:7@12,13", [0, 6, 12, 13, 18, 24, 30]),
        ("keyed:5@30", [0, 7, 15, 22, 30]),
        ("keyed:7", list(spread(36, 7).targets)),
    ],
)
def test_keyed(spec, targets):
    schedule, notices = parse_schedule(spec, 36)
    assert list(schedule.targets) == targets
    assert notices == ([] if "@" in spec else ["no prompt begins after block 0: keyed is spread here"])
    assert parse_schedule(schedule.policy, 36)[0] == schedule


@given(st.integers(1, 10), st.data())
def test_keyed_has_the_shortest_runs_that_there_can_be(blocks, data):
    marks = sorted(data.draw(st.sets(st.integers(1, blocks), max_size=3)) & set(range(1, blocks)))
    fixed = {0, *marks}
    k = data.draw(st.integers(len(fixed), blocks))
    spec = f"keyed:{k}" + ("@" + ",".join(map(str, marks)) if marks else "")
    placed, _ = parse_schedule(spec, blocks)
    assert fixed <= set(placed.targets) and len(placed.targets) == k

    def longest(targets):
        edges = [*sorted(targets), blocks]
        return max(end - start - 1 for start, end in itertools.pairwise(edges))

    others = [set(extra) | fixed for extra in itertools.combinations(set(range(blocks)) - fixed, k - len(fixed))]
    assert placed.max_draft_run == min(map(longest, others))


def test_keyed_puts_a_target_block_at_each_change(backbone):
    job, _ = resolve(backbone, timeline=TIMELINE, blocks=8, schedule="keyed:4")
    assert {cue.block for cue in job.cues} <= set(job.schedule.targets) and len(job.schedule.targets) == 4
    with pytest.raises(UsageError, match="keyed:2 is too few: block 0 and the changes of prompt take keyed:3"):
        resolve(backbone, timeline=TIMELINE, blocks=8, schedule="keyed:2")


@pytest.fixture
def here(here):
    Path("t.txt").write_text(TIMELINE + "99s: never\n", "utf-8-sig")
    return here


def test_from_the_command_line_R110(here):
    options = ["--backbone", "tiny", "--timeline", "t.txt", "--blocks", "6", "--schedule", "keyed:3"]
    told = specar("plan", *options)
    assert "the prompt 'never' is past the end (3.94 s): not used" in told.stderr
    assert "prompt    1.12s, block 2: a ball\nprompt    2.62s, block 4 cut: red\n" in told.stdout
    result = specar("generate", *options, "--out", "a.mp4")
    assert result.exit_code == 0 and "prompt: 2.62s, block 4 cut: red" in result.stderr
    report = json.loads(Path("a.json").read_text())
    assert report["prompts"] == [
        {"block": 0, "text": "a red ball"},
        {"block": 2, "text": "a ball"},
        {"block": 4, "text": "red", "cut": True},
    ]
    assert report["schedule"]["targets"] == [0, 2, 4] and report["frames"] == len(frames(Path("a.mp4"))) == 63
    assert specar("generate", "--from", "a.json", "--out", "b.mp4").exit_code == 0
    assert frames(Path("a.mp4")) == frames(Path("b.mp4"))
    assert specar("generate", "--from", "a.json", "--prompt", "a ball", "--out", "c.mp4").exit_code == 0
    assert json.loads(Path("c.json").read_text())["prompts"] == [{"block": 0, "text": "a ball"}]
    Path("u.txt").write_text("0s: red\n3.4s: a ball\n")
    again = specar(
        "plan", "--from", "a.json", "--timeline", "u.txt", "--json"
    )  # a keyed schedule goes with its prompts
    assert json.loads(again.stdout)["schedule"]["policy"] == "keyed:3@5"
    refused(2, "give only one of prompt and timeline", "generate", *options, "--prompt", "a ball")
    refused(2, "cannot read x.txt as text", "generate", "--timeline", "x.txt")


def test_a_prompt_a_line(here):
    Path("p.txt").write_text("a ball\n\n  red \n # not this\na red ball\n")
    options = ["generate", "--backbone", "tiny", "--blocks", "1", "--out", "v.mp4"]
    result = specar(*options, "--prompt-file", "p.txt", "--seed", "3")
    assert result.stdout == "v-0001.mp4\nv-0002.mp4\nv-0003.mp4\n" and result.exit_code == 0
    assert specar(*options, "--prompt", "red", "--seed", "3").exit_code == 0
    assert frames(Path("v.mp4")) == frames(Path("v-0002.mp4")) != frames(Path("v-0003.mp4"))
    assert json.loads(Path("v-0003.json").read_text())["prompts"] == [{"block": 0, "text": "a red ball"}]
    Path("v-0002.mp4").unlink()
    Path("v-0002.json").unlink()
    again = specar(*options, "--prompt-file", "p.txt")
    assert again.exit_code == 1 and again.stdout == "v-0002.mp4\n"  # what failed does not stop the rest
    listed = again.stderr[again.stderr.index("2 of 3 videos failed") :]
    assert "v-0001.mp4 exists" in listed and "v-0003.mp4 exists" in listed
    Path("empty.txt").write_text("\n# nothing\n")
    refused(2, "holds no prompt", *options, "--prompt-file", "empty.txt")
    refused(2, "v-0001.avi does not end in .mp4", *options[:-1], "v.avi", "--prompt-file", "p.txt")


MANY = ("generate", "--backbone", "tiny", "--blocks", 5, "--k", 2, "--prompt-file", "p.txt", "--out", "v.mp4")


def test_interrupted_and_repeated_is_uninterrupted(here, monkeypatch):
    Path("p.txt").write_text("a ball\nred\na red ball\n")
    assert specar(*MANY[:-1], "whole.mp4").exit_code == 0

    @contextmanager
    def interrupting(job, console):
        def block(result):
            if job.cues[0].text == "red" and result.index == 3:
                raise KeyboardInterrupt

        yield Listener(block=block)

    with monkeypatch.context() as patched:
        patched.setattr(making, "run_bar", interrupting)
        result = specar(*MANY)
    assert (result.exit_code, result.stdout) == (130, "v-0001.mp4\n")
    said = [line for line in result.stderr.splitlines() if "o on with" in line]
    assert said == ["Go on with all 3 videos: the same command again, without --overwrite"]
    first = Path("v-0001.mp4").stat().st_mtime_ns
    planned = json.loads(specar("plan", *MANY[1:], "--json").stdout)
    assert planned["refusal"] is None and planned["videos"] == 3
    for _ in range(2):  # when all is done, too
        again = specar(*MANY)
        assert (again.exit_code, again.stdout) == (0, "v-0001.mp4\nv-0002.mp4\nv-0003.mp4\n"), again.stderr
        assert Path("v-0001.mp4").stat().st_mtime_ns == first
        reports = [json.loads(Path(f"v-000{number}.json").read_text()) for number in (1, 2, 3)]
        assert [report["resumed_at"] is None for report in reports] == [True, False, True]
        for number in (1, 2, 3):
            assert frames(Path(f"v-000{number}.mp4")) == frames(Path(f"whole-000{number}.mp4"))
    assert sorted(path.name[2:] for path in here.glob("v-*")) == sorted(path.name[6:] for path in here.glob("whole-*"))
    assert [report["prompts"] for report in json.loads(specar(*MANY, "--json").stdout)] == [
        report["prompts"] for report in reports
    ]


def test_what_is_of_other_settings_fails_alone(here, backbone):
    Path("p.txt").write_text("a ball\nred\na red ball\n")
    assert specar(*MANY[:-4], "--prompt", "a ball", "--seed", 1, "--out", "v-0001.mp4").exit_code == 0
    leave(resolve(backbone, prompt="red", blocks=5, k=1)[0], backbone.shipped, Path("v-0002.mp4"), at=3)
    before = frames(Path("v-0001.mp4"))
    reasons = ("2 of 3 videos", "exists; choose another name", "v-0002.run is the run of another video")
    planned = specar("plan", *MANY[1:])
    assert planned.exit_code == 1 and all(reason in planned.stdout for reason in reasons), planned.stdout
    result = specar(*MANY)
    assert (result.exit_code, result.stdout) == (1, "v-0003.mp4\n")
    assert all(reason in result.stderr for reason in reasons), result.stderr
    ending = "Once that is mended: the same command again; with --overwrite it makes all 3 videos anew\n"
    assert result.stderr.endswith(ending)
    assert frames(Path("v-0001.mp4")) == before and Path("v-0002.run").is_dir()
    again = specar(*MANY, "--overwrite")
    assert again.exit_code == 0 and frames(Path("v-0001.mp4")) != before and not Path("v-0002.run").exists()


def test_what_stands_in_the_way_of_one_that_was_begun_is_told_before(here, backbone):
    Path("p.txt").write_text("a ball\nred\n")
    for number, prompt in enumerate(("a ball", "red"), 1):
        job, _ = resolve(backbone, prompt=prompt, blocks=5, k=2)
        leave(job, backbone.shipped, Path(f"v-000{number}.mp4"), at=3)
    assert specar("plan", *MANY[1:]).exit_code == 0
    Path("v-0001.run/run.json").unlink()
    Path("v-0002.json").write_text("mine")
    planned, made = specar("plan", *MANY[1:]), specar(*MANY)
    for code, said in ((planned.exit_code, planned.stdout), (made.exit_code, made.stderr)):
        assert code == 1 and "v-0001.run holds an unfinished video" in said and "v-0002.json exists" in said, said
    assert specar("plan", *MANY[1:], "--overwrite").exit_code == 0


def test_models_are_loaded_once_for_all_prompts(here, backbone, monkeypatch):
    loads = []
    original = type(backbone).load_network
    monkeypatch.setattr(
        type(backbone), "load_network", lambda self, role, *rest: loads.append(role) or original(self, role, *rest)
    )
    Path("p.txt").write_text("a ball\nred\na red ball\n")
    specar("generate", "--backbone", "tiny", "--blocks", "2", "--k", "1", "--prompt-file", "p.txt", "--out", "v.mp4")
    assert sorted(loads) == ["drafter", "target"] and len(list(here.glob("v-*.mp4"))) == 3
