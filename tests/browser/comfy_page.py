"""ComfyUI's page as a user has it: graphs, nodes, runs."""

import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Locator, Route

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
Graph = dict[str, Any]


class ComfyPage:
    """complaints: errors of the page; left_the_host: addresses elsewhere that it asked for, in vain."""

    def __init__(self, browser: Browser, url: str, renderer: str, shots: Path) -> None:
        self.url, self.renderer, self.shots = url, renderer, shots
        self.complaints: list[str] = []
        self.left_the_host: list[str] = []
        self._browser = browser

    def __enter__(self) -> "ComfyPage":
        self.set("Comfy.TutorialCompleted", True)
        self.set("Comfy.VueNodes.Enabled", self.renderer == "vue")
        self.page = self._browser.new_page(viewport={"width": 1720, "height": 960})
        self.page.route("**/*", self._keep_here)
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.url, wait_until="domcontentloaded")
        self.page.wait_for_function(
            "() => window.LiteGraph?.registered_node_types.SpecARScheduler && window.app?.extensionManager?.workflow"
            "?.activeWorkflow && window.app.graph.nodes.length",  # the graph that the page opens with
            timeout=120_000,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def _keep_here(self, route: Route) -> None:
        url = route.request.url
        if url.startswith((self.url, "data:", "blob:")):
            route.continue_()
        else:
            self.left_the_host.append(urlsplit(url).netloc)
            route.abort()

    def _listen(self, message: ConsoleMessage) -> None:
        # A fresh ComfyUI lacks some files of its own. It wants to know how large missing models are, which its own
        # policy forbids where these tests run.
        usual = ("404 (Not Found)", "Content Security Policy")
        if message.type == "error" and not any(text in message.text for text in usual):
            self.complaints.append(message.text)

    def set(self, setting: str, value: Any) -> None:
        """A setting, as the server keeps it: for pages that are opened from now on."""
        request = urllib.request.Request(f"{self.url}/settings/{setting}", json.dumps(value).encode())
        urllib.request.urlopen(request, timeout=60).close()

    # ------------------------------------------------------------------------------------------- graphs

    def load(self, workflow: Graph) -> None:
        self.page.evaluate("workflow => app.loadGraphData(workflow, true, true, 'test.json')", workflow)
        self.page.wait_for_timeout(300)  # nodes are mounted, strips drawn

    def saved(self) -> tuple[Graph, Graph]:
        """What "Save" writes and what "Run" sends."""
        both = self.page.evaluate("() => app.graphToPrompt()")
        return both["workflow"], both["output"]

    def inputs(self, node: str) -> dict[str, Any]:
        """What "Run" sends for the only node of a class."""
        (found,) = (told["inputs"] for told in self.saved()[1].values() if told["class_type"] == node)
        return found

    def change(self, node: str, **values: Any) -> None:
        """Sets widgets, as another script would."""
        self.page.evaluate(
            """([type, values]) => {
                const node = app.graph.nodes.find(node => node.type === type);
                for (const widget of node.widgets) if (widget.name in values) widget.value = values[widget.name];
            }""",
            [node, values],
        )
        self.page.wait_for_timeout(250)

    # ---------------------------------------------------------------------------------------- what is seen

    @property
    def timeline(self) -> Locator:
        return self.page.locator(".specar-strip[role=group]")

    def blocks(self) -> str:
        """The timeline: T for a target block, d for a drafter block."""
        roles = self.timeline.locator("[data-block]").evaluate_all("cells => cells.map(cell => cell.ariaChecked)")
        return "".join("T" if checked == "true" else "d" for checked in roles)

    def ran(self, node: str) -> str:
        """The same, of the blocks that ran, as a node's provenance strip shows them."""
        roles = self.page.evaluate(
            """type => {
                const node = app.graph.nodes.find(node => node.type === type);
                const { element } = node.widgets.find(widget => widget.name === "provenance");
                return [...element.querySelectorAll("[data-block]")].map(cell => cell.className);
            }""",
            node,
        )
        return "".join("T" if role.startswith("target") else "d" for role in roles)

    def block(self, index: int) -> Locator:
        return self.timeline.locator(f'[data-block="{index}"]')

    @property
    def facts(self) -> str:
        return self.page.locator(".specar-line[role=status]").inner_text()

    def picture(self, name: str) -> None:
        self.shots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.shots / f"{name}-{self.renderer}.png")
