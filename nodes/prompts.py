"""Prompts as CONDITIONING: one, or those of a timeline, each with the block that it begins with."""

import hashlib
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..specar_core.backbones import backbone as pair
from ..specar_core.backbones.base import Backbone
from ..specar_core.errors import UsageError
from ..specar_core.job import Job
from ..specar_core.timeline import Cue, texts

KEY = "specar_cue"  # in the entries of a timeline
PAIR = "specar_backbone"  # beside it: whose blocks it counts


def encode(clip: Any, cues: list[Cue], backbone: Backbone | None = None) -> list:
    """CONDITIONING with an entry for each prompt. No backbone: they begin with the video, whatever its blocks are."""
    encoded = {text: clip.encode_from_tokens_scheduled(clip.tokenize(text))[0] for text in texts(cues)}
    name = backbone.name if backbone else None
    return [[encoded[cue.text][0], {**encoded[cue.text][1], KEY: cue.to_dict(), PAIR: name}] for cue in cues]


def cues_of(conditioning: list, backbone: Backbone) -> tuple[Cue, ...]:
    """The prompts of a timeline; a prompt of other nodes holds for the whole video, and its text is not known."""
    told = [entry[1].get(KEY) for entry in conditioning]
    for made in {entry[1].get(PAIR) for entry in conditioning} - {None, backbone.name}:
        if pair(made).geometry != backbone.geometry:
            raise UsageError(
                f"the prompts are snapped to the blocks of {made}, and the models are {backbone.name}: connect the "
                f"Prompt Timeline to the same Loader"
            )
    if len(conditioning) == 1 and told[0] is None:
        return (Cue(0, ""),)
    if not told or None in told or [cue["block"] for cue in told] != sorted({cue["block"] for cue in told}):
        raise UsageError(
            "`positive` must hold one prompt, or those of one SpecAR Prompt Timeline: do not combine conditionings"
        )
    return tuple(Cue(**cue) for cue in told)


def embeddings(job: Job, positive: list, negative: list | None) -> Tensor:
    """Text embeddings, a row [L, D] for each of the job's texts."""
    backbone, wanted = job.backbone, texts(job.cues)
    guided = len(backbone.texts(job)) > len(wanted)
    if not guided and negative is not None:
        raise UsageError(f"{backbone.name} runs without guidance and has no use for `negative`: disconnect it")
    if guided and negative is None:
        raise UsageError(f"{backbone.name} runs with guidance: connect a negative prompt, an empty one if need be")
    entries = {entry[1][KEY]["text"] if KEY in entry[1] else "": entry[0] for entry in positive}
    rows = [embedding(backbone, "positive", entries[text]) for text in wanted]
    if negative is not None:
        if len(negative) != 1:
            raise UsageError("`negative` must hold one prompt: do not combine conditionings")
        rows.append(embedding(backbone, "negative", negative[0][0]))
    return torch.cat(rows)


def embedding(backbone: Backbone, name: str, prompt: Tensor) -> Tensor:
    """[1, L, D], padded with zero rows or cut as the models were trained with."""
    length, width = backbone.text_shape
    if prompt.shape[0] != 1:
        raise UsageError(f"`{name}` holds {prompt.shape[0]} prompts in one: SpecAR Prompt List makes a video of each")
    if prompt.shape[2] != width:
        raise UsageError(
            f"`{name}` is {prompt.shape[2]} wide, and {backbone.name} needs {width}: encode it with the CLIP of its "
            + ("Loader" if backbone.shipped else "Loader, or of a CLIPLoader of type wan")
        )
    prompt = prompt[:, :length]
    return F.pad(prompt, (0, 0, 0, length - prompt.shape[1]))


def digest(prompt: Tensor, cues: tuple[Cue, ...]) -> str:
    """SHA-256 of the embeddings and of when they are shown."""
    told = hashlib.sha256(prompt.float().contiguous().cpu().numpy())
    if len(cues) > 1:
        told.update(json.dumps([cue.to_dict() for cue in cues]).encode())
    return told.hexdigest()
