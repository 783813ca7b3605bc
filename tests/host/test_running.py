"""Graphs of SpecAR's nodes, run by a real ComfyUI."""

import io
import json

import av
import numpy as np
import pytest
from conftest import free
from graphs import node, tiny, with_latents
from PIL import Image
from safetensors.torch import load_file

from specar_core.mp4 import read_metadata


def frames(path):
    with av.open(str(path)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def latents(host, run, name="test"):
    return load_file(host.output(run.outputs[f"latents {name}"]))["latent_tensor"]


def test_a_graph_becomes_a_video(host, fresh):
    graph = tiny(blocks=3, k=2)
    run = fresh.run(graph, workflow={"nodes": ["as the page sent it"]})
    assert run.end == "execution_success", run.error
    path = host.output(run.outputs["save"])

    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 16)
        assert (stream.frames, stream.width, stream.height) == (30, 64, 48)
    pictures = frames(path)
    assert len(pictures) == 30
    assert all(picture.std() > 1 for picture in pictures), "a blank frame"
    assert all((a != b).any() for a, b in zip(pictures, pictures[1:], strict=False)), "a frame twice"

    inside = read_metadata(path)
    (report,) = run.outputs["sampler"]["specar"]
    assert json.loads(inside["specar"]) == report == run.outputs["video"]["specar"][0]
    prompt = json.loads(inside["prompt"])
    assert str(host.base) not in inside["prompt"], "a path of this machine leaves it"
    assert {name: {**node, "is_changed": None} for name, node in prompt.items()} == {
        name: {**node, "is_changed": None} for name, node in graph.items()
    }
    assert json.loads(inside["workflow"]) == {"nodes": ["as the page sent it"]}
    assert [block["role"] for block in report["blocks"]] == ["target", "target", "drafter"]
    assert (report["frames"], report["prompts"], len(report["conditioning"])) == (30, None, 64)


def test_what_the_page_is_told(fresh):
    run = fresh.run(tiny(blocks=3, seed=1))
    (schedule,) = run.outputs["schedule"]["specar_schedule"]
    told = {name: schedule[name] for name in ("blocks", "targets", "max_draft_run", "frames", "predicted_seconds")}
    assert told == {"blocks": 3, "targets": [0], "max_draft_run": 2, "frames": 30, "predicted_seconds": None}
    assert schedule["seconds"] == 30 / 16
    assert "30 frames, 1.88 s: 3 blocks, 1 by the target, longest draft run 2" in run.texts

    work = 3 * 4 + 3 * 3  # four steps and three decoded latent frames a block
    progress = run.progress("sampler")
    assert progress[-1] == (work, work)
    assert [value for value, _ in progress] == sorted(value for value, _ in progress)
    assert {total for _, total in progress[1:]} == {work}
    assert all(Image.open(io.BytesIO(preview)).size == (64, 48) for preview in run.previews)
    assert run.previews


def test_a_preview_that_fails_ends_nothing_R98(host, fresh):
    fresh.post("/probe/fail-previews", {"times": 1})
    run = fresh.run(tiny(blocks=3, seed=20))
    assert run.end == "execution_success", run.error
    assert run.previews, "the next block's were not tried"
    assert "no preview of block 0 (no room for a preview)" in host.log


@pytest.mark.parametrize("setting, value", [("SpecAR.Preview", False), ("Comfy.Execution.PreviewMethod", "none")])
def test_no_preview_if_a_setting_says_so_R97(fresh, setting, value):
    fresh.post(f"/settings/{setting}", value)
    run = fresh.run(tiny(seed=21))
    fresh.post(f"/settings/{setting}", True if value is False else "default")
    assert run.end == "execution_success" and not run.previews
    assert run.progress("sampler")[-1][0] == run.progress("sampler")[-1][1]


def test_an_unchanged_graph_runs_nothing(fresh):
    graph = tiny(seed=2)
    first, again = fresh.run(graph), fresh.run(graph)
    assert "sampler" in first.executed
    assert again.end == "execution_success" and not again.executed
    assert again.outputs["sampler"] == first.outputs["sampler"]


def test_only_what_depends_on_a_change_runs(fresh):
    fresh.run(tiny(seed=3))
    assert fresh.run(tiny(seed=4)).executed == {"sampler", "video", "save"}
    assert fresh.run(tiny(seed=4, filename_prefix="video/other")).executed == {"save"}


def test_a_video_that_was_removed_is_made_anew(host, fresh):
    fresh.run(tiny(seed=15))
    for name in ("again", "and again"):
        for path in (host.base / "temp").glob("specar-*.mp4"):
            path.unlink()
        run = fresh.run(tiny(seed=15, filename_prefix=f"video/{name}"))
        assert run.end == "execution_success", run.error
        assert run.executed == {"video", "save"}
        assert not fresh.run(tiny(seed=15, filename_prefix=f"video/{name}")).executed


