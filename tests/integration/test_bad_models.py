"""A model that cannot be trained: `vlmpack finetune` says why, and opens no data."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.recipes import changed, write_recipe
from support.shards import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli import main
from vlmpack.cli.app import app
from vlmpack.errors import DataError, RecipeError
from vlmpack.run import splits

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(TINY_MODEL, tmp_path / "model")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The splits that were opened; opening one ends the run."""
    names: list[str] = []

    def open_split(setup: Any, key: str, *_: Any, **__: Any) -> None:
        names.append(key)
        raise DataError("the data was opened", error_class="integrity")

    monkeypatch.setattr(splits, "open_split", open_split)
    return names


@pytest.fixture
def finetune(
    tmp_path: Path,
    folder: Path,
    opened: list[str],
    settings: dict[str, Any],
    monkeypatch: Any,
    capsys: Any,
) -> Callable[..., tuple[int, str]]:
    """Run `vlmpack finetune` on the folder; (exit code, standard error)."""

    def run(**changes: Any) -> tuple[int, str]:
        values = changed(settings, model__path=str(folder), **changes)
        recipe = write_recipe(tmp_path / "recipe.yaml", values)
        monkeypatch.setattr(sys, "argv", ["vlmpack", "finetune", str(recipe)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


def config_with(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_a_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {EMBEDDING: "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], int, tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, 1, ("is not a folder", "expected a model in transformers format")),
    "no config": (lambda f: (f / "config.json").unlink(), 1, ("has no config.json",)),
    "config is not JSON": (
        lambda f: (f / "config.json").write_text("{'model_type': 'qwen2_vl'}"),
        1,
        ("config.json is not valid JSON",),
    ),
    "unknown architecture": (
        lambda f: config_with(f, model_type="qwen2_6_vl"),
        2,
        ("no family of this version serves model_type 'qwen2_6_vl'", "did you mean 'qwen2_"),
    ),
    "refused architecture": (
        lambda f: config_with(f, model_type="kimi_linear"),
        2,
        ("'kimi_linear' cannot be trained: packed rows cannot run here: Kimi's delta attention",),
    ),
    "no chat template": (without_template, 1, ("chat template",)),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        1,
        ("no usable tokenizer", "tokenizer.json is missing"),
    ),
    "no image processor": (
        lambda f: (f / "preprocessor_config.json").unlink(),
        1,
        ("no usable image processor (preprocessor_config.json): the file is missing",),
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), 1, ("has no weights",)),
    "truncated weights": (cut, 1, ("model.safetensors is damaged or cut off", "bytes")),
    "a weight file is missing": (
        lose_a_file,
        1,
        ("lacks 1 of the 2 weight files", "model-00002-of-00002.safetensors"),
    ),
    "a weight is missing": (
        lambda f: weights_with(f, lambda tensors: tensors.pop(EMBEDDING)),
        1,
        (
            "do not fit its config.json",
            "missing keys: ",
            "model.language_model.embed_tokens.weight",
        ),
    ),
    "a weight is left over": (
        lambda f: weights_with(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        1,
        ("unexpected keys: ", "extra.weight"),
    ),
    "weights of another size": (
        lambda f: weights_with(f, lambda t: t.update({EMBEDDING: t[EMBEDDING][:, :64].clone()})),
        1,
        ("mismatched keys: ", "embed_tokens.weight", "576, 64", "576, 128"),
    ),
}


@pytest.mark.slow
def test_a_good_model_comes_to_the_data(
    finetune: Callable[..., tuple[int, str]], opened: list[str]
) -> None:
    """Every case below changes one thing of a folder that gets this far."""
    code, message = finetune()
    assert (code, opened) == (1, ["data.train"])
    assert "the data was opened" in message


@pytest.mark.cases(quick="unknown architecture", slow="a weight is missing")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_named_before_any_data_is_read(
    finetune: Callable[..., tuple[int, str]], opened: list[str], folder: Path, name: str
) -> None:
    damage, exit_code, words = DAMAGES[name]
    damage(folder)
    code, message = finetune()
    assert (code, opened) == (exit_code, [])
    assert "model.path" in message
    assert str(folder) in message
    for word in words:
        assert word in message, message


UNSUPPORTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "TP on hf": ({"parallelism__tensor": 2}, "parallelism.tensor", "needs model.backend: mcore"),
    "dropout of adapters on mcore": (
        {"model__backend": "mcore", "trainable__language": "lora", "trainable__lora__dropout": 0.1},
        "trainable.lora.dropout",
        "use model.backend: hf",
    ),
    "Transformer Engine on hf": (
        {"model__attention": "transformer_engine"},
        "model.attention",
        "needs model.backend: mcore",
    ),
    "EP without experts": (
        {"model__backend": "mcore", "parallelism__expert": 2},
        "parallelism.expert",
        "has no experts",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_combination_is_named_before_any_data_is_read(
    finetune: Callable[..., tuple[int, str]], opened: list[str], name: str
) -> None:
    changes, key, reason = UNSUPPORTED[name]
    code, message = finetune(**changes)
    assert (code, opened) == (2, [])
    assert key in message
    assert reason in message


@pytest.mark.parametrize(
    "command",
    ["recipe check", "recipe show", "plan", "pack -o packs", "inspect --row 0", "finetune"],
)
def test_every_command_that_takes_a_recipe_says_the_same(
    folder: Path, settings: dict[str, Any], tmp_path: Path, command: str
) -> None:
    """The model's family is a matter of the recipe."""
    config_with(folder, model_type="kimi_linear")
    bad = changed(settings, model__path=str(folder), data__train=str(tmp_path / "absent.tar"))
    recipe = write_recipe(tmp_path / "recipe.yaml", bad)
    result = CliRunner().invoke(app, [*command.split(), str(recipe)])
    assert isinstance(result.exception, RecipeError)
    (problem,) = (text for text in result.exception.problems if "model.path: " in text)
    assert "'kimi_linear' cannot be trained: packed rows cannot run here: Kimi" in problem
