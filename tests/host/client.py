"""Talks to a running ComfyUI as its page does."""

import json
import struct
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from websockets.sync.client import connect

ENDS = ("execution_success", "execution_error", "execution_interrupted")
PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4  # types of binary messages


@dataclass
class Run:
    """What became of a prompt: the refusal (HTTP 400), or all that the page was told while it ran."""

    refusal: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)  # JPEG files
    texts: list[str] = field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each node showed

    @property
    def end(self) -> str:
        return self.events[-1][0] if self.events else "refused"

    @property
    def error(self) -> str:
        """What the user reads when it was refused or failed."""
        if self.refusal:
            return json.dumps(self.refusal)
        return " ".join(data["exception_message"] for name, data in self.events if name == "execution_error")

    @property
    def executed(self) -> set[str]:
        """The nodes that ran, not answered from the cache."""
        return {data["node"] for name, data in self.events if name == "executing" and data["node"]}

    def progress(self, node: str) -> list[tuple[float, float]]:
        """(value, of how many) as reported for a node."""
        states = (
            data["nodes"][node] for name, data in self.events if name == "progress_state" and node in data["nodes"]
        )
        return [(state["value"], state["max"]) for state in states]


class Client:
    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=60) as answer:
            data = answer.read()
            return json.loads(data) if "json" in answer.headers.get_content_type() else data

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://{self.address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            data = error.read()
        return json.loads(data) if data else None

    def answers(self) -> bool:
        try:
            self.get("/system_stats")
        except OSError:
            return False
        return True

    def run(
        self,
        prompt: dict[str, Any],
        workflow: Any = None,
        on_preview: Callable[[str], Any] = lambda prompt_id: None,
        on_progress: Callable[[str, dict[str, Any]], Any] = lambda prompt_id, nodes: None,
    ) -> Run:
        """Queues an API prompt and follows it to its end; on_preview gets the prompt's id with every preview,
        on_progress the id and how far each node is."""
        client_id = uuid.uuid4().hex
        run = Run()
        with connect(f"ws://{self.address}/ws?clientId={client_id}", max_size=None) as socket:
            socket.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
            extra = {"extra_pnginfo": {"workflow": workflow}} if workflow else {}
            answer = self.post("/prompt", {"prompt": prompt, "client_id": client_id, "extra_data": extra})
            if "prompt_id" not in answer:
                run.refusal = answer
                return run
            while run.end not in ENDS:
                message = socket.recv(timeout=120)
                if isinstance(message, str):
                    event = json.loads(message)
                    if event["data"].get("prompt_id", answer["prompt_id"]) == answer["prompt_id"]:
                        run.events.append((event["type"], event["data"]))
                    if event["type"] == "progress_state":
                        on_progress(answer["prompt_id"], event["data"]["nodes"])
                    continue
                (kind,) = struct.unpack(">I", message[:4])
                if kind == TEXT:
                    (length,) = struct.unpack(">I", message[4:8])
                    run.texts.append(message[8 + length :].decode())
                elif kind in (PREVIEW, PREVIEW_WITH_METADATA):
                    run.previews.append(message[message.index(b"\xff\xd8") :])
                    on_preview(answer["prompt_id"])
        for _ in range(200):  # the history follows the last event a moment later
            if entry := self.get(f"/history/{answer['prompt_id']}").get(answer["prompt_id"]):
                run.outputs = entry["outputs"]
                return run
            time.sleep(0.05)
        raise TimeoutError(f"prompt {answer['prompt_id']} is not in the history")
