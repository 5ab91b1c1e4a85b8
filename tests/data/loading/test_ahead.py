"""An item is made while the one before is used, in a thread, and exactly one."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest

from vlmpack.data.loading import replica
from vlmpack.data.loading.replica import one_ahead


class Items:
    """Numbers, with what happened to them."""

    def __init__(
        self, count: int, *, fails: int | None = None, error: type[BaseException] = ValueError
    ) -> None:
        self.begun, self.closed, self.threads = 0, False, set[int]()
        self.go_on = threading.Event()
        self.go_on.set()
        self.count, self.fails, self.error = count, fails, error

    def __call__(self) -> Generator[int]:
        try:
            for number in range(self.count):
                self.begun += 1
                self.threads.add(threading.get_ident())
                self.go_on.wait()
                if number == self.fails:
                    raise self.error(f"item {number}")
                yield number
        finally:
            self.closed = True


def wait_until(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.001)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_all_items_come_in_their_order(count: int) -> None:
    items = Items(count)
    assert list(one_ahead(items())) == list(range(count))
    assert items.closed and threading.get_ident() not in items.threads


def test_exactly_one_is_on_its_way() -> None:
    items = Items(9)
    coming = one_ahead(items())
    assert items.begun == 0, "nothing is begun before it is asked for"
    for taken in range(1, 4):
        assert next(coming) == taken - 1
        wait_until(lambda taken=taken: items.begun > taken)
        time.sleep(0.02)
        assert items.begun == taken + 1
    coming.close()
    assert items.closed and items.begun == 4


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_comes_where_its_item_would(error: type[BaseException]) -> None:
    """One that is no Exception, too: a thread that ends with it says nothing, as at the end."""
    coming = one_ahead(Items(5, fails=2, error=error)())
    assert [next(coming), next(coming)] == [0, 1]
    with pytest.raises(error, match="item 2"):
        next(coming)
    assert list(coming) == []


def test_closing_does_not_wait_for_what_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "CLOSE_SECONDS", 0.05)
    items = Items(5)
    coming = one_ahead(items())
    assert next(coming) == 0
    wait_until(lambda: items.begun == 2)
    items.go_on.clear()
    assert next(coming) == 1
    started = time.monotonic()
    coming.close()
    assert time.monotonic() - started < 2 and not items.closed
    items.go_on.set()
