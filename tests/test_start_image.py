"""A video that begins with an image: any image, the image itself first, and no seam behind it (cases R15, R94)."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from killed import CPU, frames, leave
from PIL import Image
from test_cli import refused, specar
from test_helios_files import SMALL, models  # noqa: F401

from specar_core import report
from specar_core.backbones.causal_wan import GEOMETRY
from specar_core.backbones.session_start import start_image
from specar_core.errors import SpecarError, UsageError
from specar_core.generate import generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.measures import read_frames
from specar_core.noise import noise
from specar_core.plan import model_files
from specar_core.rollout import rollout
from specar_core.schedule import spread
from specar_core.source import crop, fit, read_image, still


def picture(width=48, height=32) -> Image.Image:
    """Red to the right, green downwards, a blue corner: nothing of it is symmetric."""
    y, x = np.mgrid[0:height, 0:width]
    values = np.stack([x * 255 / max(1, width - 1), y * 255 / max(1, height - 1), np.zeros_like(x)], axis=-1)
    values[: height // 4, : width // 4, 2] = 255
    return Image.fromarray(values.round().astype(np.uint8))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1


def psnr(a, b) -> float:
    return (10 * torch.log10(4 / ((a - b) ** 2).mean())).item()


# Reading


@pytest.mark.parametrize(
    "mode, ending", [("RGB", "png"), ("RGB", "webp"), ("CMYK", "tif"), ("CMYK", "jpg"), ("YCbCr", "jpg"), ("P", "gif")]
)
def test_colours(tmp_path, mode, ending):
    image = picture() if mode == "RGB" else picture().convert(mode)
    image.save(tmp_path / f"a.{ending}", **({"lossless": True} if ending == "webp" else {"quality": 100}))
    found, notices = read_image(tmp_path / f"a.{ending}")
    assert psnr(found, pixels(picture())) > (20 if mode == "P" else 30) and not notices


@pytest.mark.parametrize("mode", ["L", "1", "I;16", "F", "LA"])
def test_grey(tmp_path, mode):
    ramp = np.tile(np.linspace(0, 1, 48, dtype=np.float32), (32, 1))
    if mode == "I;16":
        Image.fromarray((ramp * 65535).round().astype(np.uint16)).save(tmp_path / "a.png")
    elif mode == "F":
        Image.fromarray(ramp).save(tmp_path / "a.tif")
    else:
        Image.fromarray((ramp * 255).round().astype(np.uint8)).convert(mode).save(tmp_path / "a.png")
    found, notices = read_image(tmp_path / "a.png" if mode != "F" else tmp_path / "a.tif")
    assert found.shape == (1, 3, 32, 48) and torch.equal(found[:, 0], found[:, 1])
    wanted = torch.from_numpy(ramp * 2 - 1)
    if mode == "1":
        assert found.unique().tolist() == [-1, 1] and abs(found.mean() - wanted.mean()) < 0.05
    else:
        assert (found[0, 0] - wanted).abs().max() < (1e-4 if mode in ("I;16", "F") else 1 / 255)


def test_16_bits_of_colour(tmp_path):
    """Written by ffmpeg: Pillow cannot."""
    with av.open(str(tmp_path / "a.png"), "w", format="image2", options={"update": "1"}) as container:
        stream = container.add_stream("png", rate=1)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "rgb48be"
        values = np.array(picture()).astype(np.uint16) * 257
        container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb48be")))
        container.mux(stream.encode())
    assert psnr(read_image(tmp_path / "a.png")[0], pixels(picture())) > 45


def test_transparent_parts_become_white_and_that_is_said(tmp_path):
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(48) < 24, 255, 0).astype(np.uint8)[None].repeat(32, 0)))
    image.save(tmp_path / "a.png")
    found, notices = read_image(tmp_path / "a.png")
    assert torch.equal(found[..., :24], pixels(picture())[..., :24]) and (found[..., 24:] == 1).all()
    assert notices == ["transparent parts of the image become white"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_by_exif(tmp_path, orientation):
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what undoes it, by Pillow's names
    image = picture() if orientation == 1 else picture().transpose(Image.Transpose(turns[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", quality=100, exif=exif)
    assert psnr(read_image(tmp_path / "a.jpg")[0], pixels(picture())) > 30


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"0" * 50])
def test_what_is_no_image(tmp_path, data):
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(UsageError, match="as an image"):
        read_image(tmp_path / "a.png")


def test_a_cut_off_image(tmp_path):
    picture(300, 200).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    with pytest.raises(UsageError, match="as an image"):
        read_image(tmp_path / "a.png")


# Fitting

SIDE = st.integers(1, 300)


@given(SIDE, SIDE, st.integers(1, 40), st.integers(1, 40))
def test_the_largest_part_of_the_right_shape_is_taken(width, height, across, down):
    kept = crop(width, height, across, down)
    assert kept[0] == width or kept[1] == height
    assert 1 <= kept[0] <= width and 1 <= kept[1] <= height
    # A pixel more or less is further from the wanted shape.
    assert abs(kept[0] * down - kept[1] * across) <= max(across, down)


@pytest.mark.parametrize("width, height", [(1, 1), (37, 91), (4096, 16), (48, 32), (96, 64), (47, 33)])
def test_any_size(tmp_path, width, height):
    picture(width, height).save(tmp_path / "a.png")
    source, _ = Inputs(kind="image", path=tmp_path / "a.png").source(16)
    frame = still(tmp_path / "a.png", 48, 32).frames(0, 1)
    assert frame.shape == (1, 3, 1, 32, 48) and frame.abs().max() <= 1
    (notice,) = source.fitting(48, 32) or [""]
    assert (f"the image is {width}x{height}: " in notice) == ((width, height) != (48, 32))
    assert ("cropped to" in notice) == ((width, height) not in ((48, 32), (96, 64), (1, 1)))
    if (width, height) == (48, 32):
        assert torch.equal(frame[:, :, 0], pixels(picture()))
    if (width, height) == (1, 1):
        assert len(frame.flatten(3).unique(dim=3)[0, 0, 0]) == 1


def test_the_middle_is_kept():
    image = torch.zeros(1, 3, 32, 96)
    image[..., 24:72] = torch.linspace(-1, 1, 48)
    assert torch.equal(fit(image, 48, 32)[0, 0, 0], torch.linspace(-1, 1, 48))


# Generating


def image_job(backbone, tmp_path, image=None, **asked):
    (image or picture()).save(tmp_path / "i.png")
    source, _ = Inputs(kind="image", path=tmp_path / "i.png").source(16)
    shown = {} if "timeline" in asked else {"prompt": "a red ball"}
    job, notices = resolve(backbone, **shown, **asked, source=source)
    return job, notices, {**backbone.shipped, "image": tmp_path / "i.png"}


def play(backbone, job, paths, **options):
    pair = backbone.load_pair(paths, job, CPU, lambda *_: None)
    prompt = backbone.load_text_encoder(paths["text encoder"], CPU, lambda *_: None).encode(["a red ball"])
    shape = job.geometry.latent_shape(job.width, job.height)
    start = start_image(pair, still(paths["image"], job.width, job.height).frames(0, 1), lambda block: prompt)
    size = {"height": job.height, "width": job.width}
    draw = lambda block, j: noise(0, block, j, shape)  # noqa: E731
    return pair, start, list(rollout(pair, job.schedule, lambda block: prompt, draw, resume=start, **size, **options))


def test_geometry_and_plan(backbone, tmp_path):
    job, notices, _ = image_job(backbone, tmp_path, blocks=4)
    assert job.frames == 12 * 4 + 1 and not [n for n in notices if "image" in n]
    assert [job.geometry.frames(block) for block in range(4)] == [0, 13, 25, 37]
    assert image_job(backbone, tmp_path, seconds=49 / 16)[0].blocks == 4
    assert image_job(backbone, tmp_path, frames=50)[0].blocks == 5
    text, _ = resolve(backbone, prompt="", blocks=4)
    assert job.forwards == text.forwards and job.work == text.work  # priming is no step of a block
    notices = image_job(backbone, tmp_path, blocks=4, options={"keep_first_frames": True})[1]
    assert any("keep-first-frames does nothing here" in notice for notice in notices)


def test_the_image_held_is_what_came_before_block_0_R15_R94(backbone, tmp_path):
    """As if a block that shows nothing but the image had been committed: its context and its decoder's histories."""
    job, _, paths = image_job(backbone, tmp_path, blocks=3, k=2)
    pair, start, results = play(backbone, job, paths)
    image = still(paths["image"], 48, 32).frames(0, 1)
    with torch.inference_mode():
        given = pair.vae.encode(image.expand(-1, -1, 9, -1, -1))[0]
    assert torch.equal(start.latents(-1), given) and given.shape[2] == 3

    plain = replace(pair, geometry=GEOMETRY)
    prompt = backbone.load_text_encoder(paths["text encoder"], CPU, lambda *_: None).encode(["a red ball"])
    shape = job.geometry.latent_shape(48, 32)
    shifted = lambda block, j: noise(0, block - 1, j, shape)  # noqa: E731
    known = lambda block: given if block == 0 else None  # noqa: E731
    policy = replace(spread(4, 1), targets=(0, *(target + 1 for target in job.schedule.targets)))
    expected = list(rollout(plain, policy, lambda b: prompt, shifted, height=32, width=48, known=known))[1:]
    for result, block in zip(results, expected, strict=True):
        assert torch.equal(result.latents, block.latents)
        assert torch.equal(result.frames[:, :, -12:], block.frames)
    assert [result.frames.shape[2] for result in results] == [13, 12, 12]
    assert torch.equal(results[0].frames[:, :, :1], image)  # the image itself, not what is decoded


