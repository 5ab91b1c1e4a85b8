"""Overrides: what they change, and how they are named in problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpack.errors import RecipeError
from vlmpack.recipe import load_recipe


def test_override_changes_one_key(minimal):
    base = load_recipe(minimal)
    changed = load_recipe(minimal, ["training.max_steps=20"])
    assert changed.training.max_steps == 20
    assert changed == base.model_copy(
        update={"training": base.training.model_copy(update={"max_steps": 20})}
    )


def test_later_override_wins(minimal):
    recipe = load_recipe(minimal, ["training.seed=1", "training.seed=2"])
    assert recipe.training.seed == 2


def test_values_are_yaml(minimal):
    recipe = load_recipe(
        minimal,
        ["data.train=[a.tar, {path: b.tar}]", "optim.max_grad_norm=", "optim.betas=[0.8, 0.9]"],
    )
    assert [source.path for source in recipe.data.train] == ["a.tar", "b.tar"]
    assert recipe.optim.max_grad_norm is None
    assert recipe.optim.betas == (0.8, 0.9)


def test_equals_sign_and_braces_in_a_value(minimal):
    recipe = load_recipe(minimal, ["data.train=data/key=a/{000..003}.tar"])
    assert recipe.data.train[0].path == "data/key=a/{000..003}.tar"


def test_mappings_merge_and_lists_replace(minimal):
    minimal["data"]["train"] = ["a.tar", "b.tar"]
    minimal["data"]["on_error"] = {"decode": "raise"}
    recipe = load_recipe(minimal, ["data={train: [c.tar], on_error: {schema: skip}}"])
    assert [source.path for source in recipe.data.train] == ["c.tar"]
    assert recipe.data.on_error.decode == "raise"
    assert recipe.data.on_error.schema == "skip"


def test_python_values_may_be_given_by_dotted_key(minimal, tmp_path: Path):
    recipe = load_recipe(
        minimal, {"training.max_steps": 7, "optim": {"betas": (0.5, 0.6)}, "run_dir": tmp_path}
    )
    assert recipe.training.max_steps == 7
    assert recipe.optim.betas == (0.5, 0.6)
    assert recipe.run_dir == str(tmp_path)


def test_problem_in_an_override_names_the_override(problems_of):
    assert problems_of(["training.max_stpes=20"]) == [
        "override 'training.max_stpes=20': training.max_stpes: unknown key; "
        "did you mean 'max_steps'?"
    ]


@pytest.mark.parametrize("text", ["foo", "=3", "training.=3", ".seed=3"])
def test_text_that_is_no_override(problems_of, text):
    (problem,) = problems_of([text])
    assert problem.startswith(f"override '{text}': expected key=value")


def test_tags_in_overrides_are_refused(problems_of):
    (problem,) = problems_of(["run_dir=!!python/name:os.system"])
    assert "tag '!!python/name:os.system' is not allowed" in problem


@pytest.mark.parametrize("key", ["data.train.0.path", "training.max_steps.x", "run_dir.x"])
def test_override_below_a_value_is_explained(problems_of, key):
    (problem,) = problems_of([f"{key}=1"])
    assert "has no keys below it; replace it as a whole" in problem


def test_override_of_max_steps_replaces_num_epochs_of_the_file(minimal):
    del minimal["training"]["max_steps"]
    minimal["training"]["num_epochs"] = 3
    training = load_recipe(minimal, ["training.max_steps=20"]).training
    assert (training.max_steps, training.num_epochs) == (20, None)


def test_override_of_num_epochs_replaces_max_steps_of_the_file(minimal):
    training = load_recipe(minimal, {"training": {"num_epochs": 2}}).training
    assert (training.max_steps, training.num_epochs) == (None, 2)


def test_two_overrides_of_one_choice_are_a_problem(minimal):
    with pytest.raises(RecipeError, match="num_epochs: 2, but max_steps is set too"):
        load_recipe(minimal, ["training.num_epochs=2", "training.max_steps=20"])


def test_null_override_does_not_replace_the_other_choice(minimal):
    training = load_recipe(minimal, ["training.num_epochs=null"]).training
    assert (training.max_steps, training.num_epochs) == (100, None)
