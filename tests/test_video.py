"""The mp4 that users get: every frame, its colour and its time, whatever happens on the way."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

try:
    import resource
except ImportError:
    resource = None

from specar_core.errors import SpecarError, UsageError
from specar_core.mp4 import read_metadata
from specar_core.video import VideoWriter, to_rgb8

WIDTH, HEIGHT, FPS = 64, 48, 16
UNICODE = "\u89c6\u9891 \u0442\u0435\u0441\u0442 \xe9 \N{FOX FACE}"
ROOT = Path(__file__).resolve().parents[1]


def block(index: int, frames: int = 3, height: int = HEIGHT, width: int = WIDTH) -> torch.Tensor:
    """Moving gradients: no two frames are alike."""
    t, y, x = np.mgrid[index * 12 : index * 12 + frames, :height, :width]
    return torch.from_numpy(np.stack([x * 3 + t * 5, y * 4 + t * 3, x + y + t * 7], -1).astype(np.uint8))


def writer(path: Path, **options) -> VideoWriter:
    return VideoWriter(path, FPS, WIDTH, HEIGHT, **options)


def decode(path: Path) -> list[av.VideoFrame]:
    with av.open(path) as container:
        return list(container.decode(video=0))


def pictures(*paths: Path) -> np.ndarray:
    return np.stack([frame.to_ndarray() for path in paths for frame in decode(path)])


def rgb(frame: av.VideoFrame) -> np.ndarray:
    """What its tags tell a player to show: ITU-R BT.709-6, limited range, written out and not taken from swscale."""
    assert (frame.colorspace, frame.color_range) == (1, 1)
    planes, width, height = frame.to_ndarray().astype(float), frame.width, frame.height
    luma = (planes[:height] - 16) / 219
    chroma = (planes[height:].reshape(2, height // 2, width // 2) - 128) / 224
    blue, red = chroma.repeat(2, 1).repeat(2, 2)
    red, blue = luma + 1.5748 * red, luma + 1.8556 * blue
    green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152
    return (np.stack([red, green, blue], -1) * 255).round().clip(0, 255).astype(np.uint8)


def uninterrupted(path: Path, blocks: int) -> Path:
    with writer(path) as video:
        for index in range(blocks):
            video.add_block(block(index))
        return video.finish({})


def run(script: str, *arguments: object, **options) -> subprocess.Popen[str]:
    preamble = "import sys; from tests.test_video import *\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


# Frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rgb8_rounds_to_the_nearest_level_and_clamps(dtype):
    frames = torch.linspace(-1.2, 1.2, 2 * 3 * 2 * 8 * 10).reshape(2, 3, 2, 8, 10).to(dtype)
    before = frames.clone()
    levels = to_rgb8(frames)
    assert levels.dtype == torch.uint8 and levels.shape == (2, 2, 8, 10, 3) and levels.is_contiguous()
    exact = ((frames.double() + 1) * 127.5).clamp(0, 255).permute(0, 2, 3, 4, 1)
    assert (levels - exact).abs().max() <= 0.5 + 1e-4
    assert torch.equal(frames, before)


def test_rgb8_reproduces_every_level():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16, 1).expand(1, 1, 16, 16, 3)
    frames = (levels.permute(0, 4, 1, 2, 3).float() / 127.5) - 1
    assert torch.equal(to_rgb8(frames), levels)


# The finished file


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=7),
    per_segment=st.integers(1, 4),
    width=st.integers(16, 40),
    height=st.integers(16, 40),
    fps=st.sampled_from([16, 24, Fraction(30000, 1001)]),
)
def test_joined_video_is_its_segments_at_regular_times(tmp_path_factory, sizes, per_segment, width, height, fps):
    folder = tmp_path_factory.mktemp("joined")
    with VideoWriter(folder / "a.mp4", fps, width, height, blocks_per_segment=per_segment) as video:
        for index, frames in enumerate(sizes):
            video.add_block(block(index, frames, height, width))
        joined = video.abort()
    total = sum(sizes)
    with av.open(joined) as container:
        stream = container.streams.video[0]
        frame = 1 / Fraction(fps) / stream.time_base
        packets = [packet for packet in container.demux(stream) if packet.dts is not None]
        assert [packet.dts for packet in packets] == [(index - 2) * frame for index in range(total)]
        assert stream.start_time == 0 and stream.duration == total * frame
        assert stream.average_rate == fps and stream.frames == total
    frames = decode(joined)
    assert [shown.pts for shown in frames] == [index * frame for index in range(total)]
    assert joined.read_bytes().count(b"elst") == 1

    segments = sorted((folder / "a.run").glob("*.mp4"))
    assert len(segments) == len(sizes) // per_segment
    finished = sum(sizes[: len(segments) * per_segment])
    if segments:
        assert np.array_equal(pictures(*segments), pictures(joined)[:finished])
    shown = np.stack([rgb(frame) for frame in frames])[:, :height, :width]
    wanted = np.concatenate([block(index, count, height, width) for index, count in enumerate(sizes)])
    assert np.abs(shown.astype(int) - wanted).mean() < 12  # the right frame in the right place


def test_same_frames_give_the_same_file_whatever_memory_holds(tmp_path):
    script = """
        with VideoWriter(sys.argv[1], FPS, 320, 256) as video:
            for index in range(5):
                video.add_block(block(index, 5, 256, 320))
            video.finish({})
    """
    files = []
    for fill in ("1", "200"):  # glibc fills fresh memory with it; elsewhere these are two ordinary runs
        with run(script, tmp_path / f"{fill}.mp4", env=os.environ | {"MALLOC_PERTURB_": fill}) as process:
            assert process.wait() == 0
        files.append((tmp_path / f"{fill}.mp4").read_bytes())
    assert b"threads=4" in files[0] and b"crf=17.0" in files[0] and b"open_gop=0" in files[0]
    assert files[0] == files[1]


def test_a_segment_depends_on_its_frames_only(tmp_path):
    for name, before in (("a.mp4", 0), ("b.mp4", 40)):
        with writer(tmp_path / name) as video:
            for index in [*range(before, before + 4), 4, 5, 6, 7]:
                video.add_block(block(index))
    a, b = (tmp_path / name / "segment-00001.mp4" for name in ("a.run", "b.run"))
    assert a.read_bytes() == b.read_bytes()


def test_it_is_h264_for_browsers(tmp_path):
    path = uninterrupted(tmp_path / "a.mp4", 9)
    with av.open(path) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, context.profile) == ("h264", "yuv420p", "High")
        tags = (context.color_primaries, context.color_trc, context.colorspace, context.color_range)
        assert tags == (1, 1, 1, 1)
        keys = [index for index, packet in enumerate(container.demux(video=0)) if packet.is_keyframe]
        assert {0, 12, 24} <= set(keys)
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # fast start
    assert b"colrnclx" in content


def test_colour_bars_survive_three_generations_R105(tmp_path):
    bars = np.array(
        [[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [0, 255, 255], [255, 0, 255]]
    )
    frames = bars.astype(np.uint8).repeat(16, 0)[None, None].repeat(3, 0).repeat(64, 1)
    for generation in range(3):
        with VideoWriter(tmp_path / f"{generation}.mp4", FPS, 128, 64) as video:
            video.add_block(torch.from_numpy(frames))
            path = video.finish({})
        frames = np.stack([rgb(frame) for frame in decode(path)])
        middles = frames[:, 32, 8::16].astype(int)
        assert np.abs(middles - bars).max() <= 2


def test_odd_sizes_repeat_the_last_row_and_column_R91(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "specar"), VideoWriter(tmp_path / "a.mp4", FPS, 33, 17) as video:
        for index in range(5):
            video.add_block(block(index, height=17, width=33))
        path = video.finish({})
    assert (decode(path)[0].width, decode(path)[0].height) == (34, 18)
    assert caplog.text.count("33x17") == 1


# Metadata


def test_metadata_comes_back_and_is_stored_once(tmp_path):
    metadata = {
        "specar": json.dumps({"prompt": UNICODE + "\n\"'=;#\\", "blocks": ["x" * 1000] * 1000}, ensure_ascii=False),
        "prompt": UNICODE,
        "workflow": json.dumps({"marker": "only-once"}),
    }
    with writer(tmp_path / f"{UNICODE}.mp4") as video:
        for index in range(9):
            video.add_block(block(index))
        path = video.finish(metadata)
    assert metadata.items() <= read_metadata(path).items()
    assert path.read_bytes().count(b"only-once") == 1
    assert len(decode(path)) == 27


def test_a_lone_surrogate_does_not_lose_the_video(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        video.add_block(block(0))
        assert read_metadata(video.finish({"prompt": "fox \ud800"}))["prompt"].startswith("fox")


@pytest.mark.parametrize(
    "content", [b"", b"hello, world", b"<html></html>" * 99, b"#EXTM3U\nhttp://localhost/a.mp4\n", bytes(999)]
)
def test_what_is_no_video_has_no_metadata(tmp_path, content):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    with pytest.raises(SpecarError, match="a.mp4") as failure:
        read_metadata(path)
    assert "\n" not in str(failure.value)


def test_metadata_of_another_program_is_read(tmp_path):
    with av.open(tmp_path / "a.mp4", "w", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata.update(prompt='{"1": "\xe9"}', workflow="{}")
        stream = container.add_stream("libx264", rate=16)
        stream.width = stream.height = 32
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode())
    assert {"prompt": '{"1": "\xe9"}', "workflow": "{}"}.items() <= read_metadata(tmp_path / "a.mp4").items()
    with av.open(tmp_path / "b.mp4", "w") as container:
        container.mux(container.add_stream("libx264", rate=16).encode(av.VideoFrame(640, 480, "yuv420p")))
        container.mux(container.streams[0].encode())
    assert read_metadata(tmp_path / "b.mp4") == {}


def test_metadata_of_missing_files_and_folders(tmp_path):
    for path in (tmp_path, tmp_path / "none.mp4"):
        with pytest.raises(SpecarError, match=str(path)):
            read_metadata(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> bytes:
    with writer(tmp_path_factory.mktemp("small") / "a.mp4") as video:
        video.add_block(block(0))
        return video.finish({"specar": "{}"}).read_bytes()


def test_cut_off_files_are_refused(tmp_path, small_file):
    path = tmp_path / "a.mp4"
    for length in range(0, len(small_file), 97):
        path.write_bytes(small_file[:length])
        with pytest.raises(SpecarError):
            read_metadata(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_do_worse_than_an_error(tmp_path, small_file, data):
    damaged = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 4))
        damaged[position : position + 4] = data.draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"]))
    path = tmp_path / "a.mp4"
    path.write_bytes(damaged)
    try:
        assert isinstance(read_metadata(path), dict)
    except SpecarError as error:
        assert "\n" not in str(error)


# Refusals before anything starts


def test_an_existing_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="a.mp4 exists; .*overwrite"):
        writer(path)
    assert path.read_bytes() == b"mine" and os.listdir(tmp_path) == ["a.mp4"]

    with pytest.raises(RuntimeError, match="stop"), writer(path, overwrite=True) as video:
        video.add_block(block(0))
        raise RuntimeError("stop")
    assert path.read_bytes() == b"mine" and len(decode(tmp_path / "a.partial.mp4")) == 3

    with writer(path, overwrite=True) as video:
        video.add_block(block(0))
        assert path.read_bytes() == b"mine"
        video.finish({})
    assert len(decode(path)) == 3


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(SpecarError, match="appeared"), writer(tmp_path / "a.mp4") as video:
        video.add_block(block(0))
        video.path.write_bytes(b"theirs")
        video.finish({})
    assert video.path.read_bytes() == b"theirs" and len(decode(video.partial_path)) == 3


def test_impossible_places_are_refused(tmp_path):
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a folder"):
        writer(tmp_path / "folder.mp4")
    with pytest.raises(UsageError, match="does not end in .mp4"):
        writer(tmp_path / "a.avi")
    with pytest.raises(SpecarError, match="Cannot write .*file.*Choose another folder"):
        writer(tmp_path / "file" / "a.mp4")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.mp4"]


def test_an_unfinished_video_is_not_thrown_away_unasked(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        for index in range(4):
            video.add_block(block(index))
    with pytest.raises(UsageError, match="a.run holds an unfinished video: go on with `specar resume .*a.run`"):
        writer(video.path)
    assert writer(video.path, overwrite=True).blocks_done == 0
    assert not os.listdir(video.folder)


def test_wrong_frames_are_refused(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        for frames in (block(0, height=16), block(0).float(), block(0)[0]):
            with pytest.raises(ValueError, match="not uint8"):
                video.add_block(frames)


# Interruptions


def test_nothing_is_left_without_a_block(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        assert video.abort() is None
    assert not os.listdir(tmp_path)


def test_finishing_leaves_one_file_and_what_others_put_beside_it(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        (video.folder / "blocks.json").touch()
        for index in range(5):
            video.add_block(block(index))
        video.finish({})
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "a.run"] and os.listdir(video.folder) == ["blocks.json"]
    uninterrupted(tmp_path / "b.mp4", 5)
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "a.run", "b.mp4"]


@pytest.mark.parametrize("added, checkpointed, kept", [(6, 6, 4), (8, 8, 8), (9, 7, 4), (3, 3, 0)])
def test_a_continued_run_gives_the_same_video(tmp_path, added, checkpointed, kept):
    whole = uninterrupted(tmp_path / "whole.mp4", 11)
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "a.mp4") as video:
        for index in range(added):
            video.add_block(block(index))
        raise KeyboardInterrupt
    assert len(decode(video.partial_path)) == 3 * added

    with writer(video.path, keep_blocks=checkpointed) as video:
        assert video.blocks_done == kept
        for index in range(kept, 11):
            video.add_block(block(index))
        video.finish({})
    assert video.path.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "whole.mp4"]


def test_a_damaged_segment_is_made_again(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        for index in range(12):
            video.add_block(block(index))
    second = video.folder / "segment-00001.mp4"
    second.write_bytes(second.read_bytes()[:-1])
    assert writer(video.path, keep_blocks=12).blocks_done == 4


def test_segments_of_another_size_are_not_joined(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        for index in range(4):
            video.add_block(block(index))
    with (
        pytest.raises(SpecarError, match="in another way"),
        VideoWriter(video.path, FPS, 32, 32, keep_blocks=4) as other,
    ):
        other.add_block(block(4, height=32, width=32))
        other.finish({})
    assert not video.path.exists()


def test_what_is_finished_plays_after_kill_9_R111(tmp_path):
    path = tmp_path / "a.mp4"
    script = """
        video = writer(Path(sys.argv[1]))
        for index in range(1000):
            video.add_block(block(index))
            print(video.blocks_done, flush=True)
    """
    with run(script, path) as process:
        for line in process.stdout:
            if int(line) >= 8:
                process.kill()
    assert process.returncode == -9 and not path.exists()
    whole = uninterrupted(tmp_path / "whole.mp4", 13)
    video = writer(path, keep_blocks=8)
    segments = sorted(video.folder.glob("*.mp4"))
    assert np.array_equal(pictures(*segments), pictures(whole)[: 8 * 3])
    with video:
        for index in range(video.blocks_done, 13):
            video.add_block(block(index))
        video.finish({})
    assert np.array_equal(pictures(path), pictures(whole))
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "whole.mp4"]


def test_a_lost_folder_stops_the_run_and_keeps_every_block(tmp_path):
    failure = pytest.raises(SpecarError, match="segment-00000.mp4 .*No such file")
    with failure, writer(tmp_path / "a.mp4") as video:
        for index in range(3):
            video.add_block(block(index))
        shutil.rmtree(video.folder)
        for index in range(3, 100):
            video.add_block(block(index))
    assert len(decode(video.partial_path)) == 4 * 3  # the block that failed, and none after it
    assert os.listdir(tmp_path) == ["a.partial.mp4"]


def test_a_lost_output_folder_is_made_again(tmp_path):
    with writer(tmp_path / "out" / "a.mp4", folder=tmp_path / "a.run") as video:
        video.add_block(block(0))
        (tmp_path / "out").rmdir()
        video.finish({})
    assert len(decode(video.path)) == 3


def test_a_lost_segment_is_named(tmp_path, caplog):
    with pytest.raises(SpecarError, match="segment-00000.mp4 was removed"), writer(tmp_path / "a.mp4") as video:
        for index in range(9):
            video.add_block(block(index))
            if video.blocks_done:
                (video.folder / "segment-00000.mp4").unlink(missing_ok=True)
        video.finish({})
    assert "The finished parts are in" in caplog.text and not video.path.exists()


@contextlib.contextmanager
def largest_file(size: int):
    """Fails as a full disk does: a write falls short in the middle, with EFBIG and not ENOSPC."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.skipif(resource is None, reason="no RLIMIT_FSIZE on Windows")
