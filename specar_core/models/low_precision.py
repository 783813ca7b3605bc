"""Matrix products in fp8 (e4m3), a scale for every row: about 1.6 times the rate of bf16, and half the bytes.

Weights are quantised once, activations row by row as they come. What is sensitive or small stays as it is: everything
outside the blocks (patches, text, time, head), modulation, norms, and the text's keys and values.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError, first_line

LARGEST = 448.0
CAPABILITY = (8, 9)
# By the ends of their names in CausalWan and HeliosTransformer: the text's keys and values, computed once a prompt.
KEPT = ("cross_attn.k", "cross_attn.v", "attn2.to_k", "attn2.to_v")


class Quantised(NamedTuple):
    values: Tensor  # [..., d], e4m3
    scale: Tensor  # [..., 1], float32: a row is values * scale


def quantised(x: Tensor) -> Quantised:
    """Every row of x [..., d] by its own largest value."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Quantised((x.float() / scale).to(torch.float8_e4m3fn), scale)


def product(x: Quantised, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] with its scales [out]; in the bias's dtype."""
    if x.values.is_cuda:
        rows, scales = x.values.flatten(0, -2), x.scale.flatten(0, -2)
        y = torch._scaled_mm(
            rows, weight.t(), scales, scale.unsqueeze(0), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y.unflatten(0, x.values.shape[:-1]).to(bias.dtype)
    y = F.linear(x.values.float(), weight.float()) * x.scale * scale
    return (y + bias.float()).to(bias.dtype)


class Fp8Linear(nn.Module):
    """Takes the place of an nn.Linear, under the names of its parameters; `scale` follows from what `load` is given."""

    scale: Tensor

    def __init__(self, inputs: int, outputs: int, device: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, device=device), requires_grad=False)
        self.register_buffer("scale", torch.empty(outputs, device=device), persistent=False)

    def load(self, weight: Tensor) -> None:
        """Quantise weight [out, in]; in place, unless the layer is still on the meta device."""
        values, scale = quantised(weight)
        if self.weight.is_meta:
            self.weight, self.scale = nn.Parameter(values, requires_grad=False), scale.squeeze(1)
        else:
            self.weight.data.copy_(values)
            self.scale.copy_(scale.squeeze(1))

    def forward(self, x: Tensor | Quantised) -> Tensor:
        return product(x if isinstance(x, Quantised) else quantised(x), self.weight, self.scale, self.bias)


def lower(network: Any) -> None:
    """Put Fp8Linear in the place of the wide layers of the network's blocks, before their weights are loaded."""
    for name, layer in list(network.blocks.named_modules()):
        # Tensor cores take multiples of 16.
        fits = type(layer) is nn.Linear and layer.in_features % 16 == layer.out_features % 16 == 0
        if fits and not name.endswith(KEPT):
            network.blocks.set_submodule(name, Fp8Linear(layer.in_features, layer.out_features, layer.weight.device))


def lowered(network: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    return ((name, layer) for name, layer in network.named_modules() if isinstance(layer, Fp8Linear))


def weight_bytes(build: Callable[[], nn.Module], size: int, fp8: bool = False, keep_fp32: Iterable[str] = ()) -> int:
    """Bytes of a network's weights, `size` a number but for those in fp8 and those with one of `keep_fp32` as a part
    of their dotted name."""
    with torch.device("meta"):
        network = build()
    if fp8:
        lower(network)
    single = {f"{name}.weight": 1 for name, _ in lowered(network)}
    kept = set(keep_fp32)

    def each(name: str) -> int:
        return single.get(name, size if kept.isdisjoint(name.split(".")) else 4)

    scales = sum(4 * layer.out_features for _, layer in lowered(network))
    return scales + sum(each(name) * value.numel() for name, value in network.named_parameters())


def check(device: torch.device) -> None:
    """UsageError if fp8 was asked for and this device has none."""
    if reason := unavailable(device):
        raise UsageError(f"precision fp8 cannot be used: {reason}; use bf16")


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why there are no products in fp8 here; None if there are. The CPU does the same arithmetic, slowly."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        major, minor = capability
        return f"it takes compute capability 8.9 (Ada, Hopper and later), and this GPU has {major}.{minor}"
    x, weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).split([32, 16])
    rows, (values, scale), bias = quantised(x), quantised(weight), torch.zeros(16, dtype=torch.bfloat16)
    expected = product(rows, values, scale.squeeze(1), bias).float()
    try:
        there = Quantised(*(part.to(device) for part in rows))
        found = product(there, values.to(device), scale.squeeze(1).to(device), bias.to(device)).float().cpu()
    except (RuntimeError, AttributeError) as failure:
        return f"this torch ({torch.__version__}) has none for it: {first_line(failure)}"
    error = ((found - expected).norm() / expected.norm()).item()
    return None if error < 0.01 else f"its products differ from the CPU's by {error:.2g} (relative)"
