"""Routers and time budgets: who decides, on the same rollout as every schedule."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import PROMPT, SIZE, latents, make_pair, play, seeded

from specar_core.backbones.krea import KREA
from specar_core.backbones.session import Rolling
from specar_core.backbones.tiny import TINY
from specar_core.errors import UsageError
from specar_core.forecast import Forecast
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.plan import plan
from specar_core.policies import parse
from specar_core.rollout import rollout
from specar_core.routers import Budgeted, accept_share, quantile
from specar_core.schedule import Schedule, spread

BLOCKS = 5
PRIOR = (0.0, 1.0)


def brightness(block, frames):
    return frames.mean((1, 3, 4))


def router(spec, score=brightness, blocks=BLOCKS, **options):
    return replace(parse(spec, blocks)[0], **options).begin(score, PRIOR)


def fixed(*scores):
    """Scores of the drafts of blocks 1, 2, ...: the worst of three frames."""
    return lambda block, frames: torch.tensor([9.0, scores[block - 1], 10.0])


def roles(results):
    return "".join("T" if result.role == "target" else "d" for result in results)


@pytest.mark.parametrize("options", [{}, {"rolling": {"drafter": Rolling(6, 1)}}, {"anchor_first_latent": True}])
@pytest.mark.parametrize(
    "spec, same",
    [
        ("sdvg:-inf", "first"),
        ("sdvg:inf", "target-only"),
        ("sdvg:inf@0", "target-only"),
        ("sdvg:-inf@0", "target-only"),
        ("sdvg:-inf@2", "stride:3"),
        ("sdvg-quantile:5", "target-only"),
        ("sdvg-quantile:1", "first"),
    ],
)
def test_degenerate_routers_are_schedules_bit_for_bit(spec, same, options):
    pair = make_pair(**options)
    assert torch.equal(latents(play(router(spec), pair)), latents(play(parse(same, BLOCKS)[0], pair)))


def test_a_limit_that_nobody_reaches_changes_nothing():
    scores = fixed(0.3, -0.2, 0.1, 0.4)
    free, guarded = (play(router(spec, scores)) for spec in ("sdvg:0", f"sdvg:0@{BLOCKS}"))
    assert roles(free) == roles(guarded) == "TdTdd" and torch.equal(latents(free), latents(guarded))


@pytest.mark.parametrize("options", [{}, {"rolling": {"drafter": Rolling(6, 1)}}, {"stitched": 2}])
def test_a_rejected_draft_leaves_no_trace(options):
    """The video is that of the schedule which the router came to."""
    pair = make_pair(**options)
    routed = play(router("sdvg:0", fixed(-1.0, 1.0, -1.0, 1.0)), pair)
    planned = play(Schedule(BLOCKS, (0, 1, 3)), pair)
    assert roles(routed) == roles(planned) == "TTdTd"
    for one, other in zip(routed, planned, strict=True):
        assert torch.equal(one.latents, other.latents) and torch.equal(one.frames, other.frames)
    assert [r.rejected for r in routed] == [0, 1, 0, 1, 0] and all(r.rejected == 0 for r in planned)


def test_what_a_rejected_draft_took_is_counted():
    routed = play(router("sdvg:0", fixed(-1.0, 1.0, 1.0, 1.0)))
    assert [r.forwards for r in routed] == [4, 8, 4, 4, 4]
    hybrid = play(router("sdvg:0", fixed(-1.0, 1.0, 1.0, 1.0)), make_pair(stitched=3))
    assert [r.forwards for r in hybrid] == [4, 5, 4, 4, 4]  # the target goes on from the draft's third step


def test_equal_to_the_threshold_is_kept_and_what_is_not_finite_is_not():
    routed = router("sdvg:0.5", fixed(0.5, math.nan, -math.inf, 0.49))
    assert roles(play(routed)) == "TdTTT"
    told = [routed.told(block) for block in range(BLOCKS)]
    assert [t["reason"] for t in told] == ["certain", "accepted", "rejected", "rejected", "rejected"]
    assert [t.get("score") for t in told[:4]] == [None, 0.5, None, None]


def test_a_draft_is_judged_by_its_worst_frame_or_by_the_mean_of_all():
    scores = fixed(1.0, -25.0, 2.0, 1.0)  # and 9 and 10 beside each
    assert roles(play(router("sdvg:1.5", scores))) == "TTTdT"
    assert roles(play(router("sdvg-mean:1.5", scores))) == "TdTdd"
    lone = [torch.tensor([score]) for score in (0.2, 0.7, 0.5)]
    for spec in ("sdvg:0.5", "sdvg-mean:0.5"):
        assert roles(play(router(spec, lambda block, frames: lone[block - 1], blocks=4))) == "TTdd"


def test_a_score_that_is_infinite_is_no_score():
    assert roles(play(router("sdvg:0", lambda block, frames: torch.full((12,), math.inf), blocks=2))) == "TT"


def test_blocks_of_an_earlier_run_are_not_judged_again():
    told = [{"role": "target", "reason": "certain"}, {"role": "drafter", "reason": "accepted", "score": 0.3}]
    routed = parse("sdvg-quantile:2", 3)[0].begin(lambda block, frames: pytest.fail("asked"), PRIOR, told)
    assert [routed.role(block) for block in range(2)] == ["target", "drafter"] and routed.accepts(1, None)
    assert routed.told(1) == {"reason": "accepted"} and routed.decisions[1].score == 0.3


def test_the_first_block_is_neither_drafted_nor_scored():
    asked = []
    played = play(router("sdvg:-inf", lambda block, frames: asked.append(block) or frames.mean((1, 3, 4))))
    assert asked == [1, 2, 3, 4] and played[0].forwards == 4


def test_drafts_are_scored_in_the_frames_that_would_be_shown():
    seen = {}

    def see(block, frames):
        seen[block] = frames.clone()
        return frames.mean((1, 3, 4))

    results = play(router("sdvg:-inf", see))
    assert all(torch.equal(seen[r.index], r.frames) for r in results[1:])


def test_a_router_stops_a_draft_run_that_got_long():
    assert roles(play(router("sdvg:0@1", fixed(1.0, 1.0, 1.0, 1.0)))) == "TdTdT"


# The worked values of the specification: 9 blocks and 36 blocks.
def test_shares_and_cold_thresholds():
    prior = (0.566414, 1.070617)
    assert accept_share(0.72, 9, 1, 0.95) == pytest.approx(0.81)
    assert quantile([], 1 - 0.81, prior) == pytest.approx(-0.373, abs=1e-3)
    for k, share in {1: 1, 2: 0.9714, 4: 0.9143, 7: 0.8286, 12: 0.6857, 18: 0.5143}.items():
        assert parse(f"sdvg-quantile:{k}", 36)[0].share == pytest.approx(share, abs=1e-4)
    assert parse("sdvg-quantile:99%", 36)[0].share == 0.95
    assert quantile([3.0, 1.0, 2.0, 5.0, 4.0], 0.3, prior) == pytest.approx(2.2)
    assert quantile([3.0, 1.0, 2.0, 5.0], 0.5, prior) == pytest.approx(0.566414)  # too few


def test_the_quantile_is_that_of_the_scores_before():
    scores = [0.4, 0.1, 0.9, 0.3, 0.8, 0.2, 0.7]
    routed = router("sdvg-quantile:4", fixed(*scores), blocks=8, pool=(0.5, 0.6))
    for block in range(1, 8):
        routed.role(block - 1), routed.role(block)
        before = [0.5, 0.6, *scores[: block - 1]]
        threshold = quantile(before, 1 - 4 / 7, PRIOR)
        assert routed.accepts(block, None) == (scores[block - 1] >= threshold)
        assert routed.told(block)["threshold"] == pytest.approx(threshold)


def test_scores_that_are_not_finite_are_no_part_of_the_quantile():
    routed = router("sdvg-quantile:3", fixed(math.nan, 0.5), blocks=6, pool=(0.1, 0.2, 0.3, 0.4, 0.5))
    for block in range(3):
        routed.role(block)
        assert not block or routed.accepts(block, None) == (block == 2)
    assert routed.threshold() == quantile([0.1, 0.2, 0.3, 0.4, 0.5, 0.5], 1 - 3 / 5, PRIOR)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 35), st.integers(0, 1000))
def test_the_quantile_router_comes_to_its_number_of_target_blocks(k, seed):
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randn(4000, generator=generator)
    pool, targets, videos = tuple(drafts[:500].tolist()), 0, 40
    for video in range(videos):
        routed = router(f"sdvg-quantile:{k}", lambda block, frames: drafts[500 + 36 * video + block], 36, pool=pool)  # noqa: B023
        for block in range(36):
            targets += routed.role(block) == "target" or not routed.accepts(block, None)
    assert targets / videos == pytest.approx(k, abs=2.5)


REFUSED = "sdvg: sdvg:x sdvg:nan sdvg:1@ sdvg:1@-1 sdvg-quantile:0 sdvg-quantile:101% time-budget:0 time-budget:inf"


@pytest.mark.parametrize("spec", REFUSED.split())
def test_what_cannot_be_is_refused_by_name(spec):
    with pytest.raises(UsageError, match="must|needs"):
        parse(spec, 36)


# Stitched target blocks


def test_with_equal_models_a_stitched_block_is_an_ordinary_one():
    one = make_pair()
    twins = replace(one, models=dict.fromkeys(one.models, one.models["target"]))
    plain = latents(play(spread(3, 2), twins))
    for stitched in (1, 3):
        assert (latents(play(spread(3, 2), replace(twins, stitched=stitched))) - plain).abs().max() < 1e-4


@pytest.mark.parametrize("context", [{}, {"rolling": {"drafter": Rolling(6, 1)}}])
def test_stitching_all_steps_leaves_the_target_block_0_only(context):
    pair = make_pair(**context)
    first = latents(play(Schedule(3, (0,)), pair))
    for schedule in (spread(3, 3), router("sdvg:inf", blocks=3)):
        assert torch.equal(latents(play(schedule, replace(pair, stitched=4))), first)


def test_a_stitched_block_is_of_both_models():
    results = {stitched: play(spread(2, 2), make_pair(stitched=stitched)) for stitched in (0, 1, 3, 4)}
    assert all(torch.equal(r[0].latents, results[0][0].latents) for r in results.values())  # never block 0
    second = [r[1].latents for r in results.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(second) for b in second[:i])
    steps = []
    play(spread(2, 2), make_pair(stitched=3), on_step=lambda b, s: steps.append((b, s.kind, s.role)))
    assert [role for b, kind, role in steps if b == 1 and kind == "denoise"] == ["drafter"] * 3 + ["target"]


def test_stitching_needs_one_list_of_steps():
    with pytest.raises(UsageError, match="same steps"):
        resolve(TINY, options={"stitch": 2}, steps={"drafter": [1000, 500, 250]})
    with pytest.raises(UsageError, match="0 to 3"):
        resolve(TINY, options={"stitch": 4})


@pytest.mark.parametrize(
    "schedule, asked, told",
    [
        ("first", {"options": {"stitch": 2}}, "stitch does nothing here: no target block goes on from another block"),
        ("target-only", {"options": {"drafter_context": "rolling:9"}}, "drafter-context does nothing here"),
        ("draft-only", {"steps": {"target": [1000, 500]}}, "the target makes no block: its steps do nothing here"),
    ],
)
def test_what_does_nothing_is_told(schedule, asked, told):
    before = resolve(TINY, blocks=4, schedule=schedule)[1]
    (notice,) = (line for line in resolve(TINY, blocks=4, schedule=schedule, **asked)[1] if line not in before)
    assert notice.startswith(told)
    assert resolve(TINY, blocks=4, schedule="spread:2", **asked)[1] == []


@pytest.mark.parametrize("stitch", [0, 3])
@pytest.mark.parametrize("spec", ["sdvg:-inf", "sdvg:inf", "sdvg:0@1", "spread:2", "target-only", "draft-only",
                                  "time-budget:9"])  # fmt: skip
def test_forwards_lie_between_what_the_plan_tells_R99(spec, stitch):
    job, _ = resolve(KREA, blocks=BLOCKS, schedule=spec, options={"stitch": stitch})
    policy = job.schedule
    if job.is_open:
        policy = policy.begin() if isinstance(policy, Budgeted) else router(spec, fixed(1.0, -1.0, 1.0, -1.0))
    forecast, done = Forecast(job), {"target": 0, "drafter": 0}

    def count(block, step):
        forecast.step(block, step)
        if step.role:
            done[step.role] += 1

    for result in rollout(make_pair(stitched=stitch), policy, lambda b: PROMPT, seeded(), **SIZE, on_step=count):
        forecast.learn(result)
    assert forecast.done == job.work  # progress ends at its end
    assert set(job.roles) >= {role for role, forwards in done.items() if forwards}
    for role, forwards in done.items():
        if job.is_open:
            assert job.forwards[role] >= forwards
        else:
            assert job.forwards[role] == job.at_least.forwards[role] == forwards


def test_a_router_needs_both_models_and_its_scorer(monkeypatch):
    monkeypatch.setattr("specar_core.plan.card", lambda device: "NVIDIA H200")
    machine = Machine(torch.device("cuda"), "bf16")
    planned = {spec: plan(resolve(KREA, schedule=spec)[0], machine) for spec in ("spread:7", "sdvg:-0.7", "sdvg:0@5")}
    assert planned["sdvg:-0.7"].gpu_bytes == planned["spread:7"].gpu_bytes + 2_500_000_000
    assert planned["sdvg:-0.7"].seconds is None
    assert planned["sdvg:-0.7"].to_dict()["forwards_at_least"] == {"target": 4, "drafter": 140}
    assert planned["sdvg:-0.7"].to_dict()["forwards"] == {"target": 144, "drafter": 140}
    assert planned["sdvg:0@5"].to_dict()["forwards_at_least"]["target"] == 24


# A time budget


def paced(seconds, blocks, target=2.0, draft=0.5, max_run=None, told=(), first=0.0):
    """The roles that a budget comes to on a machine of these speeds, and what they took."""
    now, roles = 0.0, [block["role"] for block in told]
    policy = Budgeted(blocks, (0,), max_run=max_run, seconds=seconds).begin(told, clock=lambda: now)
    for block in range(len(told), blocks):
        roles.append(policy.role(block))
        now += (target if roles[-1] == "target" else draft) + (first if block < 2 else 0)
    return Schedule(blocks, tuple(b for b, role in enumerate(roles) if role == "target")), now


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(8, 90), st.integers(2, 40), st.floats(1.1, 3), st.floats(0.1, 1))
def test_a_time_budget_is_used_and_kept(seconds, blocks, target, draft):
    placed, took = paced(seconds, blocks, target, draft)
    least, most = target + (blocks - 1) * draft, (blocks - 1) * target + draft
    assert took <= max(seconds, least) + 1e-6
    if least <= seconds < most:
        assert took > seconds - (target - draft) - 1e-6  # one more target block would not fit
    elif seconds >= most:
        assert len(placed.targets) == blocks - 1  # block 1 is drafted to measure the drafter


@pytest.mark.parametrize("seconds, blocks", [(30, 36), (45, 36), (20, 20)])
def test_the_target_blocks_of_a_budget_are_spread_evenly(seconds, blocks):
    placed, _ = paced(seconds, blocks)
    assert placed.max_draft_run <= -(-blocks // len(placed.targets))


def test_the_promised_draft_run_is_kept_whatever_it_takes():
    placed, took = paced(10, 36, max_run=4)
    assert placed.max_draft_run == 4 and took > 10
    assert placed.targets == tuple(range(0, 36, 5))


def test_slow_first_blocks_count_as_time_and_not_as_speed():
    placed, took = paced(40, 36, first=4.0)
    assert 40 - 1.5 < took <= 40


def test_a_budget_goes_on_with_what_an_unfinished_run_took():
    whole, _ = paced(40, 36)
    half = [{"role": whole.role(b), "seconds": 2.0 if b in whole.targets else 0.5} for b in range(18)]
    told = [{**block, "reason": ""} for block in half]
    assert paced(40, 36, told=told)[0] == whole
