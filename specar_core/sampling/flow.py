"""The shifted flow-matching table of Self-Forcing and Krea Realtime.

A noisy latent is x_t = (1 - sigma) x0 + sigma eps, and the network predicts the flow v = eps - x0. The table has 1000
entries; every time is looked up as its nearest entry, so t = 0 means the last one, sigma = 0.00498 at shift 5, and not
sigma = 0 (Self-Forcing, utils/scheduler.py of guandeh17/Self-Forcing).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class FlowTable:
    """sigma_i = s u_i / (1 + (s-1) u_i) with u_i = 1 - i/1000 and shift s; t_i = 1000 sigma_i."""

    def __init__(self, shift: float = 5.0) -> None:
        u = torch.linspace(1, 0, 1001)[:-1]
        self.sigmas = shift * u / (1 + (shift - 1) * u)
        self.timesteps = self.sigmas * 1000

    def sigma(self, t: float) -> float:
        return self.sigmas[(self.timesteps - t).abs().argmin()].item()

    def warped(self, steps: Sequence[int]) -> list[float]:
        """Times for a list of unshifted steps q in 0..1000: entry 1000-q of the table, which ends with t = 0."""
        padded = torch.cat([self.timesteps, torch.zeros(1)])
        return [padded[1000 - q].item() for q in steps]

    def renoise(self, x0: Tensor, noise: Tensor, t: float) -> Tensor:
        sigma = self.sigma(t)
        return (1 - sigma) * x0 + sigma * noise

    def x0_from_flow(self, flow: Tensor, x: Tensor, t: float) -> Tensor:
        """float64 in between, as in the reference; the result has x's dtype."""
        return (x.double() - self.sigma(t) * flow.double()).to(x.dtype)
