"""What the page computes of prompts over time, held to the Python."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specar_core.backbones import NAMES, backbone
from specar_core.errors import UsageError
from specar_core.policies import parse as parse_schedule
from specar_core.timeline import cuts, parse, snap

SCRIPT = Path(__file__).parents[2] / "web" / "prompts.js"
PAIRS = {
    name: {
        "fps": geometry.fps,
        "first_frames": geometry.frames(1),
        "later_frames": geometry.later_frames,
        "clip_frames": geometry.clip_start,
    }
    for name, geometry in ((name, backbone(name).geometry) for name in NAMES)
}


LINES = [
    "0s: a fox in snow",
    "0: a fox",
    "4.5s fade 1s: the fox runs: fast",
    "9s cut: night",
    "9 s CUT fade 2 : night",
    "10s fade 1 cut: x",
    "# a remark",
    "",
    "  12s : y  ",
    "12.s: y",
    "1s wipe: y",
    "-1s: y",
    "13s fade: y",
    "14s:",
    "15scut: y",
    "1:30: y",
    "17s:3 foxes",
    ": y",
]
timelines = st.lists(
    st.tuples(
        st.integers(1, 400), st.sampled_from(["", " cut", " fade 1s", " fade 2.25s", " fade 0.375", " cut fade 3"])
    ),
    max_size=6,
).map(
    lambda shots: "\n".join(
        ["0s: t0", *(f"{tenths / 10}s{how}: t{n}" for n, (tenths, how) in enumerate(sorted(shots), 1))]
    )
)


def parsed(text):
    try:
        return [vars(shot) for shot in parse(text)]
    except UsageError:
        return None


def test_lines(script):
    texts = [f"{first}\n{second}\n{third}" for first in LINES for second in LINES for third in ("", "16s: z")]
    found = script("parseTimeline", [[text] for text in texts])
    assert found == [parsed(text) for text in texts]
    assert sum(shots is not None for shots in found) > 20


@pytest.mark.parametrize("name", NAMES)
def test_snapping_and_lengths(script, name):
    texts = []

    @settings(max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(timelines)
    def collect(text):
        if parsed(text):
            texts.append(text)

    collect()
    geometry, pair = backbone(name).geometry, PAIRS[name]
    cues = [snap(parse(text), geometry)[0] for text in texts]
    assert script("snap", [(parsed(text), pair) for text in texts]) == [[vars(cue) for cue in told] for told in cues]
    cases = [(geometry, cuts(told), blocks) for told in cues for blocks in (1, 7, 40)]
    with_cuts = [(replace(geometry, cuts=made), made, blocks) for geometry, made, blocks in cases]
    lengths = [(blocks, pair, made) for _, made, blocks in with_cuts]
    assert script("framesWithCuts", lengths) == [made.frames(blocks) for made, _, blocks in with_cuts]
    seconds = [(blocks * 0.7, pair, made) for _, made, blocks in with_cuts]
    assert script("blocksWithCuts", seconds) == [made.blocks_for_seconds(b * 0.7) for made, _, b in with_cuts]


def test_keyed(script):
    marks = [[], [1], [3, 4], [2, 5, 9], [1, 6, 7, 8], [9]]
    cases = [(k, some, blocks) for blocks in range(10, 41, 3) for some in marks for k in range(blocks + 2)]
    expected = []
    for k, some, blocks in cases:
        try:
            spec = f"keyed:{k}" + (f"@{','.join(map(str, some))}" if some else "")
            expected.append(list(parse_schedule(spec, blocks)[0].targets))
        except UsageError:
            expected.append(None)
    assert script("keyed", cases) == expected
