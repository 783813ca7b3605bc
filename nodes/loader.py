"""SpecARLoader: a pair of models, with the text encoder and the VAE that belong to it."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..specar_core import backbones
from ..specar_core.backbones.base import Backbone
from ..specar_core.machine import Precision
from ..specar_core.models import attention as attentions
from . import host
from .clip import OwnClip
from .models import CPU, Models
from .progress import Loading
from .sockets import ModelsSocket

AUTO = "auto"
FOLDERS = {"target": "diffusion_models", "drafter": "diffusion_models", "text encoder": "text_encoders", "vae": "vae"}


class SpecARLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        networks = [AUTO, *host.listed("diffusion_models")]
        return host.schema(
            node_id="SpecARLoader",
            display_name="SpecAR Loader",
            search_aliases=["krea realtime", "self forcing", "helios", "speculative", "long video"],
            description="Loads a target and a drafter that share one rollout, and the text encoder and VAE for them.",
            inputs=[
                io.Combo.Input(
                    "backbone",
                    options=list(backbones.NAMES),
                    tooltip="The pair. krea: Krea Realtime 14B with Self-Forcing 1.3B. helios, helios-mid: Helios 14B "
                    "with its distilled form. tiny: a few million parameters, part of SpecAR, runs on any CPU.",
                ),
                io.Combo.Input(
                    "target",
                    options=networks,
                    tooltip="The checkpoint of the large model. auto: the published file, wherever it lies in your "
                    "diffusion_models folders.",
                ),
                io.Combo.Input(
                    "drafter", options=networks, tooltip="The checkpoint of the cheap model. auto: the published file."
                ),
                io.Combo.Input(
                    "precision",
                    options=[AUTO, *Precision.__args__],
                    tooltip="Of weights and computation. auto: bf16 on a GPU that has it, else fp32. fp8: half the "
                    "bytes and faster, on Ada, Hopper and later GPUs; frames differ a little from bf16. "
                    "fp8-target: in the target only.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(attentions.NAMES),
                    tooltip="auto: the fastest back end that this machine has and that agrees with torch here; the log "
                    "says which and why. sdpa always works.",
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=[AUTO, *host.listed("text_encoders")],
                    optional=True,
                    tooltip="For the CLIP output. Not needed where a CLIPLoader of type wan is used instead.",
                ),
                io.Combo.Input(
                    "vae",
                    options=[AUTO, *host.listed("vae")],
                    optional=True,
                    tooltip="For the VAE output. Not needed where a VAELoader is used instead.",
                ),
            ],
            outputs=[
                ModelsSocket.Output(display_name="models"),
                io.Clip.Output(display_name="CLIP"),
                io.Vae.Output(display_name="VAE"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, backbone, precision, attention, **names) -> str:
        """Files that were exchanged, or that "auto" finds now and did not before, are loaded anew. A digest, because
        ComfyUI writes it into the files it saves, and paths are nobody's business."""
        paths = model_paths(backbones.backbone(backbone), **names)
        told = [(what, str(path), path.stat().st_size, path.stat().st_mtime_ns) for what, path in paths.items()]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    @classmethod
    def execute(cls, backbone, target, drafter, precision, attention, text_encoder=AUTO, vae=AUTO) -> io.NodeOutput:
        pair = backbones.backbone(backbone)
        paths = model_paths(pair, target, drafter, text_encoder, vae)
        networks = {role: paths[role] for role in ("target", "drafter") if role in paths}
        models = Models(pair, host.machine(precision, attention), networks)
        return io.NodeOutput(models, load_clip(pair, models, paths), load_vae(pair, paths))


def model_paths(pair: Backbone, target, drafter, text_encoder=AUTO, vae=AUTO) -> dict[str, Path]:
    """Each file that was chosen, or else found, or else shipped, by what it is."""
    names = {"target": target, "drafter": drafter, "text encoder": text_encoder, "vae": vae}
    found = {file.what: path for file in pair.files if names[file.what] == AUTO and (path := host.find(file))}
    named = {what: host.chosen(FOLDERS[what], name) for what, name in names.items() if name != AUTO}
    return {**pair.shipped, **found, **named}


def load_clip(pair: Backbone, models: Models, paths: dict[str, Path]) -> Any:
    path = paths.get("text encoder")
    if path is None:
        return absent(pair, "text encoder", "CLIPLoader of type wan")
    if path == pair.shipped.get("text encoder"):
        return OwnClip(pair.load_text_encoder(path, replace(models.machine, device=CPU), Loading()))
    return host.load_clip(path)


def load_vae(pair: Backbone, paths: dict[str, Path]) -> Any:
    return host.load_vae(paths["vae"]) if "vae" in paths else absent(pair, "vae", "VAELoader")


def absent(pair: Backbone, what: str, other: str) -> Any:
    """An output that nothing was found for. Graphs that do not use it run all the same."""
    file = next(file for file in pair.files if file.what == what)
    place = host.models_folder() / file.folder / file.name
    return host.blocked(
        f"the {what} of {pair.name} is missing: {place} ({file.path} of {file.repository}). "
        f"Put it there, or use a {other} instead"
    )
