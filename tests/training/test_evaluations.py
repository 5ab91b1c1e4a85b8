"""The best step by a figure, and when the run stops waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import MINIMAL, changed

from vlmpack.errors import RecipeError
from vlmpack.evaluation.predictions import drop_predictions_after, predictions_at
from vlmpack.recipe import load_recipe
from vlmpack.recipe.schema import EvaluationSection
from vlmpack.training.checkpoint.folders import COMPLETE, list_checkpoints, prune, step_folder
from vlmpack.training.evaluations import Best, evaluated


def judged(best: Best, *values: float | None) -> list[bool]:
    return [best.judge(step, {best.figure: value}) for step, value in enumerate(values, 1)]


def test_a_loss_falls_and_a_metric_rises() -> None:
    loss, metric = Best("validation_loss"), Best("exact_match")
    assert judged(loss, 3.0, 2.0, 2.5, 1.0) == [True, True, False, True]
    assert judged(metric, 0.3, 0.2, 0.3, 0.5) == [True, False, False, True], "the first of equals"
    assert (loss.value, loss.step, metric.value, metric.step) == (1.0, 4, 0.5, 4)


def test_patience_counts_evaluations_that_there_were() -> None:
    best = Best("exact_match", patience=2)
    assert judged(best, 0.5, 0.4, None) == [True, False, False]
    assert not best.is_spent and not best.judge(9, {"validation_loss": 0.0})
    assert not best.judge(10, {"exact_match": 0.1}) and best.is_spent
    said = "best exact_match 0.5000 at step 1, and none better in 2 evaluations (a larger "
    assert best.words_at_stop == f"{said}evaluation.patience goes on)"
    assert not Best("exact_match").is_spent and Best.of(EvaluationSection()) is None


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    """The first one was for ever: nothing is smaller than it. It is waited out like a worse one."""
    nan, infinite = float("nan"), float("inf")
    best = Best("validation_loss", patience=2)
    assert judged(best, nan, 3.0, 2.0, nan, 1.0) == [False, True, True, False, True]
    assert (best.value, best.step) == (1.0, 5) and not best.is_spent
    assert judged(best, infinite, nan) == [False, False] and best.is_spent
    unset = Best("validation_loss", patience=2)
    assert judged(unset, infinite, nan) == [False, False] and unset.is_spent
    assert unset.value is None and unset.words == "no validation_loss yet"


def test_it_goes_on_from_a_checkpoint_of_the_same_figure() -> None:
    best, same, other = Best("anls", 3), Best("anls", 3), Best("contains", 3)
    judged(best, 0.5, 0.4)
    same.take(best.to_state())
    other.take(best.to_state())
    assert same == best and other.value is None


def test_the_best_checkpoint_is_spared(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / COMPLETE).write_text("")
    newest = step_folder(tmp_path, 4)
    prune(tmp_path, 2, newest=newest, spared={step_folder(tmp_path, 1).name})
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "3", "4"]
    prune(tmp_path, 1, newest=newest)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["4"]


def test_answers_of_steps_that_are_taken_again_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / predictions_at(step)).write_text("")
    (tmp_path / "predictions-after.jsonl").write_text("")
    drop_predictions_after(tmp_path, 20)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["predictions-after.jsonl", predictions_at(10), predictions_at(20)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation__best": "validation_loss"}, "evaluation.interval_steps is not set"),
        ({"evaluation__best": "exact_match"}, "generate_interval_steps is not set"),
        ({"evaluation__best": "exact_mach"}, "did you mean 'exact_match'"),
        ({"evaluation__patience": 3}, "evaluation.best names no figure"),
        ({"export__weights": "best"}, "evaluation.best names no figure; name one, or use last"),
        ({"evaluation__generate_interval_steps": 5}, "evaluation.generate is false"),
    ],
)
def test_what_is_followed_is_evaluated(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(changed(MINIMAL, **changes))


def test_a_row_of_metrics_is_read_by_the_names_of_the_recipe() -> None:
    row = {"step": 3, "validation_loss": 1.5, "validation_accuracy": 0.4, "loss": 2.0}
    assert evaluated(row) == {"validation_loss": 1.5}
    answers = {"step": 3, "answers_anls": 0.5, "answers_python:own": 0.25, "answers_contains": None}
    assert evaluated(answers) == {"anls": 0.5, "python:own": 0.25}
