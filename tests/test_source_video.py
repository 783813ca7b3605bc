"""A video that follows another: any file, at the pair's rate, in constant memory, with its sound (R05, R106, R107)."""

import json
import math
import os
import struct
import tracemalloc
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killed import CPU, frames, leave
from test_cli import refused, specar
from test_helios_files import SMALL, models  # noqa: F401

from specar_core.backbones.causal_wan import scaled
from specar_core.backbones.session_start import VideoLatents
from specar_core.errors import UsageError
from specar_core.generate import Listener, generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.plan import model_files
from specar_core.source import SourceVideo, length, video_size

SIZE = (48, 32)


def shade(number: int) -> int:
    return 20 + 5 * (number % 43)


def clip(path, count=40, rate=16, size=SIZE, times=None, sound=None, codec="libx264", pix_fmt="yuv420p", pixel=1):
    """Frame n is grey of shade(n), brighter by 30 in its upper left quarter. times: of the frames, in ms; pixel: the
    pixels' width over their height.

    sound: (samples [channels, n], their rate, layout), or a codec of PCM behind them.
    """
    with av.open(str(path), "w") as container:
        video = container.add_stream(codec, rate=rate, options={"crf": "10"} if codec == "libx264" else {})
        video.width, video.height, video.pix_fmt = *size, pix_fmt
        video.codec_context.sample_aspect_ratio = Fraction(pixel)
        if times:
            video.codec_context.time_base = Fraction(1, 1000)
        audio = None
        if sound:
            samples, frequency, layout, *rest = sound
            audio = container.add_stream(*(rest or ["aac"]), rate=frequency, layout=layout)
        for number in range(count):
            values = np.full((size[1], size[0], 3), shade(number), np.uint8)
            values[: size[1] // 2, : size[0] // 2] += 30
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        if audio:
            for start in range(0, samples.shape[1], 1024):
                part = np.ascontiguousarray(samples[:, start : start + 1024].astype(np.float32))
                packed = audio.codec_context.name.startswith("pcm")
                part = part.T.reshape(1, -1) if packed else part
                frame = av.AudioFrame.from_ndarray(part, format="flt" if packed else "fltp", layout=layout)
                frame.sample_rate, frame.pts = frequency, start
                container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path


def opened(path, fps=16, size=SIZE) -> SourceVideo:
    return SourceVideo(path, fps, *size, length(path, fps))


def shades(found: torch.Tensor) -> list[int]:
    """Which frames these are, by the shade of their lower half."""
    values = (found[0, :, :, 20:].mean(dim=(0, 2, 3)) + 1) * 127.5
    return [round((value.item() - 20) / 5) for value in values]


# Reading


@pytest.mark.parametrize("rate", [8, 10, 16, 24, 30, Fraction(30000, 1001), 60])
def test_resampled_to_what_is_on_the_screen(tmp_path, rate):
    source = opened(clip(tmp_path / "a.mp4", 30, rate))
    assert source.count == math.ceil((30 / Fraction(rate) - Fraction(1, 1000)) * 16)
    expected = [min(29, int((Fraction(index, 16) + Fraction(1, 1000)) * rate)) for index in range(source.count)]
    assert shades(source.frames(0, source.count)) == expected


def test_variable_rate(tmp_path):
    times = [0, 40, 1000, 1040, 1080, 2500]
    path = clip(tmp_path / "a.mkv", 6, 25, times=times)
    source = opened(path)
    shown = [max(n for n, time in enumerate(times) if time <= index * 1000 / 16 + 1) for index in range(source.count)]
    assert 40 <= source.count <= 42 and shades(source.frames(0, source.count)) == shown


@pytest.mark.parametrize("suffix, codec, pix_fmt", [("avi", "mpeg4", "yuv420p"), ("webm", "libvpx", "yuv420p"),
                                                    ("mov", "mjpeg", "yuvj420p"), ("gif", "gif", "rgb8")])  # fmt: skip
def test_any_file(tmp_path, suffix, codec, pix_fmt):
    path = clip(tmp_path / f"a.{suffix}", 12, 10, codec=codec, pix_fmt=pix_fmt)
    source = opened(path, 10)
    found = source.frames(0, 12)
    assert source.count == 12 and found.shape == (1, 3, 12, 32, 48)
    off = [(found[0, :, n, 20:].mean() + 1) * 127.5 - shade(n) for n in range(12)]
    assert max(map(abs, off)) < (25 if suffix == "gif" else 6)


def test_the_same_frames_in_any_order_and_behind_the_end(tmp_path):
    source = opened(clip(tmp_path / "a.mp4", 20))
    whole = source.frames(0, 25)
    assert shades(whole) == [*range(20), 19, 19, 19, 19, 19]
    for first, count in ((3, 4), (7, 1), (0, 2), (18, 6), (18, 6)):
        assert torch.equal(source.frames(first, count), whole[:, :, first : first + count])


def turned(path: Path, degrees: int) -> Path:
    """Write a rotation into the track header of an mp4 (ISO/IEC 14496-12, 8.3.2)."""
    matrices = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
    a, b, c, d = (value << 16 for value in matrices[degrees])
    data = path.read_bytes()
    place = data.index(b"tkhd") + 4 + 40
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data[:place] + matrix + data[place + 36 :])
    return path


