"""Reads from stores: the same bytes under every fault that passes, one named error under the rest.

Each case runs through an S3 endpoint (obstore) and through plain HTTP (our own client); the
reference is the file itself.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import threading
import time
from pathlib import Path

import pytest
from support import fault_server
from support.fault_server import Fault, FaultServer, SeededFaults
from support.folder_answers import Answer, answer_for

from vlmpack.errors import CapabilityError, DataError, RecipeError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.fetch import HEADS_AT_ONCE, ShardStamp, stamp_shards
from vlmpack.storage.remote import GAP_BYTES, spans_of
from vlmpack.storage.sources import expand_shards, stamped_shards

SIZE = 2_500_000
RANGES = [(2_400_000, 100_000), (10, 50_000), (60_010, 20), (1_000_000, 300_000), (0, 5), (70, 0)]
PASSING = [
    Fault("status", times=2, status=503),
    Fault("status", times=2, status=429),
    Fault("status", times=1, status=500),
    Fault("truncate", times=2),
    Fault("truncate", times=2, part=0.999),
    Fault("short", times=2),
    Fault("reset", times=2),
    Fault("stall", times=1),
    Fault("slow", times=1, bytes_per_second=20_000_000),
    Fault("latency", times=1, seconds=0.04),
]
PERMANENT = [
    Fault("status", times=None, status=503),
    Fault("truncate", times=None),
    Fault("short", times=None),
    Fault("reset", times=None),
    Fault("stall", times=None),
]


def name(fault: Fault) -> str:
    return f"{fault.kind}{fault.status if fault.kind == 'status' else ''}-{fault.part:g}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "x.tar").write_bytes(random.Random(1).randbytes(SIZE))
    return folder


@pytest.fixture(scope="module")
def content(folder: Path) -> bytes:
    return (folder / "bucket" / "x.tar").read_bytes()


def storage(server: FaultServer, **changes) -> StorageSection:
    values = {
        "endpoint": server.url,
        "anonymous": True,
        "allow_private": True,
        "connect_timeout_seconds": 1.0,
        "read_timeout_seconds": 0.25,
        "max_tries": 6,
        "retry_seconds": 5.0,
    }
    return StorageSection(**(values | changes))


def address(scheme: str, server: FaultServer, file: str = "x.tar") -> str:
    return f"s3://bucket/{file}" if scheme == "s3" else f"{server.url}/bucket/{file}"


def check_reads(fetcher: RoutingFetcher, stamp: ShardStamp, content: bytes, prepare) -> None:
    """The stream and the ranges are the file's, with `prepare` called before each."""
    prepare()
    with fetcher.open(stamp) as stream:
        assert stream.read() == content
    prepare()
    assert fetcher.read(stamp, 1000, 2_000_000) == content[1000:2_001_000]
    prepare()
    expected = [content[offset : offset + length] for offset, length in RANGES]
    assert fetcher.read_ranges(stamp, RANGES) == expected


def under(faults: list[Fault]):
    """Both schemes under each fault."""
    return pytest.mark.parametrize(
        ("scheme", "fault"),
        [
            pytest.param(scheme, fault, id=f"{scheme}-{name(fault)}")
            for fault in faults
            for scheme in ("s3", "http")
        ],
    )


@pytest.mark.cases(slow=("s3-stall-0.5", "http-truncate-0.5", "s3-status503-0.5"))
@under(PASSING)
def test_a_fault_that_passes_changes_no_byte(
    folder: Path, content: bytes, scheme: str, fault: Fault
) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address(scheme, server))

        def prepare() -> None:
            server.reset()
            server.fail(copy.copy(fault))

        check_reads(fetcher, stamp, content, prepare)
        fetcher.close()
        server.close()
        assert any(request.fault == fault.kind for request in server.requests), "vacuous"


def seeded(seed: int) -> SeededFaults:
    kinds = ("truncate", "short", "reset", "stall", "slow", "latency")
    faults = [Fault(kind, seconds=0.3, bytes_per_second=20_000_000) for kind in kinds]
    faults += [Fault("status", status=status) for status in (429, 500, 503)]
    return SeededFaults(seed, share=0.8, faults=tuple(faults))


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))]
)
@pytest.mark.slow
def test_seeded_faults_change_no_byte(folder: Path, content: bytes, scheme: str, seed: int) -> None:
    with FaultServer(folder, seeded=seeded(seed)) as server:
        fetcher = RoutingFetcher(storage(server, max_tries=10, retry_seconds=30.0))
        stamp = fetcher.head(address(scheme, server))
        check_reads(fetcher, stamp, content, lambda: None)
        fetcher.close()
        server.close()
        assert sum(bool(request.fault) for request in server.requests) > 1, "vacuous"


