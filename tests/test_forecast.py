"""Progress counts all work, and what is left is learnt from what was done."""

import pytest
from models import golden_pair
from test_rollout import PROMPT, SIZE, seeded

from specar_core.backbones.krea import KREA
from specar_core.backbones.pair import Step
from specar_core.backbones.session import Rolling
from specar_core.forecast import Forecast
from specar_core.job import resolve
from specar_core.rollout import BlockResult, rollout

STEP = Step("denoise", "target", 1, 4)


@pytest.mark.parametrize("schedule", ["spread:2", "target-only", "draft-only", "first"])
@pytest.mark.parametrize("context", ["session", "rolling:6"])
def test_every_forward_and_every_decoded_latent_frame_is_one_step_of_the_work_R99(schedule, context):
    job, _ = resolve(KREA, blocks=4, schedule=schedule, options={"drafter_context": context})
    rolling = {"drafter": Rolling(6)} if context != "session" and "drafter" in job.roles else {}
    forecast = Forecast(job)
    texts = []
    for result in rollout(
        golden_pair(rolling=rolling),
        job.schedule,
        lambda block: PROMPT,
        seeded(),
        **SIZE,
        on_step=lambda block, step: texts.append(forecast.step(block, step)),
    ):
        forecast.learn(result)
    assert forecast.done == len(texts) == job.work
    assert all(text.startswith("block ") for text in texts)
    assert texts[0].startswith(f"block 1 of 4, {job.schedule.role(0)}, step 1 of 4")


def block(index, role, seconds):
    return BlockResult(index, role, None, None, None, seconds, 0.0, 4)


def test_what_is_left_is_told_once_both_models_ran():
    job, _ = resolve(KREA, blocks=10, schedule="list:0,5")
    forecast = Forecast(job)
    forecast.learn(block(0, "target", 8.0))
    assert forecast.left(1) is None
    forecast.learn(block(1, "drafter", 1.0))
    forecast.learn(block(2, "drafter", 3.0))
    assert forecast.left(3) == 6 * 2.0 + 8.0
    assert forecast.left(10) == 0
    assert forecast.step(3, STEP).endswith(", 20 s left")


def test_what_is_left_is_known_without_a_walk_over_all_blocks(monkeypatch):
    job, _ = resolve(KREA, blocks=100_000, k=1000)
    forecast = Forecast(job)
    for role in ("target", "drafter"):
        forecast.learn(block(0, role, 2.0))
    monkeypatch.setattr(type(job.schedule), "role", None)
    assert forecast.left(50_000) == 100_000.0