def test_anchored_to_the_image(backbone, tmp_path):
    job, _, paths = image_job(backbone, tmp_path, blocks=3, options={"anchor_first_latent": True})
    _, start, results = play(backbone, job, paths)
    for result in results:
        assert torch.equal(result.context.anchor, start.latents(-1)[:, :, :1])


@pytest.mark.parametrize("context", ["session", "rolling:9:1"])
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_it_goes_on(backbone, tmp_path, stop, context):
    job, _, paths = image_job(backbone, tmp_path, blocks=6, k=2, options={"drafter_context": context})
    generate(job, CPU, paths, tmp_path / "whole.mp4")
    leave(job, paths, tmp_path / "a.mp4", at=stop)
    if stop:
        generate(job, CPU, paths, tmp_path / "a.mp4", resume=True)
        assert frames(tmp_path / "a.mp4") == frames(tmp_path / "whole.mp4")


def test_with_a_cut_the_image_is_forgotten(backbone, tmp_path):
    job, _, paths = image_job(backbone, tmp_path, timeline="0s: a red ball\n1.5s cut: a red ball", blocks=4)
    (tmp_path / "x").mkdir()
    white, lines = Image.new("RGB", (48, 32), "white"), "0s: a red ball\n1.5s cut: a red ball"
    other, _, others = image_job(backbone, tmp_path / "x", white, timeline=lines, blocks=4)
    results, changed = (play(backbone, *given)[2] for given in ((job, paths), (other, others)))
    assert job.geometry.cuts == (2,) and job.frames == 49 - 3
    same = [torch.equal(a.latents, b.latents) for a, b in zip(results, changed, strict=True)]
    assert same == [False, False, True, True]


