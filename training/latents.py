"""Stage 2, `python -m training.latents`: scenes as the VAE sees them, and their captions."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specar_core.backbones.tiny import TEXT_LENGTH
from specar_core.captions import WORDS
from specar_core.models.tiny_text import TinyText
from specar_core.models.vae import WanVAE

from .captions import BACKGROUNDS, PREPOSITIONS, SENTENCES, VERBS
from .shapes import Scene, render, sample_scene
from .vae import read_vae

BLOCK = 3  # latent frames of a block, and of a context
FRAMES = 33  # of a scene: 9 latent frames
IMAGES = (4, 8, 12)  # the last frames that latent frames 1, 2 and 3 decode to
WORDINGS = 2  # captions a scene
FIRST_SEED = 1 << 24


@dataclass(frozen=True)
class Latents:
    """frames [N, C, 12, h, w]: latent frames 0..8 of N scenes and the single images; ids [N, WORDINGS, L]: captions."""

    frames: Tensor
    ids: Tensor

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Random blocks 0 [B, C, 3, h, w] and their captions [B, L]."""
        chosen = self._choose(count)
        return self.frames[chosen, :, :BLOCK].float(), self.caption(chosen)

    def later(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random contexts, the blocks that follow them, and the captions.

        A context from the middle of a clip begins with a single image, as a session re-encodes its oldest latent frame.
        """
        device, chosen = self.ids.device, self._choose(count)
        start = torch.randint(1 + len(IMAGES), (count, 1), device=device)
        rows = start + torch.arange(2 * BLOCK, device=device)
        rows[:, :1] = torch.where(start > 0, start + self.frames.shape[2] - len(IMAGES) - 1, 0)
        places = rows[:, None, :, None, None].expand(-1, self.frames.shape[1], -1, *self.frames.shape[3:])
        frames = self.frames[chosen].gather(2, places).float()
        return frames[:, :, :BLOCK], frames[:, :, BLOCK:], self.caption(chosen)

    def caption(self, chosen: Tensor) -> Tensor:
        return self.ids[chosen, torch.randint(WORDINGS, chosen.shape, device=self.ids.device)]

    def _choose(self, count: int) -> Tensor:
        return torch.randint(len(self.ids), (count,), device=self.ids.device)


def vocabulary() -> list[str]:
    """Every word that a caption may hold."""
    words = {word for meanings in WORDS.values() for synonyms in meanings.values() for word in synonyms}
    words |= {f"{word}s" for synonyms in WORDS["shape"].values() for word in synonyms}
    texts = (*PREPOSITIONS, *BACKGROUNDS, *SENTENCES, *(verb for verbs in VERBS.values() for verb in verbs))
    plain = re.sub(r"\{\w+\}", "", " ".join(texts))
    return sorted(words | set(re.findall("[a-z]+", plain)) | {"and"})


def caption_ids(scenes: Sequence[Scene], device: torch.device, wordings: int = WORDINGS) -> Tensor:
    """[N, wordings, L]"""
    with torch.device("meta"):
        text = TinyText(vocabulary(), TEXT_LENGTH, dim=4)
    rows = [[text.tokenize(scene.description.caption(scene.wording + i)) for i in range(wordings)] for scene in scenes]
    padded = [[ids + [0] * (TEXT_LENGTH - len(ids)) for ids in row] for row in rows]
    return torch.tensor(padded, device=device)


@torch.inference_mode()
def encode_scenes(vae: WanVAE, scenes: Sequence[Scene], frames: int, images: Sequence[int] = ()) -> Tensor:
    """Latent frames [N, C, T, h, w] of whole clips, and behind them those of single images from them."""
    clips = render(scenes, 0, frames, device=vae.device)
    latents = [vae.encode(clips)[0]]
    latents += [vae.encode(clips[:, :, image : image + 1])[0] for image in images]
    return torch.cat(latents, dim=2)


def load_latents(folder: Path, device: torch.device) -> Latents:
    tensors = load_file(folder / "latents.safetensors", device=str(device))
    return Latents(tensors["frames"], tensors["ids"].long())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path(".train"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)

    vae = read_vae(options.folder / "vae.safetensors", device)
    frames, ids = [], []
    for first in range(FIRST_SEED, FIRST_SEED + options.scenes, options.batch):
        scenes = [sample_scene(seed) for seed in range(first, first + options.batch)]
        frames.append(encode_scenes(vae, scenes, FRAMES, IMAGES).bfloat16())
        ids.append(caption_ids(scenes, device).short())
    save_file({"frames": torch.cat(frames), "ids": torch.cat(ids)}, options.folder / "latents.safetensors")
    print(f"{options.scenes} scenes", flush=True)


if __name__ == "__main__":
    main()
