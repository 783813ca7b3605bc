"""A real race of small models, and the text of its page."""

import base64
import json
import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clips import layout, report
from small import small_backbone
from test_cli import refused, specar

from specar_core.errors import SpecarError, UsageError
from specar_core.generate import Listener, generate
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.measures import read_frames
from specar_core.race import Clip, page
from specar_core.race.run import race

CPU = Machine(torch.device("cpu"), "fp32", "sdpa")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return small_backbone(tmp_path_factory.mktemp("models"))


def jobs(pair, *policies, prompts=("a red ball",)):
    return [resolve(pair, prompt=text, schedule=policy, blocks=4)[0] for text in prompts for policy in policies]


def data_of(text):
    found = re.search(r'<script type="application/json" id="race-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


# ------------------------------------------------------------------------------------------------------ the race


def test_a_race_gives_the_videos_that_generate_gives(pair, tmp_path):
    two = jobs(pair, "spread:2", "target-only")
    out = tmp_path / "race.html"
    scores = race(two, CPU, pair.shipped, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "race-1-spread-2.json",
        "race-1-spread-2.mp4",
        "race-2-target-only.json",
        "race-2-target-only.mp4",
        "race.html",
        "race.json",
    ]
    for number, job in enumerate(two, 1):
        alone = tmp_path / f"alone-{number}.mp4"
        generate(job, CPU, pair.shipped, alone)
        (raced,) = tmp_path.glob(f"race-{number}-*.mp4")
        assert all((a == b).all() for a, b in zip(read_frames(raced), read_frames(alone), strict=True))
    assert json.loads((tmp_path / "race.json").read_text()) == scores
    assert scores["clips"][0]["paired"]["reference"] == "race-2-target-only.mp4"


def test_models_are_loaded_once_and_warmed_up(pair, tmp_path):
    loaded, told = [], []

    class Counting(type(pair)):
        def load_network(self, role, *details):
            loaded.append(role)
            return super().load_network(role, *details)

    fields = {name: getattr(pair, name) for name in pair.__dataclass_fields__}
    three = jobs(Counting(**fields), "first", "target-only", "draft-only", prompts=("a ball", "a red ball"))
    race(three, CPU, pair.shipped, tmp_path / "r.html", progress=lambda *what: told.append(what))
    assert loaded == ["target", "drafter"]
    assert [what for what in told if what[0] == "warming up"] == [("warming up", done, 4) for done in range(1, 5)]
    scenes = data_of((tmp_path / "r.html").read_text())["scenes"]
    assert scenes == [[0, 1, 2], [3, 4, 5]]


def killed_race(models, out):
    """Kills itself in block 2 of the second video."""

    def step(job):
        def stop(at, step):
            if job.schedule.policy == "sdvg-quantile:2" and at == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return Listener(step=stop)

    pair = small_backbone(models)
    race(resumed_jobs(pair), CPU, pair.shipped, out, listening=step)


def resumed_jobs(pair):
    return jobs(pair, "first", "sdvg-quantile:2", "target-only", prompts=("a large red ball",))


def without_times(told):
    """What a page or scores tell but seconds, and that it was resumed."""
    if isinstance(told, dict):
        left_out = ("seconds", "score_seconds", "timings", "resumed_at", "threads")
        return {name: without_times(value) for name, value in told.items() if name not in left_out}
    return [without_times(value) for value in told] if isinstance(told, list) else told


def test_a_race_that_was_killed_goes_on(pair, tmp_path):
    out, whole = tmp_path / "a" / "race.html", tmp_path / "b" / "race.html"
    arguments = (pair.shipped["target"].parent, out)
    process = multiprocessing.get_context("spawn").Process(target=killed_race, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in out.parent.glob("*.mp4")) == ["race-1-first.mp4"]
    first = (out.parent / "race-1-first.mp4").stat().st_mtime_ns
    with pytest.raises(UsageError, match="another video"):
        race([replace(job, seed=1) for job in resumed_jobs(pair)], CPU, pair.shipped, out)
    again = race(resumed_jobs(pair), CPU, pair.shipped, out)
    assert (out.parent / "race-1-first.mp4").stat().st_mtime_ns == first
    resumed = [clip["report"]["resumed_at"] for clip in data_of(out.read_text())["clips"]]
    assert resumed[1] in (1, 2) and resumed[::2] == [None, None]  # blocks are written while the next one is made
    assert without_times(again) == without_times(race(resumed_jobs(pair), CPU, pair.shipped, whole))
    assert without_times(data_of(out.read_text())) == without_times(data_of(whole.read_text()))
    assert sorted(path.name for path in out.parent.iterdir()) == sorted(path.name for path in whole.parent.iterdir())


def test_an_interrupted_race_tells_one_way_to_go_on(pair, tmp_path, caplog):
    def interrupt(result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        arguments = (CPU, pair.shipped, tmp_path / "r.html")
        race(jobs(pair, "first", "target-only"), *arguments, listening=lambda job: Listener(block=interrupt))
    assert (tmp_path / "r-1-first.run").exists()
    (told,) = [line for line in caplog.messages if "o on with" in line]
    assert told == "Go on with the whole race: the same command again, without --overwrite"
    with pytest.raises(UsageError, match="another video"):  # it would be of two precisions and tell of one
        race(jobs(pair, "first", "target-only"), replace(CPU, precision="bf16"), pair.shipped, tmp_path / "r.html")


def test_an_interrupted_race_that_replaces_an_old_one_begins_anew(pair, tmp_path, caplog):
    def interrupt(result):
        raise KeyboardInterrupt

    (tmp_path / "r.html").touch()
    with pytest.raises(KeyboardInterrupt):
        arguments = (CPU, pair.shipped, tmp_path / "r.html")
        listening = {"listening": lambda job: Listener(block=interrupt)}
        race(jobs(pair, "first", "target-only"), *arguments, overwrite=True, **listening)
    (told,) = [line for line in caplog.messages if "o on with" in line]
    assert told == "Go on with the whole race: the same command again, which begins anew"


def test_a_race_refuses_before_it_works(pair, tmp_path):
    with pytest.raises(UsageError, match="two or more different policies"):
        race(jobs(pair, "first", "first"), CPU, {}, tmp_path / "r.html")
    with pytest.raises(UsageError, match=r"does not end in \.html"):
        race(jobs(pair, "first", "target-only"), CPU, {}, tmp_path / "r.json")
    (tmp_path / "r-2-target-only.mp4").touch()
    with pytest.raises(UsageError, match=r"r-2-target-only\.mp4 exists"):
        race(jobs(pair, "first", "target-only"), CPU, {}, tmp_path / "r.html")
    assert [path.name for path in tmp_path.iterdir()] == ["r-2-target-only.mp4"]
    (tmp_path / "f.html").mkdir()
    with pytest.raises(UsageError, match=r"f\.html is a folder"):
        race(jobs(pair, "first", "target-only"), CPU, {}, tmp_path / "f.html", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(SpecarError, match="Cannot write"):
        race(jobs(pair, "first", "target-only"), CPU, {}, tmp_path / "file" / "r.html")


def test_an_embedding_page_holds_the_videos(pair, tmp_path):
    race(jobs(pair, "first", "draft-only"), CPU, pair.shipped, tmp_path / "r.html", embed=True)
    for clip, video in zip(
        data_of((tmp_path / "r.html").read_text())["clips"], sorted(tmp_path.glob("*.mp4")), strict=True
    ):
        kind, _, data = clip["video"].partition(",")
        assert kind == "data:video/mp4;base64" and base64.b64decode(data) == video.read_bytes()


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ["race", "--backbone", "tiny", "--blocks", 2, "--width", 48, "--height", 32]
    refused(2, "what should the videos show", *tiny, "--policy", "first", "--policy", "target-only")
    refused(2, "two or more different policies", *tiny, "--prompt", "a red ball", "--policy", "first")
    result = specar(*tiny, "--prompt", "a red ball", "--policy", "first", "--policy", "draft-only", "--out", "a b.html")
    assert (result.exit_code, result.stdout) == (0, "a b.html\n")
    clips = data_of(Path("a b.html").read_text())["clips"]
    assert [clip["video"] for clip in clips] == ["a%20b-1-first.mp4", "a%20b-2-draft-only.mp4"]
    for clip, file in zip(clips, ("a b-1-first.json", "a b-2-draft-only.json"), strict=True):
        assert clip["report"] == json.loads(Path(file).read_text())


# ------------------------------------------------------------------------------------------------------ the page


def clips(*letters, **changes):
    return [Clip(f"{word}.mp4", report(word, layout(word).frames, **changes)) for word in letters]


def test_a_page_needs_nothing_from_elsewhere():
    text = page(clips("Tdd", "TTT"))
    assert "{{" not in text and "default-src 'none'" in text
    without_data = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=|@import|url\(|https?://|import\s*[({"'*]|fetch\(""", without_data)


def test_a_prompt_is_data_and_no_markup():
    evil = '</script><script>alert(1)</script><!-- {{style}} & "'
    text = page(clips("Tdd", "TTT", prompts=[{"block": 0, "text": evil}]))
    assert evil not in text and "alert(1)</script>" not in text
    assert data_of(text)["clips"][0]["report"]["prompts"][0]["text"] == evil


def test_clips_of_other_prompts_or_seeds_are_other_scenes():
    made = [*clips("Tdd", "TTT"), *clips("Tdd", seed=1), *clips("TTT", prompts=None, conditioning="0"), *clips("ddd")]
    assert data_of(page(made))["scenes"] == [[0, 1, 4], [2], [3]]


def test_a_page_needs_a_video():
    with pytest.raises(UsageError, match="needs a video"):
        page([])


def test_the_page_knows_policies_and_where_blocks_begin():
    told = data_of(page(clips("Tdd", "TTT")))["clips"]
    assert [clip["label"] for clip in told] == ["list:0", "list:0,1,2"]
    assert told[0]["starts"] == [0, 6, 18, 30]


@pytest.mark.parametrize("name", ["schedule.js", "placing.js"])
def test_the_page_and_the_extension_share_scripts(name):
    """A page cannot load a script from the extension's folder, nor the extension one from the package."""
    assert (ROOT / "specar_core/race" / name).read_bytes() == (ROOT / "web" / name).read_bytes()
