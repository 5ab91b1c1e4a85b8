"""Questions, answers and their file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmpack.encode import ImagePart, Message, TextPart, VLMSample
from vlmpack.errors import DataError, RunDirError
from vlmpack.evaluation.predictions import (
    Prediction,
    Question,
    make_predictions,
    read_predictions,
    write_predictions,
)


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


def test_comparison_strips_but_keeps_inner_spaces_and_case() -> None:
    asked = question("A b")
    rows = predictions((asked, " A b\n"), (asked, "a b"), (asked, "Ab"))
    assert [row.correct for row in rows] == [True, False, False]


def test_questions_that_could_not_be_asked_are_left_out() -> None:
    rows = make_predictions([question("1"), question("2")], [None, "2"])
    assert [row.truth for row in rows] == ["2"]


def test_predictions_survive_the_file(tmp_path) -> None:
    rows = predictions(
        (question("1\u20282"), "\u4f60\n\x85x"), (question("3", task=None, num_images=2), "")
    )
    path = tmp_path / "predictions-after.jsonl"
    write_predictions(path, rows)
    assert read_predictions(path) == rows
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("line", ["{", "[1]", '{"key": "a"}'])
def test_damaged_predictions_name_the_line(tmp_path, line: str) -> None:
    path = tmp_path / "predictions-after.jsonl"
    write_predictions(path, predictions((question("1"), "1")))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RunDirError, match="line 2"):
        read_predictions(path)


def test_unwritable_folder_is_a_run_dir_error(tmp_path) -> None:
    with pytest.raises(RunDirError, match="cannot be written"):
        write_predictions(tmp_path / "missing" / "p.jsonl", [])


def test_question_is_what_comes_before_the_last_answer() -> None:
    sample = VLMSample(
        key="k",
        url="s.tar",
        messages=(
            Message("user", (ImagePart(0), TextPart("Read it."))),
            Message("assistant", (TextPart("12"),)),
            Message("user", (TextPart("And "), ImagePart(1), TextPart(", sum 1 + 2 = ?"))),
            Message("assistant", (TextPart("3"),)),
            Message("user", (TextPart("Thanks"), ImagePart(2))),
        ),
        images=(b"a", b"b", b"c"),
        task="read",
    )
    asked = Question.from_sample(sample)
    assert asked.messages == sample.messages[:3]
    assert asked.images == (b"a", b"b")
    assert asked.truth == "3"
    assert asked.text == "And [image 2], sum 1 + 2 = ?"


def test_an_answer_that_the_data_excludes_is_no_truth() -> None:
    turns = [("user", "Q", True), ("assistant", "A", True), ("user", "R", True)]
    turns.append(("assistant", "draft", False))
    messages = tuple(Message(role, (TextPart(text),), learn) for role, text, learn in turns)
    sample = VLMSample(key="k", url="s", messages=messages)
    assert Question.from_sample(sample).truth == "A"
    none = tuple(replace(message, learn=False) for message in messages)
    with pytest.raises(DataError, match="none that the data does not exclude"):
        Question.from_sample(replace(sample, messages=none))


def test_image_marks_at_the_ends_are_left_out_of_the_text() -> None:
    parts = (ImagePart(0), ImagePart(1), TextPart("\nWhich\none?"), ImagePart(2))
    sample = VLMSample(
        key="k",
        url="s",
        messages=(Message("user", parts), Message("assistant", (TextPart("x"),))),
        images=(b"",) * 3,
    )
    assert Question.from_sample(sample).text == "Which one?"


@pytest.mark.parametrize(
    ("messages", "images", "reason"),
    [
        ((Message("user", (TextPart("hi"),)),), (), "no assistant turn"),
        ((Message("assistant", (ImagePart(0),)),), (), "1 image placeholders"),
    ],
)
def test_samples_without_a_question_are_refused_by_name(messages, images, reason: str) -> None:
    sample = VLMSample(key="k7", url="s.tar", messages=messages, images=images)
    with pytest.raises(DataError, match=f"k7.*{reason}"):
        Question.from_sample(sample)
