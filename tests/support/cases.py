"""Where the cases of a parametrized test run.

    @pytest.mark.cases(quick="qwen3", slow=("gemma4", "pp2-*"))
    @pytest.mark.cases(quick=0.2, slow="*")

The cases with these ids are among the quick and the slow tests, all others in `make soak`. A `*`
stands for anything. Instead of ids a number is the share of them, drawn by their names.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

RUNS = ("quick", "slow")
"""In whose order an id is looked for."""


def mark_of(item: pytest.Item) -> str | None:
    """`slow`, `soak`, or None for a quick case and for a test that says nothing of its cases."""
    said = _said(item)
    if not said:
        return None
    case = _case(item)
    function = getattr(item, "originalname", item.name)
    run = next((run for run in RUNS if _is_in(case, said[run], function)), "soak")
    also = [mark.name for mark in item.iter_markers() if mark.name in ("slow", "soak")]
    if run == "quick" and also:
        raise pytest.UsageError(f"{item.nodeid} is among the quick cases, and marked {also}")
    return None if run == "quick" else run


def unknown_names(items: Iterable[pytest.Item]) -> list[str]:
    """What `cases` names and no case of its function has: the function and the name."""
    cases: dict[tuple[str, str], set[str]] = defaultdict(set)
    names: dict[tuple[str, str], set[str]] = {}
    for item in items:
        said = _said(item)
        if said:
            function = (str(item.path), getattr(item, "originalname", item.name))
            cases[function].add(_case(item))
            ids = [given for given in said.values() if not isinstance(given, float)]
            names[function] = set().union(*ids)
    return [
        f"{path}::{function}: no case is named {name!r}; there are {sorted(cases[path, function])}"
        for (path, function), all_names in names.items()
        for name in sorted(all_names)
        if not any(fits(name, case) for case in cases[path, function])
    ]


def fits(name: str, case: str) -> bool:
    """Whether an id is the name, in which `*` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, name.split("*"))), case, re.DOTALL) is not None


def _is_in(case: str, names: tuple[str, ...] | float, function: str) -> bool:
    if isinstance(names, float):
        return zlib.crc32(f"{function}[{case}]".encode()) < names * 2**32
    return any(fits(name, case) for name in names)


def _said(item: pytest.Item) -> dict[str, tuple[str, ...] | float]:
    marker = item.get_closest_marker("cases")
    if marker is None:
        return {}
    if marker.args or not marker.kwargs or not marker.kwargs.keys() <= set(RUNS):
        raise pytest.UsageError(f"{item.nodeid}: cases takes {' and '.join(RUNS)}")
    given = {run: marker.kwargs.get(run, ()) for run in RUNS}
    if any(isinstance(each, (int, float)) and not 0 < each < 1 for each in given.values()):
        raise pytest.UsageError(f"{item.nodeid}: a share of cases is above 0 and below 1")
    return {run: (names,) if isinstance(names, str) else names for run, names in given.items()}


def _case(item: pytest.Item) -> str:
    """The id of the item's parameters, as pytest writes it in brackets."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        raise pytest.UsageError(f"{item.nodeid} has no cases; found the mark `cases`")
    return str(spec.id)
