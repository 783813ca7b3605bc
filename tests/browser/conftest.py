"""ComfyUI's page in headless Chromium, over the server that the tests in tests/host start.

SPECAR_HOST is where scripts/setup_host.sh installed ComfyUI; CHROMIUM the browser, default /usr/bin/chromium;
SPECAR_SHOTS a folder for pictures of the page, default tests/browser/shots.
"""

import base64
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

HOST_TESTS = Path(__file__).parents[1] / "host"
sys.path += [str(HOST_TESTS), str(Path(__file__).parent)]

from comfy_page import ARGUMENTS, ComfyPage  # noqa: E402

# By its path: every folder of tests has a module called conftest.
_spec = importlib.util.spec_from_file_location("host_conftest", HOST_TESTS / "conftest.py")
host_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host_conftest)
host, client = host_conftest.host, host_conftest.client


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
    if not chromium.is_file():
        pytest.fail(
            f"there is no Chromium at {chromium}: `apt-get install -y chromium`, or set CHROMIUM to another",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session", params=["classic", "vue"])
def renderer(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def shared_page(browser, host, renderer) -> Iterator[ComfyPage]:
    """The page in one renderer: opening it takes seconds."""
    shots = Path(os.environ.get("SPECAR_SHOTS", Path(__file__).parent / "shots"))
    with ComfyPage(browser, f"http://{host.client.address}", renderer, shots) as page:
        yield page


@pytest.fixture
def comfy(shared_page) -> Iterator[ComfyPage]:
    """The page, which must not complain during the test, nor look elsewhere."""
    shared_page.complaints.clear()
    yield shared_page
    assert not shared_page.complaints
    assert not shared_page.left_the_host


@pytest.fixture
def forget(client):
    """Makes ComfyUI forget models and results, so that the next run does everything anew."""
    return lambda: host_conftest.free(client)


@pytest.fixture(scope="module")
def script(browser, request):
    """Calls one of the functions of the module's SCRIPT with each of many argument lists."""
    address = "data:text/javascript;base64," + base64.b64encode(request.module.SCRIPT.read_bytes()).decode()
    page = browser.new_page()

    def call(name, arguments):
        results = page.evaluate(
            "async ([address, name, all]) => { const script = await import(address);"
            " return JSON.stringify(JSON.parse(all).map(some => script[name](...some))); }",
            [address, name, json.dumps(arguments)],
        )
        return json.loads(results)

    yield call
    page.close()
