"""A recipe names what it minimises; another objective is another run."""

from __future__ import annotations

import pytest
from support.recipes import write_recipe
from support.toy_objective import FOCAL

from vlmpack.cli.recipe import check
from vlmpack.errors import ObjectiveError, RecipeError
from vlmpack.recipe import identity, identity_differences, load_recipe
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.objective import KNOBS, OBJECTIVES, ObjectiveSection
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


def test_every_knob_has_an_owner():
    owned = [name for knobs in KNOBS.values() for name in knobs]
    assert {*owned, "name", "fingerprint"} == ObjectiveSection.model_fields.keys()
    assert KNOBS.keys() <= OBJECTIVES.keys()


def test_a_knob_stands_beside_its_own_objective_alone(minimal, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "focal", "support.toy_objective:FOCAL")
    monkeypatch.setitem(KNOBS, "focal", ("sft_weight", "beta"))
    monkeypatch.setitem(KNOBS, "dpo", tuple(name for name in KNOBS["dpo"] if name != "sft_weight"))
    found = load_recipe(minimal, ["objective.name=focal", "objective.sft_weight=3"])
    assert found.objective.sft_weight == 3
    for name, knob, owners in (
        ("dpo", "sft_weight", "focal"),
        ("focal", "label_smoothing", "dpo"),
        ("sft", "beta", "dpo or focal"),
    ):
        with pytest.raises(RecipeError, match=f"'{name}' has no such knob; use .*: {owners}, or"):
            load_recipe(minimal, [f"objective.name={name}", f"objective.{knob}=0.25"])


def test_a_run_with_another_knob_is_another_run(minimal, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "focal", "support.toy_objective:FOCAL")
    monkeypatch.setitem(KNOBS, "focal", ("sft_weight",))
    monkeypatch.setitem(KNOBS, "dpo", tuple(name for name in KNOBS["dpo"] if name != "sft_weight"))
    old, new = (
        identity(load_recipe(minimal, ["objective.name=focal", f"objective.sft_weight={weight}"]))
        for weight in (1, 2)
    )
    assert identity_differences(old, new) == [
        "objective.sft_weight: 1.0 in the run folder, 2.0 in the recipe"
    ]
    assert identity_differences(old, old) == []


def of_the_section_alone(section):
    return FOCAL


def test_a_function_with_another_signature_is_refused_by_name(minimal, monkeypatch, tmp_path):
    monkeypatch.setitem(OBJECTIVES, "focal", f"{__name__}:of_the_section_alone")
    section = load_recipe(minimal, ["objective.name=focal"]).objective
    called = r"'focal': .*alone\(section\), but it is called as .*alone\(section, sources\)"
    with pytest.raises(ObjectiveError, match=called):
        objective_of(section)
    with pytest.raises(ObjectiveError, match=called):
        check(write_recipe(tmp_path / "r.yaml", minimal), ["objective.name=focal"])


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
