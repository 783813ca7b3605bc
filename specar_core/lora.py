"""LoRA files: recognised in the naming styles in use, and merged into a network's weights.

A LoRA changes a weight by strength * alpha / rank * up @ down (Hu et al. 2021, arXiv:2106.09685). It is added where the
weight lies, one tensor at a time, so that nothing exists twice and generating costs nothing more. A video without it
loads the network anew, which undoes it exactly.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import SpecarError, UsageError
from .identity import canonical_name
from .models.helios_names import helios_name
from .schedule import Role, Schedule
from .tensor_files import Checkpoint, TensorInfo, open_checkpoint, some
from .weights import dequantised, in_fp8

_PREFIXES = re.compile(
    r"^(?:base_model\.model\.|diffusion_model\.|transformer\.|lora_unet__?|lora_transformer_|unet\.)+"
)
# What diffusers, PEFT, kohya's and musubi's trainers and ComfyUI call the parts of a change; `diff` and `diff_b` are
# whole differences of a weight and of a bias.
_ENDS = {
    "up": r"\.(?:lora_up|lora_B|lora\.up|lora_linear_layer\.up)(?:\.default)?(?:\.weight)?$",
    "down": r"\.(?:lora_down|lora_A|lora\.down|lora_linear_layer\.down)(?:\.default)?(?:\.weight)?$",
    "alpha": r"\.alpha$",
    "diff": r"\.diff$",
    "diff_b": r"\.diff_b$",
}
_UNSUPPORTED = re.compile(r"\.(?:dora_scale|lora_magnitude_vector|hada_|lokr_|oft_|lora_mid)")
# diffusers' names of a Wan transformer's layers and Wan's own; the way back is in helios_names.py.
_WAN_NAMES = (
    ("condition_embedder.time_embedder.linear_1.", "time_embedding.0."),
    ("condition_embedder.time_embedder.linear_2.", "time_embedding.2."),
    ("condition_embedder.text_embedder.linear_1.", "text_embedding.0."),
    ("condition_embedder.text_embedder.linear_2.", "text_embedding.2."),
    ("condition_embedder.time_proj.", "time_projection.1."),
    ("proj_out.", "head.head."),
    (".attn1.", ".self_attn."),
    (".attn2.", ".cross_attn."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.0.", ".o."),
    (".ffn.net.0.proj.", ".ffn.0."),
    (".ffn.net.2.", ".ffn.2."),
    (".norm2.", ".norm3."),
)


@dataclass(frozen=True)
class Lora:
    """A LoRA of a video. `asked` is the one role that it was given for, None for both; `roles` are those it fits."""

    file: str
    digest: str
    strength: float = 1.0
    asked: Role | None = None
    roles: tuple[Role, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "digest": self.digest, "strength": self.strength, "roles": list(self.roles)}


@dataclass(frozen=True)
class Fit:
    """What of a file changes a network: the stored names of each changed parameter's parts, by the parts' names."""

    parts: Mapping[str, Mapping[str, str]]
    unmatched: tuple[str, ...] = ()
    wrong_sizes: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        return sum(len(parts) for parts in self.parts.values())


def parse(text: str) -> tuple[Role | None, str, float]:
    """`[ROLE=]FILE[:STRENGTH]`: the role, the file and the strength."""
    role, _, rest = text.partition("=")
    if role not in ("target", "drafter"):
        role, rest = "", text
    file, _, number = rest.rpartition(":")
    try:
        strength = float(number)
    except ValueError:  # the colon of C:\\, or none
        file, strength = rest, 1.0
    if not file or not math.isfinite(strength):
        raise UsageError(f"a LoRA is given as [ROLE=]FILE[:STRENGTH], with a number as strength, not '{text}'")
    return role or None, file, strength  # type: ignore[return-value]


def fit(checkpoint: Checkpoint, network: nn.Module) -> Fit:
    """Which of a file's tensors change which parameters. The network may be on the meta device."""
    wanted = dict(network.named_parameters())
    names = _by_any_name(wanted)
    changes: dict[str, dict[str, str]] = {}
    unmatched = []
    for stored in checkpoint.names:
        if _UNSUPPORTED.search(stored):
            raise SpecarError(f"{checkpoint.path} is no plain LoRA: {some([stored])} belongs to a kind not supported")
        part, module = _split(stored)
        name = names.get(_key(module) + "_bias" if part == "diff_b" else _key(module))
        if part and name:
            changes.setdefault(name, {})[part] = stored
        else:
            unmatched.append(stored)

    parts, wrong = {}, []
    for name, change in changes.items():
        if ("up" in change) != ("down" in change):
            unmatched += [change.pop(part) for part in ("up", "down", "alpha") if part in change]
        if not change.keys() & {"diff", "diff_b", "up"}:
            unmatched += change.values()
        elif fault := _wrong_size(name, change, checkpoint.names, wanted[name]):
            wrong.append(fault)
        else:
            parts[name] = change
    return Fit(parts, tuple(sorted(unmatched)), tuple(wrong))


