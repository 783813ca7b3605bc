"""Start images, source videos, prompts over time, LoRAs and races, through a real ComfyUI."""

import json

import av
import numpy as np
import pytest
import torch
from conftest import free
from graphs import PROMPT, node, tiny, with_latents
from PIL import Image
from safetensors.torch import save_file
from test_agreement import MACHINE, difference, normalised
from test_running import frames, latents

from specar_core.backbones.tiny import TINY
from specar_core.generate import Listener, generate
from specar_core.inputs import Inputs
from specar_core.job import resolve
from specar_core.mp4 import read_metadata

SIZE = {"width": 64, "height": 48}
TIMELINE = """0s: a large red ball bouncing on a plain grey background
0.6s fade 0.5s: a small blue star on a plain grey background
1.2s cut: a green ring on a plain navy background"""


@pytest.fixture(scope="module")
def picture(host):
    """A file in ComfyUI's input folder, of another shape than the video."""
    y, x = np.mgrid[0:60, 0:120]
    colours = np.stack([x * 2, y * 4, 255 - x * 2], -1).astype(np.uint8)
    Image.fromarray(colours).save(host.base / "input" / "start.png")
    return host.base / "input" / "start.png"


@pytest.fixture(scope="module")
def clip(host):
    """Two seconds of a moving bar at 25 frames a second, with a tone."""
    path = host.base / "input" / "bar.mp4"
    with av.open(str(path), "w") as file:
        video = file.add_stream("libx264", rate=25, width=96, height=48, pix_fmt="yuv420p")
        audio = file.add_stream("aac", rate=32000, layout="mono")
        for index in range(50):
            shown = np.full((48, 96, 3), 60, np.uint8)
            shown[:, index : index + 30] = (220, 60, 40)
            file.mux(video.encode(av.VideoFrame.from_ndarray(shown)))
        file.mux(video.encode(None))
        tone = np.sin(np.arange(64000) * 0.1, dtype=np.float32)[None]
        sound = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
        sound.sample_rate = 32000
        file.mux([*audio.encode(sound), *audio.encode(None)])
    return path


def steered(**inputs):
    """The graph of `tiny`, with further inputs of the sampler."""
    graph = tiny()
    graph["sampler"]["inputs"] |= inputs
    return graph


def made_by_the_library(path, inputs=Inputs(), **asked):  # noqa: B008 (frozen)
    """Its latents, and its video."""
    source, _ = inputs.source(TINY.geometry.fps)
    job, _ = inputs.with_loras(resolve(TINY, blocks=2, schedule="spread:1", source=source, **SIZE, **asked)[0])
    results = []
    listener = Listener(block=results.append)
    generate(job, MACHINE, {**TINY.shipped, **inputs.paths}, path, listener=listener)
    return torch.cat([result.latents for result in results], dim=2), frames(path)


def agrees(host, run, expected):
    assert run.end == "execution_success", run.error
    assert difference(normalised(latents(host, run)), expected[0]) < 1e-4
    levels = frames(host.output(run.outputs["save"])).astype(int) - expected[1]
    assert abs(levels).max() <= 4


def test_a_video_begins_with_an_image(host, fresh, picture, tmp_path):
    graph = steered(start_image=["image", 0]) | {"image": node("LoadImage", image=picture.name)}
    run = fresh.run(with_latents(graph))
    agrees(host, run, made_by_the_library(tmp_path / "a.mp4", Inputs(kind="image", path=picture), prompt=PROMPT))
    shown = frames(host.output(run.outputs["save"]))
    assert len(shown) == 25
    assert run.outputs["video"]["specar"] == run.outputs["sampler"]["specar"]
    start = np.asarray(Image.open(picture).crop((20, 0, 100, 60)).resize((64, 48), Image.Resampling.BICUBIC))
    error = ((shown[0].astype(float) - start) ** 2).mean()
    assert 10 * np.log10(255**2 / error) > 30
    assert any("the image is 120x60: cropped to 80x60 in the middle, resized to 64x48" in text for text in run.texts)


def test_a_video_follows_another(host, fresh, clip, tmp_path):
    graph = steered(source_video=["source", 0], strength=0.4) | {"source": node("LoadVideo", file=clip.name)}
    run = fresh.run(with_latents(graph))
    inputs = Inputs(kind="video", path=clip, strength=0.4)
    agrees(host, run, made_by_the_library(tmp_path / "a.mp4", inputs, prompt=PROMPT))
    with av.open(str(host.output(run.outputs["save"]))) as file:
        assert file.streams.video[0].frames == 18
        assert file.streams.audio and abs(float(file.duration / av.time_base) - 18 / 16) < 0.1


