"""Real videos and frames of them: read as a player shows them, and what the shipped tiny pair makes of them (R94)."""

import itertools
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from killed import CPU
from PIL import Image
from real import BIKES, BUNNY, CARPHONE
from test_start_image import psnr

from specar_core.backbones.session_start import start_image
from specar_core.backbones.tiny import TINY
from specar_core.captions import TINTS
from specar_core.generate import generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.noise import noise
from specar_core.rollout import rollout
from specar_core.schedule import spread
from specar_core.source import SourceVideo, length, video_size
from specar_core.video import VideoWriter, to_rgb8
from training.captions import parse
from training.scores import measure
from training.shapes import Scene, render, sample_scene

BALL = "a large red ball drifting slowly right on a plain grey background"
STAR = "a large green star drifting slowly right on a plain brown background"


def opened(path, width=96, height=64) -> SourceVideo:
    return SourceVideo(path, 16, width, height, length(path, 16))


def pictures(path) -> torch.Tensor:
    """[N, 3, H, W] in [-1, 1], decoded by PyAV alone."""
    with av.open(str(path)) as container:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2) / 127.5 - 1


def luma(frames) -> torch.Tensor:
    """[B, T], 8-bit levels, of [B, 3, T, H, W]."""
    red, green, blue = ((frames.mean((3, 4)) + 1) * 127.5).unbind(1)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    "path, size, count", [(BIKES, (640, 272), 160), (BUNNY, (1280, 720), 85), (CARPHONE, (193, 144), 65)]
)
def test_a_real_video_is_read_as_it_is_shown(path, size, count):
    assert video_size(path) == size and length(path, 16) == count
    source = opened(path, *size)
    with av.open(str(path)) as container:
        rate, shown = container.streams.video[0].average_rate, container.decode(video=0)
        for number, frame in enumerate(itertools.islice(shown, 60)):
            for index in (0, 1, 31):
                if number == int((Fraction(index, 16) + Fraction(1, 1000)) * rate):
                    picture = torch.from_numpy(frame.to_ndarray(format="rgb24", width=size[0], height=size[1]))
                    assert psnr(source.frames(index, 1)[0, :, 0], picture.permute(2, 0, 1) / 127.5 - 1) > 35
    source.close()


@pytest.mark.parametrize("path, number", [(BIKES, 0), (BIKES, 70), (BUNNY, 60), (CARPHONE, 0)])
def test_a_video_begins_with_a_photograph(tmp_path, path, number):
    """In the file, behind the encoder."""
    picture = opened(path, *video_size(path)).frames(number, 1)
    Image.fromarray(to_rgb8(picture)[0, 0].numpy()).save(tmp_path / "i.png")
    inputs = Inputs(kind="image", path=tmp_path / "i.png")
    job, notices = resolve(TINY, prompt=BALL, blocks=1, source=inputs.source(16)[0])
    assert notices[-1].startswith("the image is ") and notices[-1].endswith("resized to 96x64")
    generate(job, CPU, {**TINY.shipped, **inputs.paths}, tmp_path / "a.mp4")
    made = pictures(tmp_path / "a.mp4")
    assert len(made) == 13 and psnr(made[:1], opened(path).frames(number, 1)[:, :, 0]) > 30


