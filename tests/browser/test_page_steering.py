"""Prompts over time above the schedule, and the race, on the page in both renderers."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

WORKFLOWS = Path(__file__).parents[2] / "workflows"


def workflow(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text("utf-8"))


@pytest.fixture
def prompts(comfy):
    comfy.load(workflow("prompt timeline"))
    expect(comfy.timeline).to_be_visible()
    return comfy


def lane(comfy):
    return comfy.page.locator(".specar-lane > span")


def test_prompts_stand_over_their_blocks(prompts):
    told = [item.get_attribute("title") for item in lane(prompts).all()]
    assert told == [
        "from block 0: a large red ball bouncing on a plain grey background",
        "from block 3 (fade over 1): a large blue star bouncing on a plain grey background",
        "from block 6 (cut): two small green rings moving left on a plain navy background",
    ]
    assert prompts.blocks() == "TTdTddTdd"
    assert "99 frames, 6.2 s" in prompts.page.locator(".specar-length").inner_text()
    for item, block in zip(lane(prompts).all(), (0, 3, 6), strict=True):
        assert abs(item.bounding_box()["x"] - prompts.block(block).bounding_box()["x"]) < 3
    prompts.picture("prompts")


def test_the_lane_follows_the_text(prompts):
    prompts.change("SpecARPromptTimeline", timeline="0s: one\n5.6s: two\n60s: three")
    assert [item.inner_text() for item in lane(prompts).all()] == ["one", "two"], "the third is past the end"
    assert prompts.blocks() == "TdTddTddT"
    prompts.change("SpecARScheduler", k=1)
    assert "1 target blocks are too few for block 0 and each new prompt" in prompts.facts
    prompts.change("SpecARScheduler", policy="spread", k=3)
    assert prompts.blocks() == "TddTddTdd"
    prompts.change("SpecARPromptTimeline", timeline="no timeline")
    expect(prompts.page.locator(".specar-lane")).to_be_hidden()


def test_the_setting_for_previews_reaches_the_server(comfy, client):
    change = "shown => app.extensionManager.setting.set('SpecAR.Preview', shown)"
    assert comfy.page.evaluate("() => app.extensionManager.setting.get('SpecAR.Preview')") is True
    comfy.page.evaluate(change, False)
    assert client.get("/settings/SpecAR.Preview") is False
    comfy.page.evaluate(change, True)
    assert client.get("/settings/SpecAR.Preview") is True


def test_a_lora_between_loader_and_scheduler(comfy):
    comfy.load(workflow("tiny"))
    comfy.page.evaluate(
        """() => {
            const find = type => app.graph.nodes.find(node => node.type === type);
            const lora = LiteGraph.createNode("SpecARLora");
            app.graph.add(lora);
            find("SpecARLoader").connect(0, lora, 0);
            lora.connect(0, find("SpecARScheduler"), 0);
        }"""
    )
    comfy.page.wait_for_timeout(250)
    assert comfy.blocks() == "TdddTddd"


def test_the_race_runs_in_its_node(comfy, forget):
    forget()
    told = workflow("race")
    for node in told["nodes"]:
        if node["type"] == "SpecARScheduler":
            node["widgets_values"][1] = 2  # blocks
    comfy.load(told)
    comfy.page.evaluate("() => { app.canvas.ds.scale = 0.6; app.canvas.ds.offset = [-900, 60]; }")
    comfy.page.get_by_test_id("queue-button").click()
    page = comfy.page.frame_locator("iframe.specar-race")
    expect(page.get_by_role("button", name="Start")).to_be_visible(timeout=120_000)
    videos = page.locator("video")
    assert videos.count() == 3
    for video in videos.all():
        expect(video).to_have_js_property("readyState", 4, timeout=30_000)
        assert video.evaluate("video => video.duration") == pytest.approx(18 / 16, abs=0.1)
    paper = "() => getComputedStyle(document.querySelector('iframe.specar-race').contentDocument.body).backgroundColor"
    assert comfy.page.evaluate(paper) == "rgb(19, 20, 23)", "dark, as ComfyUI is"
    page.get_by_text("Same frame").click()
    page.get_by_text("Race", exact=True).click()
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#result")).not_to_be_empty(timeout=60_000)
    comfy.picture("race-ran")
