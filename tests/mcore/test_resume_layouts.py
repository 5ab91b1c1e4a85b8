"""A run goes on with another layout, and on the other engine, and back again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.layouts import STEPS, TESTS, torchrun
from support.relayout import STEPS_BEFORE, layout_of

WORKER = TESTS / "support" / "relayout.py"

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative, of losses and gradient norms: the stated bound of the project."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints and losses of all tests here."""
    return tmp_path_factory.mktemp("relayout")


def run(folder: Any, mode: str, layout: str, *sources: str) -> None:
    """The worker in as many processes as the layout has."""
    torchrun(WORKER, layout_of(layout).processes, mode, str(folder), layout, *sources)


def rows(folder: Any, layout: str, source: str) -> list[list[float]]:
    """(loss, gradient norm) of the steps after the checkpoint."""
    return json.loads((folder / f"{layout}-from-{source}.json").read_text())


def assert_goes_on(folder: Any, layout: str, source: str) -> None:
    """The same losses and gradient norms as the unbroken run."""
    unbroken, resumed = rows(folder, source, source), rows(folder, layout, source)
    assert len(unbroken) == STEPS
    assert abs(unbroken[-1][0] - unbroken[0][0]) > 100 * TOLERANCE * unbroken[0][0], "nothing moved"
    for before, after in zip(unbroken, resumed, strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE)


@pytest.fixture(scope="module")
def saved_at_tp2(folder):
    """Written by two tensor-parallel processes with a sharded optimizer."""
    run(folder, "save", "tp2")
    return folder


def test_tensor_parallel_to_hf(saved_at_tp2):
    run(saved_at_tp2, "resume", "hf", "tp2")
    assert_goes_on(saved_at_tp2, "hf", "tp2")


def test_both_processes_wrote(saved_at_tp2):
    files = sorted((saved_at_tp2 / "tp2" / f"step-{STEPS_BEFORE:08d}").glob("*-of-*.safetensors"))
    assert [file.name.split("-")[:2] for file in files] == [
        [kind, number] for kind in ("model", "optimizer") for number in ("00000", "00001")
    ]


@pytest.mark.parametrize("layout", ["cp2", "pp2", "dp2", "one", "tp2"])
def test_tensor_parallel_to(layout, saved_at_tp2):
    if layout != "tp2":
        run(saved_at_tp2, "resume", layout, "tp2")
        assert_goes_on(saved_at_tp2, layout, "tp2")
    else:
        unbroken = rows(saved_at_tp2, "tp2", "tp2")
        run(saved_at_tp2, "resume", "tp2", "tp2")
        assert rows(saved_at_tp2, "tp2", "tp2") == unbroken, "the same layout goes on bit by bit"


def test_the_way_back(folder):
    for layout in ("hf", "cp2", "pp2"):
        run(folder, "save", layout)
    run(folder, "resume", "tp2", "hf,cp2,pp2")
    for source in ("hf", "cp2", "pp2"):
        assert_goes_on(folder, "tp2", source)
