"""Convolutions over time with fewer products: the same numbers, and what half precision makes of them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from specar_core.models.minimal import POINTS, matrices, sums_of_taps

numbers = st.integers(-9, 9)


@given(st.sampled_from(sorted(POINTS)).flatmap(lambda m: st.lists(numbers, min_size=m + 2, max_size=m + 2)),
       st.lists(numbers, min_size=3, max_size=3))  # fmt: skip
def test_three_taps_over_m_frames_take_m_and_two_products(x, w):
    frames, taps, results = matrices(len(x) - 2)
    products = (frames @ x) * (taps @ w)
    assert len(products) == len(x)
    assert results @ products == pytest.approx(np.correlate(x, w), abs=1e-9)


def fewer(x, weight, m, rounded=lambda y: y):
    """x [1, C, T + 2, H, W] with weight [O, C, 3, 3, 3] by its sums, what is stored being `rounded`."""
    frames, _, results = (torch.tensor(matrix, dtype=x.dtype) for matrix in matrices(m))
    taps = rounded(sums_of_taps(weight, m)).to(x.dtype).permute(0, 1, 4, 2, 3)
    outputs = []
    for first in range(0, x.shape[2] - 2, m):
        sums = rounded(torch.einsum("pt,bcthw->pbchw", frames, x[:, :, first : first + m + 2]))
        products = [rounded(F.conv2d(part, tap, padding=1)) for part, tap in zip(sums, taps, strict=True)]
        outputs.append(torch.einsum("tp,pbohw->bothw", results, torch.stack(products)))
    return rounded(torch.cat(outputs, dim=2))


@pytest.mark.parametrize("m", sorted(POINTS))
def test_sums_of_taps_make_a_convolution(m):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 10, 5, 6), torch.randn(3, 4, 3, 3, 3)
    assert torch.allclose(fewer(x, weight, m), F.conv3d(x, weight, padding=(0, 1, 1)), atol=1e-4)


@pytest.mark.parametrize("alike, m, bound", [(0.0, 2, 1.6), (0.0, 4, 2.6), (0.9, 2, 1.5), (0.9, 4, 1.5)])
def test_half_precision_loses_little_more_than_the_plain_way(alike, m, bound):
    """`alike`: the part that a frame has in common with the others."""
    torch.manual_seed(0)

    def half(y):
        return y.half().double()

    common, own = torch.randn(1, 64, 1, 8, 8).double(), torch.randn(1, 64, 10, 8, 8).double()
    x = F.silu(alike**0.5 * common + (1 - alike) ** 0.5 * own)
    weight = torch.randn(64, 64, 3, 3, 3).double() / 1728**0.5
    exact = F.conv3d(x, weight, padding=(0, 1, 1))
    plain = half(F.conv3d(half(x), half(weight), padding=(0, 1, 1)))
    assert (fewer(half(x), half(weight), m, half) - exact).norm() < bound * (plain - exact).norm()
