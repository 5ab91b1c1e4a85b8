"""Quantised folders are refused by the name of their method, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.shards import TINY_MODEL
from transformers.utils.quantization_config import QuantizationMethod

from vlmpack.capabilities.config import TRAINABLE_METHOD, quantised_refusal
from vlmpack.capabilities.folder import served_model_type
from vlmpack.errors import CapabilityError, RecipeError
from vlmpack.recipe import load_recipe

METHODS = [method.value for method in QuantizationMethod]
OTHERS = [method for method in METHODS if method != TRAINABLE_METHOD]


def section(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    shutil.copytree(TINY_MODEL, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "m"


@pytest.mark.parametrize("method", [*OTHERS, "of next year"])
def test_every_other_method_is_named(method: str) -> None:
    why = quantised_refusal(section(method))
    assert why is not None
    assert f"quantised by {method} " in why
    assert "nf4" in why


def test_those_are_all_methods_but_one() -> None:
    assert {"fp8", "awq", "gptq", "compressed-tensors", "mxfp4"} < {*OTHERS}
    assert len(OTHERS) == len(METHODS) - 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        section("bitsandbytes"),
        {"quantization_config": {"load_in_4bit": True}},
        {"quantization_config": {"quant_method": QuantizationMethod.BITS_AND_BYTES}},
    ],
)
def test_dense_and_bitsandbytes_are_taken(config: dict[str, Any]) -> None:
    assert quantised_refusal(config) is None


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": section("fp8")},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": {}},
        {"quantization_config": "awq"},
    ],
)
def test_wherever_it_stands(config: dict[str, Any]) -> None:
    assert "quantised by" in str(quantised_refusal(config))


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors"])
def test_recipe_check_and_the_launch_refuse_it(tmp_path: Path, method: str) -> None:
    folder = folder_of(tmp_path, **section(method))
    with pytest.raises(CapabilityError, match=f"quantised by {method}"):
        served_model_type(folder)
    with pytest.raises(RecipeError, match=rf"model\.path.*quantised by {method}"):
        load_recipe("recipes/digits-demo.yaml", [f"model.path={folder}"])


def test_the_folder_itself_is_taken(tmp_path: Path) -> None:
    assert served_model_type(folder_of(tmp_path, quantization_config=None)) == "qwen2_5_vl"
