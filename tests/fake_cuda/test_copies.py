"""A checkpoint of tensors on a GPU: pieces come into pinned memory, one ahead of the one that is
written, and the host waits for each once before it reads it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from fake_cuda.copies import PIECE_BYTES, PLANTS
from fake_cuda.guard import run_under_guard, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
PLACE = "vlmpack/training/checkpoint/safetensors_file.py:"


@cache
def _saved() -> dict[str, dict[str, Any]]:
    return dict(zip(PLANTS, run_under_guard("fake_cuda.copies", list(PLANTS)), strict=True))


def _waits(found: dict[str, Any]) -> set[str]:
    assert all(place.startswith(PLACE) for _, place in found["waits"])
    return {what for what, _ in found["waits"]}


def test_both_ways_save_what_was_there_through_two_pinned_buffers() -> None:
    found = _saved()[""]
    assert found["wrong"] == {"at once": [], "later": []}
    assert found["pieces"] > 20
    assert len(found["waits"]) == found["pieces"]
    assert _waits(found) == {"all work"}, "no copy makes the host wait by itself"
    assert found["pinned"] == 2 * 2 * PIECE_BYTES, "two buffers for each way, whatever is saved"


def test_bytes_that_are_read_before_they_are_there_are_found() -> None:
    found = _saved()["no wait"]
    assert all("more" in names and "small" in names for names in found["wrong"].values())
    assert found["waits"] == []


def test_a_buffer_that_is_filled_while_it_is_read_is_found() -> None:
    """What fits into one piece is right all the same."""
    found = _saved()["one buffer"]
    assert all("more" in names and "small" not in names for names in found["wrong"].values())


def test_copies_into_memory_that_is_not_pinned_make_the_host_wait() -> None:
    found = _saved()["pageable"]
    assert found["wrong"] == {"at once": [], "later": []}
    assert found["pinned"] == 0
    assert "a copy to the host" in _waits(found)
