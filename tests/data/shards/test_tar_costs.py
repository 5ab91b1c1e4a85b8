"""What a hostile shard costs: about as much as an honest one of its size and number of members.

A chain of 31,744 headers before one member took over a minute. Quick runs count the calls that the
reader makes, which is the same on every machine; the soak measures time and memory, both shards in
one run.
"""

from __future__ import annotations

import io
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import RawSample, group_members
from vlmpack.data.shards.tar import read_members
from vlmpack.errors import DataError
from vlmpack.limits import (
    MAX_EXTENSION_BYTES,
    MAX_EXTENSIONS,
    MAX_FOREIGN_BYTES,
    MAX_NAME_BYTES,
    MAX_PAX_RECORDS,
)
from vlmpack.storage.fetch import LocalFetcher

CAPS = SampleCaps()
TALK = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
Extensions = list[tuple[bytes, bytes]]
"""Kind and data of the headers before a member."""


def block(name: bytes, size: int, kind: bytes) -> bytes:
    """One ustar header."""
    head = bytearray(512)
    head[: len(name)] = name
    head[124:136] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[156:157] = kind
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    return block(name, len(data), kind) + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    """One line of a pax header; its length counts itself."""
    tail = f" {key}={value}\n".encode()
    length = len(tail) + 1
    while len(str(length)) + len(tail) != length:
        length += 1
    return str(length).encode() + tail


def archive(count: int, extensions: Extensions, data: bytes = TALK) -> bytes:
    """`count` samples of one member, each behind these headers."""
    chain = b"".join(member(b"././@ext", said, kind) for kind, said in extensions)
    return b"".join(chain + member(b"%08d.json" % n, data) for n in range(count)) + bytes(1024)


