"""A pair of small models, rolled out with seeded noise."""

from dataclasses import dataclass

import torch
from safetensors.torch import load, save

from specar_core.backbones.pair import Committed, Pair
from specar_core.noise import noise
from specar_core.rollout import rollout


class Stop(Exception):
    pass


@dataclass(frozen=True)
class Rollouts:
    """prompt: text embeddings; height, width: in pixels."""

    pair: Pair
    prompt: torch.Tensor
    height: int
    width: int

    def seeded(self, seed=0, batch=1):
        shape = self.pair.geometry.latent_shape(self.width, self.height, batch)
        return lambda block, draw: noise(seed, block, draw, shape)

    def start(self, policy, pair=None, **options):
        options = {"height": self.height, "width": self.width, **options}
        prompts, noises = options.pop("prompts", lambda block: self.prompt), options.pop("noise", self.seeded())
        return rollout(pair or self.pair, policy, prompts, noises, **options)

    def play(self, policy, pair=None, **options):
        return list(self.start(policy, pair, **options))

    def committed(self, results, blocks):
        """What a checkpoint after `blocks` blocks holds, through the bytes that it would write."""
        stored = [load(save({"latents": r.latents.contiguous(), **r.context.extra()})) for r in results[:blocks]]
        extra = {name: value for name, value in stored[-1].items() if name != "latents"}
        return Committed(blocks, lambda block: stored[block]["latents"], lambda block: self.prompt, extra)


def latents(results):
    return torch.cat([result.latents for result in results], dim=2)