@pytest.mark.parametrize("degrees, corner", [(90, (0, -1)), (180, (-1, -1)), (270, (-1, 0))])
def test_rotated(tmp_path, degrees, corner):
    """The bright quarter goes from the upper left corner clockwise."""
    path = turned(clip(tmp_path / "a.mp4", 4), degrees)
    size = SIZE if degrees == 180 else SIZE[::-1]
    assert video_size(path) == size
    frame = opened(path, size=size).frames(0, 1)[0, 0, 0]
    corners = {(row, column): frame[row, column].item() for row in (0, -1) for column in (0, -1)}
    assert max(corners, key=corners.get) == corner


@pytest.mark.parametrize("width, height", [(47, 33), (96, 32), (16, 200), (640, 360)])
def test_other_sizes_are_cropped_and_resized(tmp_path, width, height):
    path = clip(tmp_path / "a.mkv", 3, size=(width, height), pix_fmt="yuv444p")
    source, _ = Inputs(kind="video", path=path).source(16)
    assert (source.width, source.height, source.frames) == (width, height, 3)
    assert f"the video is {width}x{height}: cropped to" in source.fitting(*SIZE)[0]
    assert opened(path).frames(0, 3).shape == (1, 3, 3, 32, 48)


def test_pixels_that_are_no_squares(tmp_path):
    path = clip(tmp_path / "a.mp4", 2, pixel=2)
    assert video_size(path) == (96, 32)
    found = opened(path, size=(96, 32)).frames(0, 1)[0, 0, 0]
    assert (found[:16, :46] > found[16:, :46]).all() and (found[:16, 50:] - found[16:, 50:]).abs().max() < 0.05
    assert video_size(turned(path, 90)) == (32, 96)
    assert video_size(clip(tmp_path / "b.mkv", 1, pixel=20)) == (8 * 48, 32)  # nobody means that


def test_frames_without_times(tmp_path):
    """A bare stream: 25 frames a second."""
    source = opened(clip(tmp_path / "a.h264", 25))
    assert source.count == 16 and shades(source.frames(0, 16)) == [index * 25 // 16 for index in range(16)]


def test_the_picture_on_the_cover_is_not_the_video(tmp_path):
    path = clip(tmp_path / "a.mp4", 20)
    with av.open(str(tmp_path / "b.mkv"), "w") as container, av.open(str(path)) as given:
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 80, 80, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic.value
        video = container.add_stream_from_template(given.streams.video[0], opaque=True)
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((80, 80, 3), np.uint8), format="rgb24")))
        for packet in given.demux(given.streams.video[0]):
            if packet.size:
                packet.stream = video
                container.mux(packet)
    assert video_size(tmp_path / "b.mkv") == SIZE and length(tmp_path / "b.mkv", 16) == 20
    assert shades(opened(tmp_path / "b.mkv").frames(0, 20)) == list(range(20))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")
