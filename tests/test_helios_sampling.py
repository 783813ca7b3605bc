"""The Helios samplers against stored schedules and steps, against diffusers' schedulers, and by their properties."""

import json

import pytest
import torch
from conftest import assert_close
from diffusers import HeliosDMDScheduler, HeliosScheduler
from helios_golden import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from specar_core.sampling.helios import (
    ZEROED_STEPS,
    block_noise,
    dmd,
    guided,
    guided_zero_star,
    sample_base,
    sample_distilled,
    sample_mid,
    token_count,
    upsampled,
)
from specar_core.sampling.helios_schedule import LEVELS, base_sigmas, distilled_sigmas, mid_sigmas, shift_exponent
from specar_core.sampling.unipc import UniPC

SCHEDULES = load_file(FOLDER / "sched.safetensors")
FACTS = json.loads((FOLDER / "sched.json").read_text())
SIGMAS = {"base": base_sigmas, "mid": mid_sigmas, "dmd": distilled_sigmas}
TOKENS = (540, 540, 2160)  # what the shift of each level comes from at 640x384

steps_per_level = st.tuples(*[st.integers(1, 6)] * 3)
token_counts = st.integers(100, 40_000)


def close(actual, expected, tolerance):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    assert_close(actual, expected, tolerance)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def no_one(x):
    """Is told of the steps."""


# Schedules


def test_token_counts_and_shift():
    assert token_count(torch.empty(1, 16, 9, 48, 80)) == FACTS["seq_len"]["base"]
    for level, tokens in enumerate(TOKENS):
        assert FACTS["seq_len"][f"stage{level}"] == tokens
        close(shift_exponent(tokens), FACTS["mu"][f"stage{level}"], 1e-12)


@pytest.mark.parametrize("steps", FACTS["steps"]["base"])
def test_base_schedule(steps):
    close(base_sigmas(steps, 8640), SCHEDULES[f"base.{steps}.sigmas"], 1e-6)
    times = []
    sample_base(lambda x, t: times.append(t) or x, lambda _: torch.zeros(1, 1, 9, 48, 80), [steps], no_one)
    close(times, SCHEDULES[f"base.{steps}.timesteps"], 1e-3)


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize(
    "name, steps",
    [(f"mid.{n}", n) for n in FACTS["steps"]["mid"]]
    + [(f"dmd.{n}", n) for n in FACTS["steps"]["dmd"]]
    + [(f"dmd.{n}.amp", 2 * n) for n in FACTS["steps"]["dmd"]],
)
def test_level_schedules(name, steps, level):
    sigmas, bounds = SIGMAS[name[:3]](steps, TOKENS[level]), LEVELS[level]
    close(sigmas, SCHEDULES[f"{name}.stage{level}.sigmas"], 1e-6)
    times = SCHEDULES[f"{name}.stage{level}.timesteps"]
    close([bounds.last_time + s * (bounds.first_time - bounds.last_time) for s in sigmas[:-1]], times, 1e-3)
    fed = FACTS.get(f"{name}.stage{level}.timesteps_int_fed_to_model", times.int().tolist())
    assert bounds.times(sigmas)[:-1] == times.int().tolist() == fed


@pytest.mark.parametrize("model", ["mid", "dmd"])
def test_levels(model):
    table = FACTS[f"{model}.tables"]
    close([level.first_time for level in LEVELS], table["timestep_max"], 1e-3)
    close([level.last_time for level in LEVELS], table["timestep_min"], 1e-3)
    for level, stored in zip(LEVELS[1:], FACTS[f"{model}.renoise"][1:], strict=True):
        close([level.keep, level.renoise], [stored["alpha"], stored["beta"]], 1e-9)


@given(st.sampled_from(list(SIGMAS)), st.integers(1, 60), token_counts)
def test_sigmas_fall_from_1_to_0(model, steps, tokens):
    sigmas = SIGMAS[model](steps, tokens)
    assert len(sigmas) == steps + 1
    assert 1 > sigmas[0] > 0.99 and sigmas[-1] == 0
    assert sigmas == sorted(set(sigmas), reverse=True)


# Solvers


def euler(sigmas, flows, x):
    for sigma, following, flow in zip(sigmas, sigmas[1:], flows, strict=False):
        yield (x := x + (following - sigma) * flow)