def test_a_full_disk_is_named_and_costs_nothing_finished(tmp_path, caplog):
    whole = uninterrupted(tmp_path / "whole.mp4", 9)
    with writer(tmp_path / "sizes.mp4") as video:
        for index in range(9):
            video.add_block(block(index))
    first, second = (file.stat().st_size for file in sorted(video.folder.iterdir()))
    smaller, larger = sorted((first, second))
    cases = {100: 0, smaller - 1: 0, smaller: int(first == smaller), larger: 2, whole.stat().st_size - 1: 2}
    for limit, segments in cases.items():
        folder = tmp_path / str(limit)
        caplog.clear()
        with (
            pytest.raises(
                SpecarError, match=rf"Cannot write {folder}.* \([\d,]+ bytes\): .*File too large.*\. Make room"
            ),
            largest_file(limit),
            writer(folder / "a.mp4") as video,
        ):
            for index in range(9):
                video.add_block(block(index))
            video.finish({"specar": "{}"})
        found = sorted(video.folder.iterdir())
        assert [file.suffix for file in found] == [".mp4"] * segments
        assert found or "The finished parts" not in caplog.text
        assert not video.path.exists() and not list(folder.glob("*.part"))
        if found:
            assert np.array_equal(pictures(*found), pictures(whole)[: 12 * segments])


# Memory


def test_no_more_blocks_are_held_than_the_queue_has_places_R10(tmp_path):
    alive: list[weakref.ref] = []
    with writer(tmp_path / "a.mp4", queue_blocks=2) as video:
        for index in range(16):
            frames = block(index, 12).numpy()
            alive.append(weakref.ref(frames))
            video.add_block(torch.from_numpy(frames))
            del frames
            assert sum(reference() is not None for reference in alive) <= 3
        video.finish({})


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_is_flat_over_many_blocks_R109(tmp_path):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with writer(tmp_path / "a.mp4", crf=40) as video:
        for index in range(200):
            video.add_block(block(index))
            if index == 80:
                early = resident()
        late = resident()
        video.finish({})
    assert late - early < 8e6
