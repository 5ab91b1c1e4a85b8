"""Packs are cut in the recipe's own mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import changed, run_settings

from vlmpack.data.packs.write import PackOrder
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.schema import FACTS
from vlmpack.run import packs


class Opened(Exception):
    """Says in which mode."""


def opened(recipe: Recipe, *_: object) -> None:
    raise Opened(recipe.packing.mode)


@pytest.mark.parametrize(
    ("mode", "cut"), [("online", "online"), ("offline", "online"), ("own", "own")]
)
def test_a_mode_that_plans_rows_cuts_its_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, cut: str
) -> None:
    monkeypatch.setitem(FACTS, "own", FACTS["online"])  # type: ignore[misc]
    monkeypatch.setattr(packs, "open_recipe", opened)
    packing = {"mode": "online" if mode == "own" else mode, "max_tokens": 512}
    packing |= {"path": str(tmp_path / "packs")} if mode == "offline" else {}
    settings = changed(run_settings(tmp_path), packing=packing, training__micro_batch_size=1)
    recipe = load_recipe(settings)
    if mode == "own":
        section = recipe.packing.model_copy(update={"mode": "own"})
        recipe = recipe.model_copy(update={"packing": section})
    with pytest.raises(Opened, match=f"^{cut}$"):
        packs.pack_recipe(recipe, tmp_path / "packs", PackOrder())
