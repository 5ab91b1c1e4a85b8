"""The implementation is chosen once, with a reason; nothing falls back in silence."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from fake_cuda.stand_ins import flash_attn_varlen_func

from vlmpack.attention import choose_attention, segment_attention, varlen, wide
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


WIDE = {"device": CUDA, "dtype": torch.bfloat16, "largest_head": 512}


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_wide_heads_take_segments_without_our_kernel(monkeypatch, name):
    monkeypatch.setattr(wide, "find_spec", lambda _: None)
    with pytest.raises(CapabilityError, match=rf"{name} .* at most 256 .* needs Triton"):
        choose_attention(name, **WIDE)
    choice = choose_attention("auto", **WIDE)
    assert choice.function is segment_attention and not choice.wide_heads
    assert "kernel for the model's 512 needs Triton" in choice.reason
    why = varlen.why_unavailable(name, CUDA, torch.bfloat16, largest_head=256)
    assert why is None or "channels" not in why


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "torch_varlen"),
        ({"image_blocks": True}, "segments"),
        ({"fixed_shape": True}, "torch_varlen"),
        ({"largest_head": 256}, None),
        ({"dtype": torch.float32}, None),
        ({"requested": "segments"}, None),
    ],
    ids=str,
)
def test_our_kernel_has_the_layers_with_wide_heads(monkeypatch, changed, expected):
    """Beside the implementation of the others, which an image's tokens may have the say in."""
    monkeypatch.setattr(varlen, "why_no_wide_heads", lambda *_: None)
    monkeypatch.setattr(varlen, "why_no_flash", lambda *_: "not installed")
    choice = choose_attention(**{"requested": "auto", **WIDE, **changed})
    assert choice.wide_heads == (expected is not None)
    if expected is None:
        assert choice.function is varlen._FUNCTIONS[choice.name]
    else:
        assert choice.name == expected
        assert choice.reason.endswith("; heads of 512 channels by vlmpack's Triton kernel")


def test_our_kernel_says_what_it_wants(monkeypatch):
    room = SimpleNamespace(shared_memory_per_block_optin=163 << 10)
    monkeypatch.setattr(wide, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    assert wide.why_no_wide_heads(512, CUDA) is None
    assert wide.why_no_wide_heads(513, CUDA) == "vlmpack's kernel of at most 512, the model has 513"
    room.shared_memory_per_block_optin = 99 << 10
    assert wide.why_no_wide_heads(512, CUDA).endswith(
        "needs 131072 bytes of shared memory, this GPU has 101376"
    )
    assert "needs a CUDA device" in wide.why_no_wide_heads(512, CPU)