def fitted(lora: Lora, path: Path, networks: Mapping[Role, nn.Module]) -> tuple[Lora, list[str]]:
    """The LoRA with the roles that it fits, of those that run, and what to tell of it. Reads headers only.

    SpecarError if it fits none, or not the one that it was given for; UsageError if that one does not run.
    """
    checkpoint = open_checkpoint(path)
    asked = [role for role in networks if lora.asked in (None, role)]
    if not asked:
        raise UsageError(f"the LoRA {path.name} is for the {lora.asked}, which generates no block: leave it out")
    fits = {role: fit(checkpoint, networks[role]) for role in asked}
    roles = tuple(role for role, found in fits.items() if found.parts and not found.wrong_sizes)
    if not roles:
        raise SpecarError("; ".join(f"{path.name} does not fit the {role}: {_reason(fits[role])}" for role in asked))
    notices = [f"LoRA {path.name}: {_summary(fits[role], len(checkpoint.names), role)}" for role in roles]
    notices += [
        f"LoRA {path.name} is not for the {role}: {_reason(found)}" for role, found in fits.items() if role not in roles
    ]
    return replace(lora, roles=roles), notices


def lacking(loras: Sequence[Lora], roles: Sequence[Role], schedule: Schedule | None) -> list[str]:
    """What to tell of LoRAs that change one model only, of those that run; no schedule: it is not settled yet."""
    notices = []
    for role in roles:
        blocks = [block for block in range(schedule.blocks) if schedule.role(block) == role] if schedule else []
        which = f" ({_ranges(blocks)})" if blocks else ""
        notices += [
            f"LoRA {lora.file} is on the {lora.roles[0]} only: the {role}'s blocks lack it{which}"
            for lora in loras
            if role not in lora.roles
        ]
    return notices


@torch.no_grad()
def merge(network: nn.Module, path: Path, loras: Sequence[tuple[Checkpoint, float]]) -> set[str]:
    """Add LoRAs, each with its strength, to the weights where they lie; returns the names of the changed parameters.

    path: the checkpoint that the network was loaded from. Changes of one weight are added up in float32 and rounded
    once, and a weight in fp8 is quantised from the checkpoint's anew.
    """
    fits = [(checkpoint, strength, fit(checkpoint, network).parts) for checkpoint, strength in loras]
    wanted = dict(network.named_parameters())
    changed = {name for _, _, parts in fits for name in parts}
    read = _reader(path, wanted)
    for name in changed:
        weight, layer = wanted[name], in_fp8(network, name)
        total = read(name) if layer else weight.float()
        for checkpoint, strength, parts in fits:
            if name in parts:
                total = total + strength * _difference(checkpoint, parts[name], weight)
        if layer:
            layer.load(total)
        else:
            weight.copy_(total)
    return changed


