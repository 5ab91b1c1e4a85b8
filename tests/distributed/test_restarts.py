"""Stores of processes that were started again."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from vlmpack.distributed.restarts import attempt, part_of_attempt, restarted_store


def test_attempts_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    part_of_attempt(store).set("address", "of the first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = part_of_attempt(store)
    assert not second.check(["address"]) and store.check(["address"])
    second.set("address", "of the second")
    assert store.get("address") == b"of the first"


@pytest.mark.parametrize(("count", "number"), [(None, 0), ("0", 0), ("2", 2), ("x", 0)])
def test_the_first_attempt_is_torchs(
    monkeypatch: pytest.MonkeyPatch, count: str | None, number: int
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert attempt() == number and restarted_store(2) is None
