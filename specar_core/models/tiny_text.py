"""The text encoder of the tiny pair: a vocabulary of the caption grammar's words and a small transformer."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import SpecarError
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import load_into

log = logging.getLogger("specar")


class TinyText(nn.Module):
    """Word embeddings with positions, mixed by a few transformer layers; rows behind the last word are zero."""

    def __init__(self, words: Sequence[str], length: int, dim: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.length = tuple(words), length
        # Row 0 pads. Given its rows: to draw them on the meta device, torch imports its compiler for seconds.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(len(words) + 1, dim), freeze=False)
        self.position = nn.Parameter(torch.empty(length, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, length] -> [B, length, dim]."""
        padding = ids == 0
        padding[:, 0] = False  # attention over nothing at all would be NaN: an empty prompt attends to one pad
        hidden = self.layers(self.embedding(ids) + self.position, src_key_padding_mask=padding)
        return hidden.masked_fill((ids == 0).unsqueeze(-1), 0.0)

    def tokenize(self, prompt: str) -> list[int]:
        """Ids of the known words, without padding; words outside the vocabulary carry no meaning here."""
        ids = {word: index + 1 for index, word in enumerate(self.words)}
        return [ids[word] for word in re.findall(r"[a-z]+", prompt.lower()) if word in ids]

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Text embeddings [B, length, dim]."""
        rows = []
        for prompt in prompts:
            if unknown := set(re.findall(r"[^\W\d_]+", prompt.lower())) - set(self.words):
                log.warning("The tiny pair does not know: %s", ", ".join(sorted(unknown)[:10]))
            if (kept := self.clipped(prompt)) is not None:
                log.warning("The prompt is clipped to %d known words, after '... %s'", self.length, kept)
            ids = self.tokenize(prompt)[: self.length]
            rows.append(ids + [0] * (self.length - len(ids)))
        with torch.inference_mode():
            return self(torch.tensor(rows, device=self.position.device))

    def clipped(self, prompt: str) -> str | None:
        """The last words that are kept, if the prompt is too long."""
        ids = self.tokenize(prompt)
        if len(ids) <= self.length:
            return None
        return " ".join(self.words[index - 1] for index in ids[self.length - 8 : self.length])


def outline(checkpoint: Checkpoint) -> TinyText:
    """On the meta device. The sizes and the words are in the file's metadata, under `config`."""
    try:
        config = json.loads(checkpoint.metadata["config"])["text"]
        with torch.device("meta"):
            return TinyText(**config)
    except (KeyError, ValueError, TypeError):
        raise SpecarError(f"{checkpoint.path} is not the tiny pair's text encoder") from None


def load_tiny_text(path: Path, device: torch.device) -> TinyText:
    checkpoint = open_checkpoint(path)
    encoder = outline(checkpoint)
    load_into(encoder.eval(), checkpoint, dtype=torch.float32, device=device, rename=lambda name: name)
    return encoder