def unipc(sigmas, flows, x):
    solver = UniPC(sigmas)
    for flow in flows:
        yield (x := solver.step(flow, x))


def dmd_steps(sigmas, flows, x):
    samples, remaining = [], iter(flows)
    dmd(lambda *_: next(remaining), x, sigmas, range(len(flows)), samples.append)
    return samples


@pytest.mark.parametrize(
    "name, solve", [("euler", euler), ("unipc", unipc), ("unipc_stage1", unipc), ("dmd", dmd_steps)]
)
def test_solver_steps_equal_the_stored_ones(name, solve):
    how = FACTS["step_tests"][name]
    steps = how["steps"] * (2 if how.get("amplified") else 1)
    sigmas = SIGMAS[how["schedule"]](steps, TOKENS[how["stage"]] if "stage" in how else 8640)
    close(sigmas, SCHEDULES[f"step.{name}.sigmas"], 1e-6)
    flows = [SCHEDULES[f"step.{name}.{i}.model_output"] for i in range(steps)]
    for i, sample in enumerate(solve(sigmas, flows, SCHEDULES["step.unipc.x_init"])):
        close(sample, SCHEDULES[f"step.{name}.{i}.sample"], 1e-5)
    assert i == steps - 1


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
@pytest.mark.parametrize("tokens", [300, 2160, 8640])
def test_base_steps_equal_diffusers(steps, tokens):
    oracle = HeliosScheduler(stages=1, use_dynamic_shifting=True)
    unshifted = torch.linspace(0.999, 0, steps + 1, dtype=torch.float64)[:-1].numpy()
    oracle.set_timesteps(steps, sigmas=unshifted, mu=shift_exponent(tokens))
    follow(oracle, unipc, base_sigmas(steps, tokens))


@pytest.mark.parametrize("level, steps", [(0, 1), (1, 2), (2, 3), (2, 20)])
@pytest.mark.parametrize("tokens", [300, 2160, 8640])
def test_mid_steps_equal_diffusers(level, steps, tokens):
    oracle = HeliosScheduler(stages=3, use_dynamic_shifting=True)
    oracle.set_timesteps(steps, stage_index=level, mu=shift_exponent(tokens))
    follow(oracle, unipc, mid_sigmas(steps, tokens))


@pytest.mark.parametrize("amplified", [False, True])
@pytest.mark.parametrize("level, steps", [(0, 1), (1, 2), (2, 3), (2, 8)])
def test_distilled_steps_equal_diffusers(level, steps, amplified):
    oracle = HeliosDMDScheduler(stages=3, use_dynamic_shifting=True)
    oracle.set_timesteps(steps, stage_index=level, mu=shift_exponent(2160), is_amplify_first_chunk=amplified)
    levels = {"dmd_sigmas": oracle.sigmas, "dmd_timesteps": oracle.timesteps, "all_timesteps": oracle.timesteps}
    follow(oracle, dmd_steps, distilled_sigmas(steps * (1 + amplified), 2160), **levels)


def follow(oracle, solve, sigmas, **levels):
    """Feed the same random flows to both."""
    close(sigmas, oracle.sigmas, 1e-6)
    start, *flows = normal(len(sigmas), 1, 4, 2, 4, 4)
    expected = start
    for index, sample in enumerate(solve(sigmas, flows, start)):
        extra = {**levels, "cur_sampling_step": index, "dmd_noisy_tensor": start} if levels else {}
        expected = oracle.step(flows[index], oracle.timesteps[index], expected, **extra).prev_sample
        close(sample, expected, 1e-5)


@given(st.integers(1, 30), token_counts)
def test_unipc_without_flow_stays_where_it_is(steps, tokens):
    """So a zeroed step needs no forward."""
    x = normal(16)
    for sample in unipc(base_sigmas(steps, tokens), [torch.zeros(16)] * steps, x):
        close(sample, x, 1e-5)


# Whole chunks


def straight_to(clean, sigmas):
    """The flow of straight lines that end in `clean`, asked at these sigmas in turn."""
    remaining = iter(sigmas)
    return lambda x, _: (x - clean) / next(remaining) if x.shape == clean.shape else torch.zeros_like(x)


