"""UniPC of order 2 (Zhao et al., arXiv:2302.04867) for flow matching: predictions of x0, B(h) = e^-h - 1.

    x_sigma = (1 - sigma) x0 + sigma noise          lambda(sigma) = ln(1 - sigma) - ln(sigma)

With prediction m_s of x0 at sigma_s, h = lambda_t - lambda_s and E = e^-h - 1, a step from sigma_s to sigma_t is
    x_t = (sigma_t / sigma_s) x_s - (1 - sigma_t) E (m_s + correction).
It is taken twice: to predict x_t with what is known at s, and again when m_t is known, to correct the x_t that the next
step starts from. m_t itself is not computed again.
"""

import math
from collections.abc import Sequence

from torch import Tensor


class UniPC:
    """One pass over decreasing sigmas, the last of which is 0. `step` is called once for each of the others."""

    def __init__(self, sigmas: Sequence[float]) -> None:
        # lambda(0) is infinite; with 1e-8 in its place the last step returns the prediction.
        self.sigmas = [max(sigma, 1e-8) for sigma in sigmas]
        self.lambdas = [math.log(1 - sigma) - math.log(sigma) for sigma in self.sigmas]
        self.index = 0
        self.predictions: tuple[Tensor, ...] = ()  # of the last two steps, newest first
        self.sample: Tensor  # where the newest prediction's step started, corrected

    def step(self, flow: Tensor, x: Tensor) -> Tensor:
        """The sample at the next sigma, given the sample at this one and the flow noise - x0 there."""
        prediction = x - self.sigmas[self.index] * flow
        if self.index:
            x = self._moved(self._corrector(prediction))
        self.sample = x
        self.predictions = (prediction, *self.predictions[:1])
        self.index += 1
        return self._moved(self._predictor())

    def _moved(self, correction: Tensor | float) -> Tensor:
        """The step from the sigma before `index` to the one at `index`."""
        before, here = self.sigmas[self.index - 1], self.sigmas[self.index]
        direction = self.predictions[0] + correction
        return here / before * self.sample - (1 - here) * math.expm1(-self._h) * direction

    @property
    def _h(self) -> float:
        return self.lambdas[self.index] - self.lambdas[self.index - 1]

    @property
    def _second_order(self) -> bool:
        """Neither the first step nor the last: there is no earlier prediction, or the end is a prediction itself."""
        return 1 < self.index < len(self.sigmas) - 1

    def _earlier_slope(self) -> tuple[Tensor, float]:
        """How much the prediction changes over the step, going by the one before; and where that lies, in steps."""
        newest, older = self.predictions
        ratio = (self.lambdas[self.index - 2] - self.lambdas[self.index - 1]) / self._h
        return (older - newest) / ratio, ratio

    def _predictor(self) -> Tensor | float:
        return 0.5 * self._earlier_slope()[0] if self._second_order else 0.0

    def _corrector(self, prediction: Tensor) -> Tensor:
        slope = prediction - self.predictions[0]
        if not self._second_order:
            return 0.5 * slope
        earlier, ratio = self._earlier_slope()
        h, e = self._h, math.expm1(-self._h)
        first = (-e / h - 1) / e
        second = 2 * ((e / h + 1) / h - 0.5) / e
        weight = (first - second) / (1 - ratio)
        return weight * earlier + (first - weight) * slope
