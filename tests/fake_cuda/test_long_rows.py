"""Rows of 131,072 and 262,144 tokens on 8 ranks of an 8B model: peaks, and what plan says."""

from __future__ import annotations

from functools import cache

import pytest
from fake_cuda.guard import run_under_guard, why_not
from support.shards import ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

GIB = 2**30
LONG, LONGEST = (131_072, "selective"), (262_144, "full")
WAYS = ((False, False), (True, False), (False, True), (True, True))
CASES = [(*row, *way) for row in (LONG, LONGEST) for way in WAYS]


@cache
def _found() -> dict[tuple[int, str, bool, bool], dict[str, int]]:
    names = ("tokens", "recompute", "tiles", "offload")
    given = [dict(zip(names, case, strict=True)) for case in CASES]
    beside = [ROOT / "benchmarks"]
    # One process each: transformers keeps what the one before has registered.
    found = (run_under_guard("fake_cuda.long_rows", [one], beside=beside)[0] for one in given)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_part_of_a_long_row(case: tuple[int, str, bool, bool]) -> None:
    found = _found()[case]
    assert 15 * GIB < found["peak"] <= 78 * GIB
    assert found["planned"] == pytest.approx(found["peak"], rel=0.1)


@pytest.mark.parametrize(("tokens", "recompute"), [LONG, LONGEST])
def test_tiles_and_offload_each_save(tokens: int, recompute: str) -> None:
    plain, tiles, offload, both = (_found()[tokens, recompute, *way]["peak"] for way in WAYS)
    assert offload < plain - 2 * GIB
    assert both <= offload and tiles <= plain  # under `full` the peak may be the head's
    assert recompute == "full" or tiles < plain - 20 * GIB
    host = _found()[tokens, recompute, False, True]["offloaded"]
    assert host > 34 * 8192 * tokens / 8  # the inputs of all layers but two, in bfloat16
