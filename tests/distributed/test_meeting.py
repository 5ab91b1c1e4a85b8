"""Processes of a run agree on a name that none of an earlier start has, whoever started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from vlmpack.distributed import meeting
from vlmpack.distributed.meeting import KEY, agreed_name, meeting_store
from vlmpack.errors import VlmpackError

SECONDS = 30.0


class Starts:
    """Processes as threads on one store; each is one start of a rank."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.names: dict[int, str] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, rank: int, world_size: int) -> None:
        def agree() -> None:
            self.names[rank] = agreed_name(self.store, rank, world_size, seconds=SECONDS)

        thread = threading.Thread(target=agree, daemon=True)
        thread.start()
        self.threads.append(thread)

    def finish(self) -> Sequence[str]:
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "it waits for ever"
        self.threads.clear()
        return [self.names[rank] for rank in sorted(self.names)]


@pytest.fixture
def starts() -> Starts:
    return Starts()


def test_all_agree_and_each_start_has_a_name_of_its_own(starts: Starts) -> None:
    found = []
    for _ in range(3):
        for rank in (2, 0, 1):
            starts.begin(rank, 3)
        names = starts.finish()
        assert len(names) == 3 and len({*names}) == 1
        found.append(names[0])
    assert len({*found}) == 3


def test_tokens_of_an_earlier_start_are_not_answered_again(starts: Starts) -> None:
    """The first process starts again and finds what all wrote before it."""
    for rank in (0, 1):
        starts.begin(rank, 2)
    (first, _) = starts.finish()
    starts.begin(0, 2)
    time.sleep(10 * meeting.PAUSE)
    assert starts.threads[0].is_alive(), "it met a process that is gone"
    starts.begin(1, 2)
    again = starts.finish()
    assert len({*again}) == 1 and again[0] != first


@pytest.mark.slow
def test_a_token_of_a_process_that_has_gone_unanswered_is_no_obstacle(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 wrote its token and was killed; the first process answers that, hears nothing, and
    takes the token of the rank 1 that comes next."""
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    starts.store.set(f"{KEY}/token/1", "of the dead")
    for rank in (0, 2):
        starts.begin(rank, 3)
    time.sleep(1.0)
    starts.begin(1, 3)
    assert len({*starts.finish()}) == 1
    assert starts.store.check([f"{KEY}/answer/of the dead"]), "guard: it was answered"


def test_nodes_that_count_their_starts_otherwise_meet(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced node's processes are its first, the other's are its third: nobody asks."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    starts.begin(0, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    starts.begin(1, 2)
    assert len({*starts.finish()}) == 1


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(VlmpackError, match=r"rank 1, 2 did not come within parallelism\.timeout"):
        agreed_name(store, 0, 3, seconds=0.2)
    with pytest.raises(VlmpackError, match="rank 0 did not come"):
        agreed_name(store, 1, 3, seconds=0.2)
    dead = dist.HashStore()
    dead.set(f"{KEY}/token/1", "a")
    dead.set(f"{KEY}/answer/a", "before")
    with pytest.raises(VlmpackError, match="rank 1 of this start did not come"):
        agreed_name(dead, 0, 2, seconds=0.2)


@pytest.mark.parametrize("value", [None, "False"])
def test_without_torchruns_store_torch_chooses(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", value)
    assert meeting_store(0, 2, seconds=None) is None
