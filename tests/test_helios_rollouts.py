"""Whole Helios rollouts, chunk after chunk, against those that diffusers made."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import assert_close
from helios_golden import PARTS, golden, small_vae, tiny

from specar_core.backbones import helios_start
from specar_core.backbones.helios_pair import BASE, DISTILLED, MID, HeliosPair
from specar_core.backbones.helios_start import DRAWS, SIGMAS, start
from specar_core.backbones.pair import Committed
from specar_core.rollout import rollout
from specar_core.schedule import Schedule

TOLERANCE = 5e-4
RECIPES = {"base": BASE, "mid": MID, "distilled": DISTILLED}
SIZE = {"height": 64, "width": 128}
VAE = small_vae()


class Watched:
    """A tiny model with the recipe of a stored rollout, and what it saw in each of its chunks."""

    def __init__(self, how, twice=False):
        """twice: as many steps as stored, which is what the published pipeline's amplified first chunk is."""
        self.network, self.chunks = tiny(how["weights"]), []
        self.network.register_forward_hook(lambda _, args, flow: self.chunks[-1].append((args[1], flow)))
        recipe = RECIPES[how["model"]]
        steps = how["steps"] if isinstance(how["steps"], list) else [how["steps"]]
        self.recipe = replace(
            recipe,
            sample=lambda *args: self.sample(recipe.sample, *args),
            steps=[(1 + twice) * count for count in steps],
            guidance=how["guidance_scale"],
        )

    def sample(self, sample, velocity, draw, steps, told):
        self.chunks.append([])

        def on_step(x):
            self.chunks[-1][-1] += (x,)
            told(x)

        return sample(velocity, draw, steps, on_step)


def noise(case):
    def draw(index, j):
        if j == 0:
            return case[f"chunk{index}.noise"]
        # Block noise that sums to 0 in every block comes out as it is when it is taken for white, up to this factor.
        return math.sqrt(3 / 4) * case[f"chunk{index}.block_noise{j}"]

    return draw


def prompt(case):
    return torch.cat([case["prompt_embeds"], case["negative_prompt_embeds"]])


def compare_steps(case, index, steps, first):
    """Compare what a chunk's steps saw with what is stored of it; the names of what was compared."""
    compared = set()
    for step, (t, flow, sample) in enumerate(steps, first):
        seen = {"timestep": t[:1], "pred": flow, "cond": flow[:1], "uncond": flow[1:], "latents": sample}
        for name in {f"chunk{index}.step{step}.{key}" for key in seen} & case.keys():
            assert_close(seen[name.rpartition(".")[2]], case[name], TOLERANCE)
            compared.add(name)
    return compared


def given_before(name, case):
    """What the rollout resumes from: an image, a video, or nothing."""
    if name == "v2v":
        return start(case["image_latents"], case["video_latents"].split(9, dim=2), noise_of_start({}))
    if name == "i2v":
        draws = {}
        for number, what in ((DRAWS, "image"), (DRAWS + 2, "fake")):
            draws[number] = case[f"{what}_noise"]
            chance = (case[f"{what}_sigma"].double() - SIGMAS[0]) / (SIGMAS[1] - SIGMAS[0])
            draws[number + 1] = torch.special.ndtri(chance).float().view(1, 1, 1, 1, 1)
        begun = start(case["image_latents"], [case["fake_image_latents"]], noise_of_start(draws))
        assert_close(begun.extra["anchor"], case["prefix_noised"], 1e-6)
        assert_close(begun.extra["history"][:, :, -1:], case["fake_noised"], 1e-6)
        assert not begun.extra["history"][:, :, :-1].any()
        return begun
    return None


def noise_of_start(draws):
    return lambda number: draws.get(number, torch.ones(1, 16, 9, 8, 16))


@pytest.mark.parametrize("name", ["base", "mid", "distilled", "i2v", "v2v", "mixed"])
def test_rollout(name, monkeypatch):
    case, meta = golden(f"roll_{name}")
    if name == "mixed":
        watched = {"target": Watched(meta["target"]), "drafter": Watched(meta["drafter"])}
        schedule = Schedule(meta["chunks"], tuple(i for i, role in enumerate(meta["plan"]) if role == "T"))
    else:
        watched = {"target": Watched(meta, meta.get("amplify_first_chunk", False)), "drafter": Watched(meta)}
        schedule = Schedule(meta["chunks"], (0,))
    pair = HeliosPair(
        {role: model.network for role, model in watched.items()},
        VAE,
        {role: model.recipe for role, model in watched.items()},
    )
    if name == "v2v":  # stored without noise on what was given
        monkeypatch.setattr(helios_start, "SIGMAS", (0.0, 0.0))
    text, begun = prompt(case), given_before(name, case)
    compared = set()
    for result in rollout(pair, schedule, lambda block: text, noise(case), resume=begun, **SIZE):
        assert_close(result.latents, case[f"chunk{result.index}.latents"], TOLERANCE)
        steps = watched[result.role].chunks[-1]
        recipe = pair.recipes[result.role]
        assert result.forwards == len(steps) == recipe.forwards
        compared |= compare_steps(case, result.index, steps, recipe.zeroed)
    # All that is stored of steps was compared, except the steps that are never made.
    left = {key for key in case if ".step" in key} - compared
    assert {key.split(".")[1] for key in left} == ({"step0", "step1"} if name == "mid" else set())


@pytest.mark.parametrize("block", [1, 4])
def test_history_that_a_mixed_rollout_shows(block):
    case, meta = golden("roll_mixed")
    model = Watched(meta["drafter"])
    pair = HeliosPair({"drafter": model.network}, VAE, {"drafter": model.recipe})
    committed = [case[f"chunk{index}.latents"] for index in range(block)]
    with pair.lease(**SIZE, batch=1, on_step=lambda step: None) as run:
        context = run.begin()
        for latents in committed:
            _, context = run.commit(context, latents, prompt(case))
        restored = run.restore(Committed(block, committed.__getitem__, prompt, context.extra()))
    for part, again, name in zip(context.parts(), restored.parts(), PARTS, strict=True):
        assert torch.equal(part, case[f"chunk{block}.latents_history_{name}"]) and torch.equal(part, again)
