"""The pack as users get it: through ComfyUI-Manager, on an old ComfyUI, in a folder that nobody may write to."""

import os
import shutil
import subprocess
from pathlib import Path

from conftest import CHECKOUT, PACK_NAME, copy_pack, installed, running, shipped_files
from graphs import tiny

from specar_core.mp4 import read_metadata


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_manager_installs_it_and_changes_no_package(tmp_path):
    folder = installed("SPECAR_HOST", "")
    repository = tmp_path / "specar-from-git"
    copy_pack(repository)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-C", str(repository)]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        run([*git, *words])
    freeze = [str(folder / "venv/bin/python"), "-m", "pip", "freeze", "--disable-pip-version-check"]
    before = run(freeze)
    target = folder / "ComfyUI" / "custom_nodes" / repository.name
    environment = {**os.environ, "COMFYUI_PATH": str(folder / "ComfyUI")}
    try:
        address = f"file://localhost{repository}"
        run([str(folder / "venv/bin/cm-cli"), "install", address, "--mode", "local"], env=environment)
        assert (target / "nodes" / "loader.py").is_file()
        assert run(freeze) == before
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_requirements_name_nothing_that_could_break_a_host():
    lines = [line for line in (CHECKOUT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        name, bound, _ = line.partition(">=")
        assert bound, f"{line}: lower bounds only"
        assert name in ("safetensors", "transformers", "tokenizers", "sentencepiece", "av", "Pillow"), name


def test_what_is_shipped():
    shipped = {file.as_posix() for file in shipped_files()}
    assert {"__init__.py", "nodes/host.py", "specar_core/rollout.py", "workflows/tiny.json", "LICENSE"} <= shipped
    assert not [file for file in shipped if file.startswith(("tests/", "benchmarks/", "training/", "scripts/"))]


def test_the_oldest_comfyui_without_metadata_with_model_folders_of_its_own_R61(tmp_path_factory):
    base = tmp_path_factory.mktemp("oldest")
    more = [base / "disk one" / "nets", base / "disk two" / "nets"]
    for folder in more:
        folder.mkdir(parents=True)
    (more[1] / "target.safetensors").touch()
    told = "".join(f"    {folder}\n" for folder in more)
    (base / "paths.yaml").write_text(f"mine:\n  diffusion_models: |\n{told}")
    arguments = ("--disable-metadata", "--extra-model-paths-config", str(base / "paths.yaml"))
    with running(installed("SPECAR_HOST_OLDEST", "1.0.0"), base, *arguments, pack="SpecAR späce") as host:
        kinds = {kind["name"]: kind["folders"] for kind in host.client.get("/experiment/models")}
        own = base / "models"
        before = [str(own / name) for name in ("unet", "diffusion_models")]
        assert kinds["diffusion_models"][:4] == [*before, *map(str, more)]
        assert kinds["vae"][0] == str(own / "vae") and "checkpoints" in kinds
        definitions = host.client.get("/object_info")
        assert sum(name.startswith("SpecAR") for name in definitions) == 8
        loader = definitions["SpecARLoader"]["input"]["required"]
        assert loader["target"][1]["options"] == ["auto", "target.safetensors"]
        before = contents(host.pack)
        assert "0.16.3" in host.log
        done = host.client.run(tiny())
        assert done.end == "execution_success", done.error
        assert not {"specar", "prompt", "workflow"} & read_metadata(host.output(done.outputs["save"])).keys()
        assert done.outputs["sampler"]["specar"][0]["frames"] == 18
        assert contents(host.pack) == before, "something was written into the pack"


def test_an_older_comfyui_is_told_in_one_line(tmp_path):
    folder = installed("SPECAR_HOST", "")
    code = (
        "import sys; sys.path.insert(0, '.');"
        "import comfy.cli_args; comfy.cli_args.args.cpu = True;"
        "import comfyui_version; comfyui_version.__version__ = '0.9.2';"
        "import asyncio, nodes;"
        f"asyncio.run(nodes.load_custom_node({str(tmp_path / PACK_NAME)!r}));"
        "print([name for name in nodes.NODE_CLASS_MAPPINGS if name.startswith('SpecAR')])"
    )
    copy_pack(tmp_path / PACK_NAME)
    python = str(folder / "venv/bin/python")
    done = subprocess.run([python, "-c", code], cwd=folder / "ComfyUI", capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    (told,) = (line for line in done.stderr.splitlines() if "SpecAR" in line)
    assert told.endswith("SpecAR needs ComfyUI 0.16.3 or newer, and this is 0.9.2. Update ComfyUI, then restart it.")


def contents(folder: Path) -> dict[Path, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}
