"""Where the target blocks go: properties for every H up to 300, then the exact lists."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specar_core.errors import UsageError
from specar_core.policies import parse
from specar_core.schedule import Schedule, spread

blocks_and_k = st.integers(1, 300).flatmap(lambda h: st.tuples(st.just(h), st.integers(1, h)))


@given(blocks_and_k)
def test_spread_reaches_the_bound_and_is_balanced(case):
    blocks, k = case
    schedule = spread(blocks, k)
    targets = schedule.targets
    assert targets[0] == 0 and len(set(targets)) == k and targets[-1] < blocks
    gaps = [b - a for a, b in zip(targets, (*targets[1:], blocks), strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert schedule.max_draft_run == math.ceil(blocks / k) - 1
    assert sum(schedule.draft_runs) == blocks - k
    assert [schedule.role(b) for b in range(blocks)].count("target") == k


@given(blocks_and_k)
def test_spread_nests_when_k_doubles(case):
    blocks, k = case
    if 2 * k <= blocks:
        assert set(spread(blocks, k).targets) <= set(spread(blocks, 2 * k).targets)


@given(st.integers(1, 9).flatmap(lambda h: st.tuples(st.just(h), st.sets(st.integers(1, h), max_size=h))))
def test_no_schedule_that_begins_with_a_target_does_better(case):
    blocks, others = case
    targets = tuple(sorted({0} | {b for b in others if b < blocks}))
    assert Schedule(blocks, targets).max_draft_run >= math.ceil(blocks / len(targets)) - 1


TABLE = {
    (36, 1): "0", (36, 2): "0 18", (36, 3): "0 12 24", (36, 4): "0 9 18 27", (36, 5): "0 7 14 21 28",
    (36, 6): "0 6 12 18 24 30", (36, 7): "0 5 10 15 20 25 30", (36, 8): "0 4 9 13 18 22 27 31",
    (36, 9): "0 4 8 12 16 20 24 28 32", (36, 12): "0 3 6 9 12 15 18 21 24 27 30 33",
    (36, 18): " ".join(str(b) for b in range(0, 36, 2)), (36, 36): " ".join(str(b) for b in range(36)),
    (9, 1): "0", (9, 2): "0 4", (9, 3): "0 3 6", (9, 4): "0 2 4 6", (10, 3): "0 3 6", (10, 4): "0 2 5 7",
    (7, 3): "0 2 4", (12, 5): "0 2 4 7 9", (21, 4): "0 5 10 15", (22, 6): "0 3 7 11 14 18",
}  # fmt: skip
MAX_RUN = {
    (36, 1): 35, (36, 2): 17, (36, 3): 11, (36, 4): 8, (36, 5): 7, (36, 6): 5, (36, 7): 5, (36, 8): 4, (36, 9): 3,
    (36, 12): 2, (36, 18): 1, (36, 36): 0, (9, 1): 8, (9, 2): 4, (9, 3): 2, (9, 4): 2, (10, 3): 3, (10, 4): 2,
    (7, 3): 2, (12, 5): 2, (21, 4): 5, (22, 6): 3,
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_expected_values(case):
    schedule = spread(*case)
    assert " ".join(map(str, schedule.targets)) == TABLE[case]
    assert schedule.max_draft_run == MAX_RUN[case]


@pytest.mark.parametrize(
    "spec, blocks, targets",
    [
        ("spread:7", 36, [0, 5, 10, 15, 20, 25, 30]),
        ("first", 36, [0]),
        ("front:3", 36, [0, 1, 2]),
        ("back:3", 36, [0, 34, 35]),
        ("back:1", 36, [0]),
        ("back:36", 36, list(range(36))),
        ("stride:10", 36, [0, 10, 20, 30]),
        ("stride:50", 36, [0]),
        ("list:0,5,10", 36, [0, 5, 10]),
        ("max-run:5", 36, [0, 6, 12, 18, 24, 30]),
        ("max-run:0", 4, [0, 1, 2, 3]),
        ("target-only", 3, [0, 1, 2]),
        ("spread:1", 1, [0]),
        ("first", 0, []),
        ("target-only", 0, []),
    ],
)
def test_policies(spec, blocks, targets):
    schedule, notices = parse(spec, blocks)
    assert (list(schedule.targets), schedule.policy, notices) == (targets, spec, [])


@given(st.integers(1, 300), st.integers(0, 300))
def test_max_run_keeps_its_promise_with_the_fewest_targets(blocks, run):
    schedule, _ = parse(f"max-run:{run}", blocks)
    assert schedule.max_draft_run <= run
    k = len(schedule.targets)
    assert k == 1 or math.ceil(blocks / (k - 1)) - 1 > run


@given(blocks_and_k, st.integers(0, 5))
def test_random_is_repeatable_and_a_larger_k_only_adds(case, seed):
    blocks, k = case
    targets = parse(f"random:{k}@{seed}", blocks)[0].targets
    assert len(targets) == k and targets[0] == 0
    if k < blocks:
        assert set(targets) < set(parse(f"random:{k + 1}@{seed}", blocks)[0].targets)


def test_random_positions_are_the_same_on_every_machine():
    assert parse("random:7@0", 36)[0].targets == (0, 5, 6, 7, 8, 10, 16)
    assert parse("random:7@1", 36)[0].targets != parse("random:7@0", 36)[0].targets


@pytest.mark.parametrize(
    "spec, targets, notice",
    [
        ("spread:0", [], "drafter generates everything"),
        ("draft-only", [], "drafter generates everything"),
        ("spread:50", list(range(36)), "50 target blocks asked for, but the video has 36"),
        ("list:5,10", [5, 10], "block 0 is a drafter block"),
        ("list:10,0,10", [0, 10], "sorted"),
    ],
)
def test_what_runs_with_a_notice(spec, targets, notice):
    schedule, notices = parse(spec, 36)
    assert list(schedule.targets) == targets
    assert notice in " ".join(notices)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("spread:-1", "at least 0, not -1"),
        ("spread:2.5", "whole number, not '2.5'"),
        ("spread:nan", "whole number"),
        ("spread:True", "whole number"),
        ("spread:1_0", "whole number"),
        ("spread:\u0663", "whole number"),
        ("spread", "needs a value"),
        ("spread:", "needs a value"),
        ("first:3", "takes no value"),
        ("stride:0", "at least 1"),
        ("list:0,36", "block 36 lies outside the video: its 36 blocks are 0 to 35"),
        ("list:0,,3", "whole number"),
        ("max-run:-1", "at least 0"),
        ("random:3@x", "seed"),
        ("evenly:3", "unknown schedule"),
        ("", "unknown schedule"),
        ("spread:" + "9" * 400, "whole number"),
    ],
)
def test_what_is_refused_by_name(spec, words):
    with pytest.raises(UsageError, match=words):
        parse(spec, 36)


@given(st.text(max_size=40), st.integers(0, 50))
def test_any_text_is_a_schedule_or_a_usage_error(spec, blocks):
    try:
        assert parse(spec, blocks)[0].blocks == blocks
    except UsageError:
        pass


def test_a_million_blocks_are_exact():
    schedule = spread(10**6, 999_999)
    assert len(schedule.targets) == 999_999 and schedule.max_draft_run == 1


def test_json_form():
    assert spread(9, 2).to_dict() == {
        "blocks": 9, "targets": [0, 4], "draft_runs": [3, 4], "max_draft_run": 4, "policy": "spread:2",
    }  # fmt: skip
    assert Schedule(5, ()).draft_runs == (5,)


@pytest.mark.parametrize("targets", [(1, 0), (0, 0), (5,), (-1,)])
def test_a_schedule_holds_sorted_blocks_of_the_video(targets):
    with pytest.raises(ValueError):
        Schedule(5, targets)
