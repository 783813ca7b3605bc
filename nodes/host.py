"""The one place that knows ComfyUI's own corners: versions, memory, model files, folders, progress, settings."""

import json
import logging
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import comfy.latent_formats
import comfy.model_management as memory
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import comfyui_version
import folder_paths
import torch
from comfy.cli_args import args
from comfy_api.latest import InputImpl, io
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer
from torch import Tensor, nn

from ..specar_core.files import ModelFile, locate_in
from ..specar_core.machine import Machine, Precision
from ..specar_core.models.low_precision import check as check_fp8
from ..specar_core.models.low_precision import lowered
from ..specar_core.report import quick_digest
from ..specar_core.source import video_size
from ..specar_core.tensor_files import open_checkpoint

log = logging.getLogger("specar")

OLDEST = "0.16.3"


def refusal() -> str | None:
    """Why SpecAR cannot run on this ComfyUI, in one line; None if it can."""
    version = comfyui_version.__version__
    if numbers(version) >= numbers(OLDEST):
        return None
    return f"SpecAR needs ComfyUI {OLDEST} or newer, and this is {version}. Update ComfyUI, then restart it."


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def schema(**fields: Any) -> io.Schema:
    """A node's schema. ComfyUI 0.20 and newer show what a node said (its `ui`) again when its result came from the
    cache of an earlier run or the page was loaded anew."""
    if "has_intermediate_output" in io.Schema.__dataclass_fields__:
        fields["has_intermediate_output"] = True
    return io.Schema(category="SpecAR", **fields)


# ------------------------------------------------------------------------------------------------- files


def listed(folder: str) -> list[str]:
    return folder_paths.get_filename_list(folder)


def chosen(folder: str, name: str) -> Path:
    return Path(folder_paths.get_full_path_or_raise(folder, name))


def find(file: ModelFile) -> Path | None:
    """Where a published file is: in any of ComfyUI's folders for its kind, or below them under its own name."""
    # Wan's own layout of the text encoder, which SpecAR reads and ComfyUI does not.
    readable = tuple(name for name in file.alternatives if not name.startswith("models_t5"))
    file = replace(file, alternatives=readable)
    for folder in folder_paths.get_folder_paths(file.folder):
        if path := locate_in(file, Path(folder)):
            return path
    names = (file.name, *file.alternatives)
    below = (name for name in listed(file.folder) if name.replace("\\", "/").rpartition("/")[2] in names)
    return next((chosen(file.folder, name) for name in below), None)


def models_folder() -> Path:
    return Path(folder_paths.models_dir)


def output_folder() -> Path:
    return Path(folder_paths.get_output_directory())


def temp_folder() -> Path:
    return Path(folder_paths.get_temp_directory())


def metadata_wanted() -> bool:
    return not args.disable_metadata


def previews_wanted() -> bool:
    """Unless the page's settings or the command line say that there are none. ComfyUI itself cannot tell its default
    from "none"."""
    settings = page_settings()
    words = " ".join(sys.argv).replace("=", " ")
    refused = "--preview-method none" in words or settings.get("Comfy.Execution.PreviewMethod") == "none"
    return bool(settings.get("SpecAR.Preview", True)) and not refused


