"""The text encoder of Wan's models: UMT5-XXL (Chung et al. 2023, arXiv:2304.09151), run by transformers.

Three layouts of the same weights are read: Wan's own file (github.com/Wan-Video/Wan2.1), that of transformers, and the
files repackaged for ComfyUI, which have transformers' names, may be scaled fp8, and carry the tokenizer inside.
Nothing here uses the network.
"""

import functools
import html
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SpecarError
from ..identity import canonical_names, identify
from ..tensor_files import Checkpoint, open_checkpoint
from ..weights import load_into

if TYPE_CHECKING:
    from transformers import UMT5EncoderModel

log = logging.getLogger("specar")

EOS = 1  # UMT5's vocabulary begins <pad>, </s>, <s>, <unk>
Pieces = list[tuple[str, float]]  # (piece, log probability), in the order of the ids


def clean(prompt: str) -> str:
    """A prompt the way Wan's models were trained on it: mojibake and HTML entities undone, white space collapsed."""
    text = html.unescape(html.unescape(_fix_text()(prompt)))
    return " ".join(text.split())


@functools.cache  # looked up, and its absence reported, once
def _fix_text() -> Callable[[str], str]:
    try:
        from ftfy import fix_text
    except ImportError:
        log.warning("ftfy is not installed: badly decoded characters in prompts are not repaired (pip install ftfy).")
        return str
    return fix_text


@dataclass(frozen=True)
class Tokens:
    """ids: a prompt's tokens, end token included, no padding. clipped: the last words that fit, None if all did."""

    ids: list[int]
    clipped: str | None


class Tokenizer:
    """Text to UMT5's ids.

    Both kinds of tokenizer file are only read for their vocabulary, and one engine serves them, so that the ids do not
    depend on the file. It follows the tokenizer.json of huggingface.co/google/umt5-xxl, which the models were trained
    with: a run of unknown characters is one <unk>, where sentencepiece itself would fall back to bytes.
    """

    def __init__(self, pieces: Pieces):
        """Raises SpecarError when the vocabulary is not UMT5's."""
        from tokenizers import Tokenizer as Engine
        from tokenizers import models, pre_tokenizers

        names = [piece for piece, _ in pieces]
        if names[:2] != ["<pad>", "</s>"] or "<unk>" not in names:
            raise SpecarError(f"This is not UMT5's vocabulary: it begins with {names[:4]}, not with <pad>, </s>.")
        # Only tokenizer.json lists the 300 sentinels of pre-training, at the end; they mean nothing in a prompt.
        pieces = [(piece, score) for piece, score in pieces if not piece.startswith("<extra_id_")]
        self.size = len(pieces)
        self._engine = Engine(models.Unigram(pieces, names.index("<unk>")))
        self._engine.pre_tokenizer = pre_tokenizers.Metaspace()

    def __call__(self, text: str, length: int) -> Tokens:
        """The tokens of a cleaned text, at most `length` with the end token."""
        encoding = self._engine.encode(text)
        ids = encoding.ids[: length - 1]
        clipped = None
        if len(encoding.ids) > len(ids):
            kept = text[: encoding.offsets[length - 2][1]]
            clipped = " ".join(kept.split()[-8:])[-80:]
        return Tokens([*ids, EOS], clipped)

    @classmethod
    def find(cls, checkpoint: Checkpoint, path: Path) -> "Tokenizer":
        """From the tensor `spiece_model` of the encoder's file, or from a folder beside the file `path`."""
        if "spiece_model" in checkpoint.names:
            model = checkpoint.tensor("spiece_model").reshape(-1).view(torch.uint8)
            return cls.read(f"{path}: 'spiece_model'", model.numpy().tobytes())
        folder = path if path.is_dir() else path.parent
        candidates = [
            place / name
            for place in (folder / "google" / "umt5-xxl", folder.parent / "tokenizer")  # Wan's, diffusers' layout
            for name in ("spiece.model", "tokenizer.json")
        ]
        for file in candidates:
            if file.is_file():
                return cls.read(str(file), file.read_bytes())
        raise SpecarError(
            f"No tokenizer for {path}: it holds no tensor 'spiece_model', and there is none of "
            f"{', '.join(map(str, candidates))}.\nPut spiece.model of google/umt5-xxl there, or use a file with the "
            "tokenizer inside, such as umt5_xxl_fp16.safetensors."
        )

    @classmethod
    def read(cls, name: str, content: bytes) -> "Tokenizer":
        """From the content of a spiece.model or a tokenizer.json; SpecarError names what is neither."""
        read = _json_pieces if content[:100].lstrip().startswith(b"{") else _sentencepiece_pieces
        try:
            return cls(read(content))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise SpecarError(f"{name} is not a usable UMT5 tokenizer: {error}") from error


