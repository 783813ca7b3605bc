"""Products in fp8 on the CPU, where the same arithmetic runs as on a GPU, and one product for several layers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import assert_close
from models import golden_transformer
from test_wan import PROMPT, TOKENS, noise, times
from torch import nn

from specar_core.backbones import backbone
from specar_core.errors import UsageError
from specar_core.job import resolve
from specar_core.machine import Machine
from specar_core.models import low_precision
from specar_core.models.joined import join
from specar_core.models.low_precision import Fp8Linear, lower, lowered, product, quantised, weight_bytes
from specar_core.models.wan import WAN_14B, CausalWan, KeyValueCache
from specar_core.tensor_files import in_memory
from specar_core.weights import load_into

CPU = Machine(torch.device("cpu"), "fp8")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def in_fp8(state, config):
    with torch.device("meta"):
        network = CausalWan(config)
    lower(network)
    load_into(network.eval(), in_memory(state, "test"), dtype=torch.float32)
    return network


def flow(model):
    """Of a block behind another one: the context pass and the first evaluation, then a step."""
    cache, text = KeyValueCache(model, 1, 6, TOKENS), model.encode_text(PROMPT)
    first = model(noise(6), times(0.0, 0.0, 0.0, 625.0, 625.0, 625.0), text, cache, 0, group=3, wanted=3)
    return torch.cat([first, model(noise(3), times(250.0, 250.0, 250.0), text, cache, 3)])


def test_rows_keep_their_own_scale():
    x = random(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 1e8])[:, None]
    values, scale = quantised(x)
    assert ((values.float() * scale - x).norm(dim=1) / x.norm(dim=1) < 0.04).all()
    assert values.float().abs().amax(1).tolist() == [448.0] * 5


def test_a_row_of_zeros_and_a_row_of_nan():
    values, scale = quantised(torch.stack([torch.zeros(16), torch.full((16,), torch.nan)]))
    assert not (values[0].float() * scale[0]).any()
    assert (values[1].float() * scale[1]).isnan().all()  # or a broken block would pass as a good one


def test_the_product_is_torchs():
    x, weight, bias = quantised(random(48, 64)), quantised(random(32, 64, seed=1)), random(32, seed=2).bfloat16()
    found = product(x, weight.values, weight.scale.squeeze(1), bias)
    scales = x.scale, weight.scale.t().contiguous()
    expected = torch._scaled_mm(x.values, weight.values.t(), *scales, bias=bias, out_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), expected.float(), 5e-3)


def test_a_network_in_fp8_stays_near_itself():
    model = golden_transformer("krea/krea_session_steps4_kv3")
    low = in_fp8(model.state_dict(), model.config)
    with torch.inference_mode():
        assert 0.001 < relative(flow(low), flow(model)) < 0.05


def test_what_is_sensitive_is_not_in_fp8():
    model = golden_transformer("krea/krea_session_steps4_kv3")
    low = in_fp8(model.state_dict(), model.config)
    names = {name for name, _ in lowered(low)}
    linear = {f"blocks.{i}.{layer}" for i in range(2) for layer in ("self_attn.q", "cross_attn.o", "ffn.0", "ffn.2")}
    assert linear <= names and all(name.startswith("blocks.") for name in names)
    assert not any(name.endswith(("cross_attn.k", "cross_attn.v")) for name in names)
    assert low.state_dict().keys() == model.state_dict().keys()


def test_layers_of_odd_sizes_stay_as_they_are():
    layers = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 32))
    network = nn.Module()
    network.blocks = layers
    lower(network)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear, Fp8Linear]


@pytest.mark.parametrize("fp8", [False, True])
def test_joined_layers_are_the_same_function_and_the_same_weights(fp8):
    layers = [nn.Linear(32, size) for size in (16, 32, 48)]
    if fp8:
        for index, layer in enumerate(layers):
            low = Fp8Linear(32, layer.out_features)
            low.load(layer.weight)
            low.bias.data = layer.bias.data
            layers[index] = low
    x = random(4, 32)
    with torch.no_grad():
        expected = torch.cat([layer(x) for layer in layers], dim=-1)
        whole = join(layers)
        assert_close(whole(x), expected, 1e-6)
        assert_close(torch.cat([layer(x) for layer in layers], dim=-1), expected, 1e-6)
        # What a LoRA adds to one of them, in place, holds for the whole.
        if fp8:
            layers[1].load(2 * layers[1].weight.float() * layers[1].scale.unsqueeze(1))
        else:
            layers[1].weight.mul_(2)
        assert_close(whole(x)[:, 16:48], layers[1](x), 1e-6)
    assert whole.weight.untyped_storage().data_ptr() == layers[2].weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_joined_network_is_the_same_function_under_the_same_names(fp8):
    model = golden_transformer("krea/krea_session_steps4_kv3")
    if fp8:
        model = in_fp8(model.state_dict(), model.config)
    with torch.inference_mode():
        expected, state = flow(model), {name: value.clone() for name, value in model.state_dict().items()}
        model.join()
        assert_close(flow(model), expected, 1e-5)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value.float(), model.state_dict()[name].float()) for name, value in state.items())


def test_layers_of_a_host_are_not_joined():
    class Hosts(nn.Linear):
        pass

    assert join([Hosts(16, 16), Hosts(16, 16)]) is None


def test_bytes_are_told_before_anything_is_loaded():
    whole, low = (weight_bytes(partial(CausalWan, WAN_14B), 2, fp8) for fp8 in (False, True))
    assert whole == pytest.approx(28.58e9, rel=1e-3) and low == pytest.approx(16.63e9, rel=1e-3)
    model = golden_transformer("krea/krea_session_steps4_kv3")
    network = in_fp8(model.state_dict(), model.config)
    held = sum(value.nbytes for value in network.parameters()) + sum(value.nbytes for value in network.buffers())
    assert weight_bytes(partial(CausalWan, model.config), 4, True) == held


def test_the_plan_of_krea_fits_46_and_in_fp8_32_gigabytes():
    krea = backbone("krea")
    job, _ = resolve(krea, k=7)
    low, half = (sum(krea.needs(job, replace(CPU, precision=name)).rollout.values()) for name in ("fp8", "bf16"))
    assert low < 32e9 and half < 46e9


def test_fp8_of_the_target_only():
    tiny, machine = backbone("tiny"), replace(CPU, precision="fp8-target")
    job, _ = resolve(tiny, k=2)
    pair = tiny.load_pair(tiny.shipped, job, machine, lambda *_: None)
    assert {role: any(lowered(model)) for role, model in pair.models.items()} == {"target": True, "drafter": False}
    assert pair.describe().startswith("target fp8, drafter bfloat16")
    krea = backbone("krea")
    job, _ = resolve(krea, k=7)
    by_name = {name: krea.needs(job, replace(CPU, precision=name)).rollout for name in ("fp8", "fp8-target", "bf16")}
    assert by_name["fp8-target"]["target weights"] == by_name["fp8"]["target weights"]
    assert by_name["fp8-target"]["drafter weights"] == by_name["bf16"]["drafter weights"]


def test_older_cards_are_refused_with_the_reason_R54(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    low_precision.unavailable.cache_clear()
    with pytest.raises(UsageError, match=r"fp8 cannot be used: .*8\.9.*this GPU has 8\.6; use bf16"):
        low_precision.check(torch.device("cuda"))
    low_precision.unavailable.cache_clear()
    low_precision.check(torch.device("cpu"))
