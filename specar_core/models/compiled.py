"""torch.compile for a transformer's blocks: what stands between matrix products and attention becomes few kernels."""

from typing import Any

import torch

from ..errors import first_line


def compile_blocks(network: Any) -> None:
    """All blocks share their code, so each shape that a rollout has (three a model) is compiled once, when it comes
    first, in about 10 s; torch keeps the result on disk. Attention is left to its own kernels."""
    # Compiled shapes of one piece of code, over all models of a process; torch's default of 8 is two pairs' worth.
    # Torch reads it whenever a new shape comes, so it stays set; it takes nothing from others in the process.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    network.attend = torch.compiler.disable(network.attend)
    for block in network.blocks:
        block.compile(dynamic=False)


def no_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device, in one line; None if it can."""
    try:
        torch.compile(lambda x: torch.nn.functional.silu(x) + 1)(torch.zeros(8, device=device))
    except torch._dynamo.exc.TorchDynamoException as error:  # no C++ compiler, no Triton, or one of another version
        return first_line(error)
    return None