def test_the_file_is_let_go_of(backbone, tmp_path, monkeypatch):
    """Also while somebody keeps what read it."""
    path, kept, seen = clip(tmp_path / "s.mp4", 30), [], []
    monkeypatch.setattr("specar_core.generate.opened", lambda job, paths: kept.append(opened(path)) or kept[-1])

    def held():
        return str(path) in map(os.path.realpath, Path("/proc/self/fd").iterdir())

    job, _, paths = video_job(backbone, path, blocks=2)
    generate(job, CPU, paths, tmp_path / "a.mp4", listener=Listener(block=lambda result: seen.append(held())))
    leave(job, paths, tmp_path / "b.mp4", at=1)
    assert seen == [True, True] and len(kept) == 2 and not held()


def test_colours_are_those_of_a_player(tmp_path):
    """What this program writes, it reads as it was; and what says nothing of its colours is taken for BT.601."""
    from specar_core.video import VideoWriter

    bars = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 120, 40]], dtype=torch.uint8)
    picture = bars.repeat_interleave(12, 0).expand(4, 32, 48, 3).contiguous()
    with VideoWriter(tmp_path / "a.mp4", 16, *SIZE) as writer:
        writer.add_block(picture)
        writer.finish({})
    found = opened(tmp_path / "a.mp4").frames(0, 4)
    middle = ((found[0, :, 2, 16, 6::12] + 1) * 127.5).T
    assert (middle - bars.float()).abs().max() < 4


def test_colours_of_full_range(tmp_path):
    """As telephones write them, in BT.709."""
    levels = np.array([200, 60, 40])
    luma = levels @ (0.2126, 0.7152, 0.0722)
    planes = luma, 128 + (levels[2] - luma) / 1.8556, 128 + (levels[0] - luma) / 1.5748
    values = np.repeat(np.rint(planes), (32 * 48, 16 * 24, 16 * 24)).astype(np.uint8).reshape(48, 48)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuvj420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = 1, 2
        container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="yuvj420p")))
        container.mux(stream.encode())
    found = (opened(tmp_path / "a.mp4").frames(0, 1) + 1) * 127.5
    assert (found - torch.tensor(levels).view(1, 3, 1, 1, 1)).abs().max() < 4


@pytest.mark.parametrize("data", [b"", b"no video", b"\0\0\0\x18ftypmp42" + b"0" * 100])
def test_what_is_no_video(tmp_path, data):
    (tmp_path / "a.mp4").write_bytes(data)
    for read in (lambda path: length(path, 16), video_size):
        with pytest.raises(UsageError, match="as a video"):
            read(tmp_path / "a.mp4")


