"""The table of limits: what is found above them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vlmpack.errors import RecipeError
from vlmpack.limits import MAX_RECIPE_PROBLEMS
from vlmpack.recipe import load_recipe, suggestions


def test_a_recipe_of_many_unknown_keys_names_the_first_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()

    def near(key: str, *_: object, **__: object) -> list[str]:
        asked.add(key)
        return []

    monkeypatch.setattr(suggestions, "difflib", SimpleNamespace(get_close_matches=near))
    keys = {f"odd_{n}": n for n in range(3 * MAX_RECIPE_PROBLEMS)}
    with pytest.raises(RecipeError) as error:
        load_recipe({"run_dir": "x", **keys})
    assert len(error.value.problems) == MAX_RECIPE_PROBLEMS + 1
    assert error.value.problems[-1].endswith("more problems")
    assert 0 < len(asked) <= MAX_RECIPE_PROBLEMS
