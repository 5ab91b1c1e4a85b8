"""A small correct recipe for the tests of this folder, as a mapping and as a file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from support.recipes import MINIMAL

from vlmpack.errors import RecipeError
from vlmpack.recipe import engine_rules, load_recipe, trainable_rules


@pytest.fixture(autouse=True)
def mcore_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core of the right version, whatever this machine has."""
    monkeypatch.setattr(engine_rules, "mcore_version", lambda: "0.16.1")


@pytest.fixture(autouse=True)
def bitsandbytes_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes, whatever this machine has."""
    monkeypatch.setattr(trainable_rules, "has_bitsandbytes", lambda: True)


@pytest.fixture
def minimal() -> dict:
    """The keys that a recipe must have, and no others."""
    return copy.deepcopy(MINIMAL)


@pytest.fixture
def problems_of() -> Callable[..., list[str]]:
    """The problems of the minimal recipe with overrides; empty if it loads."""

    def problems(overrides: dict | list[str], **options: object) -> list[str]:
        try:
            load_recipe(copy.deepcopy(MINIMAL), overrides, **options)
        except RecipeError as error:
            return list(error.problems)
        return []

    return problems


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a recipe file and return its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


GOOD_TEXT = """\
model:
  path: models/tiny
data:
  train: data/train-*.tar
training:
  micro_batch_size: 4
  global_batch_size: 16
  seq_length: 512
  max_steps: 100
optim:
  lr: 1e-3
run_dir: runs/test
"""


@pytest.fixture
def good_text() -> str:
    """The minimal recipe as YAML; lines are counted from 1."""
    return GOOD_TEXT
