"""The page of a real race of the tiny pair, opened from its file as a visitor does."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from firefox import Firefox
from playwright.sync_api import expect

from specar_core.backbones.tiny import TINY
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.race import Clip
from specar_core.race import page as race_page
from specar_core.race.run import race
from specar_core.schedule import Schedule

POLICIES = ("spread:2", "target-only", "draft-only")
ROUTED = ("spread:2", "sdvg:9", "sdvg:-9")  # no score reaches 9, and every score -9
PROMPTS = ("a large red ball bouncing on a plain grey background", "a small blue square </script> & more")
BLOCKS = 3
SHOTS = Path(os.environ.get("SPECAR_SHOTS", Path(__file__).parent / "shots"))


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """The page's path, and the reports of its videos, scene after scene."""
    out = tmp_path_factory.mktemp("race") / "race.html"
    scenes = zip(PROMPTS, (POLICIES, ROUTED), strict=True)
    jobs = [resolve(TINY, prompt=text, schedule=name, blocks=BLOCKS)[0] for text, names in scenes for name in names]
    race(jobs, Machine(torch.device("cpu"), "fp32"), TINY.shipped, out)
    videos = sorted(out.parent.glob("race-*.mp4"))
    return out, [json.loads(video.with_suffix(".json").read_text()) for video in videos]


@pytest.fixture
def page(browser, raced):
    """The page, which must not complain, nor ask for anything but its videos."""
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints, asked = [], []
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(raced[0].as_uri())
    yield shown
    shown.close()
    assert not complaints
    assert {Path(url).suffix for url in asked} <= {".html", ".mp4"} and all(url.startswith("file:") for url in asked)


def seconds_of(report):
    timings = report["timings"]
    rolled = sum(block["seconds"] for block in report["blocks"])
    return max(rolled, timings["total"] - timings["load"] - timings["text"])


def shown_seconds(value):
    return f"{value:.2f} s"


def placement(page):
    cells = page.locator("#strip > span").evaluate_all("cells => cells.map(cell => cell.ariaChecked)")
    return "".join("T" if checked == "true" else "d" for checked in cells)


def fact(page, name):
    return page.locator(f"[data-fact={name}]").inner_text()


def lane(page, label):
    return page.locator(".lane").filter(has=page.get_by_role("heading", name=re.compile(f"^{label}")))


def picture(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"race-{name}.png", full_page=True)


def bearable(reports):
    """A speed at which the race takes seconds, however busy the machine was when it was run."""
    slowest = max(seconds_of(report) for report in reports)
    return next((rate for rate in (1, 2, 4) if slowest / rate < 4), 8)


def test_the_numbers_are_those_of_the_reports(page, raced):
    rows = [row.split("\t") for row in page.locator("#table tbody").inner_text().splitlines()]
    for row, report, policy in zip(rows, raced[1], POLICIES, strict=False):
        taken, blocks = seconds_of(report), report["blocks"]
        targets = sum(block["role"] == "target" for block in blocks)
        assert row[:3] == [policy, shown_seconds(taken), f"{report['frames'] / taken:.2f}"]
        assert row[5] == shown_seconds(blocks[0]["seconds"])
        assert row[6] == shown_seconds(max(block["seconds"] for block in blocks))
        assert row[7:] == [f"{targets} of {BLOCKS}", str(report["schedule"]["max_draft_run"]), "0"]
        told = [item.get_attribute("title") for item in lane(page, policy).locator(".pace li").all()]
        assert told[:-1] == [f"block {b['index']}: {b['role']}, {b['seconds']:.2f} s" for b in blocks]
        facts = lane(page, policy).locator("dd").all_inner_texts()
        assert facts[0] == shown_seconds(taken) and facts[3] == f"{targets} of {BLOCKS}"
    expect(page.locator("#prompt")).to_have_text(PROMPTS[0])
    expect(page.locator("#meta")).to_contain_text(f"{raced[1][0]['frames']} frames")


