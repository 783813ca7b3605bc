"""Stage 4, `python -m training.steps`: target and drafter learn to generate a block in four evaluations.

Block 0 is distilled: where the figures are is open, so a model that learned from true clips would show the mean of all
places at the first evaluation. It learns where the teacher's ODE leads from each noise instead, which is one place.
Later blocks follow from their context, so there the truth is the goal. The target also learns from contexts that the
two models generated themselves, which keeps long videos from drifting; the drafter does not.
"""

import argparse
import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specar_core.backbones.causal_wan import GEOMETRY, SHIFT, STEPS, times
from specar_core.backbones.session import SessionPair
from specar_core.backbones.tiny import CONFIGS
from specar_core.models.tiny_text import TinyText, load_tiny_text
from specar_core.models.vae import WanVAE
from specar_core.models.wan import CausalWan
from specar_core.sampling.flow import FlowTable
from specar_core.schedule import Role

from .flow import LEVELS, build, keys_values, mixed, predict, shaken, sigma_at, some_levels
from .latents import BLOCK, Latents, caption_ids, encode_scenes, load_latents
from .loop import Training, save_weights
from .shapes import HEIGHT, WIDTH, sample_scene
from .target import FIRST, terse
from .vae import read_vae

RATES: dict[Role, float] = {"target": 4e-4, "drafter": 1.5e-3}
EULER_STEPS = 16  # of the ODE; every fourth one is a level
OWN_BLOCKS = 4  # generated behind a true block 0
OWN_FRAMES = GEOMETRY.first_frames + OWN_BLOCKS * GEOMETRY.later_frames
RING = 4  # rollouts that are remembered
PATH_SEED, OWN_SEED = 1 << 25, 1 << 26


