"""A real ComfyUI, once for all tests in this folder: SPECAR_HOST is where scripts/setup_host.sh installed it."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from client import Client

CHECKOUT = Path(__file__).parents[2]
PACK_NAME = "SpecAR-1.0_test"  # not what anybody would write into code


def installed(variable: str, release: str) -> Path:
    folder = os.environ.get(variable, "")
    if not (Path(folder) / "complete").is_file():
        pytest.fail(
            f"{variable} must be a folder with a ComfyUI: run `scripts/setup_host.sh FOLDER {release}`, then set "
            f"{variable}=FOLDER (now '{folder}')",
            pytrace=False,
        )
    return Path(folder).absolute()


def shipped_files() -> list[Path]:
    """What a node pack is made of: what git would track, without the folders of .comfyignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-per-directory=.gitignore"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    left_out = (CHECKOUT / ".comfyignore").read_text().split()
    top = {pattern.rstrip("/") for pattern in left_out}
    files = [Path(line) for line in listed.stdout.splitlines()]
    return [file for file in files if file.parts[0] not in top and not file.parts[0].startswith(".")]


def copy_pack(target: Path) -> None:
    for file in shipped_files():
        if (CHECKOUT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / file, target / file)


class Host:
    def __init__(self, base: Path, pack: Path, port: int) -> None:
        self.base, self.pack, self.client = base, pack, Client(port)

    @property
    def log(self) -> str:
        return (self.base / "server.log").read_text(errors="replace")

    def output(self, shown: dict) -> Path:
        """The file that a saving node showed."""
        (file,) = next(iter(shown[kind] for kind in ("images", "latents") if kind in shown))
        return self.base / file["type"] / file["subfolder"] / file["filename"]


@contextmanager
def running(folder: Path, base: Path, *arguments: str, pack: str = PACK_NAME) -> Iterator[Host]:
    for name in ("diffusion_models", "text_encoders", "vae"):
        (base / "models" / name).mkdir(parents=True)
    copy_pack(base / "custom_nodes" / pack)
    shutil.copytree(Path(__file__).parent / "probe", base / "custom_nodes" / "probe")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One thread: reproducible sums, and two cores that other tests share.
    environment = {**os.environ, "BASE": str(base), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(CHECKOUT / "scripts" / "start_host.sh"), str(folder), str(port), *arguments]
    with open(base / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    host = Host(base, base / "custom_nodes" / pack, port)
    try:
        for _ in range(240):
            if host.client.answers():
                break
            if server.poll() is not None:
                pytest.fail(f"ComfyUI ended at once:\n{host.log[-2000:]}", pytrace=False)
            time.sleep(0.5)
        else:
            pytest.fail(f"ComfyUI does not answer:\n{host.log[-2000:]}", pytrace=False)
        yield host
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> Iterator[Host]:
    with running(installed("SPECAR_HOST", ""), tmp_path_factory.mktemp("höst base")) as host:
        yield host


@pytest.fixture
def client(host) -> Client:
    return host.client


@pytest.fixture
def fresh(client) -> Client:
    """Nothing is cached from the tests before."""
    free(client)
    return client


def free(client: Client) -> None:
    """What "Unload Models and Execution Cache" does. ComfyUI misses a request that comes while it tidies up after a
    prompt, so it is asked again."""
    for _ in range(20):
        client.post("/free", {"unload_models": True, "free_memory": True})
        time.sleep(0.3)
        if not any(client.get("/probe").values()):
            return
    pytest.fail(f"/free left {client.get('/probe')}")
