"""The Helios transformer against stored outputs of diffusers, against diffusers itself, and its own promises."""

import pytest
import torch
from conftest import assert_close
from diffusers import HeliosTransformer3DModel
from helios_golden import PARTS, TINY, golden, tiny, transformer

from specar_core.models import helios
from specar_core.models.helios import FLOAT32_PARAMETERS, HeliosConfig, HeliosTransformer, History
from specar_core.models.helios_names import helios_name
from specar_core.models.wan import CausalWan, WanConfig

TOLERANCE = 1e-4


def no_history(model):
    """What a history of no frames would be."""
    dim, pairs = model.config.dim, sum(model.config.rope_dim) // 2
    return History(torch.zeros(1, 0, dim), torch.zeros(2, 0, 1, pairs), torch.zeros(1, 6, dim))


def history_of(model, case):
    if "latents_history_long" not in case:
        return no_history(model)
    return model.encode_history(*(case[f"latents_history_{part}"] for part in PARTS))


@pytest.mark.parametrize("name", ["full", "stage0", "pad", "batch2", "nohist", "noprefix", "amplify"])
def test_forward_equals_the_stored_output(name, monkeypatch):
    case, meta = golden(f"fwd_{name}")
    if name == "nohist":
        monkeypatch.setattr(helios, "NOISY_FRAME", 0)
    else:  # those of `noprefix` are others
        frames = [case[f"indices_latents_history_{part}"][0].tolist() for part in PARTS]
        monkeypatch.setattr(helios, "HISTORY_FRAMES", frames)
    model = tiny(*meta["weights"], is_amplify_history=meta["amplify_history"])
    seen = {}
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, i=index: seen.update({f"blk{i}.in": args}))
        block.register_forward_hook(lambda _, args, out, i=index: seen.update({f"blk{i}.out": out}))
        for part in ("attn1", "attn2"):
            to_out = getattr(block, part).to_out
            to_out.register_forward_hook(lambda _, args, out, key=f"blk{index}.{part}.out": seen.update({key: out}))

    history = history_of(model, case)
    text = model.encode_text(case["encoder_hidden_states"])
    output = model(case["hidden_states"], case["timestep"], history, text)

    assert_close(output, case["output"], TOLERANCE)
    if "blk0.out" not in case:
        return
    past = history.tokens.shape[1]
    hidden, seen_past, modulation, rope = seen["blk0.in"][:4]
    assert seen_past == past
    assert_close(hidden, case["blk0.in.hidden_states"], TOLERANCE)
    assert_close(modulation[:, 1], case["blk0.in.mod_noisy"], TOLERANCE)
    if past:
        assert_close(modulation[:, 0], case["blk0.in.mod_history"], TOLERANCE)
    stored_rope = torch.cat([part.squeeze(1).repeat_interleave(2, dim=-1) for part in rope], dim=-1)
    assert_close(stored_rope[None], case["blk0.in.rotary_emb"], TOLERANCE)
    for key in ("blk0.attn1.out", "blk0.attn2.out", "blk0.out"):
        assert_close(seen[key], case[key], TOLERANCE)
    # The last block makes nothing of the history.
    assert_close(seen["blk1.out"], case["blk1.out"][:, past:], TOLERANCE)


CONFIGURATIONS = [
    {"num_attention_heads": 3, "attention_head_dim": 12, "rope_dim": (4, 4, 4), "num_layers": 1},
    {"num_attention_heads": 2, "attention_head_dim": 32, "rope_dim": (12, 10, 10), "num_layers": 3, "ffn_dim": 40},
    {"num_attention_heads": 1, "attention_head_dim": 24, "rope_dim": (4, 12, 8), "rope_theta": 300.0, "freq_dim": 16},
    {"num_attention_heads": 4, "attention_head_dim": 8, "rope_dim": (4, 2, 2), "is_amplify_history": True},
    {"text_dim": 10, "freq_dim": 64, "num_layers": 4},
]


