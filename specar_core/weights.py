"""What a checkpoint holds and how it gets into a network: names, identity, streaming, checking."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from .errors import SpecarError, UsageError
from .models.low_precision import Fp8Linear
from .tensor_files import Checkpoint, open_checkpoint, some

# ------------------------------------------------------------------------------------------------- names

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


# ---------------------------------------------------------------------------------------------- identity

Kind = Literal["wan", "wan-i2v", "wan-vae", "helios", "umt5", "unknown"]


@dataclass(frozen=True)
class Identity:
    """Which model a checkpoint holds. `size` is "1.3B", "14B", "XXL", or the numbers themselves."""

    kind: Kind
    label: str
    size: str = ""
    width: int = 0
    layers: int = 0

    @property
    def usable(self) -> bool:
        return self.kind not in ("wan-i2v", "unknown")

    def __str__(self) -> str:
        text = f"{self.label}, {self.size}" if self.size else self.label
        return text if self.usable else f"{text} (not usable here)"


def identify(checkpoint: Checkpoint) -> Identity:
    """Recognise a model by the names and shapes of its tensors, never by its file name."""
    names = canonical_names(checkpoint.names)
    shapes = {name: checkpoint.names[stored].shape for name, stored in names.items()}

    def axis(name: str, index: int) -> int:
        shape = shapes.get(name, ())
        return shape[index] if index < len(shape) else 0

    def sized(kind: Kind, label: str, width: int, blocks: str = "blocks.") -> Identity:
        layers = len({name[len(blocks) :].split(".")[0] for name in shapes if name.startswith(blocks)})
        size = ({4096: "XXL"} if kind == "umt5" else {1536: "1.3B", 5120: "14B"}).get(width)
        return Identity(kind, label, size or f"width {width}, {layers} layers", width, layers)

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
        return Identity("wan-vae", "Wan 2.1 VAE", "" if width == 96 else f"width {width}", width)
    if "blocks.0.pos_embedding.embedding.weight" in shapes:
        return sized("umt5", "UMT5 encoder, Wan's names", axis("token_embedding.weight", 1))
    attention = "encoder.block.{}.layer.0.SelfAttention.{}.weight"
    if (query := attention.format(0, "q")) in shapes:
        label = "UMT5 encoder, Hugging Face names" + (", fp8 scaled" if _scale_names(query, names) else "")
        umt5 = sized("umt5", label, axis(query, 1), "encoder.block.")
        # UMT5 has a position bias in every layer, T5 only in the first.
        if attention.format(umt5.layers - 1, "relative_attention_bias") in shapes:
            return umt5
        return Identity("unknown", "T5 encoder, where UMT5 is needed")
    return Identity("unknown", "no model that SpecAR knows")


# ----------------------------------------------------------------------------------------------- loading

# Left over on purpose: buffers that some exports carry and that are computed here, ComfyUI's tokenizer, and what
# belongs to fp8 weights besides their scale.
_HARMLESS = frozenset({"mean", "std", "freqs", "spiece_model", "scaled_fp8"})
_HARMLESS_ENDS = (".scale_weight", ".weight_scale", ".scale_input", ".input_scale", ".comfy_quant")


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp32: Iterable[str] = (),
    rename: Callable[[str], str | None] = canonical_name,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a module that was built on the meta device, one tensor at a time: map, move, cast, assign.

    Strict: every parameter and buffer gets a tensor of its shape and every stored tensor is used, or SpecarError says
    what did not match before anything is assigned. Tensors with one of `keep_fp32` as a part of their dotted name
    become float32 instead of `dtype`. `progress(bytes done, bytes in all)` may raise to abort.

    Layers in fp8 quantise their weights as these come, so that the network is never there in `dtype`.

    Host memory: mapped pages belong to the file. Towards another device there are no copies but the driver's own; on
    the CPU a tensor that is in `dtype` already stays mapped, and a cast one costs its own size, being the result.
    """
    stored = canonical_names(checkpoint.names, rename)
    wanted = module.state_dict(keep_vars=True)
    slots: defaultdict[int, list[str]] = defaultdict(list)  # tied weights are one tensor under several names
    for name, tensor in wanted.items():
        slots[id(tensor)].append(name)
    _check_fit(module, checkpoint, wanted, slots.values(), stored)

    keep = set(keep_fp32)

    def load(names: list[str]) -> int:
        name = next(name for name in names if name in stored)
        tensor = dequantised(checkpoint, stored[name], device)
        if tensor.is_floating_point() and not in_fp8(module, name):
            tensor = tensor.to(torch.float32 if keep & set(name.split(".")) else dtype)
        value = nn.Parameter(tensor, requires_grad=False) if isinstance(wanted[name], nn.Parameter) else tensor
        for slot in names:
            owner, _, leaf = slot.rpartition(".")
            if layer := in_fp8(module, slot):
                layer.load(tensor)
            else:
                setattr(module.get_submodule(owner), leaf, value)
        return checkpoint.names[stored[name]].bytes

    done = 0
    for names in slots.values():
        done += load(names)
        if progress:
            progress(done, checkpoint.bytes)


