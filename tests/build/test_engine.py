"""`model.dtype` and `model.attention` as an engine gets them: settled for the device at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmpack.build.engine import settled_compute
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection

ENCODER: Any = SimpleNamespace(
    family=SimpleNamespace(
        modules=SimpleNamespace(image_blocks=False), largest_head=0, model_types=()
    )
)


def settled(device: str = "cpu", context: int = 1, **model: Any) -> Any:
    section = ModelSection(path="a", **model)
    split = ParallelismSection(context=context)
    return settled_compute(section, split, ENCODER, torch.device(device))


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cuda", "auto", torch.bfloat16),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_dtype(device: str, asked: str, expected: torch.dtype) -> None:
    assert settled(device, dtype=asked, attention="segments").dtype is expected


def test_attention_is_described_with_its_reason() -> None:
    assert settled(attention="segments").described() == {
        "compute dtype": "float32",
        "attention": "segments (as the recipe asks)",
    }
    chosen = settled("cuda", context=2, backend="mcore").described()
    assert chosen["attention"] == "segments (with context parallelism; or transformer_engine)"


def test_what_knows_no_context_parallelism_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("vlmpack.attention.varlen.why_unavailable", lambda *_, **__: None)
    with pytest.raises(CapabilityError, match=r"flash_attn knows no context parallelism.*is 2"):
        settled("cuda", context=2, backend="mcore", attention="flash_attn")


def test_transformer_engine_is_refused_without_a_gpu() -> None:
    with pytest.raises(CapabilityError, match="transformer_engine needs a CUDA device"):
        settled(backend="mcore", attention="transformer_engine")