def test_a_part_of_a_video_and_one_in_memory(host, fresh, clip):
    source = {"source": node("LoadVideo", file=clip.name)}
    part = {"part": node("Video Slice", video=["source", 0], start_time=1.0, duration=0.5, strict_duration=False)}
    parts = {"pieces": node("GetVideoComponents", video=["source", 0])}
    whole = {"whole": node("CreateVideo", images=["pieces", 0], fps=25.0)}
    for nodes, name in ((part, "part"), (parts | whole, "whole")):
        run = fresh.run(steered(source_video=[name, 0], strength=0.3) | source | nodes)
        assert run.end == "execution_success", run.error
        (report,) = run.outputs["sampler"]["specar"]
        assert report["options"]["strength"] == 0.3
        held = any("the source video ends at 0.5" in text for text in run.texts)
        assert held == (name == "part")
        free(fresh)
        again = fresh.run(steered(source_video=[name, 0], strength=0.3) | source | nodes)
        assert again.outputs["sampler"]["specar"][0]["options"] == report["options"], "another video to resume"


def prompts_over_time(**inputs):
    graph = tiny(positive=["prompts", 0], **inputs)
    del graph["text"]
    graph["prompts"] = node("SpecARPromptTimeline", models=["loader", 0], clip=["loader", 1], timeline=TIMELINE)
    return graph


def test_prompts_over_time(host, fresh, tmp_path):
    graph = prompts_over_time(blocks=4, policy="keyed", k=3)
    graph["schedule"]["inputs"]["prompts"] = ["prompts", 0]
    graph["half"] = node("LatentMultiply", samples=["sampler", 0], multiplier=0.999)
    graph["anew"] = node("SpecARVideoDecode", samples=["half", 0], vae=["loader", 2], images=True)
    graph["images"] = node("ProbeImages", images=["anew", 1])
    graph["part"] = node("LatentCut", samples=["sampler", 0], dim="t", index=0, amount=4)
    graph["short"] = node("SpecARVideoDecode", samples=["part", 0], vae=["loader", 2], images=True)
    graph["few images"] = node("ProbeImages", images=["short", 1])
    run = fresh.run(with_latents(graph))
    job, _ = resolve(TINY, timeline=TIMELINE, blocks=4, schedule="keyed:3", **SIZE)
    results = []
    generate(job, MACHINE, TINY.shipped, tmp_path / "a.mp4", listener=Listener(block=results.append))
    expected = torch.cat([result.latents for result in results], dim=2)
    agrees(host, run, (expected, frames(tmp_path / "a.mp4")))

    (told,) = run.outputs["prompts"]["specar_timeline"]
    assert [(cue["block"], cue.get("fade"), cue.get("cut")) for cue in told["cues"]] == [
        (0, None, None),
        (1, 1, None),
        (2, None, True),
    ]
    assert any("block 2 cut: a green ring" in text for text in run.texts)
    assert run.outputs["sampler"]["specar"][0]["schedule"]["targets"] == [0, 1, 2]
    assert run.outputs["images"]["shape"][0] == job.frames, "decoded anew, a cut begins a new stream too"
    assert run.outputs["few images"]["shape"][0] == 1 + 3 * 4 - TINY.geometry.dropped
    means = frames(host.output(run.outputs["save"])).mean(axis=(1, 2, 3)) / 255
    assert np.abs(means - run.outputs["images"]["means"]).max() < 0.02


def test_prompts_of_another_pair_are_refused(fresh):
    graph = prompts_over_time()
    graph["other"] = node("SpecARLoader", **{**graph["loader"]["inputs"], "backbone": "helios"})
    graph["prompts"]["inputs"]["models"] = ["other", 0]
    assert "snapped to the blocks of helios, and the models are tiny" in fresh.run(graph).error


