"""Which model a checkpoint holds, by the names and shapes of its tensors."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from .errors import SpecarError
from .tensor_files import Checkpoint, some

_PREFIXES = re.compile(r"(?:_fsdp_wrapped_module\.|module\.|model\.diffusion_model\.|model\.)+")
_INFIXES = re.compile(r"(^|\.)(?:_orig_mod\.|_checkpoint_wrapped_module\.)+")
# Copies of q, k and v that some inference code fuses at load and then saves. The VAE's to_qkv is a weight of its own.
_FUSED = ".self_attn.to_qkv."


def canonical_name(stored: str) -> str | None:
    """A stored name without the wrappers of training code (FSDP, DDP, torch.compile, activation checkpointing).

    None for a tensor that only repeats others.
    """
    name = _INFIXES.sub(r"\1", stored)
    if prefix := _PREFIXES.match(name):
        name = name[prefix.end() :]
    return None if _FUSED in name else name


def canonical_names(stored: Iterable[str], rename: Callable[[str], str | None] = canonical_name) -> dict[str, str]:
    """Canonical name -> stored name. SpecarError when two stored names mean the same tensor."""
    names: dict[str, str] = {}
    for name in stored:
        canonical = rename(name)
        if canonical in names:
            raise SpecarError(f"This checkpoint holds one tensor under two names: {some([name, names[canonical]])}.")
        if canonical is not None:
            names[canonical] = name
    return names


def tensor_shapes(
    checkpoint: Checkpoint, rename: Callable[[str], str | None] = canonical_name
) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a checkpoint, under their canonical names."""
    names = canonical_names(checkpoint.names, rename)
    return {name: checkpoint.names[stored].shape for name, stored in names.items()}


def scale_names(name: str, stored: Collection[str]) -> list[str]:
    """Where the scale of this weight lies, if it has one: ComfyUI's older and newer names."""
    if not name.endswith(".weight"):
        return []
    scales = (name.removesuffix("weight") + end for end in ("scale_weight", "weight_scale"))
    return [scale for scale in scales if scale in stored]


Kind = Literal["wan", "wan-i2v", "wan-vae", "helios", "umt5", "tiny-text", "unknown"]


@dataclass(frozen=True)
class Identity:
    """Which model a checkpoint holds. `size` is "1.3B", "14B", "XXL", or the numbers themselves."""

    kind: Kind
    label: str
    size: str = ""

    @property
    def usable(self) -> bool:
        return self.kind not in ("wan-i2v", "unknown")

    def __str__(self) -> str:
        text = f"{self.label}, {self.size}" if self.size else self.label
        return text if self.usable else f"{text} (not usable here)"


def identify(checkpoint: Checkpoint) -> Identity:
    """Recognise a model by the names and shapes of its tensors, never by its file name."""
    shapes = tensor_shapes(checkpoint)

    def axis(name: str, index: int) -> int:
        shape = shapes.get(name, ())
        return shape[index] if index < len(shape) else 0

    def layers(blocks: str) -> int:
        return len({name[len(blocks) :].split(".")[0] for name in shapes if name.startswith(blocks)})

    def sized(kind: Kind, label: str, width: int, blocks: str = "blocks.") -> Identity:
        size = ({4096: "XXL"} if kind == "umt5" else {1536: "1.3B", 5120: "14B"}).get(width)
        return Identity(kind, label, size or f"width {width}, {layers(blocks)} layers")

    if {"patch_short.weight", "patch_mid.weight", "patch_long.weight"} <= shapes.keys():  # under any other names
        return sized("helios", "Helios transformer", axis("patch_embedding.weight", 0))
    if "head.modulation" in shapes:
        width, channels = axis("blocks.0.self_attn.k.weight", 0), axis("patch_embedding.weight", 1)
        if channels == 36 or "img_emb.proj.1.weight" in shapes:
            return sized("wan-i2v", "Wan image-to-video transformer", width)
        if channels != 16:
            return sized("unknown", f"Wan transformer of {channels} instead of 16 input channels", width)
        return sized("wan", "Wan 2.1 text-to-video transformer", width)
    if "condition_embedder.time_proj.weight" in shapes:
        return sized("unknown", "Wan transformer under diffusers' names", axis("patch_embedding.weight", 0))
    if "decoder.head.0.gamma" in shapes and "encoder.conv1.weight" in shapes:
        width, channels = axis("decoder.head.0.gamma", 0), axis("conv2.weight", 0)
        if channels != 16:
            return Identity("unknown", f"VAE of {channels} instead of 16 latent channels")
        return Identity("wan-vae", "Wan 2.1 VAE", "" if width == 96 else f"width {width}")
    if "blocks.0.pos_embedding.embedding.weight" in shapes:
        return sized("umt5", "UMT5 encoder, Wan's names", axis("token_embedding.weight", 1))
    attention = "encoder.block.{}.layer.0.SelfAttention.{}.weight"
    if (query := attention.format(0, "q")) in shapes:
        # UMT5 has a position bias in every layer, T5 only in the first.
        if attention.format(layers("encoder.block.") - 1, "relative_attention_bias") not in shapes:
            return Identity("unknown", "T5 encoder, where UMT5 is needed")
        label = "UMT5 encoder, Hugging Face names" + (", fp8 scaled" if scale_names(query, shapes) else "")
        return sized("umt5", label, axis(query, 1), "encoder.block.")
    if {"embedding.weight", "position"} <= shapes.keys():
        return sized("tiny-text", "text encoder of the tiny pair", axis("position", 1), "layers.layers.")
    return Identity("unknown", "no model that SpecAR knows")
