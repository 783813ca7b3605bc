"""Cases of docs/cases.md, by id: what users of comparable tools met. More of them are in the other files."""

import gc
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import CPU, frames
from models import golden_pair
from safetensors.torch import load_file, save_file
from small import VAE_CONFIG
from test_rollout import PROMPT, latents, play, seeded
from typer.testing import CliRunner

from specar_core import cli, plan, tensor_files
from specar_core.backbones import backbone as named_backbone
from specar_core.backbones.session import Rolling
from specar_core.errors import SpecarError, UsageError
from specar_core.generate import Listener, generate
from specar_core.geometry import Geometry
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.models.tiny_text import TinyText
from specar_core.models.vae import WanVAE
from specar_core.mp4 import read_metadata
from specar_core.noise import noise
from specar_core.refusal import GPU_MARGIN
from specar_core.rollout import rollout
from specar_core.schedule import Schedule, spread

ROOT = Path(__file__).parents[1]
STRANGE = "\u89c6\u9891 \u0442\u0435\u0441\u0442 \xe9"


@pytest.fixture
def specar(here):
    def run(*arguments):
        return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])

    return run


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Long runs


def vae(residual_blocks: int = 2) -> WanVAE:
    network = WanVAE(replace(VAE_CONFIG, residual_blocks=residual_blocks)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for value in network.parameters():
        value.fill_(1.0)
        if value.dim() > 1:
            value.copy_(torch.randn(value.shape, generator=generator) / value[0].numel() ** 0.5)
    return network


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_2000_blocks_in_flat_memory_and_constant_time_R35_R13b():
    """Of one latent frame each, so that the drafter's rolling cache passes row 1,024, where tables of angles end."""
    one = Geometry(fps=16, latent_frames=1, size_multiple=16)
    pair = golden_pair(
        drafter="krea/sf_rollout_global",
        geometry=one,
        context_frames=1,
        steps=(1000.0,),
        vae=vae(residual_blocks=1),
        rolling={"drafter": Rolling(4, 1)},
    )
    shape = one.latent_shape(16, 16)
    memory, seconds = {}, {}
    for result in rollout(
        pair, spread(2000, 100), lambda b: PROMPT, lambda b, d: noise(0, b, d, shape), height=16, width=16
    ):
        if result.index in (399, 1199, 1999):
            gc.collect()
            memory[result.index], seconds[result.index] = resident(), time.process_time()
    assert memory[1999] - memory[399] < 4e6
    assert seconds[1999] - seconds[1199] < 2 * (seconds[1199] - seconds[399])  # of the CPU, not of the clock
    assert torch.isfinite(result.latents).all()


@pytest.mark.parametrize("frames, blocks", [(81, 8), (84, 8), (161, 14), (1001, 84)])
@pytest.mark.parametrize("rolling", [{}, {"drafter": Rolling(9, 3)}])
def test_more_frames_than_the_models_were_trained_on_R13(frames, blocks, rolling):
    job, _ = resolve(named_backbone("krea"), frames=frames)
    assert job.blocks == blocks
    pair = golden_pair(drafter="krea/sf_rollout_global", rolling=rolling, steps=(1000.0,), vae=vae(1))
    shape = pair.geometry.latent_shape(48, 16)  # tokens a frame follow from the size
    delivered = 0
    for result in rollout(
        pair, job.schedule, lambda b: PROMPT, lambda b, d: noise(0, b, d, shape), height=16, width=48
    ):
        delivered += result.frames.shape[2]
    assert delivered == job.frames >= frames


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_ten_interrupts_leave_no_memory_and_no_trace_R11():
    expected, before = latents(play(spread(2, 1))), 0
    for attempt in range(10):

        def stop(block, step, attempt=attempt):
            if (block, step.index) == (1, 1 + attempt % 3):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            play(spread(3, 1), on_step=stop)
        assert torch.equal(latents(play(spread(2, 1))), expected)
        gc.collect()
        before = before or resident()
    assert resident() - before < 8e6


# What ran before, and what looks on, changes nothing


def test_a_mixed_run_between_two_others_leaves_no_trace_R34_R33():
    alone, mixed = Schedule(3, (0, 1, 2)), spread(3, 1)
    first, _, third = (latents(play(schedule)) for schedule in (alone, mixed, alone))
    assert torch.equal(first, third)


def test_a_run_does_not_depend_on_who_watches_R25():
    watched = []
    once = play(spread(3, 1))
    again = play(spread(3, 1), on_step=lambda block, step: watched.append(torch.randn(3)))
    assert watched and torch.equal(latents(once), latents(again))


def test_latents_that_are_given_are_used_R23():
    given = latents(play(spread(1, 1), noise=seeded(5)))
    result = play(spread(2, 1), known=lambda block: given if block == 0 else None)
    assert torch.equal(result[0].latents, given) and result[0].forwards == 0
    assert not torch.equal(result[1].latents, play(spread(2, 1))[1].latents)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_every_seed_has_noise_of_its_own_R103b(seed):
    others = [value for value in (0, 1, 2, 2**63, 2**64 - 1) if value != seed]
    assert all(not torch.equal(noise(seed, 0, 0, (64,)), noise(other, 0, 0, (64,))) for other in others)
    assert resolve(named_backbone("tiny"), seed=seed)[0].seed == seed
    with pytest.raises(UsageError, match="0 to .*not -1"):
        resolve(named_backbone("tiny"), seed=-1)


# Interrupts


class Interrupted(Exception):
    pass


def at(stage: str) -> Listener:
    """Raises once, at a stage of a run."""

    def loading(what, done, total):
        if stage == f"load the {what}":
            raise Interrupted

    def step(block, step):
        if block == 2 and stage == step.kind:
            raise Interrupted

    def block(result):
        if result.index == 2 and stage == "encode":
            raise Interrupted

    return Listener(loading, step, block)


STAGES = ("text", "load the target", "load the drafter", "load the vae", "denoise", "commit", "decode", "encode")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_at_any_stage_is_followed_by_a_clean_run_R95(backbone, tmp_path, stage, monkeypatch):
    """Downloads: `test_an_exception_in_progress_keeps_what_has_arrived`."""

    def interrupted(*_):
        raise Interrupted

    job, _ = resolve(backbone, prompt="a ball", blocks=4, k=2, options={"drafter_context": "rolling:9"})
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        if stage == "text":
            patched.setattr(TinyText, "encode", interrupted)
        generate(job, CPU, backbone.shipped, out, listener=at(stage))
    report = generate(job, CPU, backbone.shipped, out, resume=(tmp_path / "a.run").exists())
    kept = 0 if stage.startswith(("load", "text")) else 3 if stage == "encode" else 2
    assert (report["resumed_at"] or 0) == kept
    generate(job, CPU, backbone.shipped, tmp_path / "b.mp4")
    assert frames(out) == frames(tmp_path / "b.mp4")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.mp4", "b.json", "b.mp4"]


# Not a number


def damaged(backbone, folder: Path, role: str) -> Path:
    weights = load_file(backbone.shipped[role])
    name = "head.head.bias" if role != "vae" else "decoder.head.2.bias"
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, folder / "nan.safetensors")
    return folder / "nan.safetensors"


