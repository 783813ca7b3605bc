import sys
import types

import pytest
import torch

from specar_core.errors import UsageError
from specar_core.models import attention
from specar_core.models.attention import Absent, Backend, choose, probe, self_test
from specar_core.models.wan import sdpa

CPU = torch.device("cpu")


def test_auto_on_a_cpu_is_torch_with_the_reasons(caplog):
    with caplog.at_level("INFO", logger="specar"):
        choice = choose(CPU, torch.float32)
    assert (choice.name, choice.attend) == ("sdpa", sdpa)
    assert "flash3: needs an NVIDIA GPU" in caplog.text and "sage" not in caplog.text


@pytest.mark.parametrize("name", ["flash3", "flash2", "cudnn", "sage"])
def test_asking_for_what_this_machine_lacks(name):
    with pytest.raises(UsageError, match=f"attention '{name}' cannot be used: needs an NVIDIA GPU"):
        choose(CPU, torch.bfloat16, name)


def test_unknown_name():
    with pytest.raises(UsageError, match="unknown attention 'flash9'; known are auto, flash3"):
        choose(CPU, torch.float32, "flash9")


def anywhere(function):
    return Backend("fake", None, None, lambda: function)


def test_a_kernel_that_computes_something_else_is_not_used_R01():
    assert self_test(sdpa, CPU, torch.float32) < 1e-5
    with pytest.raises(Absent, match="differs from torch"):
        probe(anywhere(lambda q, k, v: sdpa(q, k, v) * 1.1), CPU, torch.float32)
    with pytest.raises(Absent, match="differs from torch by 1 "):
        probe(anywhere(lambda q, k, v: sdpa(q, k, v) * float("nan")), CPU, torch.float32)


def test_a_kernel_that_refuses_is_passed_over_with_its_words_R49():
    def refuse(q, k, v):
        raise RuntimeError("no kernel image is available\nstack")

    with pytest.raises(Absent, match="fails here: no kernel image is available$"):
        probe(anywhere(refuse), CPU, torch.float32)


def test_a_mistake_of_ours_is_no_absence():
    def mistaken(q, k, v):
        return undefined_name  # noqa: F821

    with pytest.raises(NameError):
        probe(anywhere(mistaken), CPU, torch.float32)


def test_few_keys_stay_with_torch():
    calls = []
    attend = probe(anywhere(lambda q, k, v: calls.append(k.shape[1]) or sdpa(q, k, v)), CPU, torch.float32)
    calls.clear()
    q, few, many = (torch.randn(1, n, 2, 16) for n in (4, 512, 1024))
    attend(q, few, few)
    attend(q, many, many)
    assert calls == [1024]


@pytest.mark.parametrize("returns", [lambda out: out, lambda out: (out, None)])
def test_flash_attention_3_with_either_return_value(monkeypatch, returns):
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = lambda q, k, v: returns(sdpa(q, k, v))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert self_test(attention._flash3(), CPU, torch.float32) < 1e-5


@pytest.mark.parametrize("broken", [ImportError("no module"), OSError("undefined symbol: _ZN3c10")])
def test_a_missing_or_broken_package_is_absent_R42(monkeypatch, broken):
    def fail(name):
        raise broken

    monkeypatch.setattr(attention, "import_module", fail)
    for load in (attention._flash3, attention._flash2, attention._sage):
        with pytest.raises(Absent, match="cannot be imported"):
            load()


@pytest.mark.parametrize("words", ["no network\nand how to set a proxy", ""])
def test_a_kernel_that_cannot_be_fetched_is_absent_whatever_the_error(monkeypatch, words):
    """The package's HTTP client has errors of its own, which are neither OSError nor ConnectionError."""

    class ConnectError(Exception):
        pass

    def get_kernel(*_, **__):
        raise ConnectError(words)

    kernels = types.ModuleType("kernels")
    kernels.get_kernel = get_kernel
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    for missing in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Absent, match=f"no FlashAttention 3: {words[:10] or 'ConnectError'}.*$"):
        attention._flash3()
