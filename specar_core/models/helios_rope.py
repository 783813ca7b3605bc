"""Rotary positions of Helios: (frame, row, column) of a patch as angles, averaged for coarse history patches.

Frame numbers are relative: the same for every chunk. Rows and columns count 0, 1, 2, ... on the grid at hand, so the
noisy tokens of a coarse pyramid level are not spread over the full grid. A history token that covers several patches of
the full grid gets the mean of their cosines and of their sines. That is not a turn by the mean angle: it also shortens
the vector (huggingface/diffusers 0.42.1, transformer_helios.py).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_to_multiple(x: Tensor, steps: Sequence[int]) -> Tensor:
    """Repeat the last slice of each of the last three axes of [N, C, T, h, w] until it is a multiple of its step."""
    t, h, w = (-size % step for size, step in zip(x.shape[-3:], steps, strict=True))
    return F.pad(x, (0, w, 0, h, 0, t), mode="replicate") if t or h or w else x


def rope_table(frames: Tensor, height: int, width: int, rope_dim: Sequence[int], theta: float, pool: int = 1) -> Tensor:
    """cos and sin [2, tokens, 1, sum(rope_dim)/2], float32, for a grid of patches in the order (frame, row, column).

    frames: [T] frame numbers; height, width: patches of the grid; rope_dim: channels of a head that turn with (frame,
    row, column), pair i of D by position * theta^(-2i/D); pool: patches that a token covers along each axis.
    """
    device = frames.device
    grid = (len(frames), height, width)
    positions = (frames, torch.arange(height, device=device), torch.arange(width, device=device))
    angles = []
    for axis, (position, dims) in enumerate(zip(positions, rope_dim, strict=True)):
        speed = theta ** (-torch.arange(0, dims, 2, device=device) / dims)
        shape = [dims // 2, 1, 1, 1]
        shape[1 + axis] = len(position)
        angles.append(torch.outer(speed, position.float()).view(shape).expand(-1, *grid))
    turn = torch.cat(angles)
    table = pad_to_multiple(torch.stack([turn.cos(), turn.sin()]), (pool, pool, pool))
    return F.avg_pool3d(table, pool).flatten(2).transpose(1, 2).unsqueeze(2)
