"""Boxes and points of answers: read by the family's rule, and scored against the truth.

References: boxes on a grid of cells, counted one by one, and positions of the test's own record.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encode.test_objects import GOLDEN, picture, record
from encode.test_special_tokens import BOX, with_tokens
from support.families import tiny_family_folder
from support.shards import TINY_MODEL

from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import RunDirError
from vlmpack.evaluation.metrics import METRICS, overlap
from vlmpack.evaluation.predictions import (
    Prediction,
    Question,
    Shapes,
    read_predictions,
    write_predictions,
)
from vlmpack.families.coordinates import GLM, CoordinateRule, json_list
from vlmpack.recipe.data import CoordinatesSection

SIZE = (1400, 1000)
"""Of an image that the tiny Qwen2.5-VL shows as 1,036 x 756."""

Encoders = Callable[..., Encoder]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    def encoder(name: str, **settings: Any) -> Encoder:
        folder = tiny_family_folder(name, tmp_path_factory.mktemp("model") / name)
        return Encoder(folder, EncoderSettings(**settings))

    return encoder


def asked(
    encoder: Encoder, objects: Any, answer: str, sizes: tuple[tuple[int, int], ...] = (SIZE,)
) -> Question:
    given = json.dumps(record(objects, answer, images=len(sizes))).encode()
    names = tuple(f"{n}.png" for n in range(len(sizes)))
    cooked = cook_text("a", "none", given, ("json", *names)).sample
    files = tuple(picture(size) for size in sizes)
    return Question.from_sample(replace(cooked, images=files), encoder)


def answered(truth: list[Any], answer: list[Any]) -> Prediction:
    """Shapes on one image of 60 x 40."""
    shapes = Shapes(
        tuple((0.0, *map(float, shape)) for shape in truth),
        tuple((0.0, *map(float, shape)) for shape in answer),
        ((60, 40, 60, 40),),
    )
    row = {"key": "k", "shard": "s", "task": None, "num_images": 1, "question": "?"}
    return Prediction(**row, truth="t", answer="a", correct=False, shapes=shapes)


def counted_overlap(one: list[int], other: list[int]) -> float:
    """Cells in both boxes over cells in either."""
    cells = np.zeros((2, 40, 60), dtype=bool)
    for layer, (x1, y1, x2, y2) in zip(cells, (one, other), strict=True):
        layer[y1:y2, x1:x2] = True
    return float((cells[0] & cells[1]).sum() / (cells[0] | cells[1]).sum())


def some_box(rng: random.Random) -> list[int]:
    x1, x2 = sorted(rng.sample(range(61), 2))
    y1, y2 = sorted(rng.sample(range(41), 2))
    return [x1, y1, x2, y2]


def test_overlap_is_that_of_counted_cells() -> None:
    rng, shares = random.Random(3), []
    for _ in range(300):
        one, other = some_box(rng), some_box(rng)
        shares.append(counted_overlap(one, other))
        assert overlap(one, other) == pytest.approx(shares[-1], abs=1e-12)
        assert overlap(one, one) == 1
    assert min(shares) == 0 < max(shares) < 1 and 50 < sum(share > 0 for share in shares) < 290


def test_boxes_are_paired_the_best_first() -> None:
    truth, answer = [[0, 0, 10, 10], [20, 0, 30, 10]], [[20, 0, 30, 5], [22, 0, 32, 10]]
    row = answered(truth, answer)
    share = counted_overlap([20, 0, 30, 10], [22, 0, 32, 10])  # 80 cells of 120
    assert METRICS["box_iou"]([row]).share == pytest.approx(share / 2)
    assert METRICS["box_f1"]([row]).share == pytest.approx(2 / 4)
    assert METRICS["box_f1_75"]([row]).share == 0


@pytest.mark.parametrize(
    ("truth", "answer", "iou", "f1"),
    [
        ([[0, 0, 4, 4]], [[0, 0, 4, 4]], 1, 1),
        ([[0, 0, 4, 4]], [[0, 0, 4, 2]], 0.5, 1),
        ([[0, 0, 4, 4]], [[0, 0, 4, 1.9]], 0.475, 0),
        ([[0, 0, 4, 4]], [], 0, 0),
        ([[0, 0, 4, 4]], [[4, 4, 0, 0]], 0, 0),
        ([[0, 0, 4, 4]], [[2, 2]], 0, 0),
        ([[0, 0, 4, 4]], [[0, 0, 4, 4], [0, 0, 4, 4]], 0.5, 2 / 3),
        ([], [[0, 0, 4, 4]], 0, 0),
        ([], [], None, None),
    ],
)
def test_of_single_answers(
    truth: list[Any], answer: list[Any], iou: float | None, f1: float | None
) -> None:
    row = answered(truth, answer)
    assert METRICS["box_iou"]([row]).share == pytest.approx(iou)
    assert METRICS["box_f1"]([row]).share == pytest.approx(f1)


def test_points_are_found_within_a_twentieth_of_the_diagonal() -> None:
    diagonal = (60**2 + 40**2) ** 0.5
    near, far = [10 + 0.0499 * diagonal, 10], [10 + 0.0501 * diagonal, 10]
    accuracy = METRICS["point_accuracy"]
    assert accuracy([answered([[10, 10]], [near])]).share == 1
    assert accuracy([answered([[10, 10]], [far])]).share == 0
    assert accuracy([answered([[10, 10], [50, 30]], [[50, 30]])]).share == 0.5
    assert accuracy([answered([[10, 10]], [[10, 10], [10, 10]])]).share == 0.5
    assert accuracy([answered([[0, 0, 4, 4]], [[0, 0, 4, 4]])]).share is None


def test_records_without_objects_are_not_counted() -> None:
    row = replace(answered([[0, 0, 4, 4]], [[0, 0, 4, 4]]), shapes=None)
    for name in ("box_iou", "box_f1", "point_accuracy"):
        assert METRICS[name]([row]).share is None


# Read back


FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "gemma4")


@pytest.mark.parametrize("answer", ["{{objects}}", "It is at {{box:0}}, {{ref:0}}."])
@pytest.mark.parametrize("family", FAMILIES)
def test_truth_and_answer_are_read_in_original_pixels(
    family: str, answer: str, encoders: Encoders
) -> None:
    box = [200.0, 100.0, 700.0, 500.0]
    question = asked(encoders(family), {"bbox": [box], "ref": ["a cat"]}, answer)
    row = Prediction.of(question, question.truth)
    assert row.shapes is not None and row.shapes.truth == row.shapes.answer
    ((image, *found),) = row.shapes.truth
    assert image == 0 and found == pytest.approx(box, abs=0.7 + 0.5 * (family == "qwen2_5_vl"))
    assert row.shapes.images[0][:2] == SIZE
    assert METRICS["box_iou"]([row]).share == 1


def of_answer(question: Question, answer: str) -> float:
    share = METRICS["box_iou"]([Prediction.of(question, answer)]).share
    assert share is not None
    return share


def test_faults_lower_the_overlap(encoders: Encoders) -> None:
    """Numbers that are not mapped, swapped sides, and other forms, of the model that counts
    pixels."""
    question = asked(encoders("qwen2_5_vl"), {"bbox": [[200, 100, 700, 500]]}, "{{box:0}}")
    assert question.truth == "[148, 76, 518, 378]"
    assert of_answer(question, question.truth) == 1
    assert of_answer(question, " [148,76,\n518 , 378 ] ") == 1
    unmapped = of_answer(question, "[200, 100, 700, 500]")
    assert unmapped == pytest.approx(overlap([148, 76, 518, 378], [200, 100, 700, 500]))
    assert 0.1 < unmapped < 0.6
    assert of_answer(question, "[76, 148, 378, 518]") < 0.6
    for wrong in (
        "148, 76, 518, 378",
        "(148,76),(518,378)",
        "[148, 76, 518]",
        "[1, 148, 76, 518, 378]",
    ):
        assert of_answer(question, wrong) == 0, wrong


def test_two_images_have_a_map_each(encoders: Encoders) -> None:
    objects = {"bbox": [[200, 100, 700, 500], [10, 10, 60, 90]], "image_id": [0, 1]}
    sizes = (SIZE, (112, 196))
    question = asked(encoders("qwen2_5_vl"), objects, "{{box:1}} and {{box:0}}", sizes)
    shapes = Prediction.of(question, question.truth).shapes
    assert shapes is not None
    (first, *second_box), (second, *first_box) = shapes.truth
    assert (first, second) == (1, 0)
    assert second_box == pytest.approx([10, 10, 60, 90], abs=0.01)
    assert first_box == pytest.approx([200, 100, 700, 500], abs=1)
    assert shapes.images == ((*SIZE, 1036, 756), (112, 196, 112, 196))


def test_other_lists_in_a_true_answer_are_no_truth(encoders: Encoders) -> None:
    """The shapes are known, and their images with them. Labels may look like boxes."""
    objects = {"bbox": [[200, 100, 700, 500], [10, 10, 60, 90]], "image_id": [0, 1]}
    objects |= {"ref": ["[7, 8]", "[1, 2, 3, 4]"]}
    sizes, text = (SIZE, (112, 196)), "In [1, 2] {{ref:1}}: {{box:1}}, {{ref:0}}: {{box:0}}"
    question = asked(encoders("qwen2_5_vl"), objects, text, sizes)
    plain = asked(encoders("qwen2_5_vl"), objects, "{{box:1}}{{ref:1}}{{box:0}}{{ref:0}}", sizes)
    row = Prediction.of(question, "[10, 10, 60, 90] [148, 76, 518, 378]")
    assert row.shapes is not None and question.grounding is not None
    assert [shape[0] for shape in row.shapes.truth] == [1, 0]
    assert row.shapes.truth == row.shapes.answer
    assert METRICS["box_iou"]([row]).share == METRICS["box_f1"]([row]).share == 1
    read = question.grounding.read(question.truth)
    assert len(read) == 5, "a reader of the text finds the others as well"
    assert plain.grounding == question.grounding


def test_points_and_polygons_of_a_recipes_form(encoders: Encoders) -> None:
    rule = CoordinatesSection(space="norm", grid=1, decimals=3, order="yx", polygon="<{corners}>")
    objects = {"polygon": [[[0, 0], [1400, 0], [1400, 1000]]], "point": [[700, 250]]}
    encoder = encoders("idefics3", coordinates=rule)
    question = asked(encoder, objects, "{{polygon:0}} {{point:0}}")
    shapes = Prediction.of(question, "[0.250, 0.5]").shapes
    assert shapes is not None
    assert shapes.truth == ((0, 0, 0, 1400, 0, 1400, 1000), (0, 700, 250))
    assert shapes.answer == ((0, 700, 250),)


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (GLM, "[[1,2,3,4]] [[5,6]]", [(1, 2, 3, 4), (5, 6)]),
        (GLM, "<|begin_of_box|>[[1, 2], [3, 4], [5, 6]]<|end_of_box|>", [(1, 2), (3, 4), (5, 6)]),
        (json_list(source=""), '[{"bbox_2d": [1.5, -2, 3, 4]}, {"point_2d": [7,8]}',
         [(1.5, -2, 3, 4), (7, 8)]),
        (json_list(source=""), "[1, 2, 3] [12345678, 2] [1, 2, 3, 4, 5] [nan, 2]", []),
        (CoordinateRule(box="{x1} {y1} {x2} {y2}", source=""), "at 10 2 30 4", [(10, 2, 30, 4)]),
        (CoordinateRule(box="<loc{y1}><loc{x1}><loc{y2}><loc{x2}>", source=""),
         "<loc0010><loc0002><loc0030><loc0004> a", [(2, 10, 4, 30)]),
    ],
)  # fmt: skip
def test_forms(rule: CoordinateRule, text: str, found: list[Any]) -> None:
    assert [*rule.read(text)] == found


@pytest.mark.parametrize("form", ["{x1} {y1} {x2} {y2}", " {x1}  {y1}, {x2} {y2} "])
def test_white_space_is_read_in_no_time(form: str) -> None:
    """Cubic time would take minutes."""
    rule, space = CoordinateRule(box=form, point="{x} {y}", source=""), " " * 4000
    assert [*rule.read("10 2, 30 4" if "," in form else "10 2 30 4")] == [(10, 2, 30, 4)]
    assert [*rule.read(f"1{space}2")] == [(1, 2)]
    started = time.monotonic()
    for text in ("1" + space, space + "1", f"1{space}1{space}.", "1 " * 3 + space):
        [*rule.read(text)]
    assert time.monotonic() - started < 2


def test_polygons_are_read_where_a_record_has_some() -> None:
    text = "[[1, 2], [3, 4], [5, 6]]"
    assert [*GLM.read(text, polygons=True)] == [(1, 2, 3, 4, 5, 6)]
    assert len([*GLM.read(text)]) == 3


def test_answers_keep_the_tokens_of_the_form(tmp_path: Path) -> None:
    """Of records with objects alone."""
    form = f"{BOX[0]}({{x1}},{{y1}}),({{x2}},{{y2}}){BOX[1]}"
    settings = EncoderSettings(coordinates=CoordinatesSection(space="norm", box=form))
    encoder = Encoder(with_tokens(tmp_path / "model", BOX), settings)
    question = asked(encoder, {"bbox": [[140, 100, 700, 500]]}, "{{box:0}}")
    said = f"{BOX[0]}(100,100),(500,500){BOX[1]}<|im_end|>"
    ids = encoder.tokenizer(said)["input_ids"]
    kept = encoder.chat_for(objects=question.grounding is not None).decode(ids)
    assert kept == question.truth == said.removesuffix("<|im_end|>")
    assert of_answer(question, kept) == 1
    plain = encoder.chat_for(objects=False).decode(ids)
    assert plain == encoder.tokenizer.decode(ids, skip_special_tokens=True) == "(100,100),(500,500)"
    assert of_answer(question, plain) == 0


# Files


def test_shapes_come_back_from_a_file(tmp_path: Path) -> None:
    encoder = Encoder(TINY_MODEL)
    question = asked(encoder, {"bbox": [GOLDEN]}, "{{box:0}}")
    plain = replace(question, grounding=None)
    rows = [Prediction.of(each, "[1, 2, 3, 4]") for each in (question, plain)]
    path = tmp_path / "predictions-after.jsonl"
    write_predictions(path, rows)
    assert read_predictions(path) == rows
    with_shapes, without = map(json.loads, path.read_text().splitlines())
    assert "shapes" in with_shapes and "shapes" not in without


@pytest.mark.parametrize(
    "shapes",
    ['[]', '{"truth": []}', '{"truth": [["a"]], "answer": [], "images": []}',
     '{"truth": [[1, 2, 3]], "answer": [], "images": [[1, 1, 1, 1]]}',
     '{"truth": [], "answer": [], "images": [[1, 1]]}'],
)  # fmt: skip
def test_damaged_shapes_are_named(shapes: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = answered([], [])
    write_predictions(path, [replace(row, shapes=None)])
    line = json.loads(path.read_text()) | {"shapes": json.loads(shapes)}
    path.write_text(json.dumps(line))
    with pytest.raises(RunDirError, match="line 1: no prediction"):
        read_predictions(path)
