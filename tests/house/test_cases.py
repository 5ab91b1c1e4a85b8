"""The mark `cases` sends each case to one run, and a name that no case has is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import mark_of, unknown_names


def item(case: str | None, *args: str, marks: tuple[str, ...] = (), **said: Any) -> Any:
    """What these functions read of an item of pytest's."""
    mark = pytest.mark.cases(*args, **said).mark if said or args else None
    return SimpleNamespace(
        nodeid=f"test_it.py::test[{case}]",
        path=Path("test_it.py"),
        name="test",
        originalname="test",
        callspec=None if case is None else SimpleNamespace(id=case),
        get_closest_marker=lambda name: mark if name == "cases" else None,
        iter_markers=lambda: [getattr(pytest.mark, name).mark for name in marks],
    )


@pytest.mark.parametrize(
    ("case", "mark"),
    [
        ("qwen3", None),
        ("gemma4-1", "slow"),
        ("gemma4", "soak"),
        ("NormForm(offset=0.0)-x", "slow"),
        ("NormForm(offset=0x0)-x", "soak"),
        ("a[0]", None),
        ("a0", "soak"),
        ("in two\nlines", "slow"),
    ],
)
def test_a_case_is_in_one_run(case: str, mark: str | None) -> None:
    said = {"quick": ("qwen3", "a[0]"), "slow": ("gemma4-*", "NormForm(offset=0.0)*", "in*lines")}
    assert mark_of(item(case, **said)) == mark


def test_a_share_is_drawn_by_name() -> None:
    marks = [mark_of(item(f"case {n}", quick=0.2, slow="*")) for n in range(1000)]
    assert set(marks) == {None, "slow"}
    assert 150 < marks.count(None) < 250
    assert marks == [mark_of(item(f"case {n}", quick=0.2, slow="*")) for n in range(1000)]
    assert unknown_names([item("a", quick=0.2, slow="*")]) == []


def test_what_says_nothing_stays_as_it_is() -> None:
    assert mark_of(item("qwen3")) is None
    assert mark_of(item(None)) is None
    assert unknown_names([item("qwen3")]) == []


def test_a_name_without_a_case_is_found() -> None:
    said = {"quick": "qwen3", "slow": ("gemma*", "qwen2")}
    found = unknown_names([item("qwen3", **said), item("gemma3", **said)])
    assert found == ["test_it.py::test: no case is named 'qwen2'; there are ['gemma3', 'qwen3']"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (item("a", soak="a"), "takes quick and slow"),
        (item("a", "a"), "takes quick and slow"),
        (item(None, quick="a"), "has no cases"),
        (item("a", quick=1), "a share of cases is above 0 and below 1"),
        (item("a", quick="a", marks=("slow",)), "among the quick cases, and marked .'slow'"),
    ],
)
def test_a_mark_that_means_nothing_is_an_error(wrong: Any, words: str) -> None:
    with pytest.raises(pytest.UsageError, match=words):
        mark_of(wrong)