def _sentencepiece_pieces(model: bytes) -> Pieces:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=model)  # not by file name: that fails outside ASCII on Windows
    ids = list(range(processor.get_piece_size()))
    return list(zip(processor.id_to_piece(ids), processor.get_score(ids), strict=True))


def _json_pieces(text: bytes) -> Pieces:
    return [(piece, score) for piece, score in json.loads(text)["model"]["vocab"]]


class TextEncoder:
    """Prompts to embeddings."""

    def __init__(self, model: "UMT5EncoderModel", tokenizer: Tokenizer, length: int = 512):
        """length: tokens of an embedding, end token included."""
        self.model = model
        self.tokenizer = tokenizer
        self.length = length

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        length: int = 512,
        progress: Callable[[int, int], None] | None = None,
    ) -> "TextEncoder":
        """From a file of any of the three layouts; sizes are read off its tensors.

        The weights become `dtype` whatever the file holds (float16 overflows in T5). `progress(bytes done, bytes in
        all)` may raise to abort. Raises UsageError when there is no file, SpecarError when it is not a whole UMT5
        encoder or comes without a tokenizer.
        """
        path = Path(path)
        checkpoint = open_checkpoint(path)
        model = _empty_model(checkpoint)
        tokenizer = Tokenizer.find(checkpoint, path)
        if tokenizer.size > model.config.vocab_size:
            raise SpecarError(
                f"{path} has {model.config.vocab_size} tokens, its tokenizer {tokenizer.size}: they do not match."
            )
        log.info("Loading the text encoder %s", path.name)
        load_into(model, checkpoint, dtype=dtype, device=device, rename=_transformers_name, progress=progress)
        return cls(model, tokenizer, length)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [B, length, width] in the model's dtype, on its device; rows behind a prompt's end are zero.

        What does not fit is cut off, with a warning. Prompts run one by one at their own length: the mask would give
        padding no weight anyway, and so an embedding does not depend on the other prompts.
        """
        weight = self.model.get_input_embeddings().weight
        embeddings = weight.new_zeros(len(prompts), self.length, weight.shape[1])
        for row, prompt in zip(embeddings, prompts, strict=True):
            tokens = self.tokenizer(clean(prompt), self.length)
            if tokens.clipped is not None:
                log.warning(
                    'A prompt is longer than %d tokens; the rest is ignored after "... %s"', self.length, tokens.clipped
                )
            ids = torch.tensor([tokens.ids], device=weight.device)
            row[: len(tokens.ids)] = self.model(input_ids=ids).last_hidden_state[0]
        return embeddings


# Wan's names to those of transformers, which match none of the patterns.
_WAN_NAMES = {
    r"^token_embedding\.": "shared.",
    r"^norm\.": "encoder.final_layer_norm.",
    r"^blocks\.": "encoder.block.",
    r"\.pos_embedding\.embedding\.": ".layer.0.SelfAttention.relative_attention_bias.",
    r"\.attn\.": ".layer.0.SelfAttention.",
    r"\.norm1\.": ".layer.0.layer_norm.",
    r"\.norm2\.": ".layer.1.layer_norm.",
    r"\.ffn\.gate\.0\.": ".layer.1.DenseReluDense.wi_0.",
    r"\.ffn\.fc1\.": ".layer.1.DenseReluDense.wi_1.",
    r"\.ffn\.fc2\.": ".layer.1.DenseReluDense.wo.",
}


def _transformers_name(stored: str) -> str:
    name = stored
    for pattern, replacement in _WAN_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _empty_model(checkpoint: Checkpoint) -> "UMT5EncoderModel":
    """The encoder that fits a checkpoint, without memory for its weights."""
    from transformers import UMT5Config, UMT5EncoderModel

    stored = canonical_names(checkpoint.names, _transformers_name)

    def shape(name: str) -> tuple[int, ...]:
        return checkpoint.names[stored[name]].shape

    try:
        vocabulary, width = shape("shared.weight")
        inner, _ = shape("encoder.block.0.layer.0.SelfAttention.q.weight")
        buckets, heads = shape("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        hidden, _ = shape("encoder.block.0.layer.1.DenseReluDense.wi_0.weight")
    except (KeyError, ValueError) as error:
        raise SpecarError(
            f"{checkpoint.path} ({identify(checkpoint)}) is not a whole UMT5 text encoder: {error}.\nUse "
            "umt5_xxl_fp16.safetensors, umt5_xxl_fp8_e4m3fn_scaled.safetensors or models_t5_umt5-xxl-enc-bf16.pth."
        ) from error
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=inner // heads,
        d_ff=hidden,
        num_layers=len({name.split(".")[2] for name in stored if name.startswith("encoder.block.")}),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
    )
    with torch.device("meta"):
        model = UMT5EncoderModel(config).eval()
    model.set_input_embeddings(model.shared)  # one table: before it is filled, transformers 5 has two
    return model
