"""The smallest kernel: what goes wrong with it is wrong with Triton on this machine."""

import torch
import triton
import triton.language as tl


@triton.jit
def _one(x):
    tl.store(x, 1.0)


def probe() -> None:
    _one[(1,)](torch.empty(1, device="cuda"))
