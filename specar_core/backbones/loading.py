"""Wan's text encoder and VAE, which the published pairs have in common: their files, recognised, loaded and weighed."""

from functools import partial
from pathlib import Path

import torch

from ..errors import SpecarError
from ..files import ModelFile
from ..identity import identify, tensor_shapes
from ..machine import Machine
from ..models.text import TextEncoder
from ..models.vae import VaeConfig, WanVAE
from ..progress import Progress
from ..tensor_files import Checkpoint
from ..weights import load_into

# Sizes and licences: the repositories' file pages and model cards on huggingface.co, 2026.
TEXT_ENCODER_FILE = ModelFile(
    what="text encoder",
    repository="Comfy-Org/Wan_2.1_ComfyUI_repackaged",
    path="split_files/text_encoders/umt5_xxl_fp16.safetensors",
    licence="Apache-2.0",
    folder="text_encoders",
    bytes=11_366_399_385,
    sha256="7b8850f1961e1cf8a77cca4c964a358d303f490833c6c087d0cff4b2f99db2af",
    alternatives=(
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        "models_t5_umt5-xxl-enc-bf16.pth",
        "models_t5_umt5-xxl-enc-bf16.safetensors",
    ),
)
VAE_FILE = ModelFile(
    what="vae",
    repository="Comfy-Org/Wan_2.1_ComfyUI_repackaged",
    path="split_files/vae/wan_2.1_vae.safetensors",
    licence="Apache-2.0",
    folder="vae",
    bytes=253_815_318,
    sha256="2fc39d31359a4b0a64f55876d8ff7fa8d780956ae2cb13463b0223e15148976b",
    alternatives=("Wan2.1_VAE.pth", "Wan2.1_VAE.safetensors"),
)

TEXT_BYTES = 11_361_820_672 + (1 << 30)  # UMT5-XXL in bfloat16, and its work
# Elements for each pixel of a frame and each channel of the VAE's width: the decoder's histories, 944.3 M at 832x480
# and width 96; and what one decoding step takes beside those that it is given (measured: 3.1 GB on a GPU in half
# precision, and 3.9 in the plain way of a CPU). Every further latent frame that is decoded with it adds a part of that
# (measured: 5.9 GB for three).
DECODER_STATE = 944.3e6 / (832 * 480 * 96)
DECODER_WORK = 3.9e9 / 2 / (832 * 480 * 96)
DECODER_FURTHER = 0.27
ENCODER_STATE = 16.1  # likewise, counted


def check_umt5(checkpoint: Checkpoint) -> None:
    if (found := identify(checkpoint)).kind != "umt5":
        raise SpecarError(f"{checkpoint.path} cannot be the text encoder: it is a {found}")


def load_umt5(path: Path, machine: Machine, progress: Progress) -> TextEncoder:
    # On a CPU the bfloat16 weights stay mapped from the file, instead of becoming 23 GB of float32.
    told = partial(progress, "text encoder")
    return TextEncoder.load(path, dtype=torch.bfloat16, device=machine.device, progress=told)


def checked_vae(checkpoint: Checkpoint, wanted: VaeConfig | None) -> VaeConfig:
    """Its sizes. SpecarError if it is no Wan VAE, or not the one that is `wanted`."""
    if (found := identify(checkpoint)).kind != "wan-vae":
        raise SpecarError(f"{checkpoint.path} cannot be the VAE: it is a {found}")
    config = VaeConfig.detect(tensor_shapes(checkpoint))
    if wanted is not None and wanted != config:
        raise SpecarError(f"{checkpoint.path} cannot be the VAE: it is a {found}, and width {wanted.dim} is needed")
    return config


def load_vae(checkpoint: Checkpoint, wanted: VaeConfig | None, machine: Machine, progress: Progress) -> WanVAE:
    """SpecarError if it is no Wan VAE, or not the one that is `wanted`."""
    config = checked_vae(checkpoint, wanted)
    with torch.device("meta"):
        vae = WanVAE(config)
    # Half precision as in Krea's session: its 11 bits of mantissa suit pixels better than bfloat16's 8.
    dtype = torch.float32 if machine.precision == "fp32" else torch.float16
    load_into(vae.eval(), checkpoint, dtype=dtype, device=machine.device, progress=partial(progress, "vae"))
    return vae.arrange()


def decoder_bytes(size: int, pixels: int, config: VaeConfig, at_once: int) -> tuple[int, int]:
    """Bytes of the decoder's histories, and of the work of decoding `at_once` latent frames, the new histories
    included; `size` bytes a number."""
    work = DECODER_WORK * (1 + (at_once - 1) * DECODER_FURTHER)
    return size * int(DECODER_STATE * pixels * config.dim), size * int(work * pixels * config.dim)


def encoder_bytes(size: int, pixels: int, config: VaeConfig) -> int:
    """Bytes of the encoder's histories, the new ones included."""
    return 2 * size * int(ENCODER_STATE * pixels * config.dim)
