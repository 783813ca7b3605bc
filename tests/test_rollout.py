"""Properties of the rollout on a tiny pair of two different models."""

import pytest
import torch
from models import golden_pair
from safetensors.torch import load, save

from specar_core.backbones.base import Committed
from specar_core.backbones.session import Rolling
from specar_core.errors import SpecarError
from specar_core.noise import noise
from specar_core.rollout import rollout
from specar_core.schedule import Schedule, spread

SIZE = {"height": 32, "width": 48}
PROMPT = torch.randn(1, 16, 24, generator=torch.Generator().manual_seed(7))


def make_pair(**options):
    return golden_pair(drafter="krea/sf_rollout_global", **options)


PAIR = make_pair()


def seeded(seed=0, batch=1):
    shape = PAIR.geometry.latent_shape(SIZE["width"], SIZE["height"], batch)
    return lambda block, draw: noise(seed, block, draw, shape)


def play(schedule, pair=PAIR, **options):
    options = {"noise": seeded(), "prompts": lambda block: PROMPT, **SIZE, **options}
    return list(rollout(pair, schedule, options.pop("prompts"), options.pop("noise"), **options))


def latents(results):
    return torch.cat([result.latents for result in results], dim=2)


def test_roles_frames_and_forwards():
    results = play(spread(5, 2))
    assert [r.role for r in results] == ["target", "drafter", "target", "drafter", "drafter"]
    assert [r.frames.shape for r in results] == [(1, 3, 6, 32, 48)] + [(1, 3, 12, 32, 48)] * 4
    assert [r.forwards for r in results] == [4] * 5
    assert all(r.frames.abs().max() <= 1 and r.frames.dtype == torch.float32 for r in results)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_schedule_of_one_role_is_the_rollout_of_that_model(role):
    schedule = Schedule(3, tuple(range(3)) if role == "target" else ())
    alone = golden_pair("krea/krea_session_steps4_kv3" if role == "target" else "krea/sf_rollout_global")
    assert torch.equal(latents(play(schedule)), latents(play(Schedule(3, ()), alone)))


@pytest.mark.parametrize("options", [{}, {"rolling": {"drafter": Rolling(6, 1)}}, {"anchor_first_latent": True}])
def test_a_longer_video_begins_with_the_shorter_one(options):
    """So neither the number of blocks nor later target blocks reach back."""
    pair = make_pair(**options)
    assert torch.equal(latents(play(Schedule(2, (0,)), pair)), latents(play(Schedule(4, (0, 3)), pair))[:, :, :6])


def test_noise_depends_on_seed_block_and_draw_only():
    shape = (1, 16, 3, 4, 6)
    draws = {(s, b, d): noise(s, b, d, shape) for s in (0, 1) for b in (0, 1) for d in (0, 1)}
    assert torch.equal(draws[0, 1, 1], noise(0, 1, 1, shape))
    assert len({value.sum().item() for value in draws.values()}) == len(draws)
    assert noise(0, 0, 0, shape).flatten()[:2].tolist() == pytest.approx([0.53181, 0.33071], abs=1e-5)


def test_changing_k_never_changes_the_noise_of_a_block():
    asked = {}
    for k in (1, 3):
        seen = asked[k] = {}

        def spy(block, draw, seen=seen):
            seen[block, draw] = seeded()(block, draw)
            return seen[block, draw]

        play(spread(3, k), noise=spy)
    assert asked[1].keys() == asked[3].keys()
    assert all(torch.equal(asked[1][key], asked[3][key]) for key in asked[1])


def test_a_batch_shares_the_schedule_and_nothing_else():
    both = play(spread(3, 1), noise=seeded(batch=2), prompts=lambda b: PROMPT.expand(2, -1, -1), batch=2)
    alone = play(spread(3, 1), noise=lambda b, d: seeded(batch=2)(b, d)[:1])
    assert (latents(both)[:1] - latents(alone)).abs().max() < 1e-4