def test_a_race_shows_each_video_at_its_own_pace(page, raced):
    reports = dict(zip(POLICIES, raced[1], strict=False))
    rate = bearable(raced[1])
    page.get_by_label("Speed").select_option(str(rate))
    page.get_by_role("button", name="Start").click()
    for _ in range(40):  # while it runs, nothing is shown that is not made yet
        state = page.evaluate(
            """() => [parseFloat(document.getElementById("clock").textContent),
                ...[...document.querySelectorAll(".lane")].map(lane =>
                    [lane.querySelectorAll(".there").length, lane.querySelector("video").currentTime])]"""
        )
        for (blocks, played), report in zip(state[1:], reports.values(), strict=True):
            ends = [sum(b["seconds"] for b in report["blocks"][: n + 1]) for n in range(BLOCKS)]
            assert abs(blocks - sum(end <= state[0] for end in ends)) <= any(abs(end - state[0]) < 0.01 for end in ends)
            made = (0, 6, 18, 30)[blocks] / 16
            assert (
                played <= made + 0.07 * rate
            )  # what the browser plays past the last frame before it hears of the pause
        page.wait_for_timeout(30)
    expect(page.locator("#result")).not_to_be_empty(timeout=60_000)
    order = sorted(POLICIES, key=lambda policy: seconds_of(reports[policy]))
    for place, policy in zip(("1st", "2nd", "3rd"), order, strict=True):
        expect(lane(page, policy).locator(".place")).to_have_text(place)
    expect(page.locator("#result")).to_have_text(re.compile(f"^{order[0]} is first: "))
    expect(page.get_by_role("button", name="Again")).to_be_visible(timeout=10_000)  # each played to its end
    ended = page.evaluate("[...document.querySelectorAll('video')].map(video => video.ended)")
    assert ended == [True] * 3
    picture(page, "desktop")


def test_the_same_frame_of_every_video(page):
    page.get_by_text("Same frame").click()
    expect(page.locator("#scrubber")).to_be_visible()
    scrubber = page.get_by_role("slider")
    scrubber.focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    expect(scrubber).to_have_value("7")
    times = page.evaluate("[...document.querySelectorAll('video')].map(video => video.currentTime)")
    assert times == pytest.approx([7.5 / 16] * 3)
    expect(lane(page, "spread:2").locator(".screen p")).to_have_text("frame 7: block 1, target")
    expect(lane(page, "draft-only").locator(".now")).to_have_attribute("title", re.compile("^block 1: drafter"))
    lane(page, "spread:2").locator(".pace li").nth(2).click()
    expect(scrubber).to_have_value("18")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible(timeout=10_000)  # again, at the end
    expect(scrubber).to_have_value("29")


def test_the_same_frames_again_and_again(page):
    page.get_by_text("Same frame").click()
    page.get_by_label("Loop").check()
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    seen = [0]
    while len(seen) < 2000 and seen[-1] >= max(seen) / 2:
        page.wait_for_timeout(10)
        seen.append(int(page.get_by_role("slider").input_value()))
    assert max(seen) > 20 > seen[-1], "it did not begin anew"
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_a_click_on_a_picture_and_the_space_bar(page):
    page.locator(".screen").first.click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.locator("h1").click()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()
    assert page.evaluate("scrollY") == 0


def costs(reports):
    found = {}
    for report in reports:
        before = ""
        for block in report["blocks"]:
            if not block["rejected"]:
                for kind in ((before, block["role"]), block["role"]):
                    found.setdefault(kind, []).append(block["seconds"] - block.get("score_seconds", 0))
            before = block["role"]
    rest = [seconds_of(report) - sum(block["seconds"] for block in report["blocks"]) for report in reports]
    return {kind: sum(all_) / len(all_) for kind, all_ in found.items()}, sum(rest) / len(rest)


def predicted(strip, reports):
    means, total = costs(reports)
    before = ""
    for letter in strip:
        role = "target" if letter == "T" else "drafter"
        total += means.get((before, role), means[role])
        before = role
    return shown_seconds(total)


