"""Debian's Firefox as it is, driven by WebDriver BiDi (https://w3c.github.io/webdriver-bidi/)."""

import base64
import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PREFERENCES = {
    "app.normandy.enabled": False,
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "toolkit.telemetry.server": "data:,",
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "media.autoplay.default": 0,
}


class Firefox:
    """One page. complaints: what it wrote into its console; asked: the addresses that it wanted."""

    def __init__(self, program: str, profile: Path) -> None:
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        profile.mkdir()
        (profile / "user.js").write_text("\n".join(lines))
        command = [program, "--headless", "--remote-debugging-port", "0", "--profile", str(profile)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self._numbers = itertools.count()
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def __enter__(self) -> "Firefox":
        assert self._process.stderr
        for line in self._process.stderr:
            if "BiDi listening on " in line:
                self._connection = connect(line.split()[-1] + "/session", max_size=None)
                self._socket = self._connection.__enter__()
                break
        else:
            raise RuntimeError("Firefox ended before it listened")
        self.command("session.new", capabilities={})
        self.command("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self.page = self.command("browsingContext.getTree")["contexts"][0]["context"]
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.__exit__(None, None, None)
        self._process.terminate()
        self._process.communicate(timeout=20)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=60))
            if told.get("id") == number:
                if told["type"] == "error":
                    raise RuntimeError(f"{method}: {told['message']}")
                return told["result"]
            if told.get("method") == "log.entryAdded":
                self.complaints.append(told["params"]["text"])
            if told.get("method") == "network.beforeRequestSent":
                self.asked.append(told["params"]["request"]["url"])

    def open(self, address: str, width: int, height: int) -> None:
        self.command("browsingContext.setViewport", context=self.page, viewport={"width": width, "height": height})
        self.command("browsingContext.navigate", context=self.page, url=address, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, through JSON."""
        target = {"context": self.page}
        text = f"JSON.stringify({expression}) ?? 'null'"
        told = self.command("script.evaluate", expression=text, target=target, awaitPromise=True, userActivation=True)
        if told["type"] == "exception":
            raise RuntimeError(told["exceptionDetails"]["text"])
        return json.loads(told["result"]["value"])

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"in {seconds} s it has not come to this: {expression}"
            time.sleep(0.1)

    def drag(self, start: str, end: str) -> None:
        """From the middle of one element to that of another; the same one twice is a click."""
        points = [self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
                  for element in (start, end)]  # fmt: skip
        moves = [{"type": "pointerMove", "x": round(x), "y": round(y)} for x, y in points]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, moves[1], {"type": "pointerUp", "button": 0}]
        source = {"type": "pointer", "id": "mouse", "actions": actions}
        self.command("input.performActions", context=self.page, actions=[source])

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.command("browsingContext.captureScreenshot", context=self.page, origin="document")["data"]
        path.write_bytes(base64.b64decode(data))
