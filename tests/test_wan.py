"""The causal Wan transformer against recorded numbers, and properties of its cache and positions."""

import pytest
import torch
from conftest import assert_close, golden
from models import golden_transformer

from specar_core.models.rowwise import rotate
from specar_core.models.wan import WAN_1_3B, WAN_14B, CausalWan, KeyValueCache, rope_angles, sinusoid
from specar_core.sampling.flow import FlowTable

ROPE, ROPE_META = golden("krea/rope")
MODEL = golden_transformer("krea/krea_session_steps4_kv3")
PROMPT = golden("krea/krea_session_steps4_kv3")[0]["prompt_embeds"]
SIZE = (6, 10)
TOKENS = 15


def noise(frames, seed=0):
    return torch.randn(1, 16, frames, *SIZE, generator=torch.Generator().manual_seed(seed))


def times(*values):
    return torch.tensor([values])


def test_rope_angles_are_wans_for_any_row():
    rows = ROPE["rows"].long()
    for axis, name in enumerate("thw"):
        for row, cos, sin in zip(rows.tolist(), ROPE[f"d128.{name}.cos"], ROPE[f"d128.{name}.sin"], strict=True):
            grid = [1, 1, 1]
            grid[axis] = 1 if axis == 0 else row + 1
            got_cos, got_sin = rope_angles(row if axis == 0 else 0, grid, 128)
            part = ((0, 22), (22, 43), (43, 64))[axis]
            assert_close(got_cos[-1, 0, slice(*part)], cos.float(), 1e-7)
            assert_close(got_sin[-1, 0, slice(*part)], sin.float(), 1e-7)


@pytest.mark.parametrize("start", [0, 3, 105])
def test_rotation(start):
    rope = rope_angles(start, ROPE_META["grid"], 128)
    assert_close(rotate(ROPE["x"], rope), ROPE[f"causal_rope.start{start}"], 1e-6)


def test_sinusoid():
    assert_close(sinusoid(ROPE["sinus.t"], 256), ROPE["sinus.256"], 1e-12)


def test_real_grid_with_context():
    """60x104 latents, 1560 tokens a frame: block 0, the context pass at t = 0, and block 1 behind it."""
    tensors, meta = golden("krea/krea_grid1560")
    model, table = golden_transformer("krea/krea_grid1560"), FlowTable(5)

    def formula_noise(i):
        n = torch.arange(3 * 16 * 60 * 104, dtype=torch.float64) + 1000003 * (i + 1)
        value = torch.sin(12.9898 * n) * 43758.5453
        return (3.4 * (value - value.trunc())).float().view(1, 3, 16, 60, 104).transpose(1, 2)

    def check(name, value):
        value = value.transpose(1, 2)
        assert_close(value[..., ::7, ::9], tensors[f"{name}.sub"] if f"{name}.sub" in tensors else tensors[name], 2e-5)
        if f"{name}.mean_std" in tensors:
            mean_std = torch.stack([value.double().mean(), value.double().std()])
            assert_close(mean_std, tensors[f"{name}.mean_std"], 1e-6)

    text = model.encode_text(tensors["prompt_embeds"])
    cache = KeyValueCache(model, 1, 6, 1560)
    x = formula_noise(0)
    check("noise0", x)
    flow = model(x, times(1000.0, 1000.0, 1000.0), text, cache, 0)
    check("b0.flow", flow)
    x0 = table.x0_from_flow(flow, x, 1000.0)
    check("b0.x0", x0)
    cache.clear()
    check("recompute.flow", model(x0, times(0.0, 0.0, 0.0), text, cache, 0))
    x, t = formula_noise(1), meta["b1_t"]
    flow = model(x, times(t, t, t), text, cache, 3)
    check("b1.flow", flow)
    check("b1.x0", table.x0_from_flow(flow, x, t))
    assert_close(cache.keys[1][:, ::97], tensors["kv1.k.sub"], 2e-5)
    assert_close(cache.values[1][:, ::97], tensors["kv1.v.sub"], 2e-5)


def test_context_pass_and_first_evaluation_in_one_forward():
    text = MODEL.encode_text(PROMPT)
    seen, block = noise(3, 1), noise(3, 2)
    apart, fused = (KeyValueCache(MODEL, 1, 6, TOKENS) for _ in range(2))
    MODEL(seen, times(0.0, 0.0, 0.0), text, apart, 0)
    expected = MODEL(block, times(1000.0, 1000.0, 1000.0), text, apart, 3)
    both = torch.cat([seen, block], dim=2)
    got = MODEL(both, times(0.0, 0.0, 0.0, 1000.0, 1000.0, 1000.0), text, fused, 0, group=3, wanted=3)
    assert_close(got, expected, 2e-6)
    assert_close(torch.stack(fused.keys), torch.stack(apart.keys), 2e-6)
    assert_close(torch.stack(fused.values), torch.stack(apart.values), 2e-6)