@pytest.mark.parametrize("role, words", [("target", r"block 0 (target) came out with NaN"), ("vae", "decoded to NaN")])
def test_not_a_number_from_the_start_is_a_failure_and_leaves_no_video_R37_R39(backbone, specar, tmp_path, role, words):
    path = damaged(backbone, tmp_path, role)
    run = specar("generate", "--prompt", "ball", "--blocks", 2, f"--{role}", path, "--out", "a.mp4")
    assert run.exit_code == 1 and words in run.stderr and "precision" in run.stderr
    assert "blocks before" not in run.stderr
    assert os.listdir(tmp_path) == ["nan.safetensors"]


# Lengths, sizes, rates


def test_every_length_is_delivered_as_told_R90_R18():
    schedule = spread(18, 1)
    delivered = [result.frames.shape[2] for result in play(schedule, golden_pair(steps=(1000.0,), vae=vae(1)))]
    for count in range(1, 201):
        job, _ = resolve(named_backbone("krea"), frames=count)
        assert sum(delivered[: job.blocks]) == job.frames >= count
        assert not sum(delivered[: job.blocks - 1]) >= count  # and no block more than it takes
        assert resolve(named_backbone("krea"), seconds=count / 16)[0].blocks == job.blocks


def test_a_size_is_never_changed_silently_R74_R89():
    job, _ = resolve(named_backbone("krea"), width=128, height=128)
    assert (job.width, job.height) == (128, 128)
    with pytest.raises(UsageError, match="height 1080 is not a multiple of 16; use 1072 or 1088"):
        resolve(named_backbone("krea"), height=1080)


def test_each_pair_has_its_own_frame_rate_R93(specar):
    assert named_backbone("krea").geometry.fps == 16 and named_backbone("helios").geometry.fps == 24
    assert "fps" not in specar("generate", "--help").stdout


def test_a_negative_prompt_without_guidance_is_refused_R78(specar):
    run = specar("generate", "--prompt", "ball", "--negative", "blur")
    assert run.exit_code == 2 and "'negative' is not an option of tiny" in run.stderr


# Paths and text