def counted(blocks):
    return f"{blocks} block" if blocks == 1 else f"{blocks} blocks"


def check_explorer(page, reports):
    strip = placement(page)
    schedule = Schedule(BLOCKS, tuple(block for block, letter in enumerate(strip) if letter == "T"))
    assert fact(page, "targets") == f"{len(schedule.targets)} of {BLOCKS}"
    assert fact(page, "run") == counted(schedule.max_draft_run)
    anchored = schedule.targets[:1] == (0,)
    least = -(-BLOCKS // max(1, len(schedule.targets))) - 1
    assert fact(page, "bound") == (counted(least) if anchored else "none: the drafter begins")
    assert fact(page, "time") == predicted(strip, reports)
    return strip


def test_the_explorer_by_pointer(page, raced):
    reports = raced[1][:3]
    assert check_explorer(page, reports) == "TTd"
    cells = page.locator("#strip > span")
    cells.nth(1).drag_to(cells.nth(2))
    assert check_explorer(page, reports) == "TdT"
    cells.nth(0).click()
    assert check_explorer(page, reports) == "ddT"
    for button, strip in (("Cluster", "Tdd"), ("One more", "TTd"), ("Spread", "TTd"), ("One less", "Tdd")):
        page.get_by_role("button", name=button, exact=True).click()
        assert check_explorer(page, reports) == strip
    page.get_by_role("button", name="As in target-only").click()
    assert check_explorer(page, reports) == "TTT"
    page.get_by_role("button", name="As in draft-only").click()
    page.get_by_role("button", name="Scatter").click()
    assert check_explorer(page, reports) == "Tdd"


def test_the_explorer_by_keyboard(page, raced):
    page.locator("#strip > span").first.focus()
    for key, strip, focus in (
        ("Shift+ArrowRight", "TTd", 1),
        ("ArrowRight", "TdT", 2),
        ("Home", "TdT", 0),
        ("Space", "ddT", 0),
        ("End", "ddT", 2),
        ("ArrowLeft", "dTd", 1),
        ("Enter", "ddd", 1),
    ):
        page.keyboard.press(key)
        assert check_explorer(page, raced[1][:3]) == strip
        assert page.evaluate("document.activeElement.dataset.block") == str(focus)


def test_everything_is_reached_with_the_tab_key(page):
    names = []
    for _ in range(20):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 12)"))
        if names[-1] == "As in draft-":
            break
    assert [name for name in names if name in ("scene", "go", "rate")] == ["scene", "go", "rate"]
    assert names.index("Spread") == names.index("rate") + 2  # one stop for the whole strip of blocks


def test_another_scene_with_a_router(page, raced):
    page.get_by_label("Scene").select_option("1")
    expect(page.locator("#prompt")).to_have_text(PROMPTS[1])
    first, second, _ = raced[1][3:]
    expect(lane(page, "spread:2").locator("dd").first).to_have_text(shown_seconds(seconds_of(first)))
    assert lane(page, "sdvg:9").locator("dd").all_inner_texts()[3:] == ["3 of 3", "0 blocks", "2"]
    told = [item.get_attribute("title") for item in lane(page, "sdvg:9").locator(".pace .rejected").all()]
    assert told == [f"block {b}: target, {second['blocks'][b]['seconds']:.2f} s, 1 rejected" for b in (1, 2)]
    assert page.locator("[data-scores]:visible").count() == 1
    assert page.locator("[data-scores]:visible td").first.inner_text() == "race-4-spread-2.mp4"
    figure = page.locator("figure:visible").filter(has=page.get_by_role("heading", name="Run position"))
    assert {key.inner_text(): key.get_attribute("class") for key in figure.locator(".key").all()} == {
        policy: lane(page, policy).locator(".key").get_attribute("class") for policy in ("spread:2", "sdvg:-9")
    }
    check_explorer(page, raced[1][3:])


