"""One matrix product where several layers share their input, without a second copy of their weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .low_precision import Fp8Linear, Quantised

Rows = Tensor | Quantised  # of activations


def join(layers: Sequence[nn.Module]) -> nn.Module | None:
    """A layer that gives the outputs of all of these side by side; None where they are of kinds that cannot.

    Their weights become parts of its own: they keep their names, and what is added to them in place holds for both.
    Whoever puts other weights in their place has to join them again.
    """
    first = layers[0]
    if not (type(first) in (nn.Linear, Fp8Linear) and all(type(layer) is type(first) for layer in layers)):
        return None
    with torch.device("meta"):
        whole = type(first)(first.in_features, sum(layer.out_features for layer in layers))  # type: ignore
    for name in ("weight", "bias", "scale") if isinstance(first, Fp8Linear) else ("weight", "bias"):
        parts = [getattr(layer, name).data for layer in layers]
        joined = _concatenated(parts)
        for layer, part in zip(layers, joined.split([len(part) for part in parts]), strict=True):
            getattr(layer, name).data = part
        setattr(whole, name, joined if name == "scale" else nn.Parameter(joined, requires_grad=False))
    return whole


class Projections(nn.Module):
    """An attention's layers for queries, keys and values of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        # The three as one layer, if `join` made it; in a tuple, so that it is no second owner of their weights.
        self.joined: tuple[nn.Module, ...] = ()

    @property
    def three(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        raise NotImplementedError

    def join(self) -> None:
        """From now on one product gives all three; for weights that stay where they are."""
        whole = join(self.three)
        self.joined = () if whole is None else (whole,)

    def project(self, x: Rows, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, wanted, d] of the last rows, keys and values [B, N, d] of all, of x [B, N, d]."""
        q, k, v = self.three
        tokens = (x.values if isinstance(x, Quantised) else x).shape[1]
        if self.joined and wanted == tokens:
            return self.joined[0](x).chunk(3, dim=-1)
        last = slice(tokens - wanted, None)
        part = Quantised(x.values[:, last], x.scale[:, last]) if isinstance(x, Quantised) else x[:, last]
        keys = k(x)
        return q(part) if wanted else keys[:, :0], keys, v(x)  # not every product takes no rows


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat, which has no fp8 everywhere."""
    bits = torch.uint8 if parts[0].element_size() == 1 else parts[0].dtype
    return torch.cat([part.view(bits) for part in parts]).view(parts[0].dtype)