def test_sound_alone_is_no_video(tmp_path):
    with av.open(str(tmp_path / "a.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(UsageError, match="holds no video"):
        length(tmp_path / "a.wav", 16)


def test_a_damaged_end_holds_the_frame_before(tmp_path, caplog):
    path = clip(tmp_path / "a.mkv", 40)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = opened(path).frames(0, 40)
    assert torch.isfinite(found).all() and shades(found)[0] == 0


def test_memory_does_not_grow_with_the_length(tmp_path):
    """numpy's and Python's: of a minute as of a second."""
    peaks = []
    for seconds in (2, 40):
        path = clip(tmp_path / f"{seconds}.mp4", 16 * seconds, size=(320, 180))
        tracemalloc.start()
        source = opened(path)
        for first in range(0, source.count, 12):
            source.frames(first, 12)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + (1 << 20)


# Strength


@given(st.floats(0.01, 1))
def test_strength_is_kreas_index_into_the_table(strength):
    """Krea: q = trunc(linspace(1000 strength, 0, n)) in float32, which may be one less or more."""
    found = scaled((1000, 750, 500, 250, 0), strength)
    krea = torch.linspace(1000 * strength, 0, 5).int().tolist()
    assert found[-1] == 0 and list(found) == sorted(set(found), reverse=True)
    if len(found) == 5:
        assert all(abs(a - b) <= 1 for a, b in zip(found, krea, strict=True))


def test_strengths():
    assert scaled((1000, 750, 500, 250), 1) == (1000, 750, 500, 250)
    assert scaled((1000, 750, 500, 250), 0.5) == (500, 375, 250, 125)
    assert scaled((1000, 750, 500, 250), 0.57) == (570, 427, 285, 142)
    assert scaled((1000, 750, 500, 250), 0.002) == (2, 1, 0)  # each step once


def video_job(backbone, path, strength=None, **asked):
    source, _ = Inputs(kind="video", path=path, strength=strength).source(backbone.geometry.fps)
    job, notices = resolve(backbone, **{"prompt": "a red ball", **asked}, source=source)
    return job, notices, {**backbone.shipped, "video": path}


def test_length_steps_and_notices(backbone, tmp_path):
    path = clip(tmp_path / "a.mp4", 40)
    job, notices, _ = video_job(backbone, path)
    assert job.blocks == 4 and job.frames == 42 and job.source.strength == 0.5
    assert notices == ["the source video ends at 2.50 s: its last frame is held to 2.62 s"]
    job, notices, _ = video_job(backbone, path, 0.3, blocks=2)
    assert notices == ["of the source video's 2.50 s the first 1.12 s are used"]
    assert job.forwards == resolve(backbone, blocks=2)[0].forwards
    assert video_job(backbone, path, 0.001, blocks=2)[0].forwards["drafter"] < job.forwards["drafter"]
    assert "at strength 1 nothing of the source video is left" in video_job(backbone, path, 1)[1]
    for strength in (0, -0.5, 1.1, float("nan")):
        with pytest.raises(UsageError, match="the strength must be more than 0"):
            video_job(backbone, path, strength)
    with pytest.raises(UsageError, match="is for --video FILE, and there is none"):
        Inputs(strength=0.5).source(16)


# Following


def pair_of(backbone, job, paths):
    return backbone.load_pair(paths, job, CPU, lambda *_: None)


@pytest.mark.parametrize("timeline", ["0s: red", "0s: red\n3s cut: a ball"])
def test_latents_are_those_of_one_stream_from_wherever_it_goes_on(backbone, tmp_path, timeline):
    path = clip(tmp_path / "a.mp4", 156)
    job, _, paths = video_job(backbone, path, prompt="", timeline=timeline)
    pair, source = pair_of(backbone, job, paths), opened(path)
    latents = VideoLatents(pair, source)
    found = [latents(block) for block in range(job.blocks)]
    cut = job.geometry.cuts[0] if job.geometry.cuts else job.blocks
    with torch.inference_mode():
        held = torch.cat([source.frames(0, 1)] * 3 + [source.frames(0, job.geometry.frames(cut))], dim=2)
        whole = pair.vae.encode(held)[0]
        assert torch.equal(torch.cat(found[:cut], dim=2), whole)
        if cut < job.blocks:
            begin = job.geometry.frames(cut)
            rest = pair.vae.encode(source.frames(begin, job.frames - begin))[0]
            assert torch.equal(torch.cat(found[cut:], dim=2), rest)
    for block in (12, 2, 3, 3):
        assert torch.equal(latents(block), found[block])
    assert torch.equal(VideoLatents(pair, source)(13), found[13])


def test_a_little_strength_leaves_the_source_and_all_of_it_nothing(backbone, tmp_path):
    """At strength 1 the noise is all there is, as without a source; at almost 0 the latents are almost the source's."""
    path = clip(tmp_path / "a.mp4", 42)
    job, _, paths = video_job(backbone, path, 1.0)
    generate(job, CPU, paths, tmp_path / "all.mp4")
    plain, _ = resolve(backbone, prompt="a red ball", blocks=4)
    generate(plain, CPU, backbone.shipped, tmp_path / "plain.mp4")
    assert frames(tmp_path / "all.mp4") == frames(tmp_path / "plain.mp4")

    job, _, paths = video_job(backbone, path, 0.004)
    pair, results = pair_of(backbone, job, paths), []
    listener = Listener(block=lambda result: results.append(result.latents))
    generate(job, CPU, paths, tmp_path / "little.mp4", listener=listener)
    latents = VideoLatents(pair, opened(path))
    sigma = 0.02
    for block, found in enumerate(results):
        assert ((found - latents(block)).std() / latents(block).std()) < 10 * sigma


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_it_goes_on(backbone, tmp_path, stop):
    tone = np.sin(np.arange(80000) / 20)[None]
    path = clip(tmp_path / "s.mp4", 70, sound=(tone, 16000, "mono"))
    job, _, paths = video_job(backbone, path, k=2)
    generate(job, CPU, paths, tmp_path / "whole.mp4")
    leave(job, paths, tmp_path / "a.mp4", at=stop)
    assert heard(tmp_path / "a.partial.mp4").any()
    generate(job, CPU, paths, tmp_path / "a.mp4", resume=True)
    assert frames(tmp_path / "a.mp4") == frames(tmp_path / "whole.mp4")
    assert np.array_equal(heard(tmp_path / "a.mp4"), heard(tmp_path / "whole.mp4"))


def test_from_the_command_line(here):
    clip(here / "s.mp4", 50, 20, size=(64, 64))
    options = ["--backbone", "tiny", "--prompt", "a ball", "--video", "s.mp4", "--strength", "0.4"]
    told = json.loads(specar("plan", *options, "--json").stdout)
    result = specar("generate", *options, "--out", "a.mp4")
    assert result.exit_code == 0 and "the video is 64x64: cropped to 64x43 in the middle" in result.stderr
    report = json.loads(Path("a.json").read_text())
    assert told["frames"] == report["frames"] == len(frames(Path("a.mp4"))) == 42
    assert report["options"]["video"]["file"] == "s.mp4" and report["options"]["strength"] == 0.4
    assert specar("generate", "--from", "a.json", "--out", "b.mp4").exit_code == 0
    assert frames(Path("a.mp4")) == frames(Path("b.mp4"))
    assert specar("generate", "--from", "a.json", "--strength", "0.9", "--out", "c.mp4").exit_code == 0
    assert json.loads(Path("c.json").read_text())["options"]["strength"] == 0.9
    assert frames(Path("a.mp4")) != frames(Path("c.mp4"))
    refused(
        2,
        "must be more than 0, which is the source itself, and at most 1, not 0",
        "generate",
        *options[:6],
        "--strength",
        "0",
    )
    refused(2, "there is no video x.mp4", "generate", *options[:4], "--video", "x.mp4")


# Sound


def heard(path) -> np.ndarray:
    """Samples [2, n] at 48 kHz as a player hears them, what the encoder put in front left out."""
    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


def loud(samples: np.ndarray, begin: float, end: float) -> float:
    part = samples[0, round(48000 * begin) : round(48000 * end)]
    return float(np.sqrt((part**2).mean()))


def tone(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    return np.tile(0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate), (channels, 1))


@pytest.mark.parametrize(
    "seconds, rate, layout",
    [(1, 48000, "stereo"), (9, 44100, "stereo"), (2, 8000, "mono"), (2, 48000, "5.1"), (0.02, 48000, "mono")],
)
def test_sound_leaves_the_number_of_frames_R106(backbone, tmp_path, seconds, rate, layout):
    channels = {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    path = clip(tmp_path / "s.mp4", 28, sound=(tone(seconds, rate, channels), rate, layout))
    job, _, paths = video_job(backbone, path, blocks=3)
    generate(job, CPU, paths, tmp_path / "a.mp4")
    assert len(frames(tmp_path / "a.mp4")) == job.frames == 30
    with av.open(str(tmp_path / "a.mp4")) as container:
        lasts = {stream.type: stream.duration * stream.time_base for stream in container.streams}
        assert container.duration == 1875000
    assert lasts == {"video": Fraction(30, 16), "audio": Fraction(30, 16)}  # trimmed, or padded with silence
    samples = heard(tmp_path / "a.mp4")
    end = min(seconds, 28 / 16 if seconds < 1.8 else 30 / 16)
    if seconds >= 1:
        assert loud(samples, 0.1, end - 0.1) > 0.2
    if end < 1.5:
        assert loud(samples, end + 0.1, 30 / 16) < 0.01


def test_no_sound_no_track(backbone, tmp_path):
    job, _, paths = video_job(backbone, clip(tmp_path / "s.mp4", 18))
    generate(job, CPU, paths, tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert not container.streams.audio


def test_sound_stays_with_the_picture(backbone, tmp_path):
    """A click at 1 s of the source is at 1 s of the video, whose first three decoded frames are dropped."""
    samples = np.zeros((1, 96000))
    samples[0, 48000:48480] = 0.9
    path = clip(tmp_path / "s.mkv", 32, sound=(samples, 48000, "mono", "pcm_f32le"))
    job, _, paths = video_job(backbone, path)
    generate(job, CPU, paths, tmp_path / "a.mp4")
    found = heard(tmp_path / "a.mp4")
    assert abs(int(np.abs(found[0]).argmax()) - 48240) < 600


def test_a_gap_in_the_sound_is_silence(backbone, tmp_path):
    """Half a second of tone, a second that nobody recorded, and the tone again."""
    path = tmp_path / "s.mkv"
    with av.open(str(path), "w") as container, av.open(str(clip(tmp_path / "v.mp4", 36))) as given:
        video, audio = (
            container.add_stream_from_template(given.streams.video[0], opaque=True),
            container.add_stream("pcm_f32le", 8000),
        )
        audio.layout = "mono"
        for packet in given.demux(given.streams.video[0]):
            if packet.size:
                packet.stream = video
                container.mux(packet)
        for begin in (0, 12000):
            frame = av.AudioFrame.from_ndarray(tone(0.5, 8000).astype(np.float32), format="flt", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, begin, Fraction(1, 8000)
            container.mux(audio.encode(frame))
    job, _, paths = video_job(backbone, path, blocks=3)
    generate(job, CPU, paths, tmp_path / "a.mp4")
    found = heard(tmp_path / "a.mp4")
    assert [loud(found, at, at + 0.3) > 0.2 for at in (0.1, 0.7, 1.1, 1.6)] == [True, False, False, True]


def test_values_that_are_no_numbers_R107(backbone, tmp_path, caplog):
    samples = tone(2, 48000)
    samples[0, 30000:40000], samples[0, 60000] = np.nan, np.inf
    path = clip(tmp_path / "s.mkv", 32, sound=(samples, 48000, "mono", "pcm_f32le"))
    job, _, paths = video_job(backbone, path)
    with caplog.at_level("WARNING", "specar"):
        generate(job, CPU, paths, tmp_path / "a.mp4")
    assert "holds values that are no numbers" in caplog.text
    found = heard(tmp_path / "a.mp4")
    assert np.isfinite(found).all() and loud(found, 0.1, 0.5) > 0.2 and loud(found, 0.7, 0.8) < 0.02


# Helios


def test_helios_continues_a_video(models, tmp_path):  # noqa: F811
    path = clip(tmp_path / "s.mp4", 70, 24, size=(64, 64), sound=(tone(2, 8000), 8000, "mono"))
    steps = {"target": [2], "drafter": [1, 1, 1]}
    asked = {"blocks": 2, "width": 64, "height": 64, "steps": steps}
    job, _, paths = video_job(SMALL, path, **asked)
    assert job.frames == 66 and job.source.frames == 70
    generate(job, CPU, {**paths, **model_files(job, models, {})}, tmp_path / "a.mp4")
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert not container.streams.audio  # which belongs to what came before
    other = video_job(SMALL, clip(tmp_path / "t.mp4", 69, 24, size=(64, 64)), **asked)
    generate(other[0], CPU, {**other[2], **model_files(job, models, {})}, tmp_path / "b.mp4")
    assert frames(tmp_path / "a.mp4") != frames(tmp_path / "b.mp4")
    with pytest.raises(UsageError, match="helios continues a video: leave out --strength 0.5"):
        video_job(SMALL, path, 0.5, **asked)
    with pytest.raises(UsageError, match="must have at least 33 frames, not 30"):
        video_job(SMALL, clip(tmp_path / "u.mp4", 30, 24), **asked)
