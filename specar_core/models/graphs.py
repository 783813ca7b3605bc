"""A small network's forwards as CUDA graphs: its kernels are done sooner than Python launches them."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .wan import CausalWan, KeyValueCache, TextKV

# Keys and values that may stay in memory for a whole run, as a graph's addresses must. Larger models are no faster.
LARGEST = 2 << 30


def usable(model: CausalWan, cache: KeyValueCache) -> bool:
    """Whether this forward may be recorded: on a GPU, with weights that stay where they are, and small."""
    size = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    return cache.keys[0].is_cuda and bool(model.blocks[0].self_attn.joined) and size <= LARGEST


class Forwards:
    """One model's forwards over one cache. Each kind runs once, is recorded the second time, and replayed from then on.

    They live as long as the run, and hold the memory that they work in, which they share: their results are copied
    before the next one runs.
    """

    def __init__(self, model: CausalWan, cache: KeyValueCache) -> None:
        self.model, self.cache = model, cache
        self._text: TextKV = ()  # of the newest prompt, where the recorded forwards look for it
        self._latest: TextKV = ()
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, latents: Tensor, timesteps: Tensor, text: TextKV, first_frame: int, **options: Any) -> Tensor:
        """As CausalWan.forward."""
        kind = (latents.shape, first_frame, *options.items())
        if kind not in self._seen:
            self._seen.add(kind)
            return self.model(latents, timesteps, text, self.cache, first_frame, **options)
        if text is not self._latest:
            self._keep(text)
        if kind not in self._recorded:
            self._recorded[kind] = self._record(latents, timesteps, first_frame, **options)
        graph, x, t, flow = self._recorded[kind]
        x.copy_(latents)
        t.copy_(timesteps)
        self.cache.open(first_frame, latents.shape[2])
        graph.replay()
        return flow.clone()

    def _keep(self, text: TextKV) -> None:
        self._text = self._text or [(torch.empty_like(keys), torch.empty_like(values)) for keys, values in text]
        for (keys, values), (new_keys, new_values) in zip(self._text, text, strict=True):
            keys.copy_(new_keys)
            values.copy_(new_values)
        self._latest = text

    def _record(self, latents: Tensor, timesteps: Tensor, first_frame: int, **options: Any) -> Any:
        graph, x, t = torch.cuda.CUDAGraph(), latents.clone(), timesteps.clone()
        with torch.cuda.graph(graph, pool=self._pool):
            flow = self.model(x, t, self._text, self.cache, first_frame, **options)
        return graph, x, t, flow
