"""Boxes that did not follow a resized image, in samples of another trainer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.foreign import Feature, feature, padded
from support.judged import Case, statuses
from support.shards import mixed_samples, with_answer

from vlmpack.proof.judge import judge

FAULT = "coordinates beyond the image"


def samples_with(case: Case, answer: str) -> tuple[list[Feature], tuple[int, int]]:
    """The case's first three with an image, each with this answer, and the first one's sides."""
    seen = [one for one in mixed_samples() if one.images][:3]
    encoded = [case.encoder.encode(with_answer(one, answer).cooked()) for one in seen]
    assert encoded[0].media is not None
    _, height, width = encoded[0].media.grid_thw[0]
    return [feature(case.encoder, one) for one in encoded], (14 * width, 14 * height)


@pytest.mark.cases(quick=("beyond", "inside"), slow="*")
@pytest.mark.parametrize(
    ("family", "answer", "is_beyond"),
    [
        pytest.param("qwen2_5_vl", '{{"bbox_2d": [0, 0, {w}, {h}]}}', False, id="inside"),
        pytest.param("qwen2_5_vl", '{{"bbox_2d": [0, 0, 9{w}, {h}]}}', True, id="beyond"),
        pytest.param("qwen2_5_vl", "[0, 0, {w}, 9{h}]", True, id="a bare list"),
        pytest.param("qwen2_5_vl", "[9{w}, 9{h}, 0, 0]", None, id="no area"),
        pytest.param("qwen3_5", '{{"bbox_2d": [0, 0, 1000, 1000]}}', False, id="shares"),
        pytest.param("qwen3_5", '{{"bbox_2d": [0, 0, 1001, 10]}}', True, id="beyond shares"),
        pytest.param("qwen3_5", "[1900, 1910, 1920, 1930]", None, id="years"),
        pytest.param("gemma3", '{{"bbox_2d": [0, 0, 9001, 10]}}', None, id="no rule"),
    ],
)
def test_a_box_beyond_what_the_model_sees(
    family: str, answer: str, is_beyond: bool | None, cases: Callable[[str], Case]
) -> None:
    """None: nothing there is a box of this family's."""
    case = cases(family)
    _, (width, height) = samples_with(case, "")
    given, _ = samples_with(case, answer.format(w=width, h=height))
    model = case.model(packed=False)
    found = judge(model, padded, given)
    assert (FAULT in found.faults) is bool(is_beyond), str(found)
    assert ("coordinates" in statuses(found)) is (is_beyond is not None)
    assert set(found.faults) <= {FAULT}  # what the batch computes is right
    model.name_or_path = "elsewhere"
    assert "coordinates" not in statuses(judge(model, padded, given))