@pytest.mark.cases(slow=("s3-stall-0.5", "http-truncate-0.5", "s3-short-0.5"))
@under(PERMANENT)
def test_a_permanent_fault_ends_after_its_tries_with_shard_and_knob(
    folder: Path, scheme: str, fault: Fault
) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server, max_tries=2, retry_seconds=2.0))
        path = address(scheme, server)
        stamp = fetcher.head(path)
        server.fail(copy.copy(fault))
        for call, num_pieces in (
            (lambda: fetcher.open(stamp).read(), 1),
            (lambda: fetcher.read(stamp, 0, SIZE), 1),
            (lambda: fetcher.read_ranges(stamp, RANGES), len(spans_of(RANGES))),
        ):
            before = server.num_failed
            with pytest.raises(DataError, match=r"gave up after 2 tries.*data\.storage") as caught:
                call()
            asked = server.num_failed - before
            assert 2 <= asked <= 2 * num_pieces + 1, "an idle connection may be found ended"
            assert (caught.value.error_class, caught.value.shard) == ("transport", path)
        fetcher.close()


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize(
    ("status", "reason"), [(404, "no such shard"), (403, "denied"), (400, "answered 400")]
)
def test_what_will_not_pass_is_not_tried_again(
    folder: Path, scheme: str, status: int, reason: str
) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address(scheme, server))
        server.reset()
        server.fail(Fault("status", times=None, status=status, methods=("GET", "HEAD")))
        for call in (lambda: fetcher.read(stamp, 0, 9), lambda: fetcher.head(stamp.path)):
            with pytest.raises(DataError, match=reason) as caught:
                call()
            assert caught.value.error_class == "transport"
        fetcher.close()
        server.close()
        assert server.num_requests <= 3, "HEAD may be followed by one GET"


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_a_changed_shard_is_an_integrity_error(
    tmp_path: Path, scheme: str, ignores_conditions: bool
) -> None:
    """By If-Match, and by the answer's own ETag where a server does not know If-Match."""
    (tmp_path / "bucket").mkdir()
    file = tmp_path / "bucket" / "x.tar"
    file.write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address(scheme, server))
        assert fetcher.read(stamp, 2, 3) == b"234"
        if ignores_conditions:
            server.fail(Fault("etag", times=None))
        else:
            file.write_bytes(b"abcdefghij")
            os.utime(file, ns=(1, 1))
        for call in (lambda: fetcher.read(stamp, 2, 3), lambda: fetcher.open(stamp).read()):
            with pytest.raises(DataError, match="changed after it was indexed") as caught:
                call()
            assert caught.value.error_class == "integrity"
        fetcher.close()