def test_prompts_that_were_combined_are_refused(fresh):
    graph = prompts_over_time()
    graph["text"] = tiny()["text"]
    graph["both"] = node("ConditioningCombine", conditioning_1=["prompts", 0], conditioning_2=["text", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]
    assert "those of one SpecAR Prompt Timeline" in fresh.run(graph).error
    graph = prompts_over_time()
    graph["prompts"]["inputs"]["timeline"] = "0s: a\n0s: b"
    assert "line 2 of the timeline is not after the one above" in fresh.run(graph).error


def test_a_video_for_each_prompt_of_a_list(host, fresh):
    graph = tiny(positive=["list", 0])
    del graph["text"]
    graph["list"] = node("SpecARPromptList", clip=["loader", 1], prompts="a red ball\n\n# not this\na blue star\n")
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    files = run.outputs["save"]["images"]
    first, second = (frames(host.base / "output" / file["subfolder"] / file["filename"]) for file in files)
    assert first.shape == second.shape and (first != second).any()
    assert fresh.get("/probe")["CausalWan"] == 2, "the models were loaded more than once"


@pytest.fixture(scope="module")
def lora(host):
    """Changes of the target's attention, in ComfyUI's names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in TINY.outline("target").named_parameters():
        if name.endswith("self_attn.q.weight"):
            for part, shape in (("lora_down", (2, weight.shape[1])), ("lora_up", (weight.shape[0], 2))):
                stored = f"diffusion_model.{name.removesuffix('.weight')}.{part}.weight"
                tensors[stored] = torch.randn(shape, generator=generator) / 2
    folder = host.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "style.safetensors")
    save_file({"text_model.nothing.lora_up.weight": torch.zeros(2, 2)}, folder / "other.safetensors")
    return folder / "style.safetensors"


def with_lora(file, strength=0.8, role="auto"):
    graph = with_latents(tiny(models=["lora", 0]))
    graph["lora"] = node("SpecARLora", models=["loader", 0], lora=file, strength=strength, role=role)
    return graph


def test_a_lora(host, fresh, lora, tmp_path):
    before = fresh.run(with_latents(tiny()))
    run = fresh.run(with_lora(lora.name))
    inputs = Inputs(loras=((None, lora, 0.8),))
    agrees(host, run, made_by_the_library(tmp_path / "a.mp4", inputs, prompt=PROMPT))
    (told,) = run.outputs["sampler"]["specar"][0]["options"]["lora"]
    assert (told["file"], told["strength"], told["roles"]) == ("style.safetensors", 0.8, ["target"])
    assert any("style.safetensors" in text for text in run.texts)
    assert not fresh.run(with_lora(lora.name)).executed
    assert fresh.get("/probe")["CausalWan"] == 2, "a second copy of the weights"
    free(fresh)
    fresh.run(with_lora(lora.name))
    after = fresh.run(with_latents(tiny()))
    assert (latents(host, after) == latents(host, before)).all(), "not undone"
    assert (latents(host, run) != latents(host, before)).any()


def test_a_lora_that_changes_nothing(host, fresh, lora):
    assert "other.safetensors" in fresh.run(with_lora("other.safetensors")).error
    off = fresh.run(with_lora(lora.name, strength=0.0))
    none = fresh.run(with_lora("none"))
    assert off.end == none.end == "execution_success", off.error + none.error
    assert (latents(host, off) == latents(host, none)).all()
    assert (
        "other.safetensors" in host.client.get("/object_info")["SpecARLora"]["input"]["required"]["lora"][1]["options"]
    )


def routed(custom, **inputs):
    """By SpecAR's own node for prompts, which tells their text."""
    graph = tiny(**{"policy": "custom", "positive": ["list", 0], **inputs})
    graph["list"] = node("SpecARPromptList", clip=["loader", 1], prompts=PROMPT)
    graph["schedule"]["inputs"]["custom"] = custom
    del graph["text"]
    return graph


def test_a_router(host, fresh, tmp_path):
    run = fresh.run(with_latents(routed("sdvg:0.7", blocks=4)))
    results = []
    job, _ = resolve(TINY, prompt=PROMPT, blocks=4, schedule="sdvg:0.7", **SIZE)
    expected = generate(job, MACHINE, TINY.shipped, tmp_path / "a.mp4", listener=Listener(block=results.append))
    made = torch.cat([result.latents for result in results], dim=2), frames(tmp_path / "a.mp4")
    agrees(host, run, made)
    (report,) = run.outputs["sampler"]["specar"]
    assert report["schedule"] == expected["schedule"] and not report["schedule"]["planned"]
    rejected = [block["rejected"] for block in report["blocks"]]
    assert rejected == [block["rejected"] for block in expected["blocks"]] and 0 < sum(rejected) < 3
    assert any("at least 1 by the target, longest draft run at most 3" in text for text in run.texts)
    assert any(f"by the target, {sum(rejected)} drafts rejected" in text for text in run.texts)


def test_a_time_budget_and_stitched_blocks(host, fresh):
    run = fresh.run(routed("time-budget:60@1", blocks=3))
    assert run.end == "execution_success", run.error
    schedule = run.outputs["sampler"]["specar"][0]["schedule"]
    assert (schedule["policy"], schedule["targets"][0]) == ("time-budget:60@1", 0)
    graph = tiny(blocks=2, k=2)
    graph["schedule"]["inputs"]["stitch"] = 2
    run = fresh.run(graph)
    (report,) = run.outputs["sampler"]["specar"]
    assert report["options"]["stitch"] == 2 and [block["forwards"] for block in report["blocks"]] == [4, 4]
    graph["loader"]["inputs"]["backbone"] = "helios"
    graph["text"] = node("ProbeConditioning", width=4096, prompts=1)
    graph["schedule"]["inputs"] |= {"width": 0, "height": 0}
    assert "'stitch' is not an option of helios" in fresh.run(graph).error


def test_routers_that_cannot_judge_are_refused(fresh):
    graph = routed("sdvg:0.5")
    graph["text"] = tiny()["text"]
    graph["sampler"]["inputs"]["positive"] = ["text", 0]
    assert "`positive` does not tell it: connect a SpecAR Prompt Timeline" in fresh.run(graph).error
    graph = routed("sdvg:0.5")
    graph["list"]["inputs"]["prompts"] = "a fox in snow"
    assert "drafts of 'a fox in snow' cannot be judged" in fresh.run(graph).error
    assert "unknown schedule 'sdgv:1'" in fresh.run(routed("sdgv:1")).error
    graph = routed("sdvg:0.5", positive=["probe", 0], backbone="krea")
    graph["list"] = graph["probe"] = node("ProbeConditioning", width=4096, prompts=1)
    error = fresh.run(graph).error
    assert "pip install torch torchvision image-reward" in error and "SPECAR_IMAGE_REWARD" in error


def race(**more):
    """The drafter against the target, from the same noise."""
    graph = tiny()
    graph["fast"] = node("SpecARScheduler", **{**graph["schedule"]["inputs"], "policy": "draft-only"})
    graph["drafted"] = node("SpecARSpeculativeSampler", **{**graph["sampler"]["inputs"], "schedule": ["fast", 0]})
    graph["second"] = node("SpecARVideoDecode", samples=["drafted", 0], vae=["loader", 2])
    graph["race"] = node(
        "SpecARRace",
        video_1=["video", 0],
        report_1=["sampler", 1],
        video_2=["second", 0],
        report_2=["drafted", 1],
        **more,
    )
    graph["save"]["inputs"]["video"] = ["race", 0]
    return graph


def test_a_race(host, fresh):
    run = fresh.run(race())
    assert run.end == "execution_success", run.error
    (told,) = run.outputs["race"]["specar_race"]
    assert [label.partition(",")[0] for label in told["labels"]] == ["spread:1", "draft-only"]
    for video in json.loads(told["page"].split('id="race-data">')[1].split("</script>")[0])["clips"]:
        assert len(host.client.get(f"/{video['video']}")) > 1000, "the page cannot get the video"
    beside = frames(host.output(run.outputs["save"]))
    assert beside.shape == (18, 64, 128, 3)
    assert np.abs(beside[:, 16:, :64].astype(int) - beside[:, 16:, 64:]).max() > 20, "twice the same video"
    assert beside[:, :16].max() > 150 and np.median(beside[:, :16]) < 20, "labels above"
    assert "specar" not in read_metadata(host.output(run.outputs["save"]))
    assert "race" not in fresh.run(race()).executed
    assert "<svg" not in told["page"]


def test_a_race_with_scores(fresh):
    graph = race(scores=True)
    graph["schedule"]["inputs"]["policy"] = "target-only"
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    page = run.outputs["race"]["specar_race"][0]["page"]
    assert page.count("<svg") >= 5 and ">PSNR<" in page, "likeness to the target-only video"
    assert any("measuring" in text for text in run.texts)


def test_a_race_of_half_a_third_video_is_refused(fresh):
    assert "connect both `video_3` and `report_3`" in fresh.run(race(video_3=["video", 0])).error


def test_a_race_with_another_videos_report_is_refused(fresh):
    graph = race()
    graph["race"]["inputs"] |= {"report_1": ["drafted", 1], "report_2": ["sampler", 1]}
    assert "`report_1` is not of `video_1`" in fresh.run(graph).error


def test_files_of_something_else_are_named(host, fresh):
    for name, content in (("empty.mp4", b""), ("page.mp4", b"<html>" * 100), ("page.safetensors", b"<html>" * 100)):
        for folder in ("input", "models/text_encoders", "models/vae"):
            (host.base / folder / name).write_bytes(content)
    for name in ("empty.mp4", "page.mp4"):
        run = fresh.run(steered(source_video=["source", 0]) | {"source": node("LoadVideo", file=name)})
        assert f"{name} as a video: " in run.error
    for what in ("text_encoder", "vae"):
        graph = tiny()
        graph["loader"]["inputs"][what] = "page.safetensors"
        assert "page.safetensors is a web page, not a checkpoint" in fresh.run(graph).error


def test_one_source_only(fresh, picture, clip):
    graph = steered(start_image=["image", 0], source_video=["source", 0])
    graph |= {"image": node("LoadImage", image=picture.name), "source": node("LoadVideo", file=clip.name)}
    assert "connect only one of `start_image` and `source_video`" in fresh.run(graph).error
