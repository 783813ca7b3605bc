"""Downloads from a server on this machine that fails in every way a server can."""

import dataclasses
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specar_core.download import download, plan_download
from specar_core.errors import SpecarError, UsageError
from specar_core.files import ModelFile

CONTENT = bytes(range(256)) * (3 << 12)  # 3 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = ModelFile(
    what="vae",
    repository="someone/some repo",
    path="split files/vae.safetensors",
    licence="Apache-2.0",
    folder="vae",
    bytes=3_000_000,
)
ADDRESS = "/someone/some%20repo/resolve/main/split%20files/vae.safetensors"


class Handler(BaseHTTPRequestHandler):
    """The hub redirects to a storage address on the same port, as huggingface.co does to another host."""

    server: "Hub"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server
        hub.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.path == ADDRESS:
            fault = hub.hub_faults.pop(0) if hub.hub_faults else {}
            linked = {"X-Linked-Size": len(CONTENT), "X-Linked-Etag": f'"{SHA256}"'} | hub.linked
            self.answer(fault.get("status", 302), linked | {"Location": hub.storage} | fault.get("headers", {}))
        else:
            fault = hub.storage_faults.pop(0) if hub.storage_faults else {}
            self.send_file(**fault)

    def answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()

    def send_file(self, content=CONTENT, status=None, headers=None, ranges=True, stop=None, stall=False):
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "") if ranges else None
        start = int(asked[1]) if asked else 0
        usual = {"Content-Length": max(0, len(content) - start)}
        if asked and start >= len(content):
            status, usual = 416, {"Content-Range": f"bytes */{len(content)}"}
        elif asked:
            usual["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        status = status or (206 if asked else 200)
        self.answer(status, usual | (headers or {}))
        if status in (200, 206):
            self.wfile.write(content[start : start + stop if stop else None])
        if stall:
            self.server.resume.wait(20)


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.hub_faults, self.storage_faults, self.linked = [], [], [], {}
        self.storage = "/storage/abc"
        self.resume = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that hang up are part of the tests


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", f"{server.address}/")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.resume.set()
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(models, file=FILE, pauses=(0, 0), **options):
    return download([file], models, pauses=pauses, stall_seconds=0.3, **options)


def refused(models, file=FILE, **options) -> str:
    """The one line a failed download gives; nothing ever lies under the final name."""
    with pytest.raises(SpecarError) as error:
        fetch(models, file, **options)
    assert not (models / "vae" / "vae.safetensors").exists()
    message = str(error.value)
    assert "\n" not in message and len(message) < 400 + len(str(models))
    return message


def part(models: Path, content: bytes) -> Path:
    path = models / "vae" / "vae.safetensors.part"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def storage_ranges(hub) -> list[str | None]:
    return [asked for path, asked, _ in hub.requests if path == "/storage/abc"]


def test_a_file_lands_under_its_name_and_is_not_fetched_again(hub, tmp_path, monkeypatch):
    seen = []
    (models := tmp_path / "\u0432\u0438\u0434\u0435\u043e \u00e9").mkdir()
    path = models / "vae" / "vae.safetensors"

    def progress(what, done, total):
        assert what.startswith("checking") or done == os.path.getsize(f"{path}.part")
        seen.append((what, done, total))

    assert fetch(models, progress=progress) == [path]
    assert path.read_bytes() == CONTENT and os.listdir(path.parent) == [path.name]
    assert {what for what, _, _ in seen} == {"downloading vae.safetensors", "checking vae.safetensors"}
    assert seen == sorted(seen, key=lambda s: (s[0].startswith("checking"), s[1]))
    assert seen[-1] == ("checking vae.safetensors", len(CONTENT), len(CONTENT)) and seen.count(seen[-1]) == 1
    monkeypatch.setattr(socket, "socket", None)  # no network from here on
    assert fetch(models) == [path]


def test_another_name_that_serves_is_enough_R62(hub, tmp_path):
    file = dataclasses.replace(FILE, alternatives=("Wan2.1_VAE.pth",))
    (tmp_path / "vae").mkdir()
    (path := tmp_path / "vae" / "Wan2.1_VAE.pth").write_bytes(b"x")
    assert fetch(tmp_path, file) == [path] and not hub.requests


def test_the_plan_needs_no_network(tmp_path):
    (plan,) = plan_download([FILE], tmp_path)
    assert (plan.path, plan.complete, plan.present) == (tmp_path / "vae" / "vae.safetensors", False, 0)
    part(tmp_path, b"12345")
    assert plan_download([FILE], tmp_path)[0].present == 5
    plan.path.write_bytes(b"1234567")
    (plan,) = plan_download([FILE], tmp_path)
    assert plan.complete and plan.present == 7


# --------------------------------------------------------------------------------------------- transfers


def test_a_dropped_connection_continues_where_it_stopped_R66(hub, tmp_path):
    """Dropped three times, with pauses for two: getting further counts anew."""
    hub.storage_faults = [{"stop": 1 << 20}, {"stop": 100}, {"stop": 1 << 20}]
    (path,) = fetch(tmp_path)
    assert path.read_bytes() == CONTENT
    assert storage_ranges(hub) == [None, "bytes=1048576-", "bytes=1048676-", "bytes=2097252-"]


def test_a_server_that_drops_for_ever_is_given_up_and_the_next_call_continues(hub, tmp_path):
    hub.storage_faults = [{"stop": 1000}] * 3
    message = refused(tmp_path)
    assert "ended the connection at 3,000 of 3,145,728 bytes. 3,000 bytes of vae.safetensors are kept" in message
    fetch(tmp_path)
    assert storage_ranges(hub)[-1] == "bytes=3000-"


def test_a_stall_ends_R67(hub, tmp_path):
    hub.storage_faults = [{"stop": 5000, "stall": True}] * 3
    assert "has sent nothing for 0.3 s. 15,000 bytes" in refused(tmp_path)


def test_a_stall_before_the_first_byte_ends_too(hub, tmp_path):
    hub.storage_faults = [{"stop": 5000, "stall": True}]
    assert fetch(tmp_path)[0].read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(hub, tmp_path):
    hub.storage_faults = [{"stop": 1 << 20}, {"ranges": False}]
    assert fetch(tmp_path)[0].read_bytes() == CONTENT


def test_a_complete_partial_file_is_only_checked(hub, tmp_path):
    part(tmp_path, CONTENT)
    assert fetch(tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.parametrize("excess", [1, 1000])
def test_a_partial_file_that_is_too_long_starts_again(excess, hub, tmp_path):
    part(tmp_path, CONTENT + bytes(excess))
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert storage_ranges(hub) == [f"bytes={len(CONTENT) + excess}-", None]


def test_a_damaged_partial_file_is_noticed_and_deleted(hub, tmp_path):
    partial = part(tmp_path, b"x" * 1000)
    assert "arrived damaged (SHA-256" in refused(tmp_path)
    assert not partial.exists()
    fetch(tmp_path)


def test_another_part_than_asked_for_is_not_appended(hub, tmp_path):
    part(tmp_path, CONTENT[:1000])
    hub.storage_faults = [{"headers": {"Content-Range": f"bytes 0-9/{len(CONTENT)}"}}]
    assert "sends another part" in refused(tmp_path)


# -------------------------------------------------------------------------------------------------- lies


def test_other_bytes_of_the_right_number(hub, tmp_path):
    hub.storage_faults = [{"content": b"x" * len(CONTENT)}]
    assert f"expected {SHA256[:12]}) and was deleted" in refused(tmp_path)
    assert os.listdir(tmp_path / "vae") == []


@pytest.mark.parametrize("length", [10, len(CONTENT) + 10])
def test_a_length_that_is_not_the_files(length, hub, tmp_path):
    hub.storage_faults = [{"headers": {"Content-Length": length}}]
    assert f"offers another vae.safetensors ({length:,} bytes) than the one expected (3,145,728" in refused(tmp_path)


def test_a_length_that_does_not_hold_when_nothing_else_tells_it(hub, tmp_path):
    hub.linked = {"X-Linked-Size": None}
    hub.storage_faults = [{"headers": {"Content-Length": length}} for length in (len(CONTENT) + 10, 99)]
    assert fetch(tmp_path)[0].read_bytes() == CONTENT  # the next answer said better


def test_more_than_was_announced(hub, tmp_path):
    hub.linked = {"X-Linked-Size": 1000}
    hub.storage_faults = [{"headers": {"Content-Length": None}}]
    assert "sends more than the 1,000 bytes" in refused(tmp_path)
    assert os.listdir(tmp_path / "vae") == []


def test_no_length_at_all(hub, tmp_path):
    hub.linked = {"X-Linked-Size": None}
    hub.storage_faults = [{"headers": {"Content-Length": None}}]
    assert "does not say how long" in refused(tmp_path)


def test_a_hash_that_nobody_tells_leaves_the_size(hub, tmp_path, caplog):
    hub.linked = {"X-Linked-Etag": '"0123456789abcdef"'}  # git's own hash, as small files have
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert "only the size was checked" in caplog.text


@pytest.mark.parametrize("known", [{"bytes": 1000, "sha256": SHA256}, {"bytes": len(CONTENT), "sha256": "0" * 64}])
def test_a_repository_that_changed(known, hub, tmp_path):
    assert "The repository has changed" in refused(tmp_path, dataclasses.replace(FILE, **known))


def test_a_file_too_large_for_the_disk_is_refused_before_it_starts_R67b(hub, tmp_path):
    hub.linked = {"X-Linked-Size": 10**15 - 1}
    hub.storage_faults = [{"headers": {"Content-Length": None}}]
    assert "needs 999,999,999,999,999 bytes more" in refused(tmp_path)


HOSTILE_HEADERS = [
    {"X-Linked-Size": "9" * 5000},
    {"X-Linked-Size": "-1"},
    {"X-Linked-Size": "1e9"},
    {"X-Linked-Etag": "../../etc/passwd"},
    {"X-Linked-Etag": "\x7f" * 1000},
    {f"X-{i}": "y" for i in range(90)},
]


@pytest.mark.parametrize("headers", HOSTILE_HEADERS, ids=range(len(HOSTILE_HEADERS)))
def test_senseless_facts_are_ignored(headers, hub, tmp_path):
    hub.linked = headers
    assert fetch(tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.parametrize(
    "headers", [{"X": "y" * 70_000}, {f"X-{i}": "y" for i in range(200)}, {"Content-Range": "?" * 999}]
)
def test_senseless_headers_end_in_one_line(headers, hub, tmp_path):
    part(tmp_path, CONTENT[:1000])
    hub.storage_faults = [{"headers": headers}] * 9
    assert "127.0.0.1" in refused(tmp_path)


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "status, headers, message",
    [
        (403, {}, "refuses split files/vae.safetensors of someone/some repo (403)"),
        (401, {"X-Error-Code": "RepoNotFound"}, "If the repository is private, set HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, "Accept its licence on https://huggingface.co/someone/some repo, then"),
        (404, {"X-Error-Code": "EntryNotFound"}, "no split files/vae.safetensors in someone/some repo at main (404)"),
        (418, {}, "(418)"),
        (302, {"Location": "file:///etc/passwd"}, "unsafe address"),
        (302, {"Location": "http://[::"}, "unsafe address"),
        (302, {"Location": "http://\x1b\x07.example/"}, "The connection to ??.example broke"),
        (302, {"Location": ADDRESS}, "in a circle"),
        (302, {"Location": None}, "in a circle"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(status, headers, message, hub, tmp_path):
    hub.hub_faults = [{"status": status, "headers": headers}] * 10
    assert message in refused(tmp_path)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_error_is_tried_again(status, hub, tmp_path):
    hub.hub_faults = [{"status": status}] * 2
    hub.storage_faults = [{"status": status}]
    assert f"answers {status}. 0 bytes of vae.safetensors are kept" in refused(tmp_path)
    fetch(tmp_path)


@pytest.mark.parametrize("kind", ["text/html", "text/html; charset=utf-8"])
def test_a_web_page_instead_of_the_file(kind, hub, tmp_path):
    hub.storage_faults = [{"content": b"<html>Sign in</html>", "headers": {"Content-Type": kind}}]
    assert "sends a web page instead of vae.safetensors" in refused(tmp_path)


def test_nobody_there(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert "cannot be reached (" in refused(tmp_path, endpoint=endpoint)


def test_somebody_who_does_not_speak_http(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for _ in range(3):
                connection, _ = server.accept()
                connection.recv(1000)
                connection.sendall(b"220 smtp ready\r\n")
                connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert "The connection to 127.0.0.1" in refused(
            tmp_path, endpoint=f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        thread.join()


@pytest.mark.parametrize("endpoint", ["file:///etc", "huggingface.co", "https://"])
def test_an_endpoint_that_is_no_address(endpoint, tmp_path):
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        fetch(tmp_path, endpoint=endpoint)


# -------------------------------------------------------------------------------------------------- token


def test_the_token_reaches_the_hub_and_no_other_host(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    other = Hub()
    threading.Thread(target=other.serve_forever, daemon=True).start()
    hub.storage = f"{other.address}/storage/abc"
    fetch(tmp_path)
    assert hub.requests == [(ADDRESS, None, "Bearer hf_secret")]
    assert other.requests == [("/storage/abc", None, None)]
    other.shutdown()
    other.server_close()


def test_a_mangled_token_is_not_repeated_in_the_message(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sec\nret")
    with pytest.raises(UsageError, match="HF_TOKEN") as error:
        fetch(tmp_path)
    assert "sec" not in str(error.value)


# ---------------------------------------------------------------------------------------- interrupts, disk


def test_an_exception_in_progress_keeps_what_has_arrived(hub, tmp_path):
    def stop(what, done, total):
        if done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, progress=stop)
    kept = (tmp_path / "vae" / "vae.safetensors.part").read_bytes()
    assert len(kept) > 1_000_000 and CONTENT.startswith(kept) and len(os.listdir(tmp_path / "vae")) == 1
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert storage_ranges(hub)[1] == f"bytes={len(kept)}-"


def test_cancelling_R67(hub, tmp_path, monkeypatch):
    """Ctrl-C while it waits to try a stalled connection again; other tests stop it while bytes come, or stall."""

    def ctrl_c(seconds):
        assert seconds == 3600
        raise KeyboardInterrupt

    hub.storage_faults = [{"stop": 5000, "stall": True}]
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path, pauses=[3600])
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert storage_ranges(hub) == [None, "bytes=5000-"]


def test_ctrl_c_during_a_stall(hub, tmp_path):
    """A real signal to a real process: it ends at once, and the partial file is there to continue."""
    hub.storage_faults = [{"stop": 2_000_000, "stall": True}]
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_download import FILE
        from specar_core.download import download
        tell = lambda what, done, total: print(done, flush=True) if done >= 2_000_000 else None
        download([FILE], Path({str(tmp_path)!r}), progress=tell)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as process:
        assert process.stdout.readline() == b"2000000\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
    assert fetch(tmp_path)[0].read_bytes() == CONTENT
    assert storage_ranges(hub)[1] == "bytes=2000000-"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_R71(hub, tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "vae.safetensors.part").symlink_to("/dev/full")
    message = refused(tmp_path)
    assert "Cannot write" in message and "No space left on device. Make room" in message


def test_a_folder_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "models").write_bytes(b"")
    with pytest.raises(SpecarError, match="Cannot write .*vae.safetensors.part: (Not a directory|File exists)"):
        fetch(tmp_path / "models")


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root writes everywhere")
def test_a_read_only_folder(hub, tmp_path):
    (tmp_path / "vae").mkdir(mode=0o500)
    assert "Permission denied" in refused(tmp_path)


def test_a_broken_link_under_the_final_name_is_replaced(hub, tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "vae.safetensors").symlink_to("gone")
    (path,) = fetch(tmp_path)
    assert not path.is_symlink() and path.read_bytes() == CONTENT


def test_a_file_is_fetched_into_a_folder_that_is_not_there_yet(hub, tmp_path):
    assert fetch(tmp_path / "a" / "b")[0].read_bytes() == CONTENT