def _reader(path: Path, parameters: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """What a checkpoint holds of a network's parameters, each on its parameter's device."""
    checkpoint, names = open_checkpoint(path), _by_any_name(parameters)
    stored = {names.get(_key(_without_weight(canonical_name(name) or ""))): name for name in checkpoint.names}
    return lambda name: dequantised(checkpoint, stored[name], parameters[name].device)


def _difference(checkpoint: Checkpoint, parts: Mapping[str, str], weight: Tensor) -> Tensor:
    """What one LoRA of strength 1 adds to a weight, float32 on its device."""
    tensors = {part: checkpoint.tensor(stored).to(weight.device, torch.float32) for part, stored in parts.items()}
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            found = f"NaN or infinity in {parts[part]}"
            raise SpecarError(f"the LoRA {checkpoint.path} holds {found}: leave it out, or get it again")
    total = torch.zeros_like(weight, dtype=torch.float32)
    for whole in tensors.keys() & {"diff", "diff_b"}:
        total += tensors[whole].view_as(weight)
    if "up" in tensors:
        up, down = tensors["up"].flatten(1), tensors["down"].flatten(1)
        scale = tensors["alpha"].item() / len(down) if "alpha" in tensors else 1.0
        total += scale * (up @ down).view_as(weight)
    return total


def _split(stored: str) -> tuple[str, str]:
    """The part that a stored tensor is, "" if none, and the layer it belongs to."""
    for part, end in _ENDS.items():
        if found := re.search(end, stored):
            return part, _PREFIXES.sub("", canonical_name(stored[: found.start()]) or "", count=1)
    return "", stored


def _by_any_name(parameters: Iterable[str]) -> dict[str, str]:
    """Parameters by the keys of their own names, of Wan's and of diffusers', weights without their `.weight`."""
    return {_key(_without_weight(alias)): name for name in parameters for alias in (wan_name(name), helios_name(name))}


def wan_name(name: str) -> str:
    """Wan's own name of a parameter; a name that is Wan's already stays."""
    for diffusers, wan in _WAN_NAMES:
        name = name.replace(diffusers, wan)
    return name


def _without_weight(name: str) -> str:
    return name.removesuffix(".weight")


def _key(name: str) -> str:
    """kohya's and musubi's trainers write dots as underscores, so names are compared without the difference."""
    return name.replace(".", "_")


def _wrong_size(name: str, change: Mapping[str, str], infos: Mapping[str, TensorInfo], weight: Tensor) -> str | None:
    shapes = {part: infos[stored].shape for part, stored in change.items()}
    fits, there = math.prod(shapes.get("alpha", ())) == 1, []
    for whole in shapes.keys() & {"diff", "diff_b"}:
        there = list(shapes[whole])
        fits = fits and math.prod(there) == weight.numel()
    if "up" in shapes:
        up, down = shapes["up"] or (0,), shapes["down"] or (0,)
        low_rank = [up[0], math.prod(down[1:])]
        if low_rank != [weight.shape[0], weight[0].numel()] or not math.prod(up[1:]) == down[0] > 0:
            fits, there = False, low_rank
    return None if fits else f"{name} is {list(weight.shape)} in the model, {there} in the LoRA"


def _summary(found: Fit, tensors: int, role: Role) -> str:
    text = f"{found.matched} of {tensors} keys matched in the {role}"
    return text + (f"; {len(found.unmatched)} not: {some(found.unmatched)}" if found.unmatched else "")


def _reason(found: Fit) -> str:
    if found.wrong_sizes:
        return f"it was made for another size ({found.wrong_sizes[0]})"
    return f"none of its {len(found.unmatched)} keys matched: {some(found.unmatched)}"


def _ranges(blocks: Sequence[int]) -> str:
    """1-4, 6, 8-9."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1][1:] = [block]
        else:
            runs.append([block])
    return ", ".join("-".join(map(str, run)) for run in runs)
