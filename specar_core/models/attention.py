"""Attention back ends: one table, probed when first asked for, checked against torch before use.

Every back end takes and returns [B, tokens, heads, head_dim]. `choose` gives the best one that this device really has,
and logs why. A package that is not installed, or was built for another version, is passed over with its reason;
anything else that goes wrong is a fault of ours and surfaces.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UsageError, first_line
from .wan import Attend, sdpa

log = logging.getLogger("specar")

# FlashAttention 3 is slow on few keys: 206 against 435 TFLOP/s with the 512 keys of a prompt (H200).
FEW_KEYS = 1024


class Absent(Exception):
    """This back end cannot be had here; the message says why."""


@dataclass(frozen=True)
class Backend:
    name: str
    capability: tuple[int, int] | None  # lowest CUDA compute capability; None: runs anywhere
    highest: tuple[int, int] | None
    probe: Callable[[], Attend]
    automatic: bool = True


@dataclass(frozen=True)
class Choice:
    name: str
    attend: Attend


def _importable(name: str):
    """ImportError: not installed. OSError: a binary for another version of torch or CUDA."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise Absent(f"{name} cannot be imported ({error})") from None


def _first_output(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Attend:
    """Some builds of FlashAttention return the tensor, others (tensor, log-sum-exp)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _flash3() -> Attend:
    reasons = []
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            return _first_output(_importable(module).flash_attn_func)
        except Absent as absent:
            reasons.append(str(absent))
    try:
        kernels = _importable("kernels")
    except Absent as absent:
        raise Absent("; ".join([*reasons, str(absent)])) from None
    try:
        hub = kernels.get_kernel("kernels-community/flash-attn3", version=1)
    except Exception as error:
        # No build for this torch, nothing cached and no network, the wrong card: there is no end to the types, because
        # the package's HTTP client has its own.
        raise Absent(f"kernels found no FlashAttention 3: {first_line(error)}") from None
    return _first_output(hub.flash_attn_func)


def _flash2() -> Attend:
    return _first_output(_importable("flash_attn").flash_attn_func)


def _sage() -> Attend:
    sage = _importable("sageattention").sageattn
    return lambda q, k, v: sage(q, k, v, tensor_layout="NHD", is_causal=False)


def _cudnn() -> Attend:
    # Before 9.15.1 cuDNN is wrong for lengths that are not a multiple of 128, and 1560 tokens a frame are none.
    version = torch.backends.cudnn.version() or 0
    if version <= 91500:
        raise Absent(f"cuDNN {version} is too old: attention is wrong before 9.15.1")
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(order, set_priority=True):
            return sdpa(q, k, v)

    return attend


BACKENDS = (
    Backend("flash3", (9, 0), (9, 0), _flash3),  # Hopper only: H100, H200 and GH200 are all 9.0
    Backend("cudnn", (9, 0), None, _cudnn),
    Backend("flash2", (8, 0), None, _flash2),
    # SageAttention 2.2 gave noise on H100 and H200 for many users (krea-ai/realtime-video issue 16): by name only.
    Backend("sage", (8, 0), None, _sage, automatic=False),
    Backend("sdpa", None, None, lambda: sdpa),
)
NAMES = ("auto", *(backend.name for backend in BACKENDS))


def check_name(name: str) -> None:
    """UsageError unless `name` is a back end or "auto"."""
    if name not in NAMES:
        raise UsageError(f"unknown attention '{name}'; known are {', '.join(NAMES)}")


def choose(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Choice:
    """The back end called `name`, or the first of the table that this device, precision and installation allow.

    A back end asked for by name that cannot be had is refused (UsageError) with the reason.
    """
    if name != "auto":
        attend = named(device, dtype, name)
        log.info("attention: %s (by name)", name)
        return Choice(name, attend)
    passed_over: list[str] = []
    for backend in BACKENDS:
        if not backend.automatic:
            continue
        try:
            attend = probe(backend, device, dtype)
        except Absent as absent:
            passed_over.append(f"{backend.name}: {absent}")
            continue
        log.info("attention: %s (%s)", backend.name, "; ".join(passed_over) or "first choice")
        return Choice(backend.name, attend)
    raise AssertionError("sdpa is always there")


def named(device: torch.device, dtype: torch.dtype, name: str) -> Attend:
    """The function of one back end. UsageError, with the reason, if it cannot be had."""
    check_name(name)
    backend = next(backend for backend in BACKENDS if backend.name == name)
    try:
        return probe(backend, device, dtype)
    except Absent as absent:
        raise UsageError(f"attention '{name}' cannot be used: {absent}") from None


@cache
def probe(backend: Backend, device: torch.device, dtype: torch.dtype) -> Attend:
    """The back end's function, having agreed with torch's on this device; Absent with the reason otherwise, which is
    looked for again the next time."""
    if backend.capability is not None:
        if device.type != "cuda":
            raise Absent("needs an NVIDIA GPU")
        capability = torch.cuda.get_device_capability(device)
        if capability < backend.capability or (backend.highest and capability > backend.highest):
            raise Absent(f"not made for compute capability {capability[0]}.{capability[1]}")
        if dtype not in (torch.bfloat16, torch.float16):
            raise Absent(f"has no {dtype}".replace("torch.", ""))
    attend = backend.probe()
    if attend is sdpa:
        return sdpa
    error = self_test(attend, device, dtype)
    if error > 0.02:
        raise Absent(f"differs from torch by {error:.2g} (relative)")

    def by_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) if k.shape[1] < FEW_KEYS else attend(q, k, v)

    return by_shape


def self_test(attend: Attend, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error against float32 math at a real shape: 1560 queries, 3120 keys, heads of 128. NaN counts as 1."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 2, 128, generator=generator).to(device, dtype) for tokens in (1560, 3120, 3120))
    with sdpa_kernel(SDPBackend.MATH):
        expected = sdpa(q.float(), k.float(), v.float())
    try:
        error = (attend(q, k, v).float() - expected).norm() / expected.norm()
    except (RuntimeError, AssertionError, TypeError) as failure:  # how these packages refuse a device or a shape
        raise Absent(f"fails here: {first_line(failure)}") from None
    return error.item() if torch.isfinite(error) else 1.0
