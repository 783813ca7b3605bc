"""Fetches model files from Hugging Face, or from a mirror of it (HF_ENDPOINT).

A file grows beside its destination as NAME.part, continues where it stopped, and gets its name only when its size and
SHA-256 agree. huggingface_hub (2.4) would be shorter, but it compares no hash: other bytes of the right number, or a
web page, end up under the final name, and the errors of its HTTP client come through as they are.
"""

import dataclasses
import hashlib
import http.client
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import SpecarError, UsageError
from .files import ModelFile, locate
from .progress import Progress
from .tensor_files import parts

log = logging.getLogger("specar")

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PlannedFile:
    """`path` is where the file is or will be; `present` bytes are there, in a partial file unless `complete`."""

    file: ModelFile
    path: Path
    complete: bool
    present: int


def plan_download(files: Sequence[ModelFile], models: Path) -> list[PlannedFile]:
    """What is there and what is missing; looks at the disk only."""
    plan = []
    for file in files:
        found = locate(file, models)
        path = found or models / file.folder / file.name
        present = sum(_size(place) or _size(_partial(place)) for _, place in _pieces(file, path))
        plan.append(PlannedFile(file, path, found is not None, present))
    return plan


def download(
    files: Sequence[ModelFile],
    models: Path,
    *,
    endpoint: str | None = None,
    progress: Progress = lambda what, done, total: None,
    stall_seconds: float = 60,
    pauses: Sequence[float] = (1, 2, 4, 8),
) -> list[Path]:
    """Fetch what is missing, one file after another, and return where every file is.

    A connection that breaks, stalls or answers with a server error is tried again after each of `pauses` seconds,
    counted anew when it got further. Raises SpecarError, one line a fault; what has arrived stays in NAME.part for the
    next call, also when `progress` raises.
    """
    hub = _Hub(endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co", stall_seconds)
    plan = plan_download(files, models)
    for item in plan:
        if not item.complete:
            for file, path in _pieces(item.file, item.path):
                if not os.path.exists(path):
                    _fetch(file, path, hub, progress, pauses)
    return [item.path for item in plan]


def _pieces(file: ModelFile, path: Path) -> Iterator[tuple[ModelFile, Path]]:
    """The file, what comes with it and, as soon as it is there, the shards that it names; and the place of each."""
    yield file, path
    folder, depth = file.path.rpartition("/")[0], file.path.count("/")
    shards = [f"{folder}/{part.name}" for part in parts(path) if part != path] if os.path.exists(path) else []
    for name in (*file.companions, *shards):
        yield dataclasses.replace(file, path=name, sha256=None), path.parents[depth] / name


def _fetch(file: ModelFile, path: Path, hub: "_Hub", progress: Progress, pauses: Sequence[float]) -> None:
    partial = _partial(path)
    furthest, left = _size(partial), list(pauses)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                expected = _receive(file, partial, hub, progress)
                break
            except _Broken as fault:
                # At least a chunk further, or a server that drops after every byte would keep us for ever.
                if _size(partial) >= furthest + _CHUNK:
                    furthest, left = _size(partial), list(pauses)
                if not left:
                    raise SpecarError(
                        f"{fault}. {_size(partial):,} bytes of {file.name} are kept: check the network, then run the "
                        "same command to continue."
                    ) from fault
                log.warning("%s; trying again in %g s", fault, left[0])
                time.sleep(left.pop(0))
        _check(file, partial, expected, progress)
        os.replace(partial, path)
    except OSError as error:  # those of the network have become _Broken
        raise SpecarError(
            f"Cannot write {partial}: {error.strerror or error}. Make room, or choose another folder with --models-dir."
        ) from error
    log.info("%s is complete: %s", file.name, path)


@dataclass(frozen=True)
class _Expected:
    bytes: int
    sha256: str | None


class _Broken(Exception):
    """The connection failed in a way that may not last."""


def _receive(file: ModelFile, partial: Path, hub: "_Hub", progress: Progress) -> _Expected:
    """One connection: append to the partial file until it is complete. Raises _Broken when it ends before."""
    start = _size(partial)
    answer = hub.get(file, start)
    with answer.response:
        expected = answer.expected
        if answer.status == 416:
            if start != expected.bytes:
                partial.unlink()
                raise _Broken(f"{answer.host} cannot continue {file.name}")
            return expected
        if answer.status == 200:
            start = 0  # no ranges here
        free = shutil.disk_usage(partial.parent).free
        if free < expected.bytes - start:
            raise SpecarError(
                f"{file.name} needs {expected.bytes - start:,} bytes more in {partial.parent}, but {free:,} are free. "
                "Make room, or choose another folder with --models-dir."
            )
        with open(partial, "ab" if start else "wb") as out:
            for chunk in answer.chunks():
                start += len(chunk)
                if start > expected.bytes:
                    partial.unlink()
                    raise SpecarError(f"{answer.host} sends more than the {expected.bytes:,} bytes of {file.name}.")
                out.write(chunk)
                out.flush()  # what progress tells is on disk
                progress(f"downloading {file.name}", start, expected.bytes)
            os.fsync(out.fileno())
    if start < expected.bytes:
        raise _Broken(f"{answer.host} ended the connection at {start:,} of {expected.bytes:,} bytes")
    return expected


def _check(file: ModelFile, partial: Path, expected: _Expected, progress: Progress) -> None:
    if expected.sha256 is None:
        log.warning("%s: the server tells no SHA-256, only the size was checked", file.name)
        return
    digest, done = hashlib.sha256(), 0
    with open(partial, "rb") as whole:
        while chunk := whole.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {file.name}", done, expected.bytes)
    if digest.hexdigest() != expected.sha256:
        partial.unlink()
        raise SpecarError(
            f"{file.name} arrived damaged (SHA-256 {digest.hexdigest()[:12]}, expected {expected.sha256[:12]}) and was "
            "deleted. Run the same command again; if it happens twice, a proxy or mirror changes the file."
        )


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _size(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


# ------------------------------------------------------------------------------------------------ network


_Response = http.client.HTTPResponse | urllib.error.HTTPError


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Hands redirects to _Hub: urllib would send the token along."""

    def http_error_302(self, *_):
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Hub:
    """A server with Hugging Face's addresses: /REPOSITORY/resolve/REVISION/PATH."""

    def __init__(self, endpoint: str, timeout: float):
        self.endpoint = endpoint.rstrip("/") + "/"
        self.timeout = timeout
        self.token = os.environ.get("HF_TOKEN", "").strip()
        if not re.match(r"https?://[^/]", self.endpoint):
            raise UsageError(f"HF_ENDPOINT is {endpoint!r}; it must be an address like https://huggingface.co.")
        if re.search(r"[^!-~]", self.token):
            raise UsageError("HF_TOKEN holds blanks or characters outside ASCII. Copy it again.")

    def get(self, file: ModelFile, start: int) -> "_Answer":
        """The answer to a GET of the file from byte `start` on, after redirects. Raises SpecarError on a refusal."""
        url = self.endpoint + urllib.parse.quote(f"{file.repository}/resolve/{file.revision}/{file.path}")
        facts: dict[str, str] = {}
        for _ in range(10):
            response = self._request(url, start)
            if url.startswith(self.endpoint):  # the hub describes the file; where it redirects to is only storage
                facts |= {name.lower(): value for name, value in response.headers.items()}
            if response.status not in (301, 302, 303, 307, 308):
                return _Answer(file, _host(url), start, response, facts, self.timeout)
            response.close()
            try:
                url = urllib.parse.urljoin(url, response.headers.get("Location", ""))
            except ValueError:
                break
            if not url.startswith("https://" if self.endpoint.startswith("https://") else ("https://", "http://")):
                break
        raise SpecarError(f"{_host(self.endpoint)} redirects {file.name} in a circle or to an unsafe address.")

    def _request(self, url: str, start: int) -> _Response:
        request = urllib.request.Request(url, headers={"User-Agent": "specar"})  # some hosts refuse urllib's own
        if start:
            request.add_header("Range", f"bytes={start}-")
        if self.token and url.startswith(self.endpoint):
            request.add_header("Authorization", f"Bearer {self.token}")
        with _network(_host(url), self.timeout):
            try:
                return urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout)
            except urllib.error.HTTPError as error:
                return error  # an answer like any other


class _Answer:
    """A response that may hold the file: 200 (from its beginning), 206 (from `start` on) or 416 (nothing is left)."""

    def __init__(
        self, file: ModelFile, host: str, start: int, response: _Response, facts: Mapping[str, str], timeout: float
    ):
        self.host, self.response, self.timeout = host, response, timeout
        self.status = response.status or 0
        if self.status >= 500 or self.status in (408, 429):
            raise _Broken(f"{host} answers {self.status}")
        if facts.get("x-error-code") == "GatedRepo":
            raise SpecarError(
                f"{file.repository} is gated. Accept its licence on https://huggingface.co/{file.repository}, then set "
                "HF_TOKEN to a token of your account."
            )
        if self.status in (401, 403):
            raise SpecarError(
                f"{host} refuses {file.path} of {file.repository} ({self.status}). If the repository is private, set "
                "HF_TOKEN; otherwise a proxy is in the way."
            )
        if self.status not in (200, 206, 416):
            raise SpecarError(
                f"{host} has no {file.path} in {file.repository} at {file.revision} ({self.status}). It may have "
                "moved: put it into the models folder by hand."
            )
        if response.headers.get_content_type() == "text/html":
            raise SpecarError(f"{host} sends a web page instead of {file.name}: a login page or a proxy is in the way.")
        self.expected = _expected(file, host, start, response, facts)

    def chunks(self) -> Iterator[bytes]:
        while True:
            with _network(self.host, self.timeout):
                chunk = self.response.read1(_CHUNK)
            if not chunk:
                return
            yield chunk


def _expected(file: ModelFile, host: str, start: int, response: _Response, facts: Mapping[str, str]) -> _Expected:
    """Size and hash, from the table of files, else from the hub; refuses an answer that contradicts them."""
    length = _number(response.headers.get("Content-Length"))
    if response.status == 200:
        offered = length
    else:
        span = re.fullmatch(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15})", response.headers.get("Content-Range", ""))
        if response.status == 206 and (not span or span[1] != str(start)):
            raise SpecarError(
                f"{host} sends another part of {file.name} than the one asked for. Delete the .part file."
            )
        offered = int(span[2]) if span else None
    linked = _number(facts.get("x-linked-size"))
    etag = re.fullmatch(r'"?([0-9a-f]{64})"?', facts.get("x-linked-etag", ""))
    size, sha256 = linked or offered, etag[1] if etag else None
    if file.sha256:
        size, sha256 = file.bytes, file.sha256
    if size is None:
        raise SpecarError(f"{host} does not say how long {file.name} is. Use another HF_ENDPOINT.")
    if {linked or size, offered or size} != {size} or (etag and etag[1] != sha256):
        raise SpecarError(
            f"{host} offers another {file.name} ({offered or linked or size:,} bytes) than the one expected ({size:,} "
            "bytes). The repository has changed, or a proxy or mirror changes the file."
        )
    return _Expected(size, sha256)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,15}", text) else None


def _host(url: str) -> str:
    return re.sub(r"[^!-~]", "?", urllib.parse.urlsplit(url).netloc.rpartition("@")[2][:80])


@contextmanager
def _network(host: str, timeout: float) -> Iterator[None]:
    """Names what goes wrong on the network; OSErrors of the disk stay apart from its own."""
    try:
        yield
    except urllib.error.URLError as error:
        raise _Broken(f"{host} cannot be reached ({error.reason})") from error
    except TimeoutError as error:
        raise _Broken(f"{host} has sent nothing for {timeout:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"The connection to {host} broke ({type(error).__name__})") from error