@pytest.mark.parametrize("seed, changes", list(enumerate(CONFIGURATIONS)))
@pytest.mark.parametrize("size, history_size", [((4, 6), (4, 6)), ((2, 4), (8, 16)), ((6, 10), (6, 10))])
def test_equals_diffusers_on_other_configurations(seed, changes, size, history_size):
    torch.manual_seed(seed)
    published = {**TINY, **changes}
    oracle = HeliosTransformer3DModel(**published).requires_grad_(False)
    model = transformer(oracle.state_dict(), published)

    batch = 1 + seed % 2
    x, t = torch.randn(batch, 16, 9, *size), 1000 * torch.rand(batch)
    embeds = torch.randn(batch, 5, published["text_dim"])
    past = {part: torch.randn(batch, 16, frames, *history_size) for part, frames in zip(PARTS, (16, 2, 2), strict=True)}
    indices = {"long": list(range(1, 17)), "mid": [17, 18], "short": [0, 19]}
    expected = oracle(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=embeds,
        indices_hidden_states=torch.arange(20, 29)[None],
        **{f"indices_latents_history_{part}": torch.tensor([indices[part]]) for part in PARTS},
        **{f"latents_history_{part}": past[part] for part in PARTS},
    ).sample
    output = model(x, t, model.encode_history(*(past[part] for part in PARTS)), model.encode_text(embeds))
    assert_close(output, expected, TOLERANCE)


def test_the_released_size():
    with torch.device("meta"):
        parameters = dict(HeliosTransformer(HeliosConfig()).named_parameters())
    assert HeliosConfig.detect({name: tuple(p.shape) for name, p in parameters.items()}, {}) == HeliosConfig()
    assert len(parameters) == 1101
    assert sum(p.numel() for p in parameters.values()) == 14_312_427_584
    kept = [p.numel() for name, p in parameters.items() if set(FLOAT32_PARAMETERS) & set(name.split("."))]
    assert (len(kept), sum(kept)) == (125, 29_184_000)


def test_names_of_older_and_of_wan_files():
    with torch.device("meta"):
        names = dict(HeliosTransformer(HeliosConfig(num_layers=2)).named_parameters())
        wan = dict(CausalWan(WanConfig(dim=5120, ffn_dim=13824, num_layers=2, num_heads=40)).named_parameters())
    assert {helios_name(name) for name in names} == names.keys()
    assert helios_name("scale_shift_table") == "norm_out.scale_shift_table"
    renamed = {helios_name(name): parameter.numel() for name, parameter in wan.items()}
    only_helios = ("patch_short.", "patch_mid.", "patch_long.")
    assert renamed == {name: p.numel() for name, p in names.items() if not name.startswith(only_helios)}


def test_text_and_history_serve_any_number_of_forwards():
    case, meta = golden("fwd_full")
    model = tiny(*meta["weights"])
    history, text = history_of(model, case), model.encode_text(case["encoder_hidden_states"])
    first = model(case["hidden_states"], torch.tensor([900.0]), history, text)
    model(case["hidden_states"], torch.tensor([100.0]), history, text)
    assert torch.equal(model(case["hidden_states"], torch.tensor([900.0]), history, text), first)


def test_samples_of_a_batch_do_not_see_each_other():
    """So both halves of classifier-free guidance may run as one batch."""
    case, meta = golden("fwd_batch2")
    model = tiny(*meta["weights"])
    text = model.encode_text(case["encoder_hidden_states"])
    together = model(case["hidden_states"], case["timestep"], history_of(model, case), text)
    for i in range(2):
        alone = {key: value[i : i + 1] if "indices" not in key else value for key, value in case.items()}
        text = model.encode_text(alone["encoder_hidden_states"])
        output = model(alone["hidden_states"], alone["timestep"], history_of(model, alone), text)
        assert_close(output, together[i : i + 1], TOLERANCE)


def test_every_attention_goes_through_attend():
    shapes = []

    def attend(q, k, v):
        shapes.append((q.shape[1], k.shape[1]))
        return torch.zeros_like(q)

    case, meta = golden("fwd_stage0")
    model = tiny(*meta["weights"])
    model.attend = attend
    text = model.encode_text(case["encoder_hidden_states"])
    model(case["hidden_states"], case["timestep"], history_of(model, case), text)
    past, noisy, words = 240, 54, 7
    total = past + noisy
    assert shapes == [(total, total), (noisy, words), (noisy, total), (noisy, words)]


def test_bfloat16_stays_near_float32():
    case, meta = golden("fwd_full")
    model = tiny(*meta["weights"])
    for name, parameter in model.named_parameters():
        if not set(FLOAT32_PARAMETERS) & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    text = model.encode_text(case["encoder_hidden_states"])
    output = model(case["hidden_states"], case["timestep"], history_of(model, case), text)
    assert output.dtype == torch.bfloat16
    assert torch.cosine_similarity(output.float().flatten(), case["output"].flatten(), dim=0) > 0.999
