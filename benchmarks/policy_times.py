"""What a router costs beside a fixed schedule with as many target blocks: Krea's pair at full size, random weights.

    python -m benchmarks.policy_times --out benchmarks/results/policies/krea-h200.json

Times only. The router's decisions come from a list, `random:k@0`, so that both come to the same number of target
blocks; every draft is judged all the same, by a BLIP of ImageReward's size (random weights, float32, the 12 frames of a
block in one batch). `lazy` builds the target's context when the target is asked; `eager` builds it for every block, as
the authors of SDVG do. Published, on an H100 (https://statite.ai/specar): the fixed schedule is 1.73 times faster at
k=2 and 1.64 times at k=7.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specar_core.backbones import backbone
from specar_core.backbones.pair import OnStep, Pair, Step
from specar_core.backbones.session import SessionContext, SessionPair, SessionRun
from specar_core.device import paced
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.noise import Draw, noise
from specar_core.policies import parse
from specar_core.rollout import rollout
from specar_core.routers import Routed
from specar_core.schedule import Policy, Role

from .common import build, machine, synchronize, write

PUBLISHED = {2: 1.73, 7: 1.64}
SEEN = 224  # pixels, square
TOKENS = 35


class RewardSized(nn.Module):
    """Of ImageReward's size: BLIP's ViT-L/16, its text encoder, which looks at the image, and an MLP."""

    def __init__(self, small: bool = False) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        width, layers, heads = (32, 1, 2) if small else (1024, 24, 16)
        vision = BlipVisionConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
            image_size=SEEN, patch_size=16,
        )  # fmt: skip
        text = BlipTextConfig(encoder_hidden_size=width, num_hidden_layers=1 if small else 12, num_attention_heads=12)
        self.vision, self.text = BlipVisionModel(vision), BlipTextModel(text, add_pooling_layer=False)
        sizes = (text.hidden_size, 1024, 128, 64, 16, 1)
        self.head = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))

    @torch.inference_mode()
    def forward(self, frames: Tensor) -> Tensor:
        """Scores [N] of frames [3, N, H, W] in -1..1."""
        images = F.interpolate(frames.transpose(0, 1).float(), (SEEN, SEEN), mode="bicubic", antialias=True)
        seen = self.vision(images).last_hidden_state
        words = torch.ones(len(images), TOKENS, dtype=torch.long, device=images.device)
        read = self.text(words, encoder_hidden_states=seen, is_decoder=False).last_hidden_state[:, 0]
        return self.head(read)[:, 0]


class Eager(SessionPair):
    """Its target sees the context of every block, also of those whose draft is kept."""

    @contextmanager
    def lease(self, height: int, width: int, batch: int, on_step: OnStep) -> Iterator["EagerRun"]:
        run = EagerRun(self, height, width, batch, paced(self.device, on_step))
        yield run
        run.pay()


class EagerRun(SessionRun):
    """A context pass of the target is owed until a target block has done it, or is paid."""

    _owed: tuple[SessionContext, Tensor] | None = None

    def generate(self, role: Role, context: SessionContext, prompt: Tensor, draw: Draw) -> Tensor:
        if role == "drafter":
            self.pay()
            self._owed = (context, prompt)
        else:
            self._owed = None  # the first step takes the context with it
        return super().generate(role, context, prompt, draw)

    @torch.inference_mode()
    def pay(self) -> None:
        """The context pass of a block whose draft was kept."""
        if self._owed is not None:
            (context, prompt), self._owed = self._owed, None
            seen = context.window(self.pair.context_frames)
            times = self._times(len(seen), (0.0, seen.shape[2]))
            model, text = self.pair.models["target"], self._text("target", prompt)
            model(seen, times, text, self._cache("target"), 0, group=self.pair.geometry.latent_frames, wanted=0)
            self.on_step(Step("commit", "target", 1, 1))


def listed(blocks: int, k: int, score: Callable[[Tensor], Tensor]) -> Policy:
    """A router that judges every draft and comes to what a list says."""
    targets = parse(f"random:{k}@0", blocks)[0].targets

    def decided(block: int, frames: Tensor) -> Tensor:
        return score(frames[0]).nan_to_num().clamp(-1, 1) + (-10.0 if block in targets else 10.0)

    return Routed(blocks, (0,), tau=0.0).begin(decided, (0.0, 1.0))


def timed(pair: Pair, policy: Policy, size: tuple[int, int], prompt: Tensor) -> dict[str, Any]:
    shape, forwards = pair.geometry.latent_shape(*size), {"target": 0, "drafter": 0}

    def count(block: int, step: Step) -> None:
        if step.role:
            forwards[step.role] += 1

    started, blocks = time.perf_counter(), []
    for result in rollout(
        pair,
        policy,
        lambda block: prompt,
        lambda block, draw: noise(0, block, draw, shape),
        width=size[0],
        height=size[1],
        on_step=count,
    ):
        blocks.append((result.role, result.rejected, result.seconds))
        del result  # its frames, before the next block is made
    synchronize()
    kinds = {
        name: round(statistics.median(found), 4)
        for name, wanted in {"target": ("target", 0), "draft": ("drafter", 0), "rejected": ("target", 1)}.items()
        if (found := [seconds for role, rejected, seconds in blocks[1:] if (role, rejected) == wanted])
    }
    return {
        "seconds": round(time.perf_counter() - started, 3),
        "targets": sum(role == "target" for role, *_ in blocks),
        "rejected": sum(rejected for _, rejected, _ in blocks),
        "forwards": forwards,
        "median_block_seconds": kinds,
        "judging_seconds": round(sum(policy.told(block).get("score_seconds", 0) for block in range(policy.blocks)), 3),
    }


def compare(pair: Any, reward: nn.Module, ks: Sequence[int], blocks: int, size: tuple[int, int], prompt: Tensor) -> Any:
    rows = []
    for k in ks:
        fixed = timed(pair, parse(f"spread:{k}", blocks)[0], size, prompt)
        scattered = timed(pair, parse(f"random:{k}@0", blocks)[0], size, prompt)
        lazy = timed(pair, listed(blocks, k, reward), size, prompt)
        eager = timed(Eager(**vars(pair)), listed(blocks, k, reward), size, prompt)
        rows.append(
            {
                "k": k,
                "spread": fixed,
                "random": scattered,
                "sdvg lazy": lazy,
                "sdvg eager": eager,
                "times_faster": {
                    name: round(router["seconds"] / fixed["seconds"], 3)
                    for name, router in (("lazy", lazy), ("eager", eager))
                }
                | {"published": PUBLISHED.get(k)},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--k", type=int, nargs="*", default=[2, 7])
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    krea, where = backbone("krea"), Machine.here(options.precision, options.attention, options.compile)
    pair = build(resolve(krea, blocks=options.blocks, schedule="sdvg:0")[0], where)
    reward = RewardSized().to(where.device).eval()
    prompt = torch.randn(1, *krea.text_shape, device=where.device, dtype=where.dtype)
    size = krea.width, krea.height
    timed(Eager(**vars(pair)), listed(4, 3, reward), size, prompt)  # warm
    rows = compare(pair, reward, options.k, options.blocks, size, prompt)
    told = {
        "machine": machine(),
        "pair": pair.describe(),
        "scorer_parameters": sum(weight.numel() for weight in reward.parameters()),
        "blocks": options.blocks,
        "rows": rows,
    }
    write(told, options.out)


if __name__ == "__main__":
    main()
