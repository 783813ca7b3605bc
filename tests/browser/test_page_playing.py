"""From "Run" to a video that plays, and back from the video to the graph."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
from playwright.sync_api import expect

from specar_core.mp4 import read_metadata

TINY = json.loads((Path(__file__).parents[2] / "workflows" / "tiny.json").read_text("utf-8"))
DROP = """async address => {
    const file = new File([await (await fetch(address)).blob()], "dropped.mp4", { type: "video/mp4" });
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(file);
    const at = { bubbles: true, cancelable: true, clientX: 800, clientY: 800, dataTransfer };
    document.querySelector("#graph-canvas").dispatchEvent(new DragEvent("drop", at));
}"""


def pixels(path):
    with av.open(str(path)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def videos(host):
    return sorted((host.base / "output" / "video").glob("*.mp4"))


def run(comfy, host):
    """Presses "Run"; the file that was saved then."""
    before = videos(host)
    comfy.page.get_by_test_id("queue-button").click()
    for _ in range(240):
        comfy.page.wait_for_timeout(250)
        if new := [path for path in videos(host) if path not in before]:
            break
    (path,) = new
    comfy.page.wait_for_function("() => document.querySelector('video')?.readyState >= 2", timeout=30_000)
    return path


@pytest.fixture
def short(comfy, forget):
    """The tiny workflow with 3 blocks, one of them added on the page. Nothing is cached."""
    forget()
    comfy.load(TINY)
    comfy.change("SpecARScheduler", seconds=1.8)
    comfy.block(0).focus()
    comfy.page.keyboard.press("End")
    comfy.page.keyboard.press("Space")
    assert comfy.blocks() == "TdT"
    return comfy


def test_run_play_drop_and_run_again(short, host, forget):
    comfy = short
    workflow, prompt = comfy.saved()
    first = run(comfy, host)

    video = comfy.page.locator("video").first
    video.evaluate("video => { video.muted = true; return video.play(); }")
    comfy.page.wait_for_function("() => document.querySelector('video').currentTime > 0.2")
    assert video.evaluate("video => [video.videoWidth, video.videoHeight]") == [96, 64]
    assert video.evaluate("video => video.duration") == pytest.approx(30 / 16, abs=0.1)
    comfy.picture("ran")

    inside = read_metadata(first)
    assert json.loads(inside["prompt"]).keys() == prompt.keys()
    assert [node["id"] for node in json.loads(inside["workflow"])["nodes"]] == [
        node["id"] for node in workflow["nodes"]
    ]
    assert json.loads(inside["specar"])["schedule"]["targets"] == [0, 2]

    comfy.load({**TINY, "nodes": [], "links": []})
    assert comfy.saved()[1] == {}
    comfy.page.evaluate(DROP, f"/view?filename={first.name}&subfolder=video&type=output")
    comfy.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(TINY["nodes"]))
    comfy.page.wait_for_timeout(500)
    assert comfy.saved()[1] == prompt, "the graph that made the video"
    assert comfy.blocks() == "TdT"

    forget()
    second = run(comfy, host)
    assert (pixels(second) == pixels(first)).all()


def test_what_ran_is_shown(short, host):
    comfy = short
    run(comfy, host)
    for node in ("SpecARSpeculativeSampler", "SpecARVideoDecode"):
        assert comfy.ran(node) == "TdT"
    cell = comfy.page.locator(".specar-ran [data-block='2']").first
    assert cell.get_attribute("title").startswith("block 2: target, ")
    totals = comfy.page.locator("[data-specar=provenance] .specar-line").first.inner_text()
    assert "target: 2 in " in totals and "drafter: 1 in " in totals and "all: " in totals

    comfy.page.evaluate("workflow => app.loadGraphData(workflow)", comfy.saved()[0])
    expect(comfy.page.locator(".specar-ran").first).to_be_empty()
    comfy.page.get_by_test_id("queue-button").click()
    expect(comfy.page.locator(".specar-ran [data-block='2']").first).to_be_attached(timeout=30_000)
    assert comfy.ran("SpecARSpeculativeSampler") == "TdT", "from the cache"


def test_a_random_schedule_is_shown_after_a_run(comfy, forget):
    forget()
    comfy.load(TINY)
    comfy.change("SpecARScheduler", policy="random", k=2, seconds=1.8)
    assert "known after a run" in comfy.facts
    comfy.page.get_by_test_id("queue-button").click()
    expect(comfy.timeline).to_be_visible(timeout=30_000)
    assert comfy.blocks() in ("TTd", "TdT")
