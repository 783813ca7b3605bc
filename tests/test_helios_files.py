"""The backbone `helios`: jobs, the published layout, and a tiny pair of that layout from download to video."""

import json
import re
import shutil
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import av
import numpy as np
import pytest
import torch
from helios_golden import TINY, small_vae
from safetensors.torch import save_file
from test_text import HF, INSIDE
from typer.testing import CliRunner

from benchmarks.helios import main as benchmark
from specar_core.backbones import backbone, helios
from specar_core.backbones.helios import HELIOS, HELIOS_MID, NEGATIVE
from specar_core.backbones.helios_published import PUBLISHED
from specar_core.cli import app
from specar_core.download import download, plan_download
from specar_core.errors import SpecarError, UsageError
from specar_core.files import find, locate, require
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.models.attention import sdpa
from specar_core.models.helios import FLOAT32_PARAMETERS, HeliosConfig, HeliosTransformer
from specar_core.models.helios_names import helios_name
from specar_core.models.vae import VaeConfig
from specar_core.models.wan import CausalWan, WanConfig
from specar_core.noise import noise
from specar_core.report import describe_models
from specar_core.rollout import rollout

CPU, CARD = Machine(torch.device("cpu"), "fp32"), Machine(torch.device("cuda"), "bf16")
PUBLISHED_CONFIG = {"_class_name": "HeliosTransformer3DModel", **TINY, "text_dim": 32}  # the recorded text encoder's
CONFIG = HeliosConfig(**{k: v for k, v in PUBLISHED_CONFIG.items() if k in HeliosConfig.__dataclass_fields__})
SMALL = replace(HELIOS, config=CONFIG, vae_config=VaeConfig(dim=2, residual_blocks=1), text_bytes=1 << 20)
SIZE = {"width": 64, "height": 64}
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def random_state(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = HeliosTransformer(CONFIG).state_dict()
        return {name: torch.randn(v.shape) / 4 if "table" in name else v.clone() for name, v in state.items()}


STATES = {"Helios-Base": random_state(0), "Helios-Distilled": random_state(1)}


def publish(repository, state, model, shards=3):
    """The transformer and the scheduler's settings, as a repository on Hugging Face holds them; returns the index."""
    folder, where = repository / "transformer", {}
    for name in ("transformer", "transformer_init", "transformer_ode", "scheduler"):
        (repository / name).mkdir(parents=True)
        (repository / name / "unused.safetensors").write_bytes(b"the second transformer, say")
    for shard in range(shards):
        file = f"diffusion_pytorch_model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in sorted(state)[shard::shards]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    told = {**PUBLISHED[model].scheduler, "shift": 1.0, "num_train_timesteps": 1000}
    (repository / "scheduler" / "scheduler_config.json").write_text(json.dumps(told))
    return folder / INDEX


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A models folder as `specar download` leaves it."""
    root = tmp_path_factory.mktemp("models")
    for model, state in STATES.items():
        publish(root / "diffusion_models" / model, state, model)
    (root / "text_encoders").mkdir()
    (root / "vae").mkdir()
    text = {name: value.half() for name, value in HF.items()}
    save_file(text | INSIDE, root / "text_encoders" / "umt5_xxl_fp16.safetensors")
    save_file(small_vae().state_dict(), root / "vae" / "wan_2.1_vae.safetensors")
    return root


# Jobs


def job(pair=HELIOS, **asked):
    return resolve(pair, prompt="a cat on a reef", **asked)


def test_defaults():
    made, notices = job()
    assert not notices and (made.width, made.height, made.blocks, made.frames) == (640, 384, 22, 726)
    assert made.schedule.targets == (0, 11) and made.schedule.max_draft_run == 10
    assert made.forwards == {"target": 2 * 50, "drafter": 20 * 6}
    assert HELIOS.texts(made) == ["a cat on a reef", NEGATIVE]
    assert [HELIOS.guidance(made, role) for role in ("target", "drafter")] == [5.0, None]
    mid, _ = job(HELIOS_MID)
    assert mid.forwards == {"target": 2 * 58, "drafter": 20 * 6}
    assert backbone("helios") is HELIOS and backbone("helios-mid") is HELIOS_MID


def test_without_guidance_there_is_one_text():
    made, notices = job(options={"guidance": 1.0})
    assert HELIOS.texts(made) == ["a cat on a reef"] and HELIOS.guidance(made, "target") is None
    assert notices == ["guidance 1 is none: the negative prompt is not used"]
    assert HELIOS.pair({}, small_vae(), made, "sdpa").recipes["target"].combine is None
    assert len(HELIOS.texts(job(schedule="draft-only")[0])) == 1


def test_guidance_that_nobody_follows_is_told():
    asked = {"guidance": 7.0, "negative": "fog"}
    assert job(options=asked)[1] == []
    _, notices = job(options=asked, schedule="draft-only")
    assert notices[1:] == [f"{name} does nothing here: no block is made with guidance" for name in asked]


def test_another_size_runs_with_a_notice():
    made, notices = job(width=704, height=384)
    assert made.width == 704 and notices == ["Helios was trained at 640x384 only; 704x384 may look worse"]


@pytest.mark.parametrize(
    "pair, asked, message",
    [
        (HELIOS, {"width": 656}, "width 656 is not a multiple of 64; use 640 or 704"),
        (HELIOS, {"steps": {"target": [20, 20, 20]}}, r"target's steps \(Helios-Base\) must be 1 number of at least 1"),
        (HELIOS, {"steps": {"drafter": [2, 2]}}, r"drafter's steps \(Helios-Distilled\) must be 3 numbers.*not 2,2"),
        (HELIOS_MID, {"steps": {"target": [20, 0, 20]}}, "at least 1, not 20,0,20"),
        (HELIOS, {"options": {"guidance": 0.5}}, "guidance must be at least 1, which is none, not 0.5"),
        (HELIOS, {"options": {"guidance": float("nan")}}, "guidance must be one such as 5.0, not nan"),
        (backbone("krea"), {"options": {"negative": "x"}}, "'negative' is not an option of krea"),
    ],
)
def test_what_cannot_be_is_refused_by_name(pair, asked, message):
    with pytest.raises(UsageError, match=message):
        job(pair, **asked)


def test_both_models_fit_a_card_of_80_gb():
    needs = HELIOS.needs(job()[0], CARD)
    assert needs.rollout["target weights"] == needs.rollout["drafter weights"] == 2 * (14_312_427_584 + 29_184_000)
    assert 57e9 < needs.peak < 70e9
    assert HELIOS.needs(job(schedule="draft-only")[0], CARD).peak < 35e9
    assert HELIOS.needs(job(width=1280, height=704)[0], CARD).peak < 80e9


# Loading


def load(path, role="target", pair=SMALL, machine=CPU):
    return pair.load_network(role, path, machine, sdpa, lambda what, done, total: None)


def test_the_pair_runs_from_its_files(models):
    """Only what the job needs is loaded, and the text encoder and the VAE are those of `krea`."""
    made, _ = job(SMALL, blocks=3, k=1, steps={"target": [2]}, **SIZE)
    paths, told = require(SMALL.files, models, "helios", {}), set()
    encoder = SMALL.load_text_encoder(paths["text encoder"], CPU, lambda *progress: None)
    prompt = encoder.encode(SMALL.texts(made))
    assert prompt.shape == (2, *SMALL.text_shape)
    pair = SMALL.load_pair(paths, made, CPU, lambda what, done, total: told.add(what))
    assert told == {"target", "drafter", "vae"} and pair.describe() == "target float32, drafter float32, attention sdpa"
    shape = SMALL.geometry.latent_shape(**SIZE)
    results = list(rollout(pair, made.schedule, lambda b: prompt, lambda b, d: noise(0, b, d, shape), **SIZE))
    assert {role: sum(r.forwards for r in results if r.role == role) for role in made.roles} == made.forwards
    assert sum(r.frames.shape[2] for r in results) == made.frames

    drafted, _ = job(SMALL, blocks=1, schedule="draft-only", **SIZE)
    alone = SMALL.load_pair({what: path for what, path in paths.items() if what != "target"}, drafted, CPU, print)
    assert alone.models.keys() == {"drafter"}


@pytest.mark.parametrize("where", ["", "transformer", f"transformer/{INDEX}"])
def test_repository_folder_and_index_name_the_same_checkpoint(where, models):
    path = models / "diffusion_models" / "Helios-Base" / where
    state = load(path).state_dict()
    assert all(torch.equal(state[name], value) for name, value in STATES["Helios-Base"].items())
    (described,) = describe_models({"target": path})
    (by_index,) = describe_models({"target": models / "diffusion_models" / HELIOS.files[0].name})
    assert described["digest"] == by_index["digest"] and described["bytes"] == by_index["bytes"] > 700_000
    assert by_index["file"] == f"Helios-Base/transformer/{INDEX}"
    (drafter,) = describe_models({"drafter": models / "diffusion_models" / HELIOS.files[1].name})
    assert drafter["digest"] != described["digest"]


def test_what_needs_float32_keeps_it(models):
    path = models / "diffusion_models" / "Helios-Base"
    network = load(path, machine=replace(CPU, precision="bf16"))
    kept = {name for name, value in network.named_parameters() if value.dtype == torch.float32}
    assert kept == {name for name in STATES["Helios-Base"] if set(FLOAT32_PARAMETERS) & set(name.split("."))}
    assert network.dtype == torch.bfloat16


def wan_names():
    """Wan's names of what Helios has in common with it, by the names here."""
    config = WanConfig(dim=32, ffn_dim=96, num_layers=2, num_heads=2, freq_dim=32, text_dim=32)
    with torch.device("meta"):
        return {helios_name(name): name for name in CausalWan(config).state_dict()}


@pytest.mark.parametrize(
    "renamed",
    [
        {"norm_out.scale_shift_table": "scale_shift_table"},
        wan_names(),
        {name: f"model.diffusion_model.{wan_names().get(name, name)}" for name in STATES["Helios-Base"]},
    ],
    ids=["older", "wan", "prefixed"],
)
def test_older_and_wan_names(renamed, tmp_path):
    state = {renamed.get(name, name): value for name, value in STATES["Helios-Base"].items()}
    loaded = load(publish(tmp_path, state, "Helios-Base")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in STATES["Helios-Base"].items())


def test_another_model_in_a_models_place_R19(models, tmp_path):
    with pytest.raises(SpecarError, match="cannot be the target of helios: it is a Wan 2.1 VAE"):
        load(models / "vae" / "wan_2.1_vae.safetensors")
    mid = publish(tmp_path, STATES["Helios-Base"], "Helios-Mid")
    for role, path, pair, message in (
        (
            "drafter",
            mid,
            SMALL,
            "drafter of helios, which is Helios-Distilled.*it is Helios-Mid, the target of helios-mid",
        ),
        ("target", mid, SMALL, "target of helios, which is Helios-Base.*it is Helios-Mid, the target of helios-mid"),
        ("target", models / "diffusion_models" / "Helios-Distilled", SMALL, "it is Helios-Distilled, the drafter"),
        ("target", models / "diffusion_models" / "Helios-Base", HELIOS_MID, "it is Helios-Base, the target of helios"),
    ):
        with pytest.raises(SpecarError, match=message):
            load(path, role, pair)
    load(mid, "target", HELIOS_MID)


def test_a_scheduler_that_is_not_told_or_not_as_published_R19(tmp_path, caplog):
    index = publish(tmp_path, STATES["Helios-Base"], "Helios-Base")
    config = tmp_path / "scheduler" / "scheduler_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "time_shift_type": "linear"}))
    load(index)
    assert "time_shift_type is linear, not exponential as that of Helios-Base; exponential is used" in caplog.text
    config.write_text("{")
    with pytest.raises(SpecarError, match="scheduler_config.json cannot be read as JSON"):
        load(index)
    config.unlink()
    load(index)
    assert "There is no scheduler_config.json by" in caplog.text and "it is taken for Helios-Base" in caplog.text
    (index.parent / config.name).write_text(json.dumps(PUBLISHED["Helios-Mid"].scheduler))
    with pytest.raises(SpecarError, match="it is Helios-Mid"):
        load(index)


# Files


def test_a_checkpoint_in_shards_is_there_when_all_of_them_are(models, tmp_path):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    assert find(HELIOS.files, tmp_path, {})[1] == []
    assert [file.what for file in find(HELIOS_MID.files, tmp_path, {})[1]] == ["target"]
    index = locate(HELIOS.files[0], tmp_path)
    assert index == tmp_path / "diffusion_models" / "Helios-Base" / "transformer" / INDEX
    next(index.parent.glob("*-00002-of-*")).unlink()
    with pytest.raises(
        SpecarError, match=r"1 of 4 model files are missing.*\n  target: .*Helios-Base/transformer.*57\.2 GB"
    ):
        require(HELIOS.files, tmp_path, "helios", {})


@pytest.fixture
def hub(models, monkeypatch):
    """The repositories, as huggingface.co addresses them."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            asked.append(path)
            return str(models / "diffusion_models") + re.sub("^/BestWishYsh|/resolve/main", "", path)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield asked
        server.shutdown()


def test_download_fetches_the_shards_and_not_the_second_transformer(hub, tmp_path):
    base, distilled = HELIOS.files[:2]
    indexes = download([base, distilled], tmp_path, pauses=())
    assert indexes == [locate(base, tmp_path), locate(distilled, tmp_path)]
    assert len(hub) == len(set(hub)) == 2 * (1 + 2 + 3)
    assert not any("transformer_" in path or "unused" in path for path in hub)
    state = load(indexes[0]).state_dict()
    assert all(torch.equal(state[name], value) for name, value in STATES["Helios-Base"].items())

    # What is there is not fetched again, and what is lost is.
    hub.clear()
    lost = next(indexes[0].parent.glob("*-00003-of-*"))
    size = sum(path.stat().st_size for path in (tmp_path / "diffusion_models" / "Helios-Base").rglob("*.*"))
    assert plan_download([base], tmp_path)[0].present == size
    lost.rename(f"{lost}.part")
    (planned,) = plan_download([base], tmp_path)
    assert not planned.complete and planned.present == size
    download([base], tmp_path, pauses=())
    assert [path.rpartition("/")[2] for path in hub] == [lost.name] and lost.exists()


# From the command line


def specar(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def decoded(path):
    with av.open(str(path)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def test_a_video_from_the_command_line(models, tmp_path, monkeypatch):
    monkeypatch.setattr(helios, "HELIOS", SMALL)
    size = ("--width", 64, "--height", 64, "--blocks", 2, "--k", 1, "--steps", "target=2")
    common = ("generate", "--models-dir", models, "--json")
    asked = ("--backbone", "helios", "--prompt", "a cat on a reef", "--negative", "rain", "--guidance", 3, *size)
    first = specar(*common, *asked, "--out", tmp_path / "first.mp4")
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert report["sampling"]["target"] == {"steps": [2], "guidance": 3.0}
    assert report["sampling"]["drafter"] == {"steps": [2, 2, 2], "guidance": None}
    assert report["options"] == {"negative": "rain", "guidance": 3.0}
    assert [block["forwards"] for block in report["blocks"]] == [2, 6] and report["frames"] == 66

    again = specar(*common, "--from", tmp_path / "first.json", "--out", tmp_path / "again.mp4")
    other = specar(*common, "--from", tmp_path / "first.json", "--negative", "a cat", "--out", tmp_path / "other.mp4")
    assert again.exit_code == other.exit_code == 0
    videos = {name: decoded(tmp_path / f"{name}.mp4") for name in ("first", "again", "other")}
    assert videos["first"].shape == (66, 64, 64, 3)
    assert np.array_equal(videos["first"], videos["again"])
    assert not np.array_equal(videos["first"], videos["other"])


def test_the_benchmark_runs(tmp_path):
    benchmark(["--smoke", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "helios-cpu-bf16.json").read_text())
    assert [video["k"] for video in report["videos"]] == [1, 1, 2, 4, 3]
    assert report["videos"][0]["forwards"] == {"target": 5, "drafter": 12}
    assert {"forward, quarter", "forward with guidance, full", "vae decode, one block"} < report["milliseconds"].keys()
