"""The shipped tiny pair makes the video that its prompts ask for, scored against the ground truth of its data."""

import pytest
import torch

from specar_core.backbones.base import Machine
from specar_core.backbones.tiny import FOLDER
from training.evaluate import block_scores, generate, shipped
from training.shapes import sample_scene
from training.vae import HELD_OUT, gate, read_vae

SCENES = [sample_scene(HELD_OUT + number) for number in range(4)]
CPU = Machine(torch.device("cpu"), "fp32")


def scores(schedule):
    """Of three blocks each, for four prompts that no training saw."""
    return block_scores(generate([scene.caption for scene in SCENES], schedule, 3, shipped(FOLDER), CPU), SCENES)


@pytest.fixture(scope="module")
def target():
    return scores("target-only")


def test_the_target_makes_what_was_asked_for(target):
    assert target["agreement"] == pytest.approx([0.916, 0.942, 0.972], abs=0.02)
    assert target["count"] == [1, 1, 1]
    assert target["background"] == pytest.approx([0.987] * 3, abs=0.01)
    assert target["behind"][2] < 2  # 8-bit levels that the background moved


def test_the_drafter_is_worse_and_drifts(target):
    _, second, third = scores("first")["agreement"]
    assert third < second < target["agreement"][1] - 0.05


def test_held_out_clips_come_back_from_the_vae():
    told = gate(read_vae(FOLDER / "vae.safetensors", CPU.device), clips=2, frames=33)
    assert told["psnr"] == pytest.approx(33.6, abs=0.3)
    assert told["agreement"] > 0.97
