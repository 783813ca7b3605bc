"""Where model files are looked for, and what is said when one is missing."""

import os
import sys
from pathlib import Path

import pytest

from specar_core.backbones.krea import KREA
from specar_core.errors import SpecarError, UsageError
from specar_core.files import find, locate, models_dir, require

TARGET, DRAFTER, TEXT, VAE = KREA.files


def put(models: Path, file, name=None) -> Path:
    path = models / file.folder / (name or file.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_the_option_comes_before_the_variable_and_the_variable_before_the_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPECAR_MODELS", "~/shared")
    assert models_dir("~/mine") == tmp_path / "mine"
    assert models_dir() == tmp_path / "shared"
    monkeypatch.setenv("SPECAR_MODELS", "")
    for platform, variable, value, expected in (
        ("linux", "XDG_DATA_HOME", "", ".local/share/specar/models"),
        ("linux", "XDG_DATA_HOME", str(tmp_path / "data"), "data/specar/models"),
        ("darwin", "XDG_DATA_HOME", "", "Library/Application Support/specar/models"),
        ("win32", "LOCALAPPDATA", str(tmp_path / "Local"), "Local/specar/models"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv(variable, value)
        assert models_dir() == tmp_path / expected


@pytest.mark.parametrize("file", KREA.files, ids=lambda file: file.what)
def test_a_file_is_found_under_each_of_its_names_its_own_first(file, tmp_path):
    assert locate(file, tmp_path) is None
    for name in reversed((file.name, *file.alternatives)):
        assert put(tmp_path, file, name) == locate(file, tmp_path)


def test_broken_links_and_loops_are_skipped_R63(tmp_path):
    good = put(tmp_path, VAE, "Wan2.1_VAE.pth")
    (tmp_path / "vae" / VAE.name).symlink_to("gone")
    assert locate(VAE, tmp_path) == good
    os.remove(tmp_path / "vae" / VAE.name)
    (tmp_path / "vae" / VAE.name).symlink_to(VAE.name)
    assert locate(VAE, tmp_path) == good
    put(tmp_path, TARGET)
    assert locate(TEXT, tmp_path / "diffusion_models" / TARGET.name) is None


def test_all_missing_files_are_named_at_once_with_place_source_and_command_R02(tmp_path):
    target, vae = put(tmp_path, TARGET), put(tmp_path, VAE, "Wan2.1_VAE.pth")
    with pytest.raises(SpecarError) as error:
        require(KREA.files, tmp_path, "krea", {})
    assert str(error.value).splitlines() == [
        "2 of 4 model files are missing. Get them with `specar download --backbone krea`, or put them here:",
        f"  drafter: {tmp_path}/diffusion_models/self_forcing_dmd.pt (5.7 GB; checkpoints/self_forcing_dmd.pt of "
        "gdhe17/Self-Forcing)",
        f"  text encoder: {tmp_path}/text_encoders/umt5_xxl_fp16.safetensors (11.4 GB; "
        "split_files/text_encoders/umt5_xxl_fp16.safetensors of Comfy-Org/Wan_2.1_ComfyUI_repackaged)",
    ]
    drafter, text = put(tmp_path, DRAFTER), put(tmp_path, TEXT, "models_t5_umt5-xxl-enc-bf16.pth")
    assert require(KREA.files, tmp_path, "krea", {}) == {
        "target": target, "drafter": drafter, "text encoder": text, "vae": vae
    }  # fmt: skip


def test_a_path_that_the_user_names_comes_first(tmp_path):
    put(tmp_path, TARGET)
    mine = put(tmp_path / "elsewhere", DRAFTER)
    named = {"target": mine, "drafter": mine}
    assert find((TARGET, DRAFTER, VAE), tmp_path, named) == (named, [VAE])
    with pytest.raises(UsageError, match="no drafter at .*gone"):
        require(KREA.files, tmp_path, "krea", {"drafter": tmp_path / "gone"})


def test_the_table_is_consistent():
    assert {file.folder for file in KREA.files} == {"diffusion_models", "text_encoders", "vae"}
    for file in KREA.files:
        assert file.sha256 is None or len(file.sha256) == 64
    places = [(file.folder, name) for file in KREA.files for name in (file.name, *file.alternatives)]
    assert len(places) == len(set(places))