@dataclass(frozen=True)
class Paths:
    """The teacher's ODE: states [N, levels + 1, C, 3, h, w] at the four levels and at its end, captions [N, L]."""

    states: Tensor
    ids: Tensor

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random states, their noise levels [B], where they lead, and the captions."""
        device = self.ids.device
        chosen, level = torch.randint(len(self.ids), (count,), device=device), some_levels(count, device)
        return self.states[chosen, level].float(), sigma_at(level), self.states[chosen, -1].float(), self.ids[chosen]


@dataclass(frozen=True)
class Windows:
    """Contexts and the true blocks behind them [M, C, 6, h, w], with captions [M, L]; changed in place."""

    frames: Tensor
    ids: Tensor

    def later(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.randint(len(self.ids), (count,), device=self.ids.device)
        frames = self.frames[chosen].float()
        return frames[:, :, :BLOCK], frames[:, :, BLOCK:], self.ids[chosen]


def embed(text: TinyText, ids: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
        return text(ids).float()


@torch.no_grad()
def teacher_paths(teacher: CausalWan, text: TinyText, count: int, batch: int, device: torch.device) -> Paths:
    """Euler's method on the shifted scale, from noise to block 0, for fresh captions."""
    table = FlowTable(SHIFT)
    sigmas = [table.sigma(t) for t in table.warped([round(1000 * (1 - i / EULER_STEPS)) for i in range(EULER_STEPS)])]
    states, captions = [], []
    for first in range(PATH_SEED, PATH_SEED + count, batch):
        ids = caption_ids([sample_scene(seed) for seed in range(first, first + batch)], device, wordings=1)[:, 0]
        keys = keys_values(teacher, embed(text, ids))
        x, path = torch.randn(GEOMETRY.latent_shape(WIDTH, HEIGHT, batch), device=device), []
        for i, (sigma, following) in enumerate(zip(sigmas, [*sigmas[1:], 0.0], strict=True)):
            if i % (EULER_STEPS // LEVELS) == 0:
                path.append(x.bfloat16())
            x = x + (following - sigma) * predict(teacher, keys, None, x, torch.full((batch,), sigma, device=device))
        states.append(torch.stack([*path, x.bfloat16()], dim=1))
        captions.append(ids)
    return Paths(torch.cat(states), torch.cat(captions))


def step_losses(
    models: Mapping[Role, CausalWan], text: TinyText, paths: Paths, data: Latents, own: Windows, batch: int
) -> dict[str, Tensor]:
    first = int(FIRST * batch)
    later, losses = batch - first, {}
    x, sigma, end, ids = paths.sample(first)
    told = embed(text, ids)
    for role, model in models.items():
        guess = mixed_out(x, predict(model, keys_values(model, told), None, x, sigma), sigma)
        losses[f"{role} first"] = (guess - end).square().mean()

    true = data.later(later)
    pairs = zip(own.later(later // 2), data.later(later - later // 2), strict=True)
    both = [torch.cat([ours, theirs]) for ours, theirs in pairs]
    lessons: dict[Role, Sequence[Tensor]] = {"target": both, "drafter": true}
    for role, (context, x0, ids) in lessons.items():
        model = models[role]
        sigma = sigma_at(some_levels(later, x0.device))
        x = mixed(x0, torch.randn_like(x0), sigma)
        flow = predict(model, keys_values(model, embed(text, terse(ids))), shaken(context), x, sigma)
        losses[f"{role} later"] = (mixed_out(x, flow, sigma) - x0).square().mean()
    return losses


def mixed_out(x: Tensor, flow: Tensor, sigma: Tensor) -> Tensor:
    """x0 from the flow at x."""
    return x - sigma.view(-1, 1, 1, 1, 1) * flow


@dataclass(frozen=True)
class Rehearsal:
    """Rollouts behind true beginnings, as training data. `latents` [N, C, 15, h, w] are true, `ids` [N, L]."""

    vae: WanVAE
    text: TinyText
    latents: Tensor
    ids: Tensor
    own: Windows
    batch: int

    def renew(self, models: Mapping[Role, CausalWan], turn: int) -> None:
        """Replace the oldest of the remembered rollouts."""
        device, roles = self.ids.device, random.Random(turn)
        chosen = torch.randint(len(self.ids), (self.batch,), device=device)
        true, ids = self.latents[chosen].float(), self.ids[chosen]
        copies = {role: copy.deepcopy(model).to(self.dtype) for role, model in models.items()}
        steps = {role: times(STEPS[role]) for role in copies}
        pair = SessionPair(models=copies, vae=self.vae, geometry=GEOMETRY, steps=steps, shift=SHIFT)
        told, windows = embed(self.text, ids), []
        shape = GEOMETRY.latent_shape(WIDTH, HEIGHT, self.batch)
        with pair.lease(HEIGHT, WIDTH, self.batch, lambda step: None) as run:
            block = true[:, :, :BLOCK]
            _, context = run.commit(run.begin(), block, told)
            for index in range(1, OWN_BLOCKS + 1):
                goal = true[:, :, BLOCK * index : BLOCK * (index + 1)]
                seen = context.window(BLOCK)
                assert seen is not None  # only block 0 sees nothing
                windows.append(torch.cat([seen, goal], dim=2))
                if index < OWN_BLOCKS:
                    role = roles.choice(list(models))
                    block = run.generate(role, context, told, lambda draw: torch.randn(shape, device=device))
                    _, context = run.commit(context, block, told)
        size = self.batch * OWN_BLOCKS
        place = slice(turn % RING * size, (turn % RING + 1) * size)
        self.own.frames[place].copy_(torch.cat(windows))
        self.own.ids[place].copy_(ids.repeat(OWN_BLOCKS, 1))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.ids.is_cuda else torch.float32


def prepare_rehearsal(vae: WanVAE, text: TinyText, data: Latents, scenes: int, batch: int) -> Rehearsal:
    latents, ids = [], []
    device = data.ids.device
    for first in range(OWN_SEED, OWN_SEED + scenes, min(scenes, 512)):
        some = [sample_scene(seed) for seed in range(first, first + min(scenes, 512))]
        latents.append(encode_scenes(vae, some, OWN_FRAMES).bfloat16())
        ids.append(caption_ids(some, device, wordings=1)[:, 0])
    # Until there are rollouts, true contexts stand in for them.
    context, block, told = data.later(RING * OWN_BLOCKS * batch)
    own = Windows(torch.cat([context, block], dim=2).bfloat16(), told.clone())
    return Rehearsal(vae, text, torch.cat(latents), torch.cat(ids), own, batch)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--paths", type=int, default=65536, help="of the teacher's ODE")
    parser.add_argument("--own", type=int, default=8192, help="scenes for own rollouts")
    parser.add_argument("--own-batch", type=int, default=1024)
    parser.add_argument("--own-every", type=int, default=400, help="steps")
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(4)

    vae = read_vae(options.folder / "vae.safetensors", device)
    text = load_tiny_text(options.folder / "text_encoder.safetensors", device)
    data = load_latents(options.folder, device)
    models = {role: build(role, device, options.compile) for role in CONFIGS}
    models["target"].load_state_dict(load_file(options.folder / "teacher.safetensors", device=str(device)))
    paths = teacher_paths(models["target"], text, options.paths, min(options.paths, 4096), device)
    rehearsal = prepare_rehearsal(vae, text, data, options.own, options.own_batch)
    print("teacher's paths and true beginnings are there", flush=True)

    training = Training({role: (model, RATES[role]) for role, model in models.items()}, options.steps)

    averages: dict[Role, Any] = {role: training.averages[role] for role in models}

    def rehearse(step: int) -> None:
        done = step - options.steps // 5
        if done >= 0 and done % options.own_every == 0:
            rehearsal.renew(averages, done // options.own_every)

    loss = partial(step_losses, models, text, paths, data, rehearsal.own, options.batch)
    training.run([loss], options.folder / "steps", before=rehearse)
    for role, model in averages.items():
        save_weights(model, options.folder / f"{role}.safetensors", transformer=asdict(model.config))


if __name__ == "__main__":
    main()