def test_two_runs_at_once_share_nothing():
    schedule = spread(3, 2)
    expected = latents(play(schedule))
    runs = [rollout(PAIR, schedule, lambda block: PROMPT, seeded(seed), **SIZE) for seed in (0, 1)]
    results = list(zip(*runs, strict=True))
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(latents([first for first, _ in results]), expected)
    assert torch.equal(latents([second for _, second in results]), latents(play(schedule, noise=seeded(1))))


def committed(results, blocks):
    """What a checkpoint after `blocks` blocks holds, through the bytes that it would write."""
    stored = [load(save({"latents": r.latents.contiguous(), **r.context.extra()})) for r in results[:blocks]]
    extra = {name: value for name, value in stored[-1].items() if name != "latents"}
    return Committed(blocks, lambda block: stored[block]["latents"], lambda block: PROMPT, extra)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context_frames": 6},
        {"anchor_first_latent": True},
        {"rolling": {"drafter": Rolling(6, 1)}},
        {"steps": (1000.0, 937.5, 833.3333, 625.0, 0.0)},
    ],
)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_resumed_is_uninterrupted(options, blocks):
    pair, schedule = make_pair(**options), spread(5, 2)
    whole = play(schedule, pair)
    rest = play(schedule, pair, resume=committed(whole, blocks))
    assert [r.index for r in rest] == list(range(blocks, 5))
    for resumed, original in zip(rest, whole[blocks:], strict=True):
        assert torch.equal(resumed.latents, original.latents)
        assert torch.equal(resumed.frames, original.frames)


@pytest.mark.parametrize("context_frames", [3, 6])
def test_resumed_from_the_last_13_blocks_is_uninterrupted(context_frames):
    """Beyond 38 latent frames the decoder's histories are rebuilt from forgotten ones."""
    pair, schedule = make_pair(context_frames=context_frames), spread(19, 3)
    whole = play(schedule, pair)
    saved, asked = committed(whole, 17), []
    saved_latents = saved.latents
    saved = Committed(17, lambda b: asked.append(b) or saved_latents(b), saved.prompt, saved.extra)
    rest = play(schedule, pair, resume=saved)
    assert min(asked) == 17 - 13 - (context_frames // 3 - 1)
    for resumed, original in zip(rest, whole[17:], strict=True):
        assert torch.equal(resumed.latents, original.latents) and torch.equal(resumed.frames, original.frames)


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind, count", [("denoise", 6), ("decode", 4), ("decode", 5)])
def test_an_exception_in_any_step_leaves_the_block_before_it_committed_R95(kind, count):
    seen = 0

    def stop(block, step):
        nonlocal seen
        seen += step.kind == kind
        if seen == count:
            raise Stop

    done = []
    with pytest.raises(Stop):
        for result in rollout(PAIR, spread(4, 2), lambda b: PROMPT, seeded(), on_step=stop, **SIZE):
            done.append(result)
    assert [r.index for r in done] == [0]
    rest = play(spread(4, 2), resume=committed(done, 1))
    assert torch.equal(latents(done + rest), latents(play(spread(4, 2))))


def test_steps_are_reported_in_order():
    steps = []
    play(spread(2, 1), on_step=lambda block, step: steps.append((block, step.kind, step.role, step.index, step.count)))
    denoise = [(0, "denoise", "target", i, 4) for i in range(1, 5)]
    decode = [(0, "decode", None, i, 3) for i in range(1, 4)]
    assert steps[:7] == denoise + decode
    assert steps[7][:3] == (1, "denoise", "drafter") and len(steps) == 14


def test_nan_stops_before_the_block_is_committed_R37():
    def poisoned(block, draw):
        value = seeded()(block, draw)
        return value * float("nan") if (block, draw) == (2, 3) else value

    done = []
    with pytest.raises(SpecarError, match=r"block 2 \(drafter\).*NaN.*float32, attention sdpa"):
        for result in rollout(PAIR, Schedule(4, (0,)), lambda b: PROMPT, poisoned, **SIZE):
            done.append(result.index)
    assert done == [0, 1]


def test_no_blocks():
    assert play(Schedule(0, ())) == []
