"""FlashAttention 3 and 4: where they are looked for, and what they are called with.

No GPU has run them. What the packages compute is played by `segment_attention`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.interpreted import FOLDER, why_not_installed
from support.references import path_of
from torch import Tensor

from vlmpack.attention import choose_attention, segment_attention
from vlmpack.attention.flash_packages import FLASH_PACKAGES, TAKEN, flash_varlen
from vlmpack.attention.varlen import flash_attention, flash_attention_3, flash_attention_4
from vlmpack.errors import CapabilityError
from vlmpack.packing import PackedSeqParams

CUDA = torch.device("cuda", 0)
VERSIONS = {3: "flash_attn_3", 4: "flash_attn_4"}


@pytest.fixture(autouse=True)
def looks_anew() -> Iterator[None]:
    flash_varlen.cache_clear()
    yield
    flash_varlen.cache_clear()


def row(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segment_lengths=tuple(lengths),
    )


def played(calls: list[dict[str, Any]]) -> Any:
    """A function of a package: it attends as it is told to, and adds a log-sum-exp."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> tuple[Tensor, None]:
        assert qv is None and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q is not None
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        calls.append({"causal": causal, "window_size": window_size})
        left = window_size[0]
        window = None if left is None or left < 0 else left + 1
        out = segment_attention(
            q, k, v, row(lengths), causal=causal, scale=softmax_scale, window=window
        )
        return out, None

    return flash_attn_varlen_func


def give(monkeypatch: pytest.MonkeyPatch, module: str, function: Any) -> None:
    names = module.split(".")
    for end in range(1, len(names) + 1):
        made = ModuleType(".".join(names[:end]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(sys.modules[module])["flash_attn_varlen_func"] = function


@pytest.mark.parametrize("name", FLASH_PACKAGES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 3}, {"window": 3, "causal": False, "scale": 0.3}]
)
def test_every_version_is_told_the_same_row(monkeypatch, name, options):
    """Boundaries by name: the fourth argument of version 4 is no boundary."""
    calls: list[dict[str, Any]] = []
    give(monkeypatch, FLASH_PACKAGES[name].module, played(calls))
    attend = {
        "flash_attn": flash_attention,
        "flash_attn_3": flash_attention_3,
        "flash_attn_4": flash_attention_4,
    }[name]
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(12, 4, 8, generator=draw)
    k, v = torch.randn(2, 12, 2, 8, generator=draw)
    expected = segment_attention(q, k, v, row([5, 1, 6]), **options)
    assert torch.equal(attend(q, k, v, row([5, 1, 6]), **options), expected)
    assert not torch.allclose(attend(q, k, v, row([6, 6]), **options), expected, atol=1e-3)
    unbounded = None if name == "flash_attn_4" else -1
    right = {(): 0, ("causal",): unbounded, ("window",): 0}.get(tuple(options), 2)
    left = 2 if "window" in options else unbounded
    assert calls[0]["window_size"] == (left, right)


def arguments(source: Path) -> set[str]:
    (function,) = (
        node
        for node in ast.parse(source.read_text()).body
        if getattr(node, "name", None) == "flash_attn_varlen_func"
    )
    return {each.arg for each in function.args.args}


@pytest.mark.skipif(why_not_installed() is not None, reason=str(why_not_installed()))
def test_published_functions_take_these_arguments():
    """Version 4's is flash-attn 2.8.3's early copy, which takes no longest lengths: refused."""
    for file in ("flash_attn/flash_attn_interface.py", "hopper/flash_attn_interface.py"):
        assert arguments(FOLDER / file) >= TAKEN
    early = arguments(FOLDER / "flash_attn/cute/interface.py")
    assert early >= TAKEN - {"max_seqlen_q", "max_seqlen_k"} and not early >= TAKEN


def test_an_early_version_is_refused_before_the_first_step(monkeypatch):
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=False):
        raise AssertionError

    give(monkeypatch, "flash_attn.cute", flash_attn_varlen_func)
    with pytest.raises(CapabilityError, match=r"takes no max_seqlen_k, max_seqlen_q, softmax") as e:
        choose_attention("flash_attn_4", device=CUDA, dtype=torch.bfloat16)
    assert "pip install --pre flash-attn-4" in str(e.value)


def test_auto_takes_neither(monkeypatch):
    for name in VERSIONS.values():
        give(monkeypatch, FLASH_PACKAGES[name].module, played([]))
    choice = choose_attention("auto", device=CUDA, dtype=torch.bfloat16)
    assert choice.name == "torch_varlen"


@pytest.mark.parametrize(("version", "has"), [(3, 8), (3, 7), (4, 9), (4, 8)])
def test_a_gpu_that_is_too_old_is_named(monkeypatch, version, has):
    name = VERSIONS[version]
    give(monkeypatch, FLASH_PACKAGES[name].module, played([]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (has, 0))
    oldest = FLASH_PACKAGES[name].oldest
    if has >= oldest:
        assert choose_attention(name, device=CUDA, dtype=torch.bfloat16).name == name
        return
    with pytest.raises(
        CapabilityError, match=rf"capability {oldest}\.0 or newer, cuda:0 has {has}"
    ):
        choose_attention(name, device=CUDA, dtype=torch.bfloat16)


BUILD = """
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):
    return q + 1
"""
ASKED = """
import torch
from huggingface_hub import constants
from vlmpack.attention.flash_packages import flash_varlen, why_no_flash
print(why_no_flash("flash_attn_4", torch.device("cuda")))
assert constants.HF_HUB_OFFLINE is False
print(flash_varlen("flash_attn_3")(torch.ones(1), *range(6)))
"""


@pytest.mark.slow
def test_a_build_of_the_hub_is_read_from_this_machine_alone(tmp_path):
    """By the package `kernels`, though nothing forbids it the network."""
    build = tmp_path / "flash-attn3/build/torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(BUILD)
    metadata = {"name": "flash-attn3", "id": "flash_attn3", "version": 1, "license": "bsd"}
    more: dict[str, Any] = {"python-depends": [], "backend": {"type": "cpu"}}
    (build / "metadata.json").write_text(json.dumps(metadata | more))
    environment = path_of("kernels", tmp_path) | {
        "LOCAL_KERNELS": f"kernels-community/flash-attn3={build.parents[1]}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    refused, computed = done.stdout.splitlines()
    assert computed == "tensor([2.])"
    assert "kernels-community/flash-attn4" in refused and "local cache" in refused