def test_paths_of_any_script_R73(backbone, specar, tmp_path):
    folder = tmp_path / STRANGE
    folder.mkdir()
    path = folder / f"{STRANGE}.safetensors"
    path.write_bytes(backbone.shipped["drafter"].read_bytes())
    out = folder / f"{STRANGE}.mp4"
    run = specar("generate", "--prompt", "ball", "--blocks", 2, "--drafter", path, "--out", out)
    assert run.exit_code == 0, run.stderr
    assert sorted(os.listdir(folder)) == sorted(f"{STRANGE}.{end}" for end in ("json", "mp4", "safetensors"))


def python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in which `cli` works with the small pair."""
    preamble = """
        import json, sys
        from pathlib import Path
        sys.path.insert(0, "tests")
        from small import small_backbone
        from specar_core import cli
        backbone = small_backbone(Path(sys.argv[1]))
        cli.backbone = lambda name: backbone
    """
    command = [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", env=environment)


def test_any_prompt_survives_R77(tmp_path):
    """On a console that knows few characters; and the file gives the prompt back."""
    prompt = "\U0001f98a \u0645\u0631 \u4f60\u597d\nline two\t\u202e \0 and half \ud83d"
    script = """
        sys.argv = ["specar", "generate", "--prompt", json.loads(sys.argv[2]), "--blocks", "1", "--out", sys.argv[3]]
        cli.main()
    """
    out = tmp_path / f"{STRANGE}.mp4"
    done = python(script, tmp_path, json.dumps(prompt), out, PYTHONIOENCODING="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(".mp4")
    assert json.loads(read_metadata(out)["specar"])["prompts"][0]["text"] == prompt
    told = json.loads(out.with_suffix(".json").read_text("utf-8"))["prompts"][0]["text"]
    assert told == prompt.replace("\ud83d", "?")  # of which UTF-8 has nothing better


def test_with_all_files_there_nothing_is_asked_of_the_network_or_written_into_the_package_R69_R70(tmp_path):
    script = """
        package = str(Path(cli.__file__).parent)

        def watch(event, arguments):
            if event.startswith("socket."):
                raise AssertionError(f"network: {event} {arguments}")
            writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
            if (writes or event in ("os.rename", "os.remove", "os.mkdir")) and package in str(arguments[0]):
                raise AssertionError(f"written: {event} {arguments}")

        sys.addaudithook(watch)
        sys.argv = ["specar", "generate", "--prompt", "a ball", "--blocks", "2", "--out", sys.argv[2]]
        cli.main()
    """
    done = python(script, tmp_path, tmp_path / "a.mp4", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr


def test_starting_imports_nothing_heavy_R46_R47():
    """The pack's import is that of its nodes, which need the core but nothing that a host may lack or have broken."""
    heavy = "diffusers transformers huggingface_hub kernels flash_attn sageattention bitsandbytes xformers av"
    script = """
        import importlib, json, pkgutil, sys
        import specar_core.cli
        first = "torch" in sys.modules
        import specar_core
        for module in pkgutil.walk_packages(specar_core.__path__, "specar_core."):
            if not module.name.endswith(("_kernels", "_worker", ".cli")):
                importlib.import_module(module.name)
        print(json.dumps([first, [name for name in sys.argv[1].split() if name in sys.modules]]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), heavy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, []]


def test_without_a_compiler_it_runs_uncompiled_R53(tmp_path):
    script = """
        sys.argv = ["specar", "generate", "--prompt", "ball", "--blocks", "1", "--compile", "--out", sys.argv[2]]
        cli.main()
    """
    nothing = {"CC": "/bin/false", "CXX": "/bin/false", "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = python(script, tmp_path, tmp_path / "a.mp4", **nothing)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "without --compile" in line]
    assert len(said) == 1 and "compiler" in said[0] and len(done.stderr.splitlines()) < 6
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["environment"]["compile"] is False


def test_without_a_compiler_kernels_give_way_to_plain_torch_R53(tmp_path):
    """Triton is there, and finds out when a kernel is run that it cannot build one."""
    (tmp_path / "triton" / "language").mkdir(parents=True)
    (tmp_path / "triton" / "language" / "__init__.py").write_text("")
    (tmp_path / "triton" / "__init__.py").write_text("""if True:
        class jit:
            def __init__(self, function): ...
            def __getitem__(self, grid): raise RuntimeError("Failed to find C compiler.\\nPlease specify via CC.")
    """)
    script = """
        import logging
        logging.basicConfig(level="INFO", format="%(message)s")
        sys.path.insert(0, sys.argv[2])
        from specar_core.models.fused import triton_kernels
        for _ in range(2):
            assert triton_kernels("vae_kernels", "slow") is None
    """
    done = python(script, tmp_path, tmp_path)
    assert (done.returncode, done.stderr) == (0, "slow: Triton cannot be used here (Failed to find C compiler.)\n")


def test_requirements_bind_nobody_R41_R45():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    lists = re.findall(r"^(?:dependencies|cli|krea|helios) = (\[.*?\])", text, re.DOTALL | re.MULTILINE)
    needed = [line for found in lists for line in re.findall(r'"([^"]+)"', found)]
    assert len(lists) == 4 and not [line for line in needed if "==" in line or "<" in line or "~" in line]
    assert not [line for line in needed if re.match(r"flash|xformers|sage|triton|bitsandbytes|diffusers", line)]


def test_shipped_graphs_name_no_folder_R59():
    for path in (ROOT / "workflows").glob("*.json"):
        texts = [
            value for node in json.loads(path.read_text("utf-8"))["nodes"] for value in node["widgets_values"] or []
        ]
        models = [text for text in texts if isinstance(text, str) and text.endswith((".safetensors", ".pt", ".pth"))]
        assert not [name for name in models if "\\" in name or "/" in name]


def test_a_small_page_file_is_named_R87(backbone, monkeypatch):
    checkpoint = tensor_files.open_checkpoint(backbone.shipped["drafter"])

    def too_small(*_, **__):
        raise OSError(22, "The paging file is too small for this operation to complete")

    monkeypatch.setattr(tensor_files.mmap, "mmap", too_small)
    with pytest.raises(SpecarError, match="drafter.safetensors .*paging file is too small.* page file"):
        checkpoint.tensor(next(iter(checkpoint.names)))


def test_nothing_is_written_beside_a_wrong_name_R114(specar, tmp_path):
    """`--out` is a path that the user gave, and the only one that is written to."""
    (tmp_path / "inside").mkdir()
    run = specar("generate", "--prompt", "ball", "--blocks", 1, "--out", tmp_path / "inside" / "../b.mp4")
    assert run.exit_code == 0 and sorted(os.listdir(tmp_path)) == ["b.json", "b.mp4", "inside"]
    assert specar("generate", "--prompt", "ball", "--out", "../x").exit_code == 2


def test_the_table_of_cards_is_what_the_plan_says_R118(monkeypatch):
    monkeypatch.setattr(plan, "card", lambda device: "NVIDIA H200")
    rows = re.findall(
        r"^\| `(\w+)`, (\d+)x(\d+), (\w+) \| (.+) \|$", (ROOT / "docs" / "cards.md").read_text("utf-8"), re.M
    )
    assert [(row[0], row[3]) for row in rows] == list(itertools.product(("krea", "helios"), ("bf16", "fp8")))
    for name, width, height, precision, cells in rows:
        both, alone, *cards = cells.split(" | ")
        machine = Machine(torch.device("cuda"), precision)
        size = {"width": int(width), "height": int(height)}
        for told, schedule in ((both, "spread:7"), (alone, "draft-only")):
            job, _ = resolve(named_backbone(name), blocks=36, schedule=schedule, **size)
            needed = plan.plan(job, machine).gpu_bytes
            assert float(told) == pytest.approx(needed / 1e9, rel=0.01)
            for gigabytes, cell in zip((24, 32, 48, 80), cards, strict=True):
                if needed + GPU_MARGIN > 0.98 * gigabytes * 2**30:
                    assert cell != ("both" if schedule == "spread:7" else "`--schedule draft-only`")
                else:
                    assert cell == "both" if schedule == "spread:7" else cell != "nothing smaller"


def test_cards_tells_lengths_as_the_plan_does_R118(monkeypatch):
    monkeypatch.setattr(plan, "card", lambda device: "NVIDIA H200")
    machine, text = Machine(torch.device("cuda"), "bf16"), (ROOT / "docs" / "cards.md").read_text("utf-8")
    told = re.search(r"predicted: (\S+) s for a\s+minute of video, (\S+) s for ten", text)
    for seconds, expected in zip((60, 600), told.groups(), strict=True):
        job, _ = resolve(named_backbone("krea"), seconds=seconds, max_run=4)
        assert float(expected) == pytest.approx(plan.predict(job, machine)[0], rel=0.02)
    blocks, gigabytes = re.search(r"\(([\d,]+) blocks\) takes (\S+) GB", text).groups()
    job, _ = resolve(named_backbone("krea"), seconds=3600)
    assert job.blocks == int(blocks.replace(",", ""))
    assert float(gigabytes) == pytest.approx(plan.plan(job, machine).disk_bytes / 1e9, rel=0.02)


def test_the_table_of_cases_names_tests_that_exist():
    table = (ROOT / "docs" / "cases.md").read_text("utf-8")
    ids = re.findall(r"^\| (R\d+b?) \|", table, re.MULTILINE)
    assert len(ids) == len(set(ids)) > 90
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", table):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8"), f"{file}::{name}"
    for path in (ROOT / "tests").glob("test_*.py"):
        for ending in re.findall(r"def test_\w+?((?:_R\d+b?)+)\(", path.read_text("utf-8")):
            assert set(ending.strip("_").split("_")) <= set(ids), path
