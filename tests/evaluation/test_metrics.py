"""Figures count image questions alone, by the metrics that a recipe names."""

from __future__ import annotations

import pytest
from support.recipes import MINIMAL

from vlmpack.encode import ImagePart, Message, TextPart
from vlmpack.errors import RecipeError
from vlmpack.evaluation.metrics import (
    METRICS,
    NO_TASK,
    Group,
    Tally,
    checked_metric,
    score,
    written_metrics,
)
from vlmpack.evaluation.predictions import Prediction, Question
from vlmpack.recipe import load_recipe
from vlmpack.recipe.schema import METRIC_NAMES, EvaluationSection


def question(truth: str, *, task: str | None = "read", num_images: int = 1) -> Question:
    parts = (*(ImagePart(i) for i in range(num_images)), TextPart("What is it?"))
    return Question(
        key=f"k{truth}",
        shard="s.tar",
        messages=(Message("user", parts),),
        images=(b"",) * num_images,
        truth=truth,
        task=task,
    )


def predictions(*pairs: tuple[Question, str]) -> list[Prediction]:
    return [Prediction.of(asked, answer) for asked, answer in pairs]


def exact(group: Group) -> float | None:
    return group.shares["exact_match"]


def test_text_only_questions_do_not_enter_the_figures() -> None:
    text = question("9", task="text", num_images=0)
    seen = question("12")
    scores = score(predictions((seen, "12"), (seen, "13"), (text, "9"), (text, "9")))
    assert exact(scores.total) == 0.5
    assert exact(scores.text_only) == 1.0
    assert list(scores.tasks) == ["read"]


def test_without_any_image_all_questions_are_the_figures() -> None:
    one, other = (question("9", task=task, num_images=0) for task in ("sum", "sort"))
    scores = score(predictions((one, "9"), (one, "8"), (other, "9")))
    assert exact(scores.total) == 2 / 3
    assert not scores.has_images
    assert {name: exact(group) for name, group in scores.tasks.items()} == {"sum": 0.5, "sort": 1.0}


def test_characters_are_those_of_the_true_answer_in_their_places() -> None:
    scores = score(
        predictions(
            (question("1234"), "1934"),  # 3 of 4
            (question("56"), "5"),  # 1 of 2: what is missing is wrong
            (question("78"), "7899"),  # 2 of 2: what is too much is not counted
            (question("90"), ""),  # 0 of 2
            (question("3", task="count"), "3"),  # another task
        )
    )
    assert scores.total.tallies["characters"].counted == 10
    assert scores.total.shares["characters"] == pytest.approx(0.6)
    assert exact(scores.total) == pytest.approx(1 / 5)


def test_questions_without_a_task_may_be_read_too() -> None:
    asked = question("12", task=None)
    shares = score(predictions((asked, "13"))).total.shares
    assert (shares["exact_match"], shares["characters"]) == (0, 0.5)


def test_missing_groups_are_none_and_not_zero() -> None:
    scores = score(predictions((question("3", task="count"), "3")))
    assert scores.total.shares["characters"] is None
    assert exact(scores.text_only) is None
    assert exact(score(predictions((question("3", task=None), "3"))).tasks[NO_TASK]) == 1.0
    assert exact(score([]).total) is None


def test_only_the_metrics_that_were_asked_for_are_computed() -> None:
    scores = score(predictions((question("3"), "3")), {"characters": METRICS["characters"]})
    assert list(scores.total.tallies) == list(scores.tasks["read"].tallies) == ["characters"]


def test_a_metric_that_changes_its_list_changes_no_other() -> None:
    """One that dropped the wrong answers made exact_match 1.0 of 0.5, tasks and counts with it."""

    def empties(rows: list[Prediction]) -> float:
        while rows and not rows[-1].correct:
            rows.pop()
        return 0.5

    asked = [question(truth, task=task) for truth, task in (("a", "1"), ("b", "1"), ("c", "2"))]
    rows = predictions(*zip(asked, ("a", "x", "x"), strict=True))
    plain = score(rows, {"exact_match": METRICS["exact_match"]})
    for order in (("mine", "exact_match"), ("exact_match", "mine")):
        metrics = {"mine": checked_metric(empties, "mine"), **METRICS}
        scores = score(rows, {name: metrics[name] for name in order})
        assert scores.total.tallies["exact_match"] == plain.total.tallies["exact_match"]
        assert scores.total.tallies["mine"] == Tally(1.5, 3)
        assert scores.tasks.keys() == plain.tasks.keys() == {"1", "2"}


def test_a_recipe_may_name_each_metric_and_no_other() -> None:
    assert set(METRIC_NAMES) == set(METRICS)
    assert EvaluationSection().metrics == ("exact_match",)
    with pytest.raises(RecipeError, match=r"'exact_mach' is not one of .* mean 'exact_match'"):
        load_recipe(MINIMAL, ["evaluation.metrics=[exact_mach]"])


def test_written_figures_are_the_numbers_among_them() -> None:
    new = {"metrics_after": {"characters": 0.25, "exact_match": None}}
    assert written_metrics(new, "before") == {}
    assert written_metrics(new, "after") == {"characters": 0.25}


@pytest.mark.parametrize(
    ("truth", "answer", "share"),
    [
        ("kitten", "sitting", 1 - 3 / 7),  # the textbook's three edits
        ("Saturday", "sunday", 1 - 3 / 8),
        ("42", " 42 ", 1.0),
        ("", "", 1.0),
        ("abcd", "wxyz", 0.0),
        ("ab", "abcd", 0.5),  # at the threshold
        ("ab", "abcde", 0.0),  # below it
    ],
)
def test_anls_is_the_published_formula(truth: str, answer: str, share: float) -> None:
    assert METRICS["anls"](answered(truth, answer)).share == pytest.approx(share)


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("100", "105", True),
        ("100", "105.1", False),
        ("100", "95", True),
        ("-8", "-8.3", True),
        ("0", "0.0", True),
        ("0", "0.01", False),
        ("50%", "0.51", True),
        ("Red", "red ", True),
        ("red", "reds", False),
        ("12", "twelve", False),
        ("nan", "nan", True),  # a text like any other
    ],
)
def test_a_number_may_be_five_percent_off(truth: str, answer: str, right: bool) -> None:
    assert METRICS["relaxed_accuracy"](answered(truth, answer)).share == right


def test_an_answer_may_say_more_than_the_truth() -> None:
    assert METRICS["contains"](answered("Cat", "It is a cat.")).share == 1
    assert METRICS["contains"](answered("cat", "It is a dog.")).share == 0


def answered(truth: str, answer: str) -> list[Prediction]:
    return predictions((question(truth), answer))