def honest(size: int, count: int) -> bytes:
    """As large, with as many members, without a trick."""
    return archive(count, [], TALK.ljust(size // count - 1023))


def read(data: bytes, caps: SampleCaps = CAPS) -> list[RawSample]:
    members = read_members(
        io.BytesIO(data), len(data), shard="s.tar", max_member_bytes=caps.max_member_bytes
    )
    return list(group_members(members, shard="s.tar", caps=caps))


SMALL = record("a", "")
ALLOWED: dict[str, Extensions] = {
    "records": [(b"x", SMALL * MAX_PAX_RECORDS)],
    "headers": [(b"x", b"")] * MAX_EXTENSIONS,
    "headers with records": [(b"x", SMALL * (MAX_PAX_RECORDS // MAX_EXTENSIONS))] * MAX_EXTENSIONS,
    "names": [(b"L", b"\xff" * MAX_FOREIGN_BYTES)] * (MAX_EXTENSIONS - 1) + [(b"L", b"a.json")],
    "paths": [(b"L", b"a/" * 2000 + b"a.json")] * MAX_EXTENSIONS,
    "bytes": [(b"x", record("comment", "x" * (MAX_EXTENSION_BYTES - 18)))],
}
"""The worst that is still read; with one name, all members are one sample."""

REFUSED: dict[str, tuple[Extensions, str]] = {
    "chain of pax headers": ([(b"x", SMALL)] * 31_744, "more than 4 extended headers"),
    "chain of long names": ([(b"L", b"a")] * 31_744, "more than 4 extended headers"),
    "chain of global headers": ([(b"g", SMALL)] * 31_744, "more than 4 extended headers"),
    "large headers": ([(b"x", record("a", "x" * 600_000))] * 2, "headers of 1200020 bytes before"),
    "one too large": ([(b"x", record("a", "x" * (1 << 20)))], "at most 1048576 are read"),
    "records": ([(b"x", SMALL * (MAX_PAX_RECORDS + 1))], "more than 32 pax records"),
    "records in two": ([(b"x", SMALL * 17)] * 2, "more than 32 pax records"),
    "long name": ([(b"L", b"a" * (MAX_NAME_BYTES + 1))], "a name of 4097 bytes"),
    "long path": ([(b"x", record("path", "a" * 5000))], "a name of 5000 bytes"),
    "foreign name": ([(b"L", b"\xff" * 256)], "256 bytes that is not UTF-8"),
    "size in other digits": ([(b"x", record("size", "\u0662"))], "a pax size of"),
    "size with a power": ([(b"x", record("size", "\u00b2"))], "a pax size of"),
    "size of 5,000 digits": ([(b"x", record("size", "9" * 5000))], "a pax size of"),
    "negative size": ([(b"x", record("size", "-1"))], "a pax size of"),
    "size with underscores": ([(b"x", record("size", "1_0"))], "a pax size of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_chains_and_odd_sizes_are_refused_after_their_first_bytes(name: str) -> None:
    extensions, reason = REFUSED[name]
    data = archive(1, extensions)

    class Counted(io.BytesIO):
        read_bytes = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            Counted.read_bytes += len(found)
            return found

    with pytest.raises(DataError, match=reason) as caught:
        list(read_members(Counted(data), len(data), shard="s.tar", max_member_bytes=1 << 20))
    assert (caught.value.error_class, caught.value.shard) == ("integrity", "s.tar")
    assert Counted.read_bytes <= 2 * MAX_EXTENSION_BYTES


@pytest.mark.parametrize("name", ALLOWED)
def test_headers_within_the_caps_cost_few_calls_more(name: str) -> None:
    """At most five times the calls of an honest shard as large."""
    tricky = archive(20, ALLOWED[name])
    plain = honest(len(tricky), 20)
    assert len(plain) == pytest.approx(len(tricky), rel=0.05)
    calls = [num_calls(lambda data=data: read(data)) for data in (plain, tricky)]  # type: ignore[misc]
    assert calls[0] > 200, "vacuous"
    assert calls[1] <= 5 * calls[0]


def test_calls_grow_with_the_headers_alone() -> None:
    few, many = (archive(n, ALLOWED["headers with records"]) for n in (10, 80))
    assert num_calls(lambda: read(many)) <= 8.5 * num_calls(lambda: read(few))


def num_calls(work: Callable[[], object]) -> int:
    """Calls of Python and of C functions, under the very same load on every machine."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_sample_of_too_many_members_keeps_none_of_them() -> None:
    caps = SampleCaps(max_members=3)
    for count, is_good in ((3, True), (4, False), (500, False)):
        names = [b"a.json", *(b"a.%d.txt" % n for n in range(count - 1))]
        data = b"".join(member(name, TALK) for name in names) + member(b"b.json", TALK)
        first, last = read(data + bytes(1024), caps)
        assert (first.fault is None) == is_good
        assert first.length == count * 1024, "its place is known all the same"
        assert last.fault is None and last.offset == first.length
        if not is_good:
            assert first.fault is not None and f"{count} members" in first.fault
            assert sum(len(each.data or b"") for each in first.members) == 0


def test_a_sample_of_too_many_bytes_keeps_none_of_them() -> None:
    caps = SampleCaps(max_sample_bytes=100_000)
    data = b"".join(member(b"a.%d.txt" % n, b"x" * 10_000) for n in range(40))
    (found,) = read(data + bytes(1024), caps)
    assert found.fault is not None
    assert found.fault.endswith("40 members and 430080 bytes; at most 4096 and 100000 are read")
    assert sum(len(each.data or b"") for each in found.members) == 0


def test_a_large_conversation_is_not_parsed() -> None:
    caps = SampleCaps(max_json_bytes=100)
    good, bad = read(
        member(b"a.json", TALK) + member(b"b.json", TALK.ljust(101)) + bytes(1024), caps
    )
    assert good.fault is None
    assert bad.fault == "the '.json' member has 101 bytes; at most 100 are parsed"


@pytest.mark.soak
@pytest.mark.parametrize("name", ALLOWED)
def test_time_and_memory_of_a_hostile_shard(tmp_path: Path, name: str) -> None:
    """Through the index, as a user reads a shard; the best of five, taken in turns."""
    extensions = ALLOWED[name]
    count = 31 if name == "bytes" else 6000
    tricky = archive(count, extensions)
    files = {"honest": honest(len(tricky), count), "tricky": tricky}
    seconds: dict[str, list[float]] = {"honest": [], "tricky": []}
    peaks = {}
    fetcher = LocalFetcher()
    for label, data in files.items():
        (tmp_path / label).write_bytes(data)
    for turn in range(6):
        for label in files:
            stamp = fetcher.head(str(tmp_path / label))
            if turn == 5:
                tracemalloc.start()
            begin = time.perf_counter()
            rows = IndexBuilder(fetcher).scan(stamp)
            if turn == 5:
                peaks[label] = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            else:
                seconds[label].append(time.perf_counter() - begin)
            assert len(rows) >= 1
    best = {label: min(times) for label, times in seconds.items()}
    ratio = best["tricky"] / best["honest"]
    more = (peaks["tricky"] - peaks["honest"]) / 2**20
    print(f"{name}: {len(tricky) / 2**20:.0f} MiB, time x{ratio:.2f}, memory {more:+.0f} MiB")
    assert ratio <= 5
    assert more <= 512