def in_fp8(module: nn.Module, name: str) -> Fp8Linear | None:
    """The layer that keeps the weight of this name in fp8, if one does."""
    owner, _, leaf = name.rpartition(".")
    layer = module.get_submodule(owner)
    return layer if leaf == "weight" and isinstance(layer, Fp8Linear) else None


def dequantised(checkpoint: Checkpoint, name: str, device: torch.device | str) -> Tensor:
    """A stored tensor on `device`; fp8 weights times their scale (a scalar or one value a row), in float32."""
    tensor = checkpoint.tensor(name).to(device)
    for scale_name in _scale_names(name, checkpoint.names):
        scale = checkpoint.tensor(scale_name).to(device, torch.float32)
        if scale.numel() not in (1, tensor.shape[0]):
            raise SpecarError(f"{checkpoint.path}: {some([scale_name])} is a scale for blocks, which is not supported.")
        return tensor.float() * scale.reshape(-1, *[1] * (tensor.dim() - 1))
    return tensor


def _scale_names(name: str, stored: Collection[str]) -> list[str]:
    """Where the scale of this weight lies, if it has one: ComfyUI's older and newer names."""
    if not name.endswith(".weight"):
        return []
    scales = (name.removesuffix("weight") + end for end in ("scale_weight", "weight_scale"))
    return [scale for scale in scales if scale in stored]


def _check_fit(
    module: nn.Module,
    checkpoint: Checkpoint,
    wanted: Mapping[str, Tensor],
    slots: Iterable[list[str]],
    stored: Mapping[str, str],
) -> None:
    infos = {name: checkpoint.names[original] for name, original in stored.items()}
    missing = [names[0] for names in slots if infos.keys().isdisjoint(names)]
    unexpected = [
        name for name in infos.keys() - wanted.keys() if name not in _HARMLESS and not name.endswith(_HARMLESS_ENDS)
    ]
    different = [
        f"{some([name])} {infos[name]} in the file, {list(tensor.shape)} in the model"
        for name, tensor in sorted(wanted.items())
        if name in infos
        and (infos[name].shape != tensor.shape or infos[name].dtype.is_floating_point != tensor.is_floating_point())
    ]
    faults = [
        f"{what}: {len(names)} ({listed})"
        for what, names, listed in (
            ("missing", missing, some(missing)),
            ("unexpected", unexpected, some(unexpected)),
            ("wrong shape or type", different, "; ".join(different[:3])),
        )
        if names
    ]
    if faults:
        raise SpecarError(
            f"{checkpoint.path} ({identify(checkpoint)}) does not fit {type(module).__name__}: {'; '.join(faults)}."
        )


# ---------------------------------------------------------------------------------------------- checking

_SLICE = 1 << 22  # values looked at together


@dataclass(frozen=True)
class FileReport:
    """What `specar check` says of one file. `problem` is None for a whole, finite checkpoint of a usable model."""

    path: Path
    bytes: int
    identity: Identity | None = None
    tensors: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # tensors of each type
    non_finite: tuple[str, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        lines = [self.problem or f"{self.path} is whole and finite."]
        if self.identity:
            types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
            lines.append(f"  {self.identity}; {self.tensors} tensors ({types}); {self.bytes:,} bytes")
        return "\n".join(lines)


def check_file(path: str | Path, progress: Callable[[int, int], None] | None = None) -> FileReport:
    """Read a whole checkpoint; say what it is and what is wrong with it. Damage is reported, never raised."""
    path = Path(path)
    try:
        checkpoint = open_checkpoint(path, whole=False)
        identity = identify(checkpoint)
    except (SpecarError, UsageError) as error:
        return FileReport(path, os.path.getsize(path) if os.path.isfile(path) else 0, problem=str(error))
    types = Counter(str(info.dtype).removeprefix("torch.") for info in checkpoint.names.values())
    non_finite: tuple[str, ...] = ()
    problem = None
    if checkpoint.bytes < checkpoint.declared:
        problem = f"{path} is cut off: {checkpoint.present}. Download it again."
    elif non_finite := tuple(_non_finite(checkpoint, progress)):
        problem = f"{path} holds NaN or infinity in {len(non_finite)} tensors: {some(non_finite)}. Download it again."
    elif not identity.usable:
        problem = f"{path} is whole and finite, but not usable here."
    return FileReport(path, checkpoint.bytes, identity, len(checkpoint.names), dict(types), non_finite, problem)


def _non_finite(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> Iterator[str]:
    done = 0
    for name, info in checkpoint.names.items():
        if info.dtype.is_floating_point and info.bytes:
            parts = checkpoint.tensor(name).reshape(-1).split(_SLICE)
            # NaN and infinity both show in the extremes, which need no mask of the tensor's size.
            if not all(torch.stack(part.float().aminmax()).isfinite().all() for part in parts):
                yield name
        done += info.bytes
        if progress:
            progress(done, checkpoint.bytes)