def test_from_the_command_line_R15(here):
    picture(40, 40).save("i.png")
    options = ["--backbone", "tiny", "--prompt", "a ball", "--blocks", "3", "--image", "i.png"]
    told = json.loads(specar("plan", *options, "--json").stdout)
    result = specar("generate", *options, "--out", "a.mp4")
    assert (
        result.exit_code == 0
        and "the image is 40x40: cropped to 40x27 in the middle, resized to 48x32" in result.stderr
    )
    report = json.loads(Path("a.json").read_text())
    assert told["frames"] == report["frames"] == len(frames(Path("a.mp4"))) == 37
    assert report["options"]["image"]["file"] == "i.png"
    first = torch.from_numpy(next(read_frames(Path("a.mp4")))).permute(2, 0, 1)[None]
    assert psnr(first / 127.5 - 1, still(Path("i.png"), 48, 32).image) > 30
    assert specar("generate", "--from", "a.json", "--out", "b.mp4").exit_code == 0
    assert frames(Path("a.mp4")) == frames(Path("b.mp4"))
    picture(48, 32).save("i.png")
    changed = specar("generate", "--from", "a.json", "--out", "c.mp4")
    assert "notice: the image is not the file it was made with" in changed.stderr
    assert frames(Path("c.mp4")) != frames(Path("a.mp4"))
    Path("i.png").unlink()
    refused(2, "there is no image i.png in", "generate", "--from", "a.json", "--out", "d.mp4")
    refused(2, "there is no image x.png", "generate", *options[:6], "--image", "x.png")
    refused(2, ". is a folder and no image", "generate", *options[:6], "--image", ".")
    refused(2, "give only one of image and video", "generate", *options, "--video", "x.mp4")
    Path("i.png").write_bytes(b"text")
    refused(2, "cannot read i.png as an image", "generate", *options)
    picture().save("i.png")
    refused(2, "an image has no strength: leave out --strength 0.5", "generate", *options, "--strength", "0.5")


