"""A recipe names what it minimises; another objective is another run."""

from __future__ import annotations

import pytest
from support.toy_objective import FOCAL

from vlmpack.errors import RecipeError
from vlmpack.recipe import identity, identity_differences, load_recipe
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.objective import OBJECTIVES
from vlmpack.recipe.sources import Source
from vlmpack.training.objective import SFT, objective_of


def test_a_recipe_names_its_objective(minimal, monkeypatch):
    plain = load_recipe(minimal)
    assert objective_of(plain.objective) is SFT
    assert not any(key.startswith("objective") for key in identity(plain)), "as before"
    with pytest.raises(RecipeError, match=r"'sftt' is not one of .*; did you mean 'sft'"):
        load_recipe(minimal, ["objective.name=sftt"])
    monkeypatch.setitem(OBJECTIVES, "focal", "support.toy_objective:FOCAL")
    other = load_recipe(minimal, ["objective.name=focal"])
    assert objective_of(other.objective) is FOCAL
    assert identity_differences(identity(plain), identity(other)) == [
        "objective.name: 'sft', by default, in the run folder, 'focal' in the recipe"
    ]


def test_a_test_split_may_have_a_source_that_is_neither_trained_nor_validated():
    data = DataSection(
        train=(Source(name="a", path="a.tar"), Source(name="b", path="b.tar")),
        test=(Source(name="c", path="c.tar"),),
    )
    assert data.places_of(data.train) == [0, 1]
    assert data.places_of(data.test) == []


def test_nothing_to_group_by_is_the_default(minimal):
    assert load_recipe(minimal, ["data.group_by=null"]) == load_recipe(minimal)
    assert load_recipe(minimal, ["data.group_by=image"]).data.group_by == "image"
    with pytest.raises(RecipeError, match=r"data.group_by: .*'images'.* did you mean 'image'"):
        load_recipe(minimal, ["data.group_by=images"])


def test_a_source_is_reported_by_itself_where_its_split_has_another_one():
    a, b, c = (Source(name=name, path=f"{name}.tar") for name in "abc")
    one_each = DataSection(train=(a,), validation=(b,))
    assert one_each.source_names == ()
    assert one_each.places_of(one_each.train) == one_each.places_of(one_each.validation) == []
    several = DataSection(train=(a, b), validation=(a,))
    assert several.source_names == ("a", "b")
    assert several.places_of(several.validation) == []  # validation_margin is a's already
    held = DataSection(train=(a,), validation=(c, b))
    assert (held.source_names, held.places_of(held.validation)) == (("c", "b"), [0, 1])
    assert held.places_of(held.train) == []
