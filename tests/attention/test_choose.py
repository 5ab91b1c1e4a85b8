"""The implementation is chosen once, with a reason; nothing falls back in silence."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from fake_cuda.stand_ins import flash_attn_varlen_func

from vlmpack.attention import choose_attention, segment_attention, varlen
from vlmpack.attention.flash_packages import flash_varlen
from vlmpack.attention.varlen import flash_attention, torch_varlen_attention
from vlmpack.errors import CapabilityError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def looks_for_packages_anew():
    flash_varlen.cache_clear()
    yield
    flash_varlen.cache_clear()


def test_auto_on_cpu_is_segments_and_says_why_not_the_others():
    choice = choose_attention("auto", device=CPU, dtype=torch.float32)
    assert (choice.name, choice.function) == ("segments", segment_attention)
    assert "flash_attn needs a CUDA device" in choice.reason
    assert "torch_varlen needs a CUDA device" in choice.reason


def test_segments_can_always_be_asked_for():
    choice = choose_attention("segments", device=CUDA, dtype=torch.float32)
    assert choice.function is segment_attention
    assert choice.reason == "as the recipe asks"


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_a_cuda_kernel_is_refused_on_cpu(name):
    with pytest.raises(CapabilityError, match=rf"model\.attention: {name} cannot run.*CUDA.*cpu"):
        choose_attention(name, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_float32_is_refused_by_the_cuda_kernels(name):
    with pytest.raises(CapabilityError, match=r"needs bfloat16 or float16.*float32"):
        choose_attention(name, device=CUDA, dtype=torch.float32)
    choice = choose_attention("auto", device=CUDA, dtype=torch.float32)
    assert choice.name == "segments"


@pytest.mark.parametrize(
    ("installed", "expected", "function"),
    [
        ({"flash_attn", "torch.nn.attention.varlen"}, "flash_attn", flash_attention),
        ({"torch.nn.attention.varlen"}, "torch_varlen", torch_varlen_attention),
        (set(), "segments", segment_attention),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_auto_on_cuda_takes_the_first_that_is_installed(monkeypatch, installed, expected, function):
    def import_module(name):
        if name not in installed:
            raise ImportError(f"No module named {name!r}")
        return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, varlen_attn=None)

    monkeypatch.setattr(varlen.importlib, "import_module", import_module)
    choice = choose_attention("auto", device=CUDA, dtype=torch.bfloat16)
    assert (choice.name, choice.function) == (expected, function)
    if expected != "flash_attn":
        assert "flash_attn.flash_attn_varlen_func cannot be imported" in choice.reason


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed here"
)
def test_flash_attn_without_its_package_names_it():
    with pytest.raises(CapabilityError, match=r"wanted: flash-attn 2\.7 or newer"):
        choose_attention("flash_attn", device=CUDA, dtype=torch.bfloat16)


def test_this_torch_has_the_varlen_kernel_that_the_adapter_imports():
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    assert {"scale", "window_size"} <= set(signature(varlen_attn).parameters)


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_image_blocks_take_segments_wherever_they_run(name):
    options = {"device": CUDA, "dtype": torch.bfloat16, "image_blocks": True}
    with pytest.raises(
        CapabilityError, match=rf"attention: {name} cannot run: an image's tokens attend in both"
    ):
        choose_attention(name, **options)
    choice = choose_attention("auto", **options)
    assert choice.function is segment_attention
    assert "attend in both directions" in choice.reason


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_wide_heads_take_segments_wherever_they_run(name):
    options = {"device": CUDA, "dtype": torch.bfloat16, "largest_head": 512}
    with pytest.raises(CapabilityError, match=rf"{name} takes heads of at most 256 channels"):
        choose_attention(name, **options)
    choice = choose_attention("auto", **options)
    assert choice.name == "segments"
    assert "the model has 512" in choice.reason
    why = varlen.why_unavailable(name, CUDA, torch.bfloat16, largest_head=256)
    assert why is None or "channels" not in why
