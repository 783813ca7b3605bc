"""Properties of the rollout on a tiny pair of two different models."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import golden_pair
from rollouts import Rollouts, latents

from specar_core import device
from specar_core import rollout as rollouts
from specar_core.backbones.pair import Committed
from specar_core.backbones.session import Rolling
from specar_core.device import paced
from specar_core.noise import noise
from specar_core.schedule import Schedule, spread

SIZE = {"height": 32, "width": 48}
PROMPT = torch.randn(1, 16, 24, generator=torch.Generator().manual_seed(7))


def make_pair(**options):
    """The drafter's weights are the target's, as in all golden files, but each a little off."""
    pair, generator = golden_pair(drafter="krea/sf_rollout_global", **options), torch.Generator().manual_seed(1)
    for weight in pair.models["drafter"].parameters():
        weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return pair


KREA = Rollouts(make_pair(), PROMPT, **SIZE)
PAIR, seeded, play, committed = KREA.pair, KREA.seeded, KREA.play, KREA.committed


def test_roles_frames_and_forwards():
    results = play(spread(5, 2))
    assert [r.role for r in results] == ["target", "drafter", "target", "drafter", "drafter"]
    assert [r.frames.shape for r in results] == [(1, 3, 6, 32, 48)] + [(1, 3, 12, 32, 48)] * 4
    assert [r.forwards for r in results] == [4] * 5
    assert all(r.frames.abs().max() <= 1 and r.frames.dtype == torch.float32 for r in results)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_schedule_of_one_role_is_the_rollout_of_that_model(role):
    schedule = Schedule(3, tuple(range(3)) if role == "target" else ())
    alone = replace(PAIR, models=dict.fromkeys(PAIR.models, PAIR.models[role]))
    assert torch.equal(latents(play(schedule)), latents(play(Schedule(3, ()), alone)))
    assert not torch.equal(latents(play(schedule)), latents(play(Schedule(3, (1,)))))


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


def test_a_batch_shares_the_schedule_and_nothing_else():
    both = play(spread(3, 1), noise=seeded(batch=2), prompts=lambda b: PROMPT.expand(2, -1, -1), batch=2)
    alone = play(spread(3, 1), noise=lambda b, d: seeded(batch=2)(b, d)[:1])
    assert (latents(both)[:1] - latents(alone)).abs().max() < 1e-4


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
def test_resumed_from_the_last_15_blocks_is_uninterrupted(context_frames):
    """Beyond 44 latent frames the decoder's histories are rebuilt from forgotten ones."""
    pair, schedule = make_pair(context_frames=context_frames), spread(19, 3)
    whole = play(schedule, pair)
    saved, asked = committed(whole, 17), []
    saved_latents = saved.latents
    saved = Committed(17, lambda b: asked.append(b) or saved_latents(b), saved.prompt, saved.extra)
    rest = play(schedule, pair, resume=saved)
    assert min(asked) == 17 - 15 - (context_frames // 3 - 1)
    for resumed, original in zip(rest, whole[17:], strict=True):
        assert torch.equal(resumed.latents, original.latents) and torch.equal(resumed.frames, original.frames)


def test_restoring_a_rolling_cache_is_reported_as_the_block_that_comes_next():
    pair, told = make_pair(rolling={"drafter": Rolling(6)}), []
    whole = play(spread(4, 1), pair)
    play(spread(4, 1), pair, resume=committed(whole, 3), on_step=lambda block, step: told.append((block, step.kind)))
    assert told[:3] == [(3, "commit")] * 3 and {block for block, _ in told} == {3}


def test_forwards_of_a_commit_are_not_decoding_time(monkeypatch):
    """On a clock that only the models move: 1 a decoded latent frame, 100 a forward, 10,000 an encoding."""
    clock = 0

    def taking(ticks, function):
        def call(*arguments, **options):
            nonlocal clock
            clock += ticks
            return function(*arguments, **options)

        return call

    pair = make_pair(rolling={"drafter": Rolling(6)})
    for module in (rollouts, device):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(pair.vae, "decode", taking(1, pair.vae.decode))
    monkeypatch.setattr(pair.vae, "encode", taking(10_000, pair.vae.encode))
    for model in pair.models.values():
        monkeypatch.setattr(model, "forward", taking(100, model.forward))
    results = play(spread(3, 1), pair)
    assert [result.decode_seconds for result in results] == [3, 3, 3]
    assert [result.seconds for result in results] == [503, 10_503, 10_503]


def test_at_most_one_step_is_in_flight(monkeypatch):
    """On a GPU the event of a step is waited for when the next one has been launched, and then the next one is told."""
    log = []

    class Event:
        def __init__(self):
            self.number = sum(entry[0] == "launched" for entry in log)

        def record(self):
            log.append(("launched", self.number))

        def synchronize(self):
            log.append(("waited for", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    told = paced(torch.device("cuda"), lambda step: log.append(("told", step)))
    for step in range(3):
        told(step)
    assert log == [
        *[("launched", 0), ("told", 0)],
        *[("launched", 1), ("waited for", 0), ("told", 1)],
        *[("launched", 2), ("waited for", 1), ("told", 2)],
    ]
    assert paced(torch.device("cpu"), log.append) == log.append


def test_no_blocks():
    assert play(Schedule(0, ())) == []
