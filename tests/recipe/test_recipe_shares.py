"""`data.validation: 2%` in a recipe: what is taken for a share, and what is said of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmpack.errors import RecipeError
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.recipe.identity import identity
from vlmpack.recipe.sources import Share

MODEL = {"model": {"path": "m"}, "run_dir": "r", "training": {"max_steps": 4}}
SIZES = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 2}


def load(validation: Any, **data: Any) -> Any:
    values: dict[str, Any] = {**MODEL, "training": MODEL["training"] | SIZES}
    values["data"] = {"train": "a.tar", "validation": validation, **data}
    values |= {"evaluation": {"interval_steps": 2}, "optim": {"lr": 1.0e-3}}
    return load_recipe(values)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        *(("2%", "2%"), (" 2 % ", "2%"), ("0.50%", "0.5%"), ("50%", "50%")),
        *(("0.00001%", "0.00001%"), ("12.3456789%", "12.3456789%")),
    ],
)
def test_a_share_is_kept_as_it_is_meant(tmp_path: Path, given: str, share: str) -> None:
    recipe = load(given, image_root="photos")
    assert isinstance(recipe.data.validation, Share)
    assert recipe.data.validation == share
    assert recipe.data.validation.fraction == pytest.approx(float(share[:-1]) / 100)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_recipe(recipe))
    again = load_recipe(path)
    assert again == recipe == load_recipe(recipe)
    assert isinstance(again.data.validation, Share)
    moved = load_recipe(recipe, base_dir=tmp_path)
    assert moved.data.validation == share
    assert moved.data.train[0].path == str(tmp_path / "a.tar")
    assert identity(recipe)["data.validation"] == share


@pytest.mark.parametrize("given", ["a.tar", "./2%", "100%/a.tar", "val%", ["a.tar"], None])
def test_files_are_files(given: Any) -> None:
    recipe = (
        load(given)
        if given
        else load_recipe(load("a.tar"), {"evaluation": {}, "data.validation": None})
    )
    assert not isinstance(recipe.data.validation, Share)
    assert "data.validation" not in identity(recipe)


@pytest.mark.parametrize("given", ["0%", "51%", "100%", "-2%", "2,5%", "1.2.3%", 0.02, 2, 0])
def test_no_share_is_refused_in_words(given: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        load(given)
    [problem] = caught.value.problems
    assert "data.validation: expected a share of data.train above 0% and up to 50%" in problem
    assert str(given) in problem


def test_other_problems_keep_their_places() -> None:
    with pytest.raises(RecipeError, match=r"data\.validation\[1\]\.path: expected a string"):
        load(["a.tar", {"path": ""}])
    with pytest.raises(RecipeError, match=r"expected a string or a mapping .* found true"):
        load(True)


def test_sources_are_named_after_those_of_training() -> None:
    data = load("2%", train=["x/a.tar", "y/b.tar"]).data
    assert data.source_names == ("x-a", "y-b")
    assert data.splits()["validation"] == ()
