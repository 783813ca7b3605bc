"""Makes docs/race.webp: a race of the tiny pair on its page, at the pace at which it was run.

    python scripts/race_picture.py [POLICY...]

Needs Chromium (/usr/bin/chromium, or CHROMIUM), playwright and Pillow, and a machine with nothing else to do.
"""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

TARGET = Path(__file__).parents[1] / "docs" / "race.webp"
POLICIES = ("spread:3", "sdvg:0.9")  # as many target blocks each
WIDTH, SHOWN = 1000, 760  # pixels of the page and of the picture
PAUSE, END = 1000, 4000  # milliseconds before the start and behind the finish


def recorded(page: Page) -> tuple[list[Image.Image], list[int]]:
    """Pictures of a race from its start to its finish, and for how many milliseconds each is shown."""
    box = page.locator("#result").bounding_box()
    region = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 12}
    pictures, moments = [], []

    def take() -> None:
        moments.append(float(page.locator("#clock").inner_text().split()[0]))
        picture = Image.open(io.BytesIO(page.screenshot(clip=region))).convert("RGB")
        pictures.append(
            picture.resize((SHOWN, round(SHOWN * picture.height / picture.width)), Image.Resampling.LANCZOS)
        )

    page.get_by_label("Speed").select_option("0.5")  # a screenshot takes its time; the durations are those of the clock
    page.add_style_tag(content=".rate { visibility: hidden }")
    take()
    page.get_by_role("button", name="Start").click()
    while not page.locator("#result").inner_text():
        page.wait_for_timeout(100)
        take()
    take()
    steps = [round(1000 * (after - before)) for before, after in zip(moments, moments[1:], strict=False)]
    return pictures, [PAUSE, *(max(20, step) for step in steps[1:]), END]


def main(policies: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        out = Path(folder, "race.html")
        asked = [word for policy in policies for word in ("--policy", policy)]
        command = [sys.executable, "-m", "specar_core.command", "race", "--backbone", "tiny", "--example", "tiny-ball"]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # blocks of one role then take equally long
        subprocess.run([*command, *asked, "--out", str(out)], check=True, cwd=TARGET.parents[1], env=one_thread)
        program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(out.as_uri())
        page.wait_for_timeout(500)
        first, *others = zip(*recorded(page), strict=True)
        browser.close()
    durations = [first[1], *(duration for _, duration in others)]
    images = [picture for picture, _ in others]
    first[0].save(TARGET, save_all=True, append_images=images, duration=durations, loop=0, quality=60, method=6)
    print(f"{TARGET}, {len(durations)} pictures, {TARGET.stat().st_size >> 10} kB")


if __name__ == "__main__":
    main(sys.argv[1:] or list(POLICIES))
