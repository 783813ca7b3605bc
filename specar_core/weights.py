"""How a checkpoint gets into a network: one tensor after another, and only if every one fits."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from .errors import SpecarError
from .identity import canonical_name, canonical_names, identify, scale_names
from .models.low_precision import Fp8Linear
from .tensor_files import Checkpoint, some

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
    for scale_name in scale_names(name, checkpoint.names):
        scale = checkpoint.tensor(scale_name).to(device, torch.float32)
        if scale.numel() not in (1, tensor.shape[0]):
            raise SpecarError(f"{checkpoint.path}: {some([scale_name])} is a scale for blocks, which is not supported.")
        return tensor.float() * scale.reshape(-1, *[1] * (tensor.dim() - 1))
    return tensor


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
