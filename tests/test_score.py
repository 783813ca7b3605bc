"""Scores of real files: read with their reports, compared with the target-only one, as JSON, table and page."""

import json
import re

import pytest
import torch
from clips import HEIGHT, WIDTH, layout, report, video
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import refused, specar

from specar_core import charts
from specar_core.errors import SpecarError, UsageError
from specar_core.measures import measure, read_frames
from specar_core.metrics import drift, seams
from specar_core.score import rows, score, table
from specar_core.video import VideoWriter

MIXED, TARGETS = "TdddTddd", "TTTTTTTT"


def wander(letters, by=1.0):
    return [by * (index % 9) for index in range(layout(letters).frames)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [
        video(folder / "mixed.mp4", MIXED, wander(MIXED, 2)),
        video(folder / "other seed.mp4", TARGETS, wander(TARGETS), seed=1),
        video(folder / "targets.mp4", TARGETS, wander(TARGETS)),
    ]


@pytest.fixture(scope="module")
def scores(pair):
    return score(pair)


@pytest.mark.parametrize("colour", [(200, 30, 60), (20, 180, 90), (40, 60, 220), (128, 128, 128)])
def test_colours_come_back_as_they_were(tmp_path, colour):
    """With the matrix and range that the video was written in."""
    picture = torch.tensor(colour, dtype=torch.uint8).expand(6, HEIGHT, WIDTH, 3).contiguous()
    with VideoWriter(tmp_path / "flat.mp4", 16, WIDTH, HEIGHT) as writer:
        writer.add_block(picture)
        writer.finish({})
    for frame in read_frames(tmp_path / "flat.mp4"):
        assert abs(frame.astype(int) - colour).max() <= 2


def test_every_number_can_be_computed_again(scores, pair):
    clip = json.loads(json.dumps(scores))["clips"][0]
    spans, track = layout(MIXED), measure(read_frames(pair[0]), layout(MIXED))
    assert clip["boundaries"] == seams(track, spans)
    assert clip["drift"] == drift(track, spans)
    assert clip["differences"] == pytest.approx(track.differences, rel=1e-5)
    luma = clip["frames"]["luma"]
    for block, (start, end) in enumerate(zip(clip["starts"], clip["starts"][1:], strict=False)):
        assert clip["blocks"]["luma"]["mean"][block] == pytest.approx(sum(luma[start:end]) / (end - start), rel=1e-4)
    assert clip["source"] == "mp4" and clip["roles"].count("target") == 2


def test_the_reference_is_the_target_only_video_of_the_same_rollout(scores):
    mixed, other, targets = scores["clips"]
    assert mixed["paired"]["reference"] == "targets.mp4"
    assert targets["paired"] is other["paired"] is None
    assert len(mixed["paired"]["psnr"]) == 8 and all(20 < value < 60 for value in mixed["paired"]["psnr"])


def test_curves_of_a_policy_pool_its_videos(pair, tmp_path):
    again = video(tmp_path / "again.mp4", MIXED, wander(MIXED, 5), seed=3)
    told = score([pair[0], again])["policies"]
    assert [(policy["policy"], policy["clips"]) for policy in told] == [("list:0,4", 2)]
    alone = score([pair[0]])["policies"][0]["run_position"]["luma"]
    assert told[0]["run_position"]["luma"]["n"] == [2 * n for n in alone["n"]]


def test_rollouts_with_a_window_are_looked_at_for_pulses_of_its_length(tmp_path):
    rolling = video(tmp_path / "r.mp4", MIXED, wander(MIXED), options={"drafter_context": "rolling:6:1"})
    pulses = score([rolling])["clips"][0]["flicker"]["pulses"]
    assert {name: told["period"] for name, told in pulses.items()} == {"block": 12, "context window": 24}


def test_the_table_has_a_row_for_each_video(scores):
    lines = table(scores).splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["mixed.mp4", "other seed.mp4", "targets.mp4"]
    mixed = rows(scores)[0]
    assert mixed["PSNR"] == f"{min(scores['clips'][0]['paired']['psnr']):.3g}"
    assert mixed["seam excess"] == f"{scores['clips'][0]['seams']['excess']:.3g}"
    assert rows(scores)[1]["PSNR"] == "-"


def test_charts_draw_every_value_inside_their_frame(scores):
    found = {chart.title: chart for chart in charts.charts(scores)}
    assert list(found) == [
        "Seams",
        "Luma over time",
        "Saturation over time",
        "Sharpness over time",
        "Run position",
        "PSNR",
    ]
    assert found["Seams"].svg.count("<path") == 3 * 7
    for chart in found.values():
        for points in re.findall(r'points="([^"]+)"', chart.svg):
            for x, y in (map(float, point.split(",")) for point in points.split()):
                assert 0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_an_axis_has_some_round_values(low, size):
    values = charts._round_values(low, low + size)
    assert 3 <= len(values) <= 11
    assert all(low - 1e-6 * size <= value <= low + 1.000001 * size for value in values)


def test_names_from_outside_are_text_on_the_page(tmp_path):
    evil = video(tmp_path / "<img src=x>.mp4", MIXED, wander(MIXED))
    text = charts.page(score([evil]))
    assert "&lt;img src=x&gt;.mp4" in text and "<img" not in text


# --------------------------------------------------------------------------------------------------------- files


def test_a_report_beside_the_video_serves_as_well(pair, tmp_path):
    bare = tmp_path / "bare.mp4"
    made = report(MIXED, layout(MIXED).frames)
    bare.write_bytes(pair[0].read_bytes().replace(b"specar", b"nobody"))
    with pytest.raises(UsageError, match=r"no report of SpecAR in it, nor bare\.json beside it"):
        score([bare])
    bare.with_suffix(".json").write_text(json.dumps(made))
    assert score([bare])["clips"][0]["roles"][:2] == ["target", "drafter"]


@pytest.mark.parametrize("told", ["", "[]", "{}", '{"blocks": []}', "null", '{"blocks": 1, "frames": 2}'])
def test_other_json_is_no_report(tmp_path, told):
    (tmp_path / "a.mp4").write_bytes(b"no video")
    (tmp_path / "a.json").write_text(told)
    with pytest.raises(UsageError, match="no report"):
        score([tmp_path / "a.mp4"])


def test_a_video_without_its_frames_is_an_error_with_its_name(tmp_path):
    short = video(tmp_path / "short.mp4", "Td", wander("Td"), frames=30)
    with pytest.raises(SpecarError, match=r"short\.mp4: it has 18 frames, and its report says 30"):
        score([short])


def test_the_command_prints_a_table_json_and_plots(pair, tmp_path):
    page = tmp_path / "plots.html"
    result = specar("score", *pair, "--plots", page)
    assert result.exit_code == 0 and result.stdout == table(score(pair)) + "\n"
    assert page.read_text().count("<svg") == 6
    refused(2, "exists", "score", pair[0], "--plots", page)
    before = pair[0].read_bytes()
    refused(2, "does not end in .html", "score", pair[0], "--plots", pair[0], "--overwrite")
    assert pair[0].read_bytes() == before
    assert json.loads(specar("score", pair[0], "--json").stdout)["clips"][0]["video"] == "mixed.mp4"


def test_a_blank_video_is_told_and_no_success(tmp_path):
    blank = video(tmp_path / "blank.mp4", "Td", [500] * 18)  # white
    result = specar("score", blank)
    assert result.exit_code == 1
    assert "18 of 18 frames are blank" in result.stderr