def test_the_same_inputs_give_the_same_video(host, fresh):
    graph = with_latents(tiny(seed=5, blocks=3))
    first = fresh.run(graph)
    fresh.run(tiny(seed=6, policy="draft-only"))
    free(fresh)
    second = fresh.run(graph)
    assert "sampler" in second.executed
    assert (latents(host, first) == latents(host, second)).all()
    assert (frames(host.output(first.outputs["save"])) == frames(host.output(second.outputs["save"]))).all()


def test_two_samplers_in_one_graph_share_nothing(host, fresh):
    graph = with_latents(tiny(seed=7))
    second = {**graph["sampler"]["inputs"], "seed": 8}
    both = with_latents({**graph, "second": node("SpecARSpeculativeSampler", **second)}, "second", "second")
    together = fresh.run(both)
    free(fresh)
    alone = fresh.run({**graph, "sampler": node("SpecARSpeculativeSampler", **second)})
    free(fresh)
    first = fresh.run(graph)
    assert (latents(host, together) == latents(host, first)).all()
    assert (latents(host, together, "second") == latents(host, alone)).all()
    assert (latents(host, alone) != latents(host, first)).any()


def test_images_on_request(host, fresh):
    graph = {**tiny(seed=9), "images": node("ProbeImages", images=["video", 1])}
    off = fresh.run(graph)
    assert "IMAGE is empty while `images` is off" in off.error
    graph["video"]["inputs"]["images"] = True
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    assert run.outputs["images"]["shape"] == [18, 48, 64, 3]
    means = frames(host.output(run.outputs["save"])).mean(axis=(1, 2, 3)) / 255
    assert np.abs(means - run.outputs["images"]["means"]).max() < 0.01


