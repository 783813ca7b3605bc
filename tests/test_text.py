"""The text encoder: cleaning, tokens, and the layouts its weights come in."""

import io
import json
import logging
import re
import shutil
import sys

import pytest
import torch
from conftest import assert_close, golden, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from specar_core.errors import SpecarError
from specar_core.models import text as text_module
from specar_core.models.text import TextEncoder, Tokenizer, Tokens, clean

T, META = golden("krea/text")
WAN = weights(T)
CORPUS = "a cat on a sunlit reef, slow camera. the cat walks over the hill and a dog runs. rain at night".split()


def train(vocabulary: int, byte_fallback: bool) -> bytes:
    """A small sentencepiece model with UMT5's special ids and, like UMT5's, no normalisation."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(CORPUS[i:] + CORPUS[:i]) for i in range(len(CORPUS))]),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocabulary,
        normalization_rule_name="identity",
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


def as_json(pieces) -> Engine:
    """The pieces as the tokenizer.json of google/umt5-xxl holds them: sentinels appended, bytes not used."""
    sentinels = [(f"<extra_id_{i}>", 0.0) for i in reversed(range(300))]
    engine = Engine(models.Unigram([*pieces, *sentinels], 3))
    engine.add_special_tokens(["<pad>", "</s>", "<s>", "<unk>", *(piece for piece, _ in sentinels)])
    engine.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " ")])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return engine


SMALL = train(60, byte_fallback=False)  # fits the 97 rows of the recorded encoder
PROCESSOR = SentencePieceProcessor(model_proto=train(330, byte_fallback=True))
PIECES = text_module._sentencepiece_pieces(PROCESSOR.serialized_model_proto())
REFERENCE = as_json(PIECES)
FROM_SENTENCEPIECE = Tokenizer(PIECES)
FROM_JSON = Tokenizer(text_module._json_pieces(REFERENCE.to_str().encode()))

known = st.lists(st.sampled_from([*CORPUS, "reefs", "hillcat"]), max_size=30).map(" ".join)
anything = st.text(st.sampled_from("acdeghilnorstuw .,>/Z\u00e9\u732b\U0001f600"), max_size=60).map(clean)


# Cleaning


@pytest.mark.parametrize("prompt, cleaned", META["clean"])
def test_clean_recorded(prompt, cleaned):
    assert clean(prompt) == cleaned


@given(st.text())
@settings(derandomize=True)
def test_clean_leaves_single_spaces_only(prompt):
    cleaned = clean(prompt)
    assert cleaned == re.sub(r"\s+", " ", cleaned).strip()


def test_clean_without_ftfy_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    text_module._fix_text.cache_clear()
    assert [clean("It\u00e2\u20ac\u2122s &amp;lt; "), clean(" b")] == ["It\u00e2\u20ac\u2122s <", "b"]
    assert len(caplog.records) == 1 and "ftfy is not installed" in caplog.text
    text_module._fix_text.cache_clear()


# Tokens


@given(anything)
@settings(derandomize=True)
def test_both_files_and_the_reference_give_the_same_ids(prompt):
    ids = REFERENCE.encode(prompt).ids
    assert FROM_JSON(prompt, 512).ids == FROM_SENTENCEPIECE(prompt, 512).ids == ids


@given(known)
@settings(derandomize=True)
def test_sentencepiece_itself_gives_the_same_ids(prompt):
    assert FROM_SENTENCEPIECE(prompt, 512).ids == [*PROCESSOR.encode(prompt), 1]


def test_sentinels_of_pre_training_are_plain_text():
    ids = FROM_JSON("<extra_id_3>", 512).ids
    assert ids == FROM_SENTENCEPIECE("<extra_id_3>", 512).ids and max(ids) < len(PIECES)


@given(anything, st.integers(2, 20))
@settings(derandomize=True)
def test_clipping_keeps_the_first_tokens(prompt, length):
    whole, tokens = FROM_JSON(prompt, 10_000).ids, FROM_JSON(prompt, length)
    assert tokens.ids == [*whole[:-1][: length - 1], 1]
    assert (tokens.clipped is not None) == (len(whole) > length)
    assert tokens.clipped is None or tokens.clipped in prompt


@pytest.mark.parametrize("count", [0, 1, 510, 511, 512, 513, 5000])
def test_511_tokens_and_the_end_token_fit(count):
    tokens = FROM_JSON(" ".join(["cat"] * count), 512)
    assert len(FROM_JSON("cat", 512).ids) == 2
    assert tokens.ids == [tokens.ids[0]] * min(count, 511) + [1]
    assert (tokens.clipped is not None) == (count > 511)


# The encoder


def scaled_fp8(state):
    """Linear weights in fp8 with a scale each, the rest in fp16, as in umt5_xxl_fp8_e4m3fn_scaled."""
    file = {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if tensor.dim() == 2 and "SelfAttention.relative" not in name and "shared" not in name:
            scale = tensor.abs().max() / 448
            file[name] = (tensor / scale).to(torch.float8_e4m3fn)
            file[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            file[name] = tensor.half()
    return file


HF = {text_module._transformers_name(name): tensor for name, tensor in WAN.items()}
INSIDE = {"spiece_model": torch.frombuffer(bytearray(SMALL), dtype=torch.uint8)}


@pytest.fixture
def wan_pth(tmp_path):
    file = tmp_path / "models_t5_umt5-xxl-enc-bf16.pth"
    torch.save(WAN, file)
    (tmp_path / "google" / "umt5-xxl").mkdir(parents=True)
    (tmp_path / "google" / "umt5-xxl" / "spiece.model").write_bytes(SMALL)
    return file


@pytest.fixture
def comfy(tmp_path):
    save_file(HF | INSIDE, tmp_path / "umt5_xxl.safetensors")
    return tmp_path / "umt5_xxl.safetensors"


@pytest.fixture
def diffusers(tmp_path):
    file = tmp_path / "text_encoder" / "model.safetensors"
    file.parent.mkdir()
    save_file(HF, file)
    (tmp_path / "tokenizer").mkdir()
    engine = as_json(text_module._sentencepiece_pieces(SMALL))
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(engine.to_str(), encoding="utf-8")
    return file


@pytest.mark.parametrize("layout", ["wan_pth", "comfy", "diffusers"])
def test_recorded_embeddings(layout, request):
    encoder = TextEncoder.load(request.getfixturevalue(layout), torch.float32, length=T["ids"].shape[1])
    with torch.no_grad():
        raw = encoder.model(input_ids=T["ids"], attention_mask=T["mask"]).last_hidden_state
    assert_close(raw, T["encoder_out"], 5e-5)

    recorded = {str(i): ids[:n].tolist() for i, (ids, n) in enumerate(zip(T["ids"], META["lens"], strict=True))}
    encoder.tokenizer = lambda prompt, length: Tokens(recorded[prompt], None)
    embeddings = encoder.encode(["0", "1"])
    assert_close(embeddings, T["prompt_embeds"], 5e-5)
    assert not embeddings[0, META["lens"][0] :].any()


def test_an_embedding_does_not_depend_on_its_neighbours(comfy):
    encoder = TextEncoder.load(comfy, length=64)
    prompts = ["a cat on a reef", "", "rain at night, a dog runs over the hill"]
    together = encoder.encode(prompts)
    assert together.shape == (3, 64, 32) and together.dtype == torch.bfloat16
    lengths = [len(encoder.tokenizer(prompt, 64).ids) for prompt in prompts]
    assert [int(row.any(1).sum()) for row in together] == lengths
    assert torch.equal(together, torch.cat([encoder.encode([prompt]) for prompt in prompts]))


def test_a_long_prompt_is_clipped_with_a_notice(comfy, caplog):
    encoder = TextEncoder.load(comfy, length=8)
    short, long = "a cat", "a cat on a reef and a dog runs at night"
    kept = encoder.tokenizer(long, 8).clipped
    assert encoder.tokenizer(short, 8).clipped is None and kept and long.startswith(kept)
    caplog.clear()
    encoder.encode([short, long])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and f"... {kept}" in caplog.text
    assert torch.equal(encoder.encode([long])[0, :-1], encoder.encode([long + " again"])[0, :-1])


def test_scaled_fp8_is_dequantised_R74(tmp_path, comfy):
    file = scaled_fp8(HF)
    save_file(file | INSIDE, tmp_path / "fp8.safetensors")
    encoder = TextEncoder.load(tmp_path / "fp8.safetensors", torch.float32)
    for name, parameter in encoder.model.named_parameters():
        scale = file.get(name.removesuffix("weight") + "scale_weight", torch.tensor(1.0))
        assert torch.equal(parameter, file[name].float() * scale)
    exact = TextEncoder.load(comfy, torch.float32).encode(["a cat"])
    assert (encoder.encode(["a cat"]) - exact).norm() < 0.2 * exact.norm()


def test_no_tokenizer_says_where_it_was_looked_for(wan_pth):
    shutil.rmtree(wan_pth.parent / "google")
    with pytest.raises(SpecarError) as error:
        TextEncoder.load(wan_pth)
    for place in ("spiece_model", str(wan_pth.parent / "google" / "umt5-xxl" / "spiece.model"), "tokenizer.json"):
        assert place in str(error.value)


@pytest.mark.parametrize("content", [b"", b"damaged", json.dumps({"model": {"vocab": [["a", 0.0]]}}).encode()])
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_unusable_tokenizer_is_named(wan_pth, name, content):
    folder = wan_pth.parent / "google" / "umt5-xxl"
    (folder / "spiece.model").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(SpecarError, match=re.escape(str(folder / name))):
        TextEncoder.load(wan_pth)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shared.weight": None}, "not a whole UMT5 text encoder: 'shared.weight'"),
        ({"encoder.block.1.layer.0.layer_norm.weight": None}, "missing.*block.1.layer.0.layer_norm"),
        ({"encoder.final_layer_norm.weight": torch.ones(31)}, "final_layer_norm"),
        ({"encoder.final_layer_norm.weight": torch.ones(32, dtype=torch.int8)}, "final_layer_norm"),
        ({"shared.weight": torch.zeros(40, 32)}, "do not match"),
        ({"spiece_model": torch.zeros(9, dtype=torch.uint8)}, "x.safetensors: 'spiece_model' is not a usable UMT5"),
        ({"spiece_model": torch.zeros(9, dtype=torch.bfloat16)}, "x.safetensors: 'spiece_model' is not a usable UMT5"),
    ],
)
def test_unusable_weights_are_refused(tmp_path, change, message):
    state = HF | INSIDE | change
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "x.safetensors")
    with pytest.raises(SpecarError, match=message):
        TextEncoder.load(tmp_path / "x.safetensors")