@given(steps_per_level)
def test_straight_flow_is_followed_to_its_end(steps):
    """Whatever the number of steps, and from wherever the last level of a pyramid starts."""
    clean, *draws = normal(4, 1, 4, 9, 8, 16)
    tokens, below = token_count(clean), token_count(clean) // 4
    flow = straight_to(clean, base_sigmas(steps[2], tokens))
    close(sample_base(flow, draws.__getitem__, steps[2:], no_one), clean, 1e-4)
    for sample, sigmas in ((sample_mid, mid_sigmas), (sample_distilled, distilled_sigmas)):
        flow = straight_to(clean, sigmas(steps[2], below))
        close(sample(flow, draws.__getitem__, steps, no_one), clean, 1e-4)


@given(steps_per_level)
def test_pyramid_without_flow_is_its_noise(steps):
    """A level starts from a part of the level below, up-sampled, and block noise; the first from shrunken noise."""
    draws = normal(3, 1, 4, 9, 16, 8)
    expected = 4 * draws[0].unflatten(-1, (2, 4)).unflatten(-3, (4, 4)).mean((-3, -1))
    for level, white in zip(LEVELS[1:], (draws[1, ..., :8, :4], draws[2]), strict=True):
        expected = level.keep * upsampled(expected) + level.renoise * block_noise(white)
    for sample in (sample_mid, sample_distilled):
        close(sample(lambda x, _: torch.zeros_like(x), draws.__getitem__, steps, no_one), expected, 1e-4)


@given(steps_per_level)
def test_on_step_sees_every_forward_and_zeroed_steps_have_none(steps):
    widths, seen = [], []

    def velocity(x, t):
        widths.append(x.shape[-1])
        return x

    for sample, zeroed in ((sample_distilled, 0), (sample_mid, ZEROED_STEPS)):
        widths.clear()
        seen.clear()
        sample(velocity, lambda _: torch.zeros(1, 4, 9, 8, 8), steps, seen.append)
        assert widths == [2] * (steps[0] - zeroed) + [4] * steps[1] + [8] * steps[2]
        assert [x.shape[-1] for x in seen] == widths


@pytest.mark.parametrize("sample, steps", [(sample_base, (3,)), (sample_mid, (3, 1, 1)), (sample_distilled, (1, 1, 1))])
def test_raising_in_on_step_ends_the_chunk(sample, steps):
    def stop(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(lambda x, t: x, lambda _: torch.zeros(1, 4, 9, 8, 8), steps, stop)


# Noise and guidance


def test_covariance_of_block_noise():
    """From its matrix, so exactly: 1 for a value with itself, -1/3 inside a block of 2 x 2, 0 between blocks."""
    matrix = block_noise(torch.eye(32).reshape(32, 1, 2, 4, 4)).flatten(1)
    rows = torch.arange(4) // 2
    blocks = (4 * torch.arange(2)[:, None, None] + 2 * rows[:, None] + rows).flatten()
    expected = torch.where(blocks[:, None] == blocks, -1 / 3, 0.0).fill_diagonal_(1)
    close(matrix.T @ matrix, expected, 1e-6)


def test_block_noise_sums_to_zero_and_is_kept():
    """Which is how stored block noise is put in for the white noise that it would be made from."""
    noise = block_noise(normal(2, 4, 9, 8, 16))
    close(noise.unflatten(-1, (8, 2)).unflatten(-3, (4, 2)).sum((-3, -1)), torch.zeros(2, 4, 9, 4, 8), 3e-6)
    close(block_noise((3 / 4) ** 0.5 * noise), noise, 1e-6)


def test_upsampled_noise_with_block_noise_is_white():
    """The covariance that a level starts with, where its end of the level below is pure noise of scale S."""
    for start, level in zip((0.666333, 0.333666), LEVELS[1:], strict=True):
        inside = (level.keep * start) ** 2
        close(inside - level.renoise**2 / 3, 0.0, 1e-9)


@given(st.floats(0, 10), st.floats(-3, 3))
def test_guidance(scale, multiple):
    cond, uncond = normal(2, 2, 16, 3, 4, 4)
    for combine in (guided, guided_zero_star):
        close(combine(cond, uncond, 1.0), cond, 1e-5)
    # CFG-Zero* leaves alone what is a multiple of uncond, and finds the multiple for each sample of a batch.
    close(guided_zero_star(multiple * uncond, uncond, scale), multiple * uncond, 1e-4)
    close(guided_zero_star(cond[1:], uncond[1:], scale), guided_zero_star(cond, uncond, scale)[1:], 1e-5)