def test_no_flash_and_no_step_of_brightness_after_the_image_R94():
    """Over a block of the target and one of the drafter. The pair knows plain scenes and no photographs: its VAE is
    off by a few levels there."""
    photographs = [opened(path).frames(number, 1) for path, number in ((BIKES, 0), (BUNNY, 60), (CARPHONE, 50))]
    plain = [torch.tensor(TINTS[tint]).div(127.5).sub(1).view(1, 3, 1, 1, 1).expand(1, 3, 1, 64, 96)
             for tint in ("navy", "grey")]  # fmt: skip
    bright = parse("two large white stars standing still on a gradient grey background")
    scenes = [render([Scene(bright, ((0.5, 0.5, 0.0),) * 2)], 0, 1), render([sample_scene(3)], 0, 1)]
    texts = [BALL] * 3 + ["a small white ball standing still on a plain navy background"] * 2
    texts += [bright.caption(), sample_scene(3).caption]
    image = torch.cat([*photographs, *plain, *scenes])

    job, _ = resolve(TINY, blocks=2, k=1)
    pair = TINY.load_pair(TINY.shipped, job, CPU, lambda *_: None)
    pair = replace(pair, geometry=replace(pair.geometry, image=True, dropped=0))
    told = TINY.load_text_encoder(TINY.shipped["text encoder"], CPU, lambda *_: None).encode(texts)
    shape = TINY.geometry.latent_shape(96, 64, len(texts))
    results = rollout(
        pair,
        spread(2, 1),
        lambda block: told,
        lambda block, draw: noise(0, block, draw, shape),
        height=64,
        width=96,
        batch=len(texts),
        resume=start_image(pair, image, lambda block: told),
    )
    steps = luma(torch.cat([result.frames for result in results], dim=2)).diff(dim=1).abs()
    assert steps.shape == (7, 24)
    assert steps[3:].max() < 2 and steps[:3].max() < 10


def loudness(path) -> np.ndarray:
    """[n] of each tenth of a second, all channels together."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=8000)
        parts = [part.to_ndarray()[0] for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    samples = np.concatenate(parts)
    return np.sqrt((samples[: len(samples) // 800 * 800].reshape(-1, 800) ** 2).mean(1))


def follow(path, out, strength, prompt=BALL, blocks=4):
    inputs = Inputs(kind="video", path=path, strength=strength)
    job, _ = resolve(TINY, prompt=prompt, blocks=blocks, k=1, source=inputs.source(16)[0])
    generate(job, CPU, {**TINY.shipped, **inputs.paths}, out)
    return pictures(out)


def test_a_real_video_is_followed_with_its_sound(tmp_path):
    source = opened(BUNNY).frames(0, 42)[0].transpose(0, 1)
    likeness = []
    for strength in (0.1, 0.9):
        made = follow(BUNNY, tmp_path / f"{strength}.mp4", strength)
        assert made.shape == source.shape
        patterns = [frames - frames.mean((2, 3), keepdim=True) for frames in (made, source)]
        likeness.append(torch.cosine_similarity(*(pattern.flatten(1) for pattern in patterns)).mean())
    assert likeness[0] > likeness[1] + 0.1
    made, given = loudness(tmp_path / "0.1.mp4"), loudness(BUNNY)
    assert len(made) == 26  # 42 frames last 2.625 s
    assert np.corrcoef(made, given[: len(made)])[0, 1] > 0.98
    with av.open(str(tmp_path / "0.1.mp4")) as container:
        assert {stream.type: stream.duration * stream.time_base for stream in container.streams} == {
            "video": Fraction(42, 16), "audio": Fraction(42, 16)
        }  # fmt: skip


def test_strength_goes_from_the_source_to_the_prompt(tmp_path):
    """A scene that the pair knows, at another rate, and a prompt that asks for another one."""
    source = render([Scene(parse(BALL), ((0.2, 0.5, 0.3),))], 0, 70, fps=25)
    with VideoWriter(tmp_path / "s.mp4", 25, 96, 64) as writer:
        writer.add_block(to_rgb8(source)[0])
        writer.finish({})
    source = opened(tmp_path / "s.mp4").frames(0, 30)[0].transpose(0, 1)
    near, prompted = [], []
    for strength in (0.02, 0.15, 0.9):
        made = follow(tmp_path / "s.mp4", tmp_path / f"{strength}.mp4", strength, STAR, blocks=3)
        near.append(psnr(made, source))
        prompted.append(measure(made.transpose(0, 1), parse(STAR))["agreement"].nanmean().item())
    assert near[0] > 28 > near[1] + 8 and near[1] > near[2]
    assert prompted[2] > prompted[0] + 0.2