def test_its_text_works_in_a_frame(browser, raced):
    """As other pages show it, with the videos in it."""
    out, reports = raced
    videos = [base64.b64encode(video.read_bytes()).decode() for video in sorted(out.parent.glob("race-*.mp4"))[:2]]
    reports = [reports[0], {**reports[1], "resumed_at": 1}]
    clips = [Clip(f"data:video/mp4;base64,{data}", report) for data, report in zip(videos, reports, strict=True)]
    around = browser.new_page()
    complaints = []
    around.on("console", lambda message: complaints.append(message.text))
    around.evaluate(
        "text => Object.assign(document.body.appendChild(document.createElement('iframe')), {srcdoc: text})",
        race_page(clips),
    )
    frame = around.frame_locator("iframe")
    frame.get_by_label("Speed").select_option(str(bearable(reports)))
    resumed = frame.locator(".lane").filter(has_text="Interrupted before block 1")
    blocks = sum(block["seconds"] for block in reports[1]["blocks"])
    expect(resumed.locator("dd").first).to_have_text(shown_seconds(blocks))
    frame.get_by_role("button", name="Start").click()
    expect(frame.locator("#result")).not_to_be_empty(timeout=60_000)
    expect(frame.locator(".screen.waiting")).to_have_count(0)
    expect(frame.locator(".place.first")).to_have_count(1)
    around.close()
    assert not complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone(page, scheme):
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme=scheme)
    lanes = page.locator(".lane").evaluate_all("lanes => lanes.map(lane => lane.offsetHeight)")
    assert sum(lanes) < 740, "a race is seen at once"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360  # nothing to scroll sideways
    small = page.evaluate(
        "[...document.querySelectorAll('#controls button, #placements button, select')]"
        ".filter(element => element.offsetParent && element.offsetHeight < 32).map(element => element.outerHTML)"
    )
    assert small == []
    back, ink = page.evaluate(
        "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
    )
    assert contrast(back, ink) > 7
    picture(page, f"phone-{scheme}")


def contrast(a, b):
    """WCAG 2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""

    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_it_works_in_firefox_too(raced, tmp_path):
    program = os.environ.get("FIREFOX") or shutil.which("firefox-esr")
    if not program:
        pytest.fail("there is no firefox-esr: `apt-get install -y firefox-esr`, or set FIREFOX", pytrace=False)
    with Firefox(program, tmp_path / "profile") as firefox:
        firefox.open(raced[0].as_uri(), 1280, 900)
        cell = "document.querySelectorAll('#strip > span')[{}]".format
        strip = (
            "[...document.querySelectorAll('#strip > span')].map(c => c.ariaChecked === 'true' ? 'T' : 'd').join('')"
        )
        firefox.evaluate("document.getElementById('strip').scrollIntoView({block: 'center'})")
        assert firefox.evaluate(strip) == "TTd"
        firefox.drag(cell(1), cell(2))
        assert firefox.evaluate(strip) == "TdT"
        told = firefox.evaluate("document.querySelector('[data-fact=time]').textContent")
        assert told == predicted("TdT", raced[1][:3])
        firefox.evaluate("document.getElementById('go').scrollIntoView({block: 'center'})")
        firefox.evaluate(f"document.getElementById('rate').value = '{bearable(raced[1])}'")
        firefox.drag("document.getElementById('go')", "document.getElementById('go')")
        firefox.wait_for("document.getElementById('go').textContent === 'Again'", 60)
        assert firefox.evaluate("[...document.querySelectorAll('video')].map(video => video.ended)") == [True] * 3
        first = min(zip(POLICIES, raced[1], strict=False), key=lambda raced: seconds_of(raced[1]))[0]
        assert firefox.evaluate("document.getElementById('result').textContent").startswith(f"{first} is first")
        firefox.picture(SHOTS / "race-firefox.png")
        assert not firefox.complaints
        assert all(url.startswith("file:") for url in firefox.asked)
