"""How long a store is asked again: the time without progress counts, on a clock of the tests' own.

The server is real, on loopback; only what `Tries` reads as the time and does as waiting is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

import pytest
from support.fault_server import Fault, FaultServer

from vlmpack.errors import DataError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.http import _retry_after
from vlmpack.storage.transport import Transient, Tries

SIZE = 6_000_000
BUDGET = 180.0
NOW = 1_750_000_000.0


@dataclass
class Clock:
    """In place of the module `time`."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("vlmpack.storage.transport.time", clock)
    return clock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "x.tar").write_bytes(random.Random(1).randbytes(SIZE))
    return folder


def storage(server: FaultServer, **changes: object) -> StorageSection:
    values: dict[str, object] = {
        "endpoint": server.url,
        "anonymous": True,
        "allow_private": True,
        "max_tries": 4,
        "retry_seconds": BUDGET,
    }
    return StorageSection(**(values | changes))  # type: ignore[arg-type]


def address(scheme: str, server: FaultServer) -> str:
    return "s3://bucket/x.tar" if scheme == "s3" else f"{server.url}/bucket/x.tar"


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_download_that_goes_on_outlives_every_break(
    folder: Path, clock: Clock, scheme: str
) -> None:
    """Ten times the budget passes between any two reads, and the connection breaks three times."""
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address(scheme, server))
        server.fail(Fault("truncate", times=3, part=0.3))
        got = b""
        with fetcher.open(stamp) as stream:
            while chunk := stream.read(500_000):
                got += chunk
                clock.now += 10 * BUDGET
        fetcher.close()
        assert got == (folder / "bucket" / "x.tar").read_bytes()
        assert server.num_failed == 3, "vacuous"
        assert clock.now > 100 * BUDGET, "vacuous"


def test_the_clock_starts_at_the_first_fault_and_again_after_any_bytes(clock: Clock) -> None:
    tries = Tries("x.tar", StorageSection(max_tries=100, retry_seconds=BUDGET))
    for _ in range(20):
        clock.now += 0.9 * BUDGET
        tries.note(Transient("broke off"))
        tries.progressed(1)
    clock.now += 100 * BUDGET
    tries.note(Transient("broke off"))
    clock.now += BUDGET
    with pytest.raises(DataError, match=r"gave up after 22 tries, 1[89]\d\.\d s without progress"):
        tries.note(Transient("broke off"))


def test_without_progress_the_budget_ends_the_tries(clock: Clock) -> None:
    tries = Tries("x.tar", StorageSection(max_tries=10_000, retry_seconds=BUDGET))
    start = clock.now
    with pytest.raises(DataError, match=r"retry_seconds 180"):
        while True:
            tries.note(Transient("the server answered 503"))
            tries.progressed(0)
    assert 0.8 * BUDGET < clock.now - start <= BUDGET


def test_a_server_that_gives_little_at_a_time_still_spends_its_tries(clock: Clock) -> None:
    tries = Tries("x.tar", StorageSection(max_tries=5, retry_seconds=BUDGET))
    for _ in range(4):
        tries.note(Transient("broke off"))
        tries.progressed(1000)
    with pytest.raises(DataError, match="gave up after 5 tries"):
        tries.note(Transient("broke off"))


def test_a_mebibyte_in_all_gives_the_tries_back(clock: Clock) -> None:
    tries = Tries("x.tar", StorageSection(max_tries=5, retry_seconds=BUDGET))
    for _ in range(100):
        tries.note(Transient("broke off"))
        tries.progressed(400 << 10)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "37"}, 37.0),
        ({"Retry-After": formatdate(NOW + 41, usegmt=True), "Date": formatdate(NOW)}, 41.0),
    ],
    ids=["seconds", "date"],
)
def test_a_wait_that_the_server_asks_for_is_kept(
    folder: Path, clock: Clock, headers: dict[str, str], seconds: float
) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address("http", server))
        server.fail(Fault("status", times=2, status=503, headers=headers))
        assert len(fetcher.read(stamp, 0, 1000)) == 1000
        fetcher.close()
        assert clock.slept == [seconds, seconds]


def test_a_wait_beyond_the_budget_ends_the_tries_at_once(folder: Path, clock: Clock) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address("http", server))
        server.fail(Fault("status", times=None, status=429, headers={"Retry-After": "600"}))
        with pytest.raises(DataError, match=r"asked to wait 600 s .*retry_seconds 180") as caught:
            fetcher.read(stamp, 0, 1000)
        assert caught.value.error_class == "transport"
        fetcher.close()
        assert clock.slept == []


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0.0),
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": formatdate(NOW - 50, usegmt=True), "date": formatdate(NOW)}, 0.0),
        ({"retry-after": formatdate(NOW + 50, usegmt=True), "date": formatdate(NOW)}, 50.0),
        ({"retry-after": formatdate(NOW + 50, usegmt=True), "date": "soon"}, 50.0),
        ({"retry-after": formatdate(NOW + 50, usegmt=True)}, 50.0),
        ({"retry-after": formatdate(NOW + 50).replace("-0000", "")}, 50.0),
        *(
            ({"retry-after": garbage}, 0.0)
            for garbage in (
                "",
                "-5",
                "1e3",
                "nan",
                "inf",
                "1_0",
                "\xb2",
                "9" * 5000,
                "Mon, 99 Nov 2026 07:00:00 GMT",
                "Fri, 31 Dec 99999 23:59:59 GMT",
                "Fri, 31 Dec 1999 23:59:59 +9999999",
                "soon",
                ",,,",
            )
        ),
    ],
)
def test_only_a_number_or_a_date_is_a_wish(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], expected: float
) -> None:
    now: Callable[[], float] = lambda: NOW  # noqa: E731
    monkeypatch.setattr("vlmpack.storage.http.time.time", now)
    assert _retry_after(headers) == expected
