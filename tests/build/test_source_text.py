"""Fingerprints of a program's code: one for each thing that it does, the same in every process."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import ROOT
from support.toy_objective import FOCAL, focal

from vlmpack.build.source_text import fingerprint


def closed_over(gamma: Any) -> Callable[..., Any]:
    def loss(losses: Any, batch: Any) -> Any:
        return {"loss_sum": (losses**gamma).sum()}

    return loss


def by_default(gamma: Any) -> Callable[..., Any]:
    def loss(losses: Any, batch: Any, gamma: Any = gamma) -> Any:
        return {"loss_sum": (losses**gamma).sum()}

    return loss


def by_keyword_default(gamma: Any) -> Callable[..., Any]:
    def loss(losses: Any, batch: Any, *, gamma: Any = gamma) -> Any:
        return {"loss_sum": (losses**gamma).sum()}

    return loss


def by_attribute(gamma: Any) -> Callable[..., Any]:
    loss = closed_over(1)
    loss.gamma = gamma  # type: ignore[attr-defined]
    return loss


def in_a_helper(gamma: Any) -> Callable[..., Any]:
    helper = closed_over(gamma)

    def loss(losses: Any, batch: Any) -> Any:
        return helper(losses, batch)

    return loss


def decorated(gamma: Any) -> Callable[..., Any]:
    @wraps(focal)
    def loss(*arguments: Any) -> Any:
        return focal(*arguments)["loss_sum"] ** gamma

    return loss


def in_a_lambda(gamma: Any) -> Callable[..., Any]:
    return lambda losses, batch: {"loss_sum": (losses**gamma).sum()}


class Keep:
    """Has a state, and functions that read it."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def convert(self, record: Any) -> Any:
        return record, self.kept

    def __call__(self, record: Any) -> Any:
        return record, self.kept


class Apart(Keep):
    """The same state in slots and without a dictionary."""

    __slots__ = ("more",)


class Without(Keep):
    """Leaves out what it has open."""

    def __getstate__(self) -> Any:
        return {"kept": self.kept}


@pytest.mark.parametrize(
    "make",
    [
        closed_over,
        by_default,
        by_keyword_default,
        by_attribute,
        in_a_helper,
        decorated,
        in_a_lambda,
        Keep,
        Apart,
        lambda gamma: Keep(gamma).convert,
        lambda gamma: partial(focal, gamma),
        lambda gamma: Keep([closed_over(gamma)]),
        lambda gamma: Keep({"deep": (Keep(gamma),)}),
    ],
)
def test_what_a_function_does_by_other_means_than_its_text(make: Callable[..., Any]) -> None:
    assert fingerprint(make(1.0)) == fingerprint(make(1.0)) != fingerprint(make(5.0))
    assert fingerprint(make(1.0)) != fingerprint(make(None))


def test_another_text_in_a_closure_or_a_class_above_is_another_function() -> None:
    def one(record: Any) -> Any:
        return record

    def other(record: Any) -> Any:
        return [record]

    assert fingerprint(closed_over(one)) != fingerprint(closed_over(other))
    texts = [fingerprint(kind(1)) for kind in (Keep, Apart, Without)]
    assert len(set(texts)) == 3
    assert fingerprint(FOCAL) != fingerprint(focal) == fingerprint(focal)


ALIKE: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (1, "1"),
    ("1", b"1"),
    ([1, [2]], [1, 2]),
    ([1, 2], (1, 2)),
    ({1: 2}, {"1": 2}),
    ({1, 2}, [1, 2]),
    (["a', 'b"], ["a", "b"]),
    (np.zeros(2, np.int64), np.zeros(4, np.int32)),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.array([{1}, None]), np.array([{2}, None])),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()),
    (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    (defaultdict(list), defaultdict(set)),
    (deque([1]), deque([2])),
    (re.compile("a"), re.compile("b")),
    (Path("a"), Path("b")),
    (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    (torch.exp, torch.log),
    ([].append, [1].append),
    (Keep, Apart),
]


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_states_that_look_alike_are_told_apart(one: Any, other: Any) -> None:
    assert fingerprint(Keep(one)) == fingerprint(Keep(one))
    assert fingerprint(Keep(one)) != fingerprint(Keep(other))


def varied() -> list[Any]:
    """What a hash seed, an address or an order of insertion could decide."""
    words = {"alpha", "beta", "gamma", "delta", "epsilon"}
    named = Keep({word: len(word) for word in sorted(words)})
    return [
        Keep(words),
        Keep(frozenset(words)),
        Keep([(1, words)]),
        named.convert,
        closed_over(words),
        lambda losses, batch: {"loss_sum": sum(x for x in losses if x in {"a", "b", "c", "d"})},
        Keep(lambda: [lambda: 1]),
        Keep([torch.arange(3), np.arange(3), re.compile("a"), Path("a"), torch.float32]),
        Keep(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.1))),
        FOCAL,
    ]


@pytest.mark.soak
def test_every_process_finds_the_same(tmp_path: Path) -> None:
    program = (
        "from build.test_source_text import fingerprint, varied\nprint(*map(fingerprint, varied()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join((f"{ROOT}/tests", str(ROOT)))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {" ".join(map(fingerprint, varied())) + "\n"}


def test_a_state_that_cannot_be_looked_at_needs_a_version() -> None:
    """Two of them would be one; the text and what can be looked at still count."""
    lock = threading.Lock()
    for made in (Keep(lock), Keep({"deep": [Keep(lock)]}), closed_over(lock), Keep(lock).convert):
        with pytest.raises(ValueError, match=r"cannot pickle '_thread\.lock'.*Give it a `version`"):
            fingerprint(made)
    one, two = Keep(lock), Keep(lock)
    one.version, two.version = 1, 2  # type: ignore[attr-defined]
    assert fingerprint(one) != fingerprint(two)
    assert fingerprint(closed_over([one])) != fingerprint(closed_over([two]))
    assert fingerprint(Without(1)) == fingerprint(Without(1)), "guard"
    opened = Without(1)
    opened.handle = lock  # type: ignore[attr-defined]
    assert fingerprint(opened) == fingerprint(Without(1))


def test_what_holds_itself_or_is_deep_needs_a_version() -> None:
    one = Keep([])
    one.kept += [one]
    with pytest.raises(ValueError, match=r"cannot be looked at \(.*Give it a `version`"):
        fingerprint(one)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        fingerprint(Keep(deep))


def test_another_release_of_a_package_is_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of torch are known by name where they are held; one's own are not."""
    held, own = Keep(torch.nn.functional.relu), Keep(focal)
    before = fingerprint(held), fingerprint(own)
    for function in (torch.nn.functional.relu, focal):
        monkeypatch.setattr(function, "__code__", (lambda x: x + 1).__code__)
    assert fingerprint(held) == before[0] and fingerprint(own) != before[1]
