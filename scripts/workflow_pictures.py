"""Makes the thumbnails of the workflows and the picture in the README, on the page of a running ComfyUI.

    scripts/start_host.sh FOLDER 8188 &
    python scripts/workflow_pictures.py http://127.0.0.1:8188

Needs Chromium (/usr/bin/chromium, or CHROMIUM), and playwright, av and Pillow.
"""

import io
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

import av
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

CHECKOUT = Path(__file__).parents[1]
sys.path.insert(0, str(CHECKOUT / "tests" / "browser"))

from comfy_page import ARGUMENTS, ComfyPage  # noqa: E402

COLOURS = {"T": "#e8862e", "d": "#5b9bd5"}  # as on the page
FRAME = (576, 384)
STRIP = 28
GRAPH = """() => {
    const { scale, offset } = app.canvas.ds;
    const canvas = document.querySelector("#graph-canvas").getBoundingClientRect();
    const onPage = (x, y) => [canvas.x + (x + offset[0]) * scale, canvas.y + (y + offset[1]) * scale];
    const corners = app.graph.nodes.flatMap(({ pos: [x, y], size: [width, height] }) =>
        [onPage(x, y - 30), onPage(x + width, y + height)]);  // a title is 30 high
    const [left, top] = [0, 1].map(axis => Math.min(...corners.map(corner => corner[axis])) - 12);
    const [right, bottom] = [0, 1].map(axis => Math.max(...corners.map(corner => corner[axis])) + 12);
    return { x: left, y: top, width: right - left, height: bottom - top };
}"""


FIT = """() => {
    const corners = app.graph.nodes.flatMap(({ pos: [x, y], size: [width, height] }) =>
        [[x, y - 30], [x + width, y + height]]);
    const [left, top] = [0, 1].map(axis => Math.min(...corners.map(corner => corner[axis])) - 40);
    const [right, bottom] = [0, 1].map(axis => Math.max(...corners.map(corner => corner[axis])) + 40);
    app.canvas.ds.scale = Math.min(1580 / (right - left), 800 / (bottom - top), 1);
    app.canvas.ds.offset = [70 / app.canvas.ds.scale - left, 90 / app.canvas.ds.scale - top];
    app.canvas.setDirty(true, true);
}"""


def workflow(name: str) -> dict:
    return json.loads((CHECKOUT / "workflows" / f"{name}.json").read_text("utf-8"))


def graph(comfy: ComfyPage) -> Image.Image:
    """The nodes, as large as all of them fit, without the page around them."""
    comfy.page.evaluate(FIT)
    comfy.page.wait_for_timeout(6000)  # messages about the run go away
    return Image.open(io.BytesIO(comfy.page.screenshot(clip=comfy.page.evaluate(GRAPH)))).convert("RGB")


def small(picture: Image.Image) -> Image.Image:
    picture.thumbnail((720, 720))
    return picture


def run(comfy: ComfyPage, name: str) -> None:
    comfy.load(workflow(name))
    comfy.page.get_by_test_id("queue-button").click()
    comfy.page.wait_for_selector("video", timeout=300_000)


def ran(comfy: ComfyPage) -> Image.Image:
    """A frame of its video, above the strip of its blocks."""
    address = comfy.page.locator("video").first.evaluate("video => video.currentSrc")
    with av.open(io.BytesIO(urllib.request.urlopen(address).read())) as video:
        frames = [frame.to_image() for frame in video.decode(video=0)]
    picture = Image.new("RGB", (FRAME[0], FRAME[1] + STRIP))
    picture.paste(frames[len(frames) // 2].resize(FRAME, Image.Resampling.BICUBIC))
    blocks = comfy.ran("SpecARSpeculativeSampler")
    for i, role in enumerate(blocks):
        left, right = (FRAME[0] * edge // len(blocks) for edge in (i, i + 1))
        ImageDraw.Draw(picture).rectangle((left + 1, FRAME[1] + 3, right - 2, FRAME[1] + STRIP), COLOURS[role])
    return picture


def without_models(told: dict) -> dict:
    """As if no file were missing."""
    for node in told["nodes"]:
        if node["type"] == "SpecARLoader":
            del node["properties"]["models"]
            node["widgets_values"][1:] = ["auto"] * len(node["widgets_values"][1:])
    return told


def main(url: str) -> None:
    thumbnails = CHECKOUT / "workflows"
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as shots:
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        with ComfyPage(browser, url, "vue", Path(shots)) as comfy:
            comfy.page.evaluate("() => app.extensionManager.setting.set('Comfy.Minimap.Visible', false)")
            for name in ("image to video", "video to video", "prompt timeline"):
                run(comfy, name)
                ran(comfy).save(thumbnails / f"{name}.jpg", quality=88)
            run(comfy, "race")
            small(graph(comfy)).save(thumbnails / "race.jpg", quality=88)
            run(comfy, "tiny")
            ran(comfy).save(thumbnails / "tiny.jpg", quality=88)
            middle = "video => { video.controls = false; video.currentTime = video.duration / 2; }"
            comfy.page.locator("video").first.evaluate(middle)
            graph(comfy).save(CHECKOUT / "docs" / "comfyui.jpg", quality=88)
            for name in ("krea", "helios"):
                comfy.load(without_models(workflow(name)))
                small(graph(comfy)).save(thumbnails / f"{name}.jpg", quality=88)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
