"""What holds for the rollout of any pair, on two small ones."""

import pytest
import torch
from rollouts import Stop, latents
from test_helios_pair import HELIOS
from test_rollout import KREA

from specar_core.errors import SpecarError
from specar_core.schedule import Schedule, spread

pytestmark = pytest.mark.parametrize("pair", [pytest.param(KREA, id="krea"), pytest.param(HELIOS, id="helios")])


def test_a_longer_video_begins_with_the_shorter_one(pair):
    """So neither the number of blocks nor later target blocks reach back."""
    short, long = (latents(pair.play(schedule)) for schedule in (Schedule(2, (0,)), Schedule(3, (0, 2))))
    assert torch.equal(short, long[:, :, : short.shape[2]])


def test_noise_of_a_block_does_not_depend_on_the_schedule(pair):
    asked = {}

    def spy(block, draw):
        asked.setdefault((block, draw), []).append(pair.seeded()(block, draw))
        return asked[block, draw][-1]

    for targets in (1, 2):
        pair.play(spread(2, targets), noise=spy)
    assert {block for block, _ in asked} == {0, 1}
    assert all(torch.equal(draws[0], draw) for draws in asked.values() for draw in draws)


def test_two_runs_at_once_share_nothing(pair):
    schedule = spread(2, 1)
    results = list(zip(*(pair.start(schedule, noise=pair.seeded(seed)) for seed in (0, 1)), strict=True))
    assert not torch.is_inference_mode_enabled()
    for seed, run in enumerate(zip(*results, strict=True)):
        assert torch.equal(latents(run), latents(pair.play(schedule, noise=pair.seeded(seed))))


@pytest.mark.parametrize("kind, step", [("denoise", 1), ("decode", 0), ("decode", -1)])
def test_an_exception_in_any_step_leaves_the_block_before_it_committed_R95(pair, kind, step):
    """In block 1, at its step of that kind."""
    whole, seen, done = pair.play(spread(3, 2)), [], []

    def stop(block, told):
        if block == 1 and told.kind == kind:
            seen.append(told)
            if told.index == (told.count if step < 0 else step + 1):
                raise Stop

    with pytest.raises(Stop):
        for result in pair.start(spread(3, 2), on_step=stop):
            done.append(result)
    assert [result.index for result in done] == [0] and seen
    rest = pair.play(spread(3, 2), resume=pair.committed(done, 1))
    assert torch.equal(latents(done + rest), latents(whole))


def test_nan_stops_before_the_block_is_committed_R37(pair):
    def poisoned(block, draw):
        value = pair.seeded()(block, draw)
        return value * float("nan") if (block, draw) == (1, 2) else value

    done = []
    with pytest.raises(SpecarError, match=r"block 1 \(drafter\).*NaN.*target float32, drafter float32, attention sdpa"):
        for result in pair.start(spread(3, 1), noise=poisoned):
            done.append(result.index)
    assert done == [0]


def test_steps_are_reported_in_order(pair):
    steps, expected = [], []
    results = pair.play(spread(2, 1), on_step=lambda block, step: steps.append((block, step)))
    for result in results:
        for kind, role, count in (("denoise", result.role, result.forwards), ("decode", None, result.latents.shape[2])):
            expected += [(result.index, kind, role, index, count) for index in range(1, count + 1)]
    assert [(block, step.kind, step.role, step.index, step.count) for block, step in steps] == expected
