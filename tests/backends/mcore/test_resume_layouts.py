"""A run goes on with another layout, and on the other engine, and back again.

What is saved and what goes on from it are computed in different processes, those of a kind
together; the hf engine's in the test's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from backends.mcore.relayout import STEPS_BEFORE, file_of, run_job
from support.engines import make_engine, make_stepper
from support.forked import check_ranks
from support.layouts import LAYOUTS, STEPS
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder

WORKER = Path(__file__).with_name("relayout.py")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative, of losses and gradient norms: the stated bound of the project."""

FROM_TP2, FURTHER_FROM_TP2 = ("cp2", "pp2"), ("dp2", "tp2")
TO_TP2, FURTHER_TO_TP2 = ("hf",), ("cp2", "pp2")
"""With a sharded optimizer, in two processes; further ones are soak tests."""


def run(folder: Any, processes: int, *jobs: str) -> None:
    """The worker's jobs, one after another."""
    check_ranks([WORKER, folder, *jobs], processes)


def run_hf(folder: Any, job: str) -> None:
    """A job on the hf engine, here."""
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL))
    run_job(folder, job, make_stepper(engine), LAYOUTS["one"], engine.ranks)


def rows(folder: Any, job: str) -> list[list[float]]:
    """(loss, gradient norm) of the steps after the checkpoint."""
    return json.loads(file_of(folder, job).read_text())


def assert_goes_on(folder: Any, layout: str, source: str) -> None:
    """The same losses and gradient norms as the unbroken run."""
    unbroken, resumed = rows(folder, f"save:{source}"), rows(folder, f"resume:{layout}:{source}")
    assert len(unbroken) == STEPS
    assert abs(unbroken[-1][0] - unbroken[0][0]) > 100 * TOLERANCE * unbroken[0][0], "nothing moved"
    for before, after in zip(unbroken, resumed, strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints and losses of all tests here; saved by either engine."""
    folder = tmp_path_factory.mktemp("relayout")
    run(folder, 2, "save:tp2")
    run_hf(folder, "save:hf")
    return folder


@pytest.fixture(scope="module")
def resumed(saved):
    """Gone on in two processes."""
    return gone_on(saved, FROM_TP2, TO_TP2)


@pytest.fixture(scope="module")
def further(saved):
    """In further layouts."""
    run(saved, 2, *(f"save:{name}" for name in FURTHER_TO_TP2))
    return gone_on(saved, FURTHER_FROM_TP2, FURTHER_TO_TP2)


def gone_on(folder: Any, from_tp2: tuple[str, ...], to_tp2: tuple[str, ...]) -> Any:
    """The folder, with the rows of these."""
    jobs = [f"resume:{name}:tp2" for name in from_tp2]
    run(folder, 2, *jobs, *(f"resume:tp2:{name}" for name in to_tp2))
    return folder


def test_both_processes_wrote(saved):
    files = sorted((saved / "tp2" / f"step-{STEPS_BEFORE:08d}").glob("*-of-*.safetensors"))
    assert [file.name.split("-")[:2] for file in files] == [
        [kind, number] for kind in ("model", "optimizer") for number in ("00000", "00001")
    ]


def test_tensor_parallel_to_hf(saved):
    run_hf(saved, "resume:hf:tp2")
    assert_goes_on(saved, "hf", "tp2")


def test_tensor_parallel_to_one_process(saved):
    run(saved, 1, "resume:one:tp2")
    assert_goes_on(saved, "one", "tp2")


@pytest.mark.parametrize("layout", FROM_TP2)
def test_tensor_parallel_to(resumed, layout):
    assert_goes_on(resumed, layout, "tp2")


@pytest.mark.soak
@pytest.mark.parametrize("layout", FURTHER_FROM_TP2)
def test_tensor_parallel_to_further_layouts(further, layout):
    assert_goes_on(further, layout, "tp2")
    if layout == "tp2":
        unbroken, again = rows(further, "save:tp2"), rows(further, "resume:tp2:tp2")
        assert again == unbroken, "the same layout goes on bit by bit"


@pytest.mark.parametrize("source", TO_TP2)
def test_the_way_back(resumed, source):
    assert_goes_on(resumed, "tp2", source)


@pytest.mark.soak
@pytest.mark.parametrize("source", FURTHER_TO_TP2)
def test_further_ways_back(further, source):
    assert_goes_on(further, "tp2", source)
