"""A pool whose process is killed: the error says so, and what to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from vlmpack.activity import ACTIVITY
from vlmpack.data.index import shard_pool
from vlmpack.data.index.shard_pool import AHEAD, each_shard
from vlmpack.errors import VlmpackError


def doubled(number: int) -> int:
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_killed_process_is_named_with_what_to_do() -> None:
    reports = each_shard(
        doubled, [1, -1, 3], processes=2, preload=(), in_order=True, remedy="use fewer --processes"
    )
    with pytest.raises(VlmpackError, match=r"2 processes .* was killed.*fewer --process"):
        list(reports)


@pytest.mark.cases(slow="True")
@pytest.mark.parametrize("in_order", [True, False])
def test_few_shards_are_held_at_a_time(in_order: bool) -> None:
    given: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(40):
            given.append(number)
            yield number

    reports = each_shard(
        doubled, numbers(), processes=2, preload=(), in_order=in_order, remedy="none"
    )
    first = next(reports)
    assert len(given) == 2 * AHEAD
    rest = list(reports)
    assert sorted([first, *rest]) == [2 * number for number in range(40)]
    assert not in_order or [first, *rest] == sorted([first, *rest])


class Keeps:
    """Work that counts what it was called with, where it is."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, number: int) -> tuple[int, int, int]:
        self.seen += 1
        return number, os.getpid(), self.seen


def test_a_process_gets_the_work_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tokenizer is loaded once. Many small shards are sent several at a time."""
    monkeypatch.setattr(shard_pool, "FEWEST_TURNS", 3)
    sent: list[int] = []
    submit = ProcessPoolExecutor.submit

    def counted(pool: Any, call: Any, some: list[int]) -> Any:
        sent.append(len(some))
        return submit(pool, call, some)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", counted)
    reports = list(
        each_shard(Keeps(), range(40), processes=2, preload=(), in_order=False, remedy="none")
    )
    assert sorted(number for number, _, _ in reports) == list(range(40))
    most = {pid: 0 for _, pid, _ in reports}
    for _, pid, seen in reports:
        most[pid] = max(most[pid], seen)
    assert sum(most.values()) == 40, "each process counts on"
    assert sent == [7] * 5 + [5]


def test_no_process_starts_for_nothing() -> None:
    assert not list(
        each_shard(Keeps(), [], processes=2, preload=("no_such",), in_order=False, remedy="none")
    )


def watched(number: int) -> tuple[int, str, set[str]]:
    return number, ACTIVITY.phase, {thread.name for thread in threading.enumerate()}


def test_each_process_is_watched_while_it_works() -> None:
    """So that a slow store is named by the process that waits for it."""
    reports = each_shard(watched, [1, 2], processes=2, preload=(), in_order=True, remedy="none")
    for number, (given, phase, threads) in enumerate(reports, start=1):
        assert (given, phase) == (number, "working on a shard")
        assert "vlmpack-watchdog" in threads


def test_each_report_is_progress_of_the_process_that_waits_for_it() -> None:
    """It is no stall that other processes index hundreds of shards."""
    beats: list[int] = []
    reports = each_shard(doubled, [1, 2, 3], processes=2, preload=(), in_order=False, remedy="none")
    for _ in reports:
        beats.append(ACTIVITY.beats)
    assert len(beats) == len(set(beats)) == 3
    assert not ACTIVITY.waits()


@pytest.mark.parametrize("in_order", [True, False])
def test_what_is_waited_for_is_said(in_order: bool) -> None:
    said: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            said.extend(ACTIVITY.waits())

    thread = threading.Thread(target=look)
    thread.start()
    list(each_shard(watched, [1, 2], processes=2, preload=(), in_order=in_order, remedy="none"))
    done.set()
    thread.join()
    assert set(said) == {"waiting for the processes that work on shards"}


def moves_slowly(number: int) -> int:
    for _ in range(9):
        time.sleep(0.5)
        ACTIVITY.moved()
    return number


def stands_still(number: int) -> int:
    time.sleep(4.5)
    return number


@pytest.mark.slow
@pytest.mark.parametrize("work", [moves_slowly, stands_still])
def test_processes_that_move_are_no_silence_of_the_one_that_waits(work: Any) -> None:
    """A shard may be large. Processes that stand still are one, a control."""
    before = ACTIVITY.beats
    reports = each_shard(work, [1, 2], processes=2, preload=(), in_order=True, remedy="none")
    first = next(reports)
    moved = ACTIVITY.beats - before
    assert [first, *reports] == [1, 2]
    assert (moved > 3) == (work is moves_slowly), "both begin, and one ends"