def test_a_weak_etag_is_no_condition_and_still_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If-Match compares strongly, so a server refuses it with a weak ETag, even its own."""

    def weakly(
        root: Path, method: str, path: str, query: str, headers: dict, fault: None
    ) -> Answer:
        if "if-match" in headers:
            return Answer(412)
        found = answer_for(root, method, path, query, headers, fault)
        found.headers["ETag"] = f"W/{found.headers['ETag']}"
        return found

    monkeypatch.setattr(fault_server, "answer_for", weakly)
    (tmp_path / "bucket").mkdir()
    file = tmp_path / "bucket" / "x.tar"
    file.write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address("http", server))
        assert stamp.version.startswith("W/")
        assert fetcher.read(stamp, 2, 3) == b"234"
        os.utime(file, ns=(1, 1))
        with pytest.raises(DataError, match="changed after it was indexed"):
            fetcher.read(stamp, 2, 3)
        fetcher.close()


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_shard_replaced_in_the_middle_of_a_stream_is_never_mixed(
    tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "bucket").mkdir()
    file = tmp_path / "bucket" / "x.tar"
    file.write_bytes(b"a" * 4_000_000)
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(address(scheme, server))
        server.fail(Fault("truncate", part=0.5))
        stream = fetcher.open(stamp)
        assert set(stream.read(100_000)) == {ord("a")}
        file.write_bytes(b"b" * 4_000_000)
        os.utime(file, ns=(1, 1))
        with pytest.raises(DataError, match="changed") as caught:
            stream.read()
        assert caught.value.error_class == "integrity"
        stream.close()
        fetcher.close()


def test_a_read_past_the_end_is_an_integrity_error(folder: Path) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head("s3://bucket/x.tar")
        with pytest.raises(DataError, match=f"it has {SIZE}") as caught:
            fetcher.read(stamp, SIZE - 3, 4)
        assert (caught.value.error_class, caught.value.offset) == ("integrity", SIZE - 3)


def test_stretches_hold_every_range_once() -> None:
    near, far = GAP_BYTES, GAP_BYTES + 1
    assert spans_of([(100 + near, 10), (0, 100)]) == [(0, 110 + near)]
    assert spans_of([(100 + far, 10), (0, 100)]) == [(0, 100), (100 + far, 110 + far)]
    assert spans_of([(0, 100), (10, 20)]) == [(0, 100)]
    assert spans_of([]) == []


def test_neighbours_are_one_request_and_cost_no_other_bytes(folder: Path, content: bytes) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head("s3://bucket/x.tar")
        server.reset()
        ranges = [(at, 10_000) for at in range(0, 1_000_000, 10_000)]
        random.Random(0).shuffle(ranges)
        assert fetcher.read_ranges(stamp, ranges) == [content[a : a + n] for a, n in ranges]
        server.close()
        assert server.stats() == {"requests": 1, "bytes": 1_000_000}


def test_globs_list_once_and_braces_look_at_each(tmp_path: Path) -> None:
    (tmp_path / "bucket" / "deep" / "er").mkdir(parents=True)
    for file in ("t-000.tar", "t-001.tar", "t-010.tar", "v.tar", "deep/t-000.tar", "deep/er/t.tar"):
        (tmp_path / "bucket" / file).write_bytes(b"x" * len(file))
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(storage(server))
        stamps = stamped_shards(["s3://bucket/t-*.tar"], key="data.train", fetcher=fetcher)
        assert [stamp.path[12:] for stamp in stamps] == ["t-000.tar", "t-001.tar", "t-010.tar"]
        assert [request.method for request in server.requests] == ["GET"], "one listing, no HEAD"
        assert stamps == tuple(fetcher.head(stamp.path) for stamp in stamps)

        def expand(*patterns: str) -> list[str]:
            found = expand_shards(patterns, key="data.train", fetcher=fetcher)
            return [path[12:] for path in found]

        assert expand("s3://bucket/{deep/er,deep}/t*.tar") == ["deep/er/t.tar", "deep/t-000.tar"]
        assert expand("s3://bucket/*/t-00[0-9].tar") == ["deep/t-000.tar"]
        assert expand("s3://bucket/t-0{10..10}.tar") == ["t-010.tar"]
        with pytest.raises(RecipeError, match=r"'s3://bucket/u-\*\.tar' matches none of the 6"):
            expand("s3://bucket/u-*.tar")
        with pytest.raises(RecipeError, match="named twice"):
            expand("s3://bucket/t-*.tar", "s3://bucket/t-000.tar")
        with pytest.raises(DataError, match="no such shard") as caught:
            stamped_shards(["s3://bucket/t-{000..002}.tar"], key="k", fetcher=fetcher)
        assert caught.value.shard == "s3://bucket/t-002.tar"
        fetcher.close()


def test_many_shards_are_looked_at_together(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    for number in range(32):
        (tmp_path / "bucket" / f"{number:02}.tar").write_bytes(bytes(number + 1))
    with FaultServer(tmp_path) as server:
        server.together = threading.Barrier(HEADS_AT_ONCE, timeout=10)
        fetcher = RoutingFetcher(storage(server, read_timeout_seconds=20.0))
        paths = [address("http", server, f"{number:02}.tar") for number in range(32)]
        stamps = stamp_shards(fetcher, paths)
        assert [stamp.size for stamp in stamps] == list(range(1, 33))
        assert not server.together.broken, "fewer requests in flight at once"
        fetcher.close()


def test_clients_do_not_travel(folder: Path, content: bytes) -> None:
    with FaultServer(folder) as server:
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head("s3://bucket/x.tar")
        state = pickle.dumps(fetcher)
        assert len(state) < 2000
        copied = pickle.loads(state)
        assert all(remote._live is None for remote in copied.remotes.values())
        assert copied.read(stamp, 5, 9) == content[5:14]


def _child(fetcher: RoutingFetcher, stamp: ShardStamp, config: StorageSection, pipe) -> None:
    for each in (fetcher, RoutingFetcher(config)):
        begin = time.monotonic()
        try:
            each.read(stamp, 0, 5)
        except CapabilityError as error:
            pipe.send((str(error), time.monotonic() - begin))
        else:
            pipe.send(("no error", 0.0))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_a_fork_raises_at_once(folder: Path) -> None:
    """The inherited fetcher, and a new one: obstore's threads are gone for both."""
    with FaultServer(folder) as server:
        config = storage(server)
        fetcher = RoutingFetcher(config)
        stamp = fetcher.head("s3://bucket/x.tar")
        here, there = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=_child, args=(fetcher, stamp, config, there))
        child.start()
        try:
            for _ in range(2):
                assert here.poll(10), "the child hangs"
                message, seconds = here.recv()
                assert "forkserver or spawn" in message
                assert seconds < 1.0
        finally:
            child.kill()
            child.join()
            child.close()
            here.close()
            there.close()
