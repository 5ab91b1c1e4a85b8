"""Quantised folders are refused by the name of their method, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.shards import ROOT, TINY_MODEL
from transformers.utils.quantization_config import QuantizationMethod
from typer.testing import CliRunner

from vlmpack.capabilities.config import quantised_refusal
from vlmpack.capabilities.folder import served_model_type
from vlmpack.cli.app import app
from vlmpack.errors import CapabilityError, RecipeError, VlmpackError
from vlmpack.recipe import load_recipe

METHODS = [method.value for method in QuantizationMethod]
READ = ("bitsandbytes", "fp8", "compressed-tensors")
OTHERS = [method for method in METHODS if method not in READ]


def section(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


def words(**changes: Any) -> dict[str, Any]:
    """A config.json of compressed-tensors, in words of 32 bits."""
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
    named = {k: changes.pop(k) for k in list(changes) if k in (*weights, "actorder")}
    group = {"targets": ["Linear"], "weights": weights | named}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", **changes}
    return {"quantization_config": {"config_groups": {"group_0": group}} | section}


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


def test_those_are_all_methods_but_three() -> None:
    assert {"awq", "gptq", "mxfp4", "fbgemm_fp8", "torchao"} < {*OTHERS}
    assert len(OTHERS) == len(METHODS) - len(READ)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        section("bitsandbytes"),
        section("fp8"),
        words(),
        words(num_bits=8, strategy="channel", actorder="weight"),
        {"quantization_config": {"load_in_4bit": True}},
        {"quantization_config": {"quant_method": QuantizationMethod.BITS_AND_BYTES}},
    ],
)
def test_dense_and_what_is_read_are_taken(config: dict[str, Any]) -> None:
    assert quantised_refusal(config) is None


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": section("awq")},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": {}},
        {"quantization_config": "awq"},
    ],
)
def test_wherever_it_stands(config: dict[str, Any]) -> None:
    assert "quantised by" in str(quantised_refusal(config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (words(format="float-quantized"), "compressed-tensors in the format 'float-quantized'"),
        (words(num_bits=3), "compressed-tensors with weights of int of 3 bits"),
        (words(type="float", num_bits=8), "compressed-tensors with weights of float of 8 bits"),
        (words(actorder="group"), "compressed-tensors with actorder: group"),
        (words(config_groups=None), "compressed-tensors with weights of None of None bits"),
    ],
)
def test_other_schemes_of_a_method_are_named(config: dict[str, Any], named: str) -> None:
    assert f"quantised by {named} (" in str(quantised_refusal(config))


@pytest.mark.parametrize("method", ["awq", "gptq", "torchao"])
def test_recipe_check_and_the_launch_refuse_it(tmp_path: Path, method: str) -> None:
    folder = folder_of(tmp_path, **section(method))
    with pytest.raises(CapabilityError, match=f"quantised by {method}"):
        served_model_type(folder)
    with pytest.raises(RecipeError, match=rf"model\.path.*quantised by {method}"):
        load_recipe("recipes/digits-demo.yaml", [f"model.path={folder}"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_every_command_that_opens_weights_says_so(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 1, and an error that the program prints as one."""
    folder = folder_of(tmp_path, **section(method))
    for file in TINY_MODEL.glob("*.safetensors"):
        shutil.copy(file, folder)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    monkeypatch.chdir(ROOT)
    recipe = ["recipes/digits-demo.yaml", f"model.path={folder}", f"run_dir={tmp_path / 'run'}"]
    commands = [
        ["recipe", "check", *recipe],
        ["verify", *recipe],
        ["plan", *recipe],
        ["plan", *recipe, "--measure"],
        ["finetune", *recipe],
        ["inspect", *recipe, "--row", "0"],
        ["merge", str(folder), str(adapters), "-o", str(tmp_path / "merged")],
        ["generate", "hi", "--model", str(folder)],
        ["chat", "--model", str(folder)],
    ]
    for command in commands:
        found = CliRunner().invoke(app, command)
        assert isinstance(found.exception, VlmpackError | SystemExit), (command, found.output)
        said = " ".join(f"{found.output} {found.exception}".split())
        assert found.exit_code == 1 and f"quantised by {method} (quantization_config)" in said


def test_the_folder_itself_is_taken(tmp_path: Path) -> None:
    assert served_model_type(folder_of(tmp_path, quantization_config=None)) == "qwen2_5_vl"
