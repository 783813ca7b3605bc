"""One forward of a causal model over a context and a block, as in a rollout, but with gradients."""

import torch
from torch import Tensor, nn

from specar_core.backbones.causal_wan import SHIFT
from specar_core.backbones.tiny import CONFIGS
from specar_core.models.wan import CausalWan, TextKV
from specar_core.schedule import Role

LEVELS = 4  # evaluations a block, at steps 1000, 750, 500 and 250
CONTEXT_NOISE = 0.15


class OneForward:
    """Stands in for the KeyValueCache where one forward sees all that there is: autograd cannot follow the slices of
    one buffer that every layer writes to."""

    def __init__(self, model: CausalWan, batch: int, tokens: int) -> None:
        shape = (batch, tokens, model.config.num_heads, model.config.head_dim)
        self._empty = lambda: torch.empty(shape, dtype=torch.bfloat16, device=model.patch_embedding.bias.device)

    def open(self, first_frame: int, frames: int) -> None:
        pass

    def slot(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = self._empty(), self._empty()
        return keys, values, keys, values


def build(role: Role, device: torch.device, compiled: bool) -> CausalWan:
    """A fresh model, its gates open and its flow zero."""
    model = CausalWan(CONFIGS[role]).to(device)
    for name, parameter in model.named_parameters():
        if name.endswith("modulation"):
            nn.init.normal_(parameter, std=0.1)
            if parameter.shape[1] == 6:
                parameter.data[:, 2::3] += 1  # the gates
    nn.init.zeros_(model.head.head.weight)
    nn.init.zeros_(model.head.head.bias)
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def predict(model: CausalWan, text: TextKV, context: Tensor | None, x: Tensor, sigma: Tensor) -> Tensor:
    """The flow of the block x [B, C, 3, h, w] at noise levels sigma [B], behind a clean context or none."""
    batch, _, frames, height, width = x.shape
    times = (1000 * sigma)[:, None].expand(-1, frames)
    if context is not None:
        x = torch.cat([context, x], dim=2)
        times = torch.cat([torch.zeros_like(times), times], dim=1)
    cache = OneForward(model, batch, x.shape[2] * height * width // 4)
    with torch.autocast(x.device.type, torch.bfloat16):
        flow = model(x, times, text, cache, 0, group=frames, wanted=frames)  # type: ignore[arg-type]
    return flow.float()


def keys_values(model: CausalWan, embeddings: Tensor) -> TextKV:
    with torch.autocast(embeddings.device.type, torch.bfloat16):
        return model.encode_text(embeddings)


def shifted(u: Tensor) -> Tensor:
    """Noise level at step 1000 u."""
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def some_levels(count: int, device: torch.device) -> Tensor:
    """Which of the evaluations, [B] in 0..3."""
    return torch.randint(LEVELS, (count,), device=device)


def sigma_at(level: Tensor) -> Tensor:
    return shifted(1 - level / LEVELS)


def mixed(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    sigma = sigma.view(-1, 1, 1, 1, 1)
    return (1 - sigma) * x0 + sigma * noise


def shaken(context: Tensor) -> Tensor:
    """Half of the contexts with some noise, so that a model gets used to imperfect ones."""
    shape = (len(context), 1, 1, 1, 1)
    strength = CONTEXT_NOISE * torch.rand(shape, device=context.device)
    strength = strength * (torch.rand(shape, device=context.device) < 0.5)
    return context + strength * torch.randn_like(context)
