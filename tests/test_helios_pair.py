"""Properties of the rollout on a pair of two tiny Helios models, and what it may begin with."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helios_golden import small_vae, tiny
from rollouts import Rollouts, latents

from specar_core.backbones import helios_start
from specar_core.backbones.helios_pair import BASE, DISTILLED, MID, HeliosPair
from specar_core.backbones.helios_start import DRAWS, SIGMAS, start, start_image, start_video
from specar_core.models.streaming import StreamState
from specar_core.schedule import Schedule, spread

SIZE = {"height": 64, "width": 64}
# A prompt, and the negative one.
PROMPT = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(7))
PAIR = HeliosPair(
    {"target": tiny("weights_target"), "drafter": tiny("weights_drafter")},
    small_vae(),
    {"target": replace(BASE, steps=(3,)), "drafter": replace(DISTILLED, steps=(2, 1, 1))},
)


HELIOS = Rollouts(PAIR, PROMPT, **SIZE)
seeded, play, committed = HELIOS.seeded, HELIOS.play, HELIOS.committed


def block_0(draw):
    return seeded()(0, draw)


def test_roles_frames_and_forwards():
    results = play(spread(3, 1))
    assert [r.role for r in results] == ["target", "drafter", "drafter"]
    assert [r.forwards for r in results] == [3, 4, 4]
    for result in results:
        assert result.latents.shape == (1, 16, 9, 8, 8) and result.frames.shape == (1, 3, 33, 64, 64)
        assert result.latents.dtype == result.frames.dtype == torch.float32 and result.frames.abs().max() <= 1


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_schedule_of_one_role_is_the_rollout_of_that_model(role):
    schedule = Schedule(2, (0, 1) if role == "target" else ())
    alone = HeliosPair({role: PAIR.models[role]}, PAIR.vae, {role: PAIR.recipes[role]})
    assert torch.equal(latents(play(schedule)), latents(play(schedule, alone)))


def test_mid_as_target_does_not_ask_for_its_zeroed_steps():
    pair = replace(PAIR, recipes={**PAIR.recipes, "target": replace(MID, steps=(3, 1, 1))})
    mid, drafted = play(spread(2, 1), pair)
    assert mid.forwards == pair.recipes["target"].forwards == 3
    assert torch.isfinite(drafted.latents).all()


def test_every_chunk_is_decoded_as_a_clip_of_its_own():
    for result in play(spread(2, 1)):
        state, frames = StreamState(), []
        for latent in result.latents.split(1, dim=2):
            decoded, state = PAIR.vae.decode(latent, state)
            frames.append(decoded)
        assert torch.equal(result.frames, torch.cat(frames, dim=2).clamp(-1, 1))


def test_a_batch_shares_the_schedule_and_nothing_else():
    """The prompts of the batch come first, then the negative ones."""
    two = torch.cat([PROMPT[:1], PROMPT[:1].flip(1), PROMPT[1:], PROMPT[1:]])
    both = play(spread(2, 1), noise=seeded(batch=2), prompts=lambda block: two, batch=2)
    for i in (0, 1):
        one = two[i::2]
        alone = play(
            spread(2, 1), noise=lambda b, d, i=i: seeded(batch=2)(b, d)[i : i + 1], prompts=lambda block, one=one: one
        )
        assert (latents(both)[i : i + 1] - latents(alone)).abs().max() < 1e-4


def test_text_is_encoded_once_for_a_prompt_and_model():
    rows = []
    hooks = [
        model.condition_embedder.text_embedder.register_forward_hook(lambda _, args, out: rows.append(len(out)))
        for model in PAIR.models.values()
    ]
    play(spread(4, 2))
    other = PROMPT.clone()
    play(spread(4, 2), prompts=lambda block: PROMPT if block < 2 else other)
    for hook in hooks:
        hook.remove()
    assert rows == [2, 1] + [2, 1, 2, 1]


def test_guidance_needs_the_negative_prompt():
    with pytest.raises(ValueError, match="the target needs 2 rows of text embeddings, not 1"):
        play(spread(2, 1), prompts=lambda block: PROMPT[:1])
    alone = play(Schedule(2, ()), prompts=lambda block: PROMPT[:1])
    assert torch.equal(latents(alone), latents(play(Schedule(2, ()))))


# Interruptions


@cache
def uninterrupted():
    return play(spread(4, 2))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_continuing_from_committed_latents_is_the_uninterrupted_rollout(blocks):
    """Bit by bit, at a hand-over and inside a draft run."""
    rest = play(spread(4, 2), resume=committed(uninterrupted(), blocks))
    assert [r.index for r in rest] == list(range(blocks, 4))
    for resumed, original in zip(rest, uninterrupted()[blocks:], strict=True):
        assert torch.equal(resumed.latents, original.latents)
        assert torch.equal(resumed.frames, original.frames)


# Images and videos


def frames(count, seed=0):
    return torch.rand(1, 3, count, 64, 64, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_a_rollout_begins_with_an_image():
    begun = start_image(PAIR, frames(1), block_0)
    assert begun.blocks == 0 and not begun.extra["history"][:, :, :18].any()
    results = play(spread(2, 1), resume=begun)
    assert torch.equal(results[1].context.anchor, begun.extra["anchor"])  # for ever
    other = play(spread(2, 1), resume=start_image(PAIR, frames(1, seed=1), block_0))
    assert (latents(results) - latents(other)).abs().max() > 0.01
    # A checkpoint of a video that began with an image resumes like any other.
    rest = play(spread(2, 1), resume=committed(results, 1))
    assert torch.equal(rest[0].latents, results[1].latents)


@pytest.mark.parametrize("count, known", [(33, 9), (70, 18), (99, 19), (140, 19)])
def test_a_rollout_continues_a_video(monkeypatch, count, known):
    monkeypatch.setattr(helios_start, "SIGMAS", (0.0, 0.0))
    video = frames(count)
    source = SimpleNamespace(count=count, frames=lambda first, some: video[:, :, first : first + some])
    begun = start_video(PAIR, source, block_0)
    anchor, history = begun.extra["anchor"], begun.extra["history"]
    assert torch.equal(anchor, PAIR.vae.encode(video[:, :, :1])[0])
    assert history.shape[2] == 19 and not history[:, :, : 19 - known].any()
    assert torch.equal(history[:, :, -9:], PAIR.vae.encode(video[:, :, -33:])[0])
    assert play(Schedule(1, ()), resume=begun)[0].frames.shape[2] == 33


def test_given_latents_get_noise_of_their_own():
    """One sigma for each latent frame, between the bounds; draws that no sampler uses, the same for any length."""
    zeros, asked = torch.zeros(1, 16, 9, 8, 8), set()

    def draw(number):
        asked.add(number)
        return block_0(number)

    history = start(zeros[:, :, :1], [zeros, zeros], draw).extra["history"]
    assert asked == {DRAWS, DRAWS + 1, DRAWS + 2, DRAWS + 3, DRAWS + 4, DRAWS + 5} and min(asked) > 2
    shorter = start(zeros[:, :, :1], [zeros], block_0).extra["history"]
    assert torch.equal(history[:, :, -9:], shorter[:, :, -9:])
    scale = history[0, :, -18:].std(dim=(0, 2, 3), correction=0)
    white = torch.cat([block_0(DRAWS + 4), block_0(DRAWS + 2)], dim=2)[0].std(dim=(0, 2, 3), correction=0)
    sigmas = scale / white
    assert SIGMAS[0] < sigmas.min() < sigmas.max() < SIGMAS[1] and len(sigmas.unique()) == 18