def test_changed_latents_are_decoded_anew(host, fresh):
    graph = tiny(seed=10)
    graph["half"] = node("LatentMultiply", samples=["sampler", 0], multiplier=0.5)
    graph["cut"] = node("LatentCut", samples=["sampler", 0], dim="t", index=0, amount=4)
    graph["large"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bilinear", scale_by=2.0)
    original = fresh.run(graph)
    runs = {}
    for name in ("half", "cut", "large"):
        changed = {**graph, "video": node("SpecARVideoDecode", samples=[name, 0], vae=["loader", 2])}
        changed["video"]["inputs"]["report"] = ["sampler", 1]
        runs[name] = run = fresh.run(changed)
        assert run.end == "execution_success", run.error
        told = "specar" in read_metadata(host.output(run.outputs["save"]))
        assert told == ("video" in run.outputs) == (name == "half"), "the report is of another video"
        assert told != any("the report is left out" in text for text in run.texts)
    pictures, before = (frames(host.output(one.outputs["save"])) for one in (runs["half"], original))
    assert pictures.shape == before.shape and (pictures != before).any()
    assert frames(host.output(runs["large"].outputs["save"])).shape == (18, 96, 128, 3)
    changed["cut"]["inputs"]["amount"] = 1
    changed["video"]["inputs"]["samples"] = ["cut", 0]
    assert "`samples` are too short: the first 3 frames are left out" in fresh.run(changed).error


def test_cancelling_while_latents_are_decoded_anew(host, fresh):
    graph = tiny(seed=16, blocks=12)
    graph["large"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bilinear", scale_by=6.0)
    graph["video"]["inputs"]["samples"] = ["large", 0]

    def cancel(prompt_id, nodes):
        if nodes.get("video", {}).get("value"):
            fresh.post("/interrupt", {"prompt_id": prompt_id})

    before = set((host.base / "output").iterdir())
    assert fresh.run(graph, on_progress=cancel).end == "execution_interrupted"
    assert set((host.base / "output").iterdir()) == before, "nothing goes on from there"
    assert list((host.base / "temp").glob("specar-*.partial.mp4"))


def test_an_unchanged_copy_is_recognised(fresh):
    graph = tiny(seed=11)
    graph["same"] = node("LatentMultiply", samples=["sampler", 0], multiplier=1.0)
    graph["video"]["inputs"]["samples"] = ["same", 0]
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    assert {total for _, total in run.progress("video")} == {1}, "it was decoded again"


def test_comfyui_decodes_the_latents_too(fresh):
    graph = {**tiny(seed=12), "decode": node("VAEDecode", samples=["sampler", 0], vae=["loader", 2])}
    graph["images"] = node("ProbeImages", images=["decode", 0])
    run = fresh.run(graph)
    assert run.end == "execution_success", run.error
    assert run.outputs["images"]["shape"] == [21, 48, 64, 3]  # 12 H - 3


def test_cancelling_keeps_the_finished_blocks_and_queueing_again_goes_on(host, fresh):
    graph = with_latents(tiny(blocks=30, seed=13))
    run = fresh.run(graph, on_preview=lambda prompt_id: fresh.post("/interrupt", {"prompt_id": prompt_id}))
    assert run.end == "execution_interrupted"
    done, work = run.progress("sampler")[-1]
    assert done < work / 2
    (partial,) = (host.base / "output").glob("specar-*.partial.mp4")
    kept = json.loads(read_metadata(partial)["specar"])
    assert 1 <= len(kept["blocks"]) < 15
    assert len(frames(partial)) == kept["frames"] == 12 * len(kept["blocks"]) - 6
    assert any(f"the finished blocks are in output/{partial.name}" in text for text in run.texts)

    other = fresh.run(tiny(seed=13))
    assert other.end == "execution_success", other.error
    assert partial.exists(), "another graph's run is no business of this one"

    resumed = fresh.run(graph)
    assert resumed.end == "execution_success", resumed.error
    assert resumed.outputs["sampler"]["specar"][0]["resumed_at"] == len(kept["blocks"])
    assert not list((host.base / "output").glob("specar-*"))
    free(fresh)
    whole = fresh.run(graph)
    assert whole.outputs["sampler"]["specar"][0]["resumed_at"] is None
    assert (latents(host, resumed) == latents(host, whole)).all()
    assert (frames(host.output(resumed.outputs["save"])) == frames(host.output(whole.outputs["save"]))).all()


def test_a_run_without_a_partial_video_or_without_its_lock_is_told(host, fresh):
    output, graph = host.base / "output", tiny(blocks=30, seed=17)

    def cancel(prompt_id):
        for segment in output.glob("specar-*.run/segment-*.mp4"):
            segment.unlink()  # so that, as on a full disk, no partial video can be made
            fresh.post("/interrupt", {"prompt_id": prompt_id})

    run = fresh.run(graph, on_preview=cancel)
    (folder,) = output.glob("specar-*")
    assert any(f"the finished blocks are in output/{folder.name}; queue the graph again" in text for text in run.texts)
    (folder / "lock").rename(output / "lock")
    assert f"{folder} is no longer whole: remove that folder" in fresh.run(graph).error
    (output / "lock").rename(folder / "lock")
    assert fresh.run(graph).outputs["sampler"]["specar"][0]["resumed_at"] >= 4


def test_free_empties_everything(fresh):
    fresh.run(tiny(seed=14))
    there = fresh.get("/probe")
    assert there["CausalWan"] == 2
    assert there["KeyValueCache"] == there["WanVAE"] == 0, "run state outlived its run"
    free(fresh)


REFUSALS = {
    "size": (dict(width=100), "width 100 is not a multiple of 16; use 96 or 112"),
    "positions": (dict(policy="list", positions="0,9"), "block 9 lies outside the video: its 2 blocks are 0 to 1"),
    "no number": (dict(policy="list", positions="0,x"), "a target block must be a whole number, not 'x'"),
    "missing text encoder": (dict(backbone="krea"), "the text encoder of krea is missing"),
    "missing models": (dict(backbone="krea", positive=["odd", 0], vae=["pixels", 0]), "2 of 2 model files are missing"),
    "unknown file": (dict(target="gone.safetensors"), "gone.safetensors"),
    "negative": (dict(negative=["text", 0]), "tiny runs without guidance and has no use for `negative`"),
    "width of the text": (dict(positive=["odd", 0]), "`positive` is 4096 wide, and tiny needs 64"),
    "two prompts": (dict(positive=["two", 0]), "`positive` must hold one prompt"),
    "no VAE of Wan": (dict(vae=["pixels", 0]), "cannot be the VAE"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(client, name):
    changes, message = REFUSALS[name]
    graph = tiny()
    graph["sampler"]["inputs"].setdefault("negative", None)
    graph |= {
        "odd": node("ProbeConditioning", width=4096, prompts=1),
        "two": node("ProbeConditioning", width=64, prompts=2),
        "pixels": node("VAELoader", vae_name="pixel_space"),
    }
    for key, value in changes.items():
        for owner in graph.values():
            if key in owner["inputs"]:
                owner["inputs"][key] = value
    if graph["sampler"]["inputs"]["negative"] is None:
        del graph["sampler"]["inputs"]["negative"]
    run = client.run(graph)
    assert run.end != "execution_success"
    assert message in run.error
    assert client.run(tiny()).end == "execution_success"
