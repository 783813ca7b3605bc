"""What the page computes by itself, held to the Python."""

from itertools import combinations
from pathlib import Path

from specar_core.errors import UsageError
from specar_core.policies import parse
from specar_core.schedule import Schedule, spread

LONGEST = 60
WITH_NUMBER = ("spread", "front", "back", "stride", "max-run")
SCRIPT = Path(__file__).parents[2] / "web" / "schedule.js"


def test_target_blocks(script):
    cases = [(name, number, blocks) for blocks in range(1, LONGEST + 1) for name in WITH_NUMBER
             for number in range(name == "stride", blocks + 3)]  # fmt: skip
    cases += [(name, 0, blocks) for blocks in range(1, LONGEST + 1) for name in ("first", "target-only", "draft-only")]
    expected = [parse(f"{name}:{number}" if name in WITH_NUMBER else name, blocks)[0] for name, number, blocks in cases]
    assert script("place", cases) == [list(schedule.targets) for schedule in expected]


def test_what_only_a_run_can_tell(script):
    assert script("place", [("random", 3, 9), ("stride", 0, 9), ("", None, 9), ("spread", None, 9)]) == [None] * 4


def test_longest_draft_run(script):
    schedules = [spread(blocks, k) for blocks in range(1, LONGEST + 1) for k in range(blocks + 1)]
    schedules += [parse(f"random:{k}@{blocks}", blocks)[0] for blocks in range(1, LONGEST + 1) for k in range(blocks)]
    schedules += [Schedule(9, targets) for k in range(10) for targets in combinations(range(9), k)]
    found = script("longestDraftRun", [(schedule.targets, schedule.blocks) for schedule in schedules])
    assert [run["length"] for run in found] == [schedule.max_draft_run for schedule in schedules]
    for run, schedule in zip(found, schedules, strict=True):
        assert all(schedule.role(run["start"] + i) == "drafter" for i in range(run["length"]))


def test_bound(script):
    cases = [(blocks, k) for blocks in range(1, LONGEST + 1) for k in range(1, blocks + 1)]
    assert script("bound", cases) == [spread(blocks, k).max_draft_run for blocks, k in cases]


def test_positions(script):
    texts = ["0", "0,5,10", " 10, 0 ,5,5", "+3", "0,60", "60", "-1", "", "0,", "1.5", "0x1", "1e1", "a", "0 5"]
    expected = []
    for text in texts:
        try:
            expected.append(list(parse(f"list:{text}", 60)[0].targets))
        except UsageError:
            expected.append(None)
    assert script("parsePositions", [(text, 60) for text in texts]) == expected
