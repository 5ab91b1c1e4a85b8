"""While saving and loading, no rank holds more than its own share and one tensor.

A model of 100 MB of parameters; moments are twice as large. Figures are printed with `pytest -s`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.layouts import LAYOUTS, TESTS, torchrun
from support.wide import write_wide_model

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak counter"
    ),
]

MEGABYTE = 1 << 20
MARGIN = 10 * MEGABYTE
"""Buffers of files and code that is imported on first use. A second copy of one rank's parameters
would be 52 MB or more, of what it writes 140 MB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("memory")
    write_wide_model(made / "model")
    return made


@pytest.fixture(scope="module", params=["tp2", "dp2"])
def facts(folder, request):
    """By rank."""
    script = TESTS / "support" / "checkpoint_memory.py"
    torchrun(script, LAYOUTS[request.param].processes, str(folder), request.param)
    by_rank = json.loads((folder / f"{request.param}.json").read_text(encoding="utf-8"))
    for rank, fact in enumerate(by_rank):
        shares = {name: fact[name] for name in ("parameters", "moments", "written", "largest")}
        print(f"\n{request.param} rank {rank}, MB: " + show(shares))
        for name in ("build", "step", "save", "load", "background"):
            print(f"  {name:11}" + show(fact[name]))
    return by_rank


def show(sizes):
    return "  ".join(f"{name} {size / MEGABYTE:.1f}" for name, size in sizes.items())


def test_the_share_is_large_against_the_margin(facts):
    for fact in facts:
        assert fact["parameters"] > 5 * MARGIN
        assert fact["written"] > 10 * MARGIN
        assert fact["largest"] < MARGIN


@pytest.mark.parametrize("action", ["save", "load"])
def test_one_tensor_beyond_the_share(facts, action):
    for rank, fact in enumerate(facts):
        extra = fact[action]["peak"] - fact[action]["before"]
        assert extra <= fact["largest"] + MARGIN, f"rank {rank}"


def test_a_copy_of_the_share_would_be_seen(facts):
    """Saving in the background is the price of not waiting: it holds a copy on the host."""
    for rank, fact in enumerate(facts):
        extra = fact["background"]["peak"] - fact["background"]["before"]
        assert 0.95 * fact["written"] <= extra <= fact["written"] + MARGIN, f"rank {rank}"


def test_an_engine_is_built_within_the_memory_that_it_trains_in(facts):
    """Pretrained weights are read box by box; pages of the mapped file count as memory here."""
    for rank, fact in enumerate(facts):
        assert fact["build"]["peak"] <= fact["step"]["after"] + fact["largest"] + MARGIN, (
            f"rank {rank}"
        )
