"""What stands between a transformer's matrix products, row by row: norms, modulation, RoPE, residuals, GELU.

Plain torch says what is meant. On a GPU Triton does each in one pass, which torch does in up to six, and hands rows on
in fp8 where the product behind them wants that.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused import triton_kernels
from .joined import Rows
from .low_precision import Fp8Linear, Quantised

Rope = tuple[Tensor, Tensor]


def kernels(x: Tensor, *layers: nn.Module) -> ModuleType | None:
    """Triton's version for a tensor that it can take; torch's own needs no more than torch.

    It knows no gradients and is nothing for torch.compile, which has its own way. Layers of a host (`operations`) may
    keep their weights elsewhere, and change them, until they are called: nobody else reads those.
    """
    own = all(type(layer) in (nn.LayerNorm, nn.RMSNorm, nn.Linear, Fp8Linear) for layer in layers)
    busy = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if not x.is_cuda or not own or busy:
        return None
    return triton_kernels("rowwise_kernels", "the models run on plain torch, which takes about a third longer")


def normed(
    x: Tensor,
    norm: nn.Module,
    consumer: nn.Module,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    update: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Rows]:
    """x + gate * update, and that through LayerNorm and modulation, norm(x) * (1 + scale) + shift, for `consumer`.

    x, update [B, F, S, d]; shift, scale, gate [B, F, 1, d]. Update and gate may be left out; so may shift and scale,
    both, if the norm has weights of its own.
    """
    layers = [norm] if norm.elementwise_affine else []
    if fused := kernels(x, *layers):
        vectors = {
            "shift": norm.bias if shift is None else shift.squeeze(2),
            "scale": norm.weight if scale is None else scale.squeeze(2),
            "update": None if update is None else update.flatten(1, 2).contiguous(),
            "gate": None if gate is None else gate.squeeze(2),
        }
        plus = float(scale is not None)
        total, rows = _residual_norm(fused, x.flatten(1, 2), norm, consumer, x.shape[2], **vectors, plus=plus)
        return total.view_as(x), rows
    x = x if update is None else added(x, update, gate)
    y = norm(x) if shift is None or scale is None else torch.addcmul(shift, norm(x), 1 + scale)
    return x, y.flatten(1, 2)


def added(x: Tensor, update: Tensor, gate: Tensor | None = None) -> Tensor:
    """x + gate * update, shaped as in `normed`."""
    if fused := kernels(x):
        gate = None if gate is None else gate.squeeze(2)
        rows = x.flatten(1, 2).contiguous()
        return fused.residual_norm(rows, x.shape[2], update=update.flatten(1, 2).contiguous(), gate=gate)[0].view_as(x)
    return x + update if gate is None else torch.addcmul(x, gate, update)


def modulated(hidden: Tensor, norm: nn.Module, shift: Tensor, scale: Tensor, past: int, consumer: nn.Module) -> Rows:
    """norm(hidden) * (1 + scale) + shift of hidden [B, N, d], in float32, where the vectors [B, 2, d] are those of the
    first `past` tokens and of the others. One vector a token would be 1.4 GB a block of Helios at full size."""
    if fused := kernels(hidden):
        size, (shift, scale) = _groups(hidden, past, shift, scale)
        return _residual_norm(fused, hidden, norm, consumer, size, shift=shift, scale=scale)[1]
    parts = enumerate(norm(hidden.float()).tensor_split([past], dim=1))
    modulated = [torch.addcmul(shift[:, i : i + 1], x, 1 + scale[:, i : i + 1]) for i, x in parts]
    return torch.cat(modulated, dim=1).to(hidden.dtype)


def gated(hidden: Tensor, update: Tensor, gate: Tensor, past: int) -> Tensor:
    """hidden + gate * update, shaped as in `modulated`, summed in the gate's dtype."""
    if fused := kernels(hidden):
        size, (gate,) = _groups(hidden, past, gate)
        return fused.residual_norm(hidden.contiguous(), size, update=update.contiguous(), gate=gate)[0]
    parts = enumerate(zip(hidden.tensor_split([past], dim=1), update.tensor_split([past], dim=1), strict=True))
    sums = [torch.addcmul(x, new, gate[:, i : i + 1]) for i, (x, new) in parts]
    return torch.cat(sums, dim=1).to(hidden.dtype)


def _groups(hidden: Tensor, past: int, *vectors: Tensor) -> tuple[int, list[Tensor]]:
    """How the kernels are told of both parts: rows of the first vector, and the vectors."""
    return (past, list(vectors)) if past else (hidden.shape[1], [vector[:, 1:] for vector in vectors])


def plain_normed(x: Tensor, norm: nn.Module, consumer: nn.Module) -> Rows:
    """x [B, N, d] through a LayerNorm with weights of its own, in float32."""
    if fused := kernels(x, norm):
        return _residual_norm(fused, x, norm, consumer, shift=norm.bias, scale=norm.weight, plus=0.0)[1]
    return norm(x.float()).to(x.dtype)


def _residual_norm(
    fused: ModuleType, x: Tensor, norm: nn.Module, consumer: nn.Module, size: int = 1, **vectors: Any
) -> tuple[Tensor, Rows]:
    """The kernel's sum, and its normed rows as `consumer` takes them."""
    fp8 = isinstance(consumer, Fp8Linear)
    total, rows, scales = fused.residual_norm(x.contiguous(), size, **vectors, eps=norm.eps, fp8=fp8)
    return total, Quantised(rows, scales) if fp8 else rows


def heads(x: Tensor, norm: nn.Module | None, rope: Rope | None, count: int, out: Tensor | None = None) -> Tensor:
    """x [B, N, d] through RMSNorm and RoPE, as [B, N, heads, head_dim]; into `out` where it is given."""
    layers = [] if norm is None else [norm]
    if fused := kernels(x, *layers):
        if out is None:
            out = x.new_empty(*x.shape[:2], count, x.shape[2] // count)
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return fused.turn(x, gain, rope, out, eps)
    x = (x if norm is None else norm(x)).unflatten(-1, (count, -1))
    x = x if rope is None else rotate(x, rope)
    return x if out is None else out.copy_(x)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn adjacent pairs of x [B, tokens, heads, head_dim] by their angles, in float32."""
    cos, sin = rope
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def feed_forward(first: nn.Module, second: nn.Module, x: Rows) -> Tensor:
    """Two layers with GELU (by tanh) between them."""
    if isinstance(x, Tensor) and kernels(x, first) and isinstance(first, nn.Linear):
        # GELU in the product's last step: 2.4 ms a step of the 14B model.
        y = torch._addmm_activation(first.bias, x.flatten(0, -2), first.weight.t(), use_gelu=True)
        return second(y.unflatten(0, x.shape[:-1]))
    y = first(x)
    if (fused := kernels(y, first, second)) and isinstance(second, Fp8Linear):
        return second(Quantised(*fused.quantised(y, gelu=True)))
    return second(F.gelu(y, approximate="tanh"))


def rows_for(x: Tensor, consumer: nn.Module) -> Rows:
    """x, or its rows in fp8 if the consumer takes those."""
    fused = kernels(x)
    return Quantised(*fused.quantised(x)) if fused and isinstance(consumer, Fp8Linear) else x
