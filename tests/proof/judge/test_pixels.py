"""Pixels that are another sample's move that one: a swap is named, and a leak only beside it."""

from __future__ import annotations

from typing import Any

import pytest
from support.foreign import broken, packing
from support.judged import statuses

FAMILIES = ["qwen2_5_vl", pytest.param("internvl", marks=pytest.mark.slow)]


def said_of(found: Any, name: str) -> str:
    [row] = [one.check for one in found.findings if one.check.name == name]
    return str(row.detail)


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_pixels_are_no_leak(cases: Any, family: str) -> None:
    found = cases(family).judge("pixels swapped")
    assert found.faults == ("pixels swapped",), str(found)
    assert "ids alone were changed" in said_of(found, "isolation")
    assert "ids alone" not in said_of(cases(family).judge(), "isolation")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_leak_beside_swapped_pixels_is_one(cases: Any, family: str) -> None:
    case = cases(family)
    collate = broken(packing(case.model()), "isolation")
    found = case.judge("pixels swapped", collate=collate)
    assert found.faults == ("pixels swapped", "isolation"), str(found)


@pytest.mark.slow
def test_where_the_change_is_somebodys_the_row_says_what_may_explain_it(cases: Any) -> None:
    def change(sample: Any) -> Any:
        pixels = {n: v.flip(0) for n, v in sample.items() if n == "pixel_values"}
        return {**sample, **pixels}

    case = cases("qwen2_5_vl")
    found = case.judge("pixels swapped", change=change)
    assert found.faults == ("pixels swapped", "isolation"), str(found)
    assert "may come from the pixels of the rows above" in said_of(found, "isolation")
    right = case.judge(change=change)
    assert right.passed and statuses(right)["isolation"] == "shown", str(right)
    assert "pixels" not in said_of(right, "isolation")