def test_the_start_from_an_image_is_a_part_of_the_rollout_s_time(backbone, tmp_path, monkeypatch):
    """On a clock that ticks when it is looked at; the blocks themselves take no time."""
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    for module in ("rollout", "device"):
        monkeypatch.setattr(f"specar_core.{module}.time", SimpleNamespace(perf_counter=lambda: 0))
    job, _, paths = image_job(backbone, tmp_path, blocks=1)
    told = generate(job, CPU, paths, tmp_path / "a.mp4")["timings"]
    plain = generate(replace(job, source=None), CPU, paths, tmp_path / "b.mp4")["timings"]
    assert (told["rollout"], plain["rollout"]) == (2, 1)  # to look for one and read it, and to encode it
    assert told["load"] + told["text"] + told["rollout"] + told["decode"] <= told["total"]


def test_a_changed_image_is_no_continuation(backbone, tmp_path):
    job, _, paths = image_job(backbone, tmp_path, blocks=3)
    leave(job, paths, tmp_path / "a.mp4", at=1)
    other, _, _ = image_job(backbone, tmp_path, Image.new("RGB", (48, 32), "white"), blocks=3)
    with pytest.raises(SpecarError, match="the image is not the file it was made with. Put that file back"):
        generate(other, CPU, paths, tmp_path / "a.mp4", resume=True)


def test_helios_begins_with_an_image_as_its_history(
    models,  # noqa: F811
    tmp_path,
):
    """Through the files and the video; what the history holds is shown in test_helios_pair.py."""

    def made(name, colour):
        (tmp_path / name).mkdir()
        image = Image.new("RGB", (64, 64), colour)
        steps = {"target": [2], "drafter": [1, 1, 1]}
        job, _, paths = image_job(SMALL, tmp_path / name, image, blocks=2, width=64, height=64, steps=steps)
        assert job.frames == 66
        paths = {**paths, **model_files(job, models, {})}
        generate(job, CPU, paths, tmp_path / name / "a.mp4")
        return frames(tmp_path / name / "a.mp4")

    red, again, blue = made("a", "red"), made("b", "red"), made("c", "blue")
    assert len(red) == 66 and red == again and red != blue
