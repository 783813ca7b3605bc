import json
import logging
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small import small_backbone

from specar_core import cli

GOLDEN = Path(__file__).parent / "golden"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, with all that it starts


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _command_line_is_gone_after_each_test():
    """The command line lets the library's log out on standard error; a process of its own would end with it."""
    yield
    logging.getLogger("specar").handlers.clear()


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    return small_backbone(tmp_path_factory.mktemp("models"))


@pytest.fixture
def here(tmp_path, monkeypatch, backbone):
    """The folder in which the command line makes its videos, all with the small pair."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "backbone", lambda name: backbone)
    return tmp_path


def golden(name: str):
    """Tensors and metadata of a golden file, e.g. golden("krea/sched")."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        return tensors, json.loads(file.metadata()["meta"])


def weights(tensors):
    """The state dict that a golden file carries."""
    return {key[3:]: value for key, value in tensors.items() if key.startswith("sd.")}


def assert_close(actual, expected, tolerance):
    """Largest absolute difference, in float64; NaN never passes."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    worst = (actual.double() - expected.double()).abs().max().item()
    assert worst <= tolerance, f"differs by {worst:.3g}, tolerance {tolerance:g}"