def test_all_history_in_one_pass_is_one_pass_a_block():
    """handover.json, lazy_full_history_vs_eager: without eviction one block-causal pass equals appending."""
    text, latents = MODEL.encode_text(PROMPT), noise(9)
    apart, lazy = (KeyValueCache(MODEL, 1, 9, TOKENS) for _ in range(2))
    for block in range(3):
        MODEL(latents[:, :, 3 * block : 3 * block + 3], torch.zeros(1, 3), text, apart, 3 * block, wanted=0)
    MODEL(latents, torch.zeros(1, 9), text, lazy, 0, group=3, wanted=0)
    assert_close(torch.stack(lazy.keys), torch.stack(apart.keys), 2e-6)
    assert_close(torch.stack(lazy.values), torch.stack(apart.values), 2e-6)


def test_only_the_last_frames_of_a_full_history_are_another_function():
    """handover.json, lazy_last3_vs_rolling6.V_last_block: layer 0 agrees, deeper values carry what was evicted."""
    text, latents = MODEL.encode_text(PROMPT), noise(12)
    rolling, last = KeyValueCache(MODEL, 1, 6, TOKENS), KeyValueCache(MODEL, 1, 6, TOKENS)
    for block in range(4):
        MODEL(latents[:, :, 3 * block : 3 * block + 3], torch.zeros(1, 3), text, rolling, 3 * block, wanted=0)
    last.seen = 9 * TOKENS  # frame 9 comes next
    MODEL(latents[:, :, 9:], torch.zeros(1, 3), text, last, 9, wanted=0)
    newest = [values[:, 3 * TOKENS :] for values in rolling.values]
    lonely = [values[:, : 3 * TOKENS] for values in last.values]
    assert_close(lonely[0], newest[0], 2e-6)
    assert (lonely[1] - newest[1]).norm() / newest[1].norm() > 1e-3


def test_keys_of_a_noisy_evaluation_are_not_the_clean_ones():
    """handover.json, kv_t625_vs_t0_same_latent: so the clean pass cannot be skipped."""
    text, clean, noisy = MODEL.encode_text(PROMPT), *(KeyValueCache(MODEL, 1, 3, TOKENS) for _ in range(2))
    MODEL(noise(3), torch.zeros(1, 3), text, clean, 0)
    MODEL(noise(3), torch.full((1, 3), 625.0), text, noisy, 0)
    assert (clean.values[1] - noisy.values[1]).norm() / clean.values[1].norm() > 0.01


@pytest.mark.parametrize("row", [30, 5000])
def test_rows_may_shift_together(row):
    """Window-relative and absolute rows are interchangeable, also beyond the 1024 rows of Wan's table."""
    text, flows = MODEL.encode_text(PROMPT), []
    for first in (0, row):
        cache = KeyValueCache(MODEL, 1, 6, TOKENS)
        cache.seen = first * TOKENS
        MODEL(noise(3, 1), torch.zeros(1, 3), text, cache, first)
        flows.append(MODEL(noise(3, 2), torch.full((1, 3), 625.0), text, cache, first + 3))
    assert_close(flows[1], flows[0], 2e-4)


def test_a_batch_is_its_members():
    text = MODEL.encode_text(PROMPT.expand(2, -1, -1))
    pair = torch.cat([noise(3, 1), noise(3, 2)])
    together = MODEL(pair, torch.full((2, 3), 937.5), text, KeyValueCache(MODEL, 2, 3, TOKENS), 0)
    alone = MODEL.encode_text(PROMPT)
    for i in range(2):
        flow = MODEL(pair[i : i + 1], torch.full((1, 3), 937.5), alone, KeyValueCache(MODEL, 1, 3, TOKENS), 0)
        assert_close(together[i : i + 1], flow, 2e-6)


@pytest.mark.parametrize(
    "config, parameters, tensors", [(WAN_1_3B, 1_418_996_800, 825), (WAN_14B, 14_288_491_584, 1095)]
)
def test_full_sizes(config, parameters, tensors):
    with torch.device("meta"):
        state = CausalWan(config).state_dict()
    assert (sum(value.numel() for value in state.values()), len(state)) == (parameters, tensors)
