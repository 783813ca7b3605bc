"""The schedule's timeline on the page, in both renderers: whatever it changes is in the prompt, as text."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

WORKFLOWS = Path(__file__).parents[2] / "workflows"


@pytest.fixture
def timeline(comfy):
    """The tiny workflow, 8 blocks long, two of them target blocks."""
    comfy.load(json.loads((WORKFLOWS / "tiny.json").read_text("utf-8")))
    expect(comfy.timeline).to_be_visible()
    assert comfy.blocks() == "TdddTddd"
    return comfy


def schedule(comfy):
    told = comfy.inputs("SpecARScheduler")
    return told["policy"], told["k"], told["positions"]


def test_drag(timeline):
    timeline.block(4).hover()
    timeline.page.mouse.down()
    timeline.block(5).hover()
    assert timeline.blocks() == "TddddTdd", "it moves with the pointer"
    timeline.block(6).hover()
    timeline.page.mouse.up()
    assert timeline.blocks() == "TdddddTd"
    assert schedule(timeline) == ("list", 2, "0,6")
    assert "longest draft run 5, bound 3" in timeline.facts
    timeline.picture("dragged")


def test_a_drag_passes_over_other_target_blocks_and_leaves_the_strip(timeline):
    places = "() => app.graph.nodes.map(node => node.pos.join()).sort()"
    before = timeline.page.evaluate(places)
    timeline.block(0).hover()
    timeline.page.mouse.down()
    box = timeline.block(7).bounding_box()
    timeline.page.mouse.move(box["x"] + 200, box["y"] + 150, steps=12)
    timeline.page.mouse.up()
    assert timeline.blocks() == "ddddTddT"
    assert "no bound: the drafter begins" in timeline.facts
    assert timeline.page.evaluate(places) == before, "the node stays where it is"


def test_click_adds_and_removes(timeline):
    timeline.block(2).click()
    assert schedule(timeline) == ("list", 2, "0,2,4")
    assert "3 of 8 by the target (38%)" in timeline.facts
    timeline.block(2).click()
    timeline.block(4).click()
    assert schedule(timeline) == ("list", 2, "0")
    timeline.block(0).click()
    assert schedule(timeline)[0] == "draft-only", "a list cannot be empty"
    assert timeline.blocks() == "dddddddd"


def test_keyboard(timeline):
    press, focused = timeline.page.keyboard.press, timeline.page.locator(":focus")
    timeline.block(0).focus()
    press("Shift+ArrowRight")
    expect(focused).to_have_attribute("aria-label", "block 1, drafter")
    assert timeline.blocks() == "TdddTddd"
    for _ in range(3):
        press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "block 5, drafter")
    press("Shift+ArrowLeft")
    press("ArrowLeft")
    expect(focused).to_have_attribute("aria-label", "block 3, target")
    assert schedule(timeline) == ("list", 2, "0,3")
    press("End")
    press("Space")
    assert schedule(timeline) == ("list", 2, "0,3,7")
    press("Delete")
    assert schedule(timeline) == ("list", 2, "0,3")
    press("Home")
    press("ArrowLeft")
    assert timeline.blocks() == "TddTdddd", "there is nothing before block 0"
    press("ArrowRight")
    expect(focused).to_have_attribute("aria-label", "block 1, target")
    assert timeline.page.evaluate("() => app.graph.nodes.length") == 7, "Delete is for blocks here"


def test_undo(timeline):
    timeline.block(2).click()
    timeline.page.wait_for_timeout(300)
    timeline.page.keyboard.press("Control+z")
    timeline.page.wait_for_timeout(600)
    assert timeline.blocks() == "TdddTddd"
    assert schedule(timeline) == ("auto", 2, "0")


def test_spread_cluster_scatter(timeline):
    timeline.block(2).click()
    timeline.page.get_by_role("button", name="Cluster").click()
    assert (timeline.blocks(), schedule(timeline)[:2]) == ("TTTddddd", ("front", 3))
    assert "longest draft run 5, bound 2" in timeline.facts
    timeline.page.get_by_role("button", name="Scatter").click()
    policy, _, positions = schedule(timeline)
    assert policy == "list" and len(positions.split(",")) == timeline.blocks().count("T") == 3
    timeline.page.get_by_role("button", name="Spread").click()
    assert (timeline.blocks(), schedule(timeline)[:2]) == ("TdTddTdd", ("spread", 3))
    assert "longest draft run 2, bound 2" in timeline.facts


def test_it_follows_the_widgets(timeline):
    timeline.change("SpecARScheduler", policy="back", k=3)
    assert timeline.blocks() == "TdddddTT"
    timeline.change("SpecARScheduler", seconds=2.0)
    assert timeline.blocks() == "TdTT"
    timeline.change("SpecARScheduler", blocks=12, policy="list", positions="0,11")
    assert timeline.blocks() == "TddddddddddT"
    timeline.change("SpecARScheduler", blocks=12, policy="custom", custom="max-run:5")
    assert timeline.blocks() == "TdddddTddddd"
    timeline.change("SpecARScheduler", custom="list:0,3")
    assert timeline.blocks() == "TddTdddddddd"
    timeline.change("SpecARLoader", backbone="helios")
    timeline.change("SpecARScheduler", blocks=0, seconds=5.0, policy="auto")
    assert timeline.blocks() == "Tddd", "33 frames a block, 24 a second"
    assert "132 frames, 5.5 s" in timeline.page.locator(".specar-length").inner_text()


@pytest.mark.parametrize(
    "values, told",
    [
        (dict(policy="list", positions="0,8"), "positions must be blocks from 0 to 7"),
        (dict(policy="random", k=3), "known after a run"),
        (dict(policy="custom", custom="spread"), "known after a run"),
        (dict(policy="custom", custom="sdvg:0.7@3"), "settled while they are made"),
        (dict(policy="spread", k=30, blocks=2000), "30 of 2000 by the target (2%)"),
    ],
)
def test_what_cannot_be_drawn_is_told(timeline, values, told):
    timeline.change("SpecARScheduler", **values)
    expect(timeline.timeline).to_be_hidden()
    assert told in timeline.facts


def test_an_input_that_another_node_decides(timeline):
    timeline.page.evaluate(
        """() => {
            const node = app.graph.nodes.find(node => node.type === "SpecARScheduler");
            const number = LiteGraph.createNode("PrimitiveInt");
            app.graph.add(number);
            number.connect(0, node, node.inputs.findIndex(input => input.name === "k"));
        }"""
    )
    timeline.page.wait_for_timeout(250)
    assert "Another node decides this" in timeline.facts


def test_the_predicted_time_belongs_to_its_schedule(timeline):
    """No CPU was measured, so the page is told what a node would say on a card that was."""
    told = {"blocks": 8, "targets": [0, 4], "policy": "max-run:5", "frames": 90, "width": 96, "predicted_seconds": 33.4}
    timeline.page.evaluate(
        "told => app.graph.nodes.find(node => node.type === 'SpecARScheduler').onExecuted({ specar_schedule: [told] })",
        told,
    )
    length = timeline.page.locator(".specar-length")
    expect(length).to_have_text("90 frames, 5.6 s, made in about 33 s")
    timeline.block(2).click()
    expect(length).to_have_text("90 frames, 5.6 s")
    timeline.block(2).click()
    timeline.change("SpecARScheduler", width=112)
    expect(length).to_have_text("90 frames, 5.6 s")


@pytest.mark.parametrize("blocks", [3, 36, 300])
def test_many_blocks(timeline, blocks):
    timeline.change("SpecARScheduler", blocks=blocks)
    assert len(timeline.blocks()) == blocks
    strip = timeline.timeline.bounding_box()
    widths = {round(timeline.block(b).bounding_box()["width"]) for b in (0, blocks // 2, blocks - 1)}
    last = timeline.block(blocks - 1).bounding_box()
    assert len(widths) == 1 and min(widths) >= 5
    assert strip["x"] - 1 <= last["x"] and last["x"] + last["width"] <= strip["x"] + strip["width"] + 1
    timeline.block(blocks - 1).click()
    assert schedule(timeline)[2].endswith(f",{blocks - 1}") or schedule(timeline)[2] == "0,2"


def test_it_is_not_saved_and_not_sent(timeline):
    timeline.block(2).click()
    workflow, prompt = timeline.saved()
    (saved,) = (node for node in workflow["nodes"] if node["type"] == "SpecARScheduler")
    assert saved["widgets_values"] == [5.0, 0, 96, 64, "list", 2, "0,2,4", "", 0]
    for told in prompt.values():
        assert not {"timeline", "provenance"} & told["inputs"].keys()
    timeline.load(workflow)
    assert timeline.blocks() == "TdTdTddd"
    assert timeline.saved()[1] == prompt


def test_for_screen_readers(timeline):
    assert timeline.timeline.get_attribute("aria-label") == "2 of 8 by the target (25%), longest draft run 3, bound 3"
    assert "Arrow keys" in timeline.timeline.get_attribute("aria-description")
    assert timeline.timeline.get_by_role("checkbox").count() == 8
    assert timeline.timeline.get_by_role("checkbox", name="block 4, target", checked=True).is_visible()
    assert timeline.timeline.locator("[tabindex='0']").count() == 1, "one stop for the Tab key"


def test_the_setting(timeline):
    change = "shown => app.extensionManager.setting.set('SpecAR.Strips', shown)"
    timeline.page.evaluate(change, False)
    expect(timeline.timeline).to_be_hidden()
    timeline.page.evaluate(change, True)
    expect(timeline.timeline).to_be_visible()


def test_a_light_theme(timeline):
    change = "name => app.extensionManager.setting.set('Comfy.ColorPalette', name)"
    timeline.page.evaluate(change, "light")
    timeline.page.wait_for_timeout(500)
    timeline.picture("light")
    timeline.page.evaluate(change, "dark")