def page_settings() -> dict[str, Any]:
    """What the page keeps on the server; with several users, those of the first one."""
    folder = folder_paths.get_public_user_directory("default")
    try:
        settings = json.loads((Path(folder) / "comfy.settings.json").read_text("utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


# ---------------------------------------------------------------------------------------------- video files


def video_file(video: Any) -> Path:
    """The file of a VIDEO. One that is in memory, or a part of a file, is written first."""
    if isinstance(video, InputImpl.VideoFromFile) and isinstance(source := video.get_stream_source(), str):
        video_size(Path(source))  # UsageError with its name if it is no video
        if abs(InputImpl.VideoFromFile(source).get_duration() - video.get_duration()) < 1e-3:
            return Path(source)
    path = temp_folder() / f"specar-{uuid.uuid4().hex}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    video.save_to(str(path))
    # Named by its content: the same graph finds what it left unfinished.
    return path.replace(path.with_name(f"specar-{quick_digest(path)[-32:]}.mp4"))


def address(path: Path) -> str | None:
    """Where the page gets a file, relative to its own address; None if it lies elsewhere."""
    kinds = {"temp": temp_folder(), "output": output_folder(), "input": Path(folder_paths.get_input_directory())}
    for kind, folder in kinds.items():
        if path.resolve().is_relative_to(folder.resolve()):
            place = path.resolve().relative_to(folder.resolve())
            words = {"filename": place.name, "subfolder": place.parent.as_posix().removeprefix("."), "type": kind}
            return f"api/view?{urlencode(words)}"
    return None


# ------------------------------------------------------------------------------------------------ models


def machine(precision: str, attention: str) -> Machine:
    device = memory.get_torch_device()
    automatic: Precision = "bf16" if memory.should_use_bf16(device) else "fp32"
    if precision.startswith("fp8"):
        check_fp8(device)
    return Machine(device, automatic if precision == "auto" else precision, attention)


def hosted(network: nn.Module) -> Any:
    """A network of specar_core, built anew with ComfyUI's layers, in ComfyUI's handle: that decides where the weights
    lie, moves them layer by layer if they do not fit, and frees them."""
    with torch.device("meta"):
        twin = type(network)(network.config, comfy.ops.manual_cast, network.attend)
    for name, layer in lowered(network):
        twin.set_submodule(name, layer)
    twin.load_state_dict(network.state_dict(), assign=True)
    twin.eval().requires_grad_(False)
    return comfy.model_patcher.CoreModelPatcher(
        twin, load_device=memory.get_torch_device(), offload_device=memory.unet_offload_device()
    )


def load(handles: list[Any], beside: int) -> None:
    """Makes room for these networks and `beside` more bytes on the device, and loads what fits."""
    memory.load_models_gpu(handles, memory_required=beside)


def make_room(size: int) -> None:
    memory.free_memory(size, memory.get_torch_device())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """ComfyUI's errors do not name the file."""
    try:
        yield
    except Exception:
        open_checkpoint(path)  # SpecarError with its name and what it is, if that is no checkpoint
        raise


def load_clip(path: Path) -> Any:
    """What CLIPLoader of type "wan" gives."""
    with reading(path):
        return comfy.sd.load_clip(
            ckpt_paths=[str(path)],
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType.WAN,
        )


def load_vae(path: Path) -> Any:
    """What VAELoader gives."""
    with reading(path):
        weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae


def vae_weights(vae: Any) -> Mapping[str, Tensor]:
    """Empty for what is no VAE of ComfyUI's own."""
    return vae.get_sd() if isinstance(vae, comfy.sd.VAE) else {}


def to_vae_space(latents: Tensor) -> Tensor:
    """Latents as the models see them to LATENT as ComfyUI's nodes exchange it."""
    return comfy.latent_formats.Wan21().process_out(latents)


def from_vae_space(samples: Tensor) -> Tensor:
    return comfy.latent_formats.Wan21().process_in(samples)


# ----------------------------------------------------------------------------------------------- running


def blocked(message: str) -> ExecutionBlocker:
    """An output that stops whatever is connected to it, with this message."""
    return ExecutionBlocker(message)


def stop_if_asked() -> None:
    """Raises if the user cancelled."""
    memory.throw_exception_if_processing_interrupted()


def say(text: str) -> None:
    """Shows a line on the node that runs."""
    context = get_executing_context()
    if context is not None:
        PromptServer.instance.send_progress_text(text, context.node_id)


class ProgressBar:
    """The bar of the node that runs."""

    def __init__(self, total: int) -> None:
        self._bar, self._total = comfy.utils.ProgressBar(total), total

    def update(self, done: int, picture: Image.Image | None = None) -> None:
        if picture is not None:
            # ComfyUI would enlarge a small one to the size.
            largest = args.preview_size if max(picture.size) > args.preview_size else None
            try:
                self._bar.update_absolute(done, self._total, ("JPEG", picture, largest))
                return
            except memory.InterruptProcessingException:
                raise
            except Exception as error:  # of another pack's preview: no reason to end a run
                log.warning("the preview failed (%s)", error)
        self._bar.update_absolute(done, self._total)
