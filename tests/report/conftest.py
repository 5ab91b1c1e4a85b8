"""Rows to inspect; read-only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def inspect_settings(tmp_path_factory: Any) -> dict[str, Any]:
    """A recipe in mode `online`."""
    from inspected import make_settings

    return make_settings(tmp_path_factory.mktemp("inspect"))


@pytest.fixture(scope="session")
def inspect_recipe(inspect_settings: dict[str, Any]) -> Path:
    """The same as a file."""
    from support.recipes import write_recipe

    return write_recipe(Path(inspect_settings["run_dir"]).parent / "recipe.json", inspect_settings)


@pytest.fixture(scope="session")
def opened_row(inspect_recipe: Path) -> Any:
    """(row, bin, encoder) of the row with the hostile sample, over two context-parallel ranks."""
    from inspected import HOSTILE_KEY

    from vlmpack.proof.rows.opening import Wanted, open_row

    return open_row(inspect_recipe, Wanted(key=HOSTILE_KEY), context=2)
