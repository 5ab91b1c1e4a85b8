"""Orders in files: the same as in memory, made once, and never read when they are damaged."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.shard_fakes import open_data, write_shards

from vlmpack.data.index.parts import SEAL_BYTES
from vlmpack.data.plan import batches, order
from vlmpack.data.plan.batches import Plan, PlanSource, Position, _key, seeded_order
from vlmpack.data.plan.order import OrderFile
from vlmpack.data.plan.packers import FixedPacker
from vlmpack.errors import CapabilityError, DataError

COUNT = 100
LABELS = ("global", 3, "a", 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from 50 samples on, with many blocks, buckets and pages."""
    monkeypatch.setattr(batches, "LARGE", 50)
    monkeypatch.setattr(order, "BLOCK", 16)
    monkeypatch.setattr(order, "PAGE", 4 * 32)


def opened(folder: Path, count: int = COUNT) -> OrderFile:
    return OrderFile(folder, count, _key(*LABELS))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.order"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are made."""
    found: list[Path] = []
    pages = OrderFile._pages

    def spy(self: OrderFile) -> Iterator[bytes]:
        found.append(self.path)
        return pages(self)

    monkeypatch.setattr(OrderFile, "_pages", spy)
    return found


@pytest.mark.parametrize(("block", "page"), [(1, 1), (7, 5), (16, 32), (64, 16), (1000, 1000)])
def test_the_order_is_that_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, page: int
) -> None:
    monkeypatch.setattr(order, "BLOCK", block)
    monkeypatch.setattr(order, "PAGE", 4 * page)
    for count in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 129, 250):
        truth, found = seeded_order(count, *LABELS), opened(tmp_path, count)
        assert found[0:count].dtype == np.int64
        assert found[0:count].tolist() == truth.tolist()
        for start, stop in ((0, 1), (count // 3, count // 2 + 1), (count - 1, count)):
            assert found[start:stop].tolist() == truth[start:stop].tolist()
    assert len(files(tmp_path)) == 12


def test_the_order_is_that_in_memory_at_its_own_block_and_page(tmp_path: Path) -> None:
    count = 2 * order.BLOCK + 123_457
    assert 4 * count > order.PAGE
    found = opened(tmp_path, count)[0:count]
    assert np.array_equal(found, seeded_order(count, *LABELS))
    assert np.array_equal(np.sort(found), np.arange(count))


class FewKeys:
    """A stream whose keys repeat, and differ in few bits."""

    kinds = np.array([0, 1, 2**64 - 1, 2**63, 2**47, 2**47 + 1, 2**40], np.uint64)

    def __init__(self, key: int) -> None:
        self.generator = np.random.default_rng(key % 1000)

    def random_raw(self, count: int) -> Any:
        return self.kinds[self.generator.integers(0, self.kinds.size, count)]


@pytest.mark.usefixtures("small")
def test_equal_keys_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "Philox", FewKeys)
    keys = FewKeys(_key(*LABELS)).random_raw(5000)
    truth = np.argsort(keys, kind="stable")
    assert Counter(keys.tolist()).most_common()[-1][1] > 500
    assert np.array_equal(opened(tmp_path, 5000)[0:5000], truth)
    other = 4999 - np.argsort(keys[::-1], kind="stable")
    assert np.array_equal(keys[other], keys[truth]) and not np.array_equal(other, truth)


def plan_of(folder: Path | None, **changes: Any) -> Plan:
    sources = [
        PlanSource("a", np.arange(3, 153, dtype=np.int64)[::-1], 190),
        PlanSource("b", np.arange(200, 249, dtype=np.int64), 20),
        PlanSource("c", np.arange(300, 400, dtype=np.int64), 60),
    ]
    shuffle: Literal["global", "none"] = changes.pop("shuffle", "global")
    packer = FixedPacker(8, 3)
    return Plan(
        sources, seed=5, shuffle=shuffle, window=48, packer=packer, folder=folder, **changes
    )


@pytest.mark.usefixtures("small")
def test_a_plan_from_files_is_the_plan_in_memory(tmp_path: Path, made: list[Path]) -> None:
    walked = list(islice(plan_of(None).walk(Position()), 120))
    assert not made and walked[-1].position.epoch == 3
    assert list(islice(plan_of(tmp_path).walk(Position()), 120)) == walked
    assert len(made) == len(files(tmp_path)) == len(set(made)) > 6, "passes of a and c"
    for at in range(0, 119, 5):
        assert next(plan_of(tmp_path).walk(walked[at].following)) == walked[at + 1]
    assert len(made) == len(files(tmp_path)), "made once"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("changes", [{"shuffle": "none"}, {"groups": np.arange(400) // 2}])
def test_groups_and_index_order_need_no_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    plans = [plan_of(folder, **changes) for folder in (tmp_path, None)]
    assert len({str(list(islice(plan.walk(Position()), 50))) for plan in plans}) == 1
    assert not list(tmp_path.iterdir()) and not plans[0].filed


@pytest.mark.usefixtures("small")
def test_a_folder_that_cannot_be_written_leaves_orders_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = plan_of(None).window_order(1, 2).tolist()
    assert plan_of(tmp_path).filed == [150, 100]
    monkeypatch.setattr(os, "access", lambda *_: False)
    plan = plan_of(tmp_path)
    assert plan.window_order(1, 2).tolist() == truth
    assert not list(tmp_path.iterdir()) and not plan.filed


def damaged(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Every third byte flipped in turn, cuts, and pages that are others."""
    for place in range(0, len(good), 3):
        yield f"byte {place}", good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :]
    for end in (0, 1, 100, 4 * 32, 4 * 32 + SEAL_BYTES, len(good) - SEAL_BYTES, len(good) - 1):
        yield f"cut at {end}", good[:end]
    page = 4 * 32 + SEAL_BYTES
    yield "pages swapped", good[page : 2 * page] + good[:page] + good[2 * page :]
    yield "zeros", bytes(len(good))


@pytest.mark.usefixtures("small")
def test_damage_is_found_wherever_it_is(
    tmp_path: Path,
    made: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    truth = opened(tmp_path)[0:COUNT].tolist()
    (path,) = files(tmp_path)
    good = path.read_bytes()
    assert len(good) == 4 * COUNT + 4 * SEAL_BYTES
    unlike = 0
    for what, bad in damaged(good):
        path.write_bytes(bad)
        unlike += bad[: 4 * 32] != good[: 4 * 32]
        caplog.clear()
        made.clear()
        assert opened(tmp_path)[0:COUNT].tolist() == truth, what
        assert made == [path] and path.read_bytes() == good, what
        assert "is damaged; it is made again" in caplog.text
    assert unlike > 40, "a reader without seals would have read other samples"
    path.write_bytes(good + b"more")
    assert opened(tmp_path)[0:COUNT].tolist() == truth


@pytest.mark.usefixtures("small")
def test_another_order_under_its_name_is_not_taken(tmp_path: Path, made: list[Path]) -> None:
    truth = opened(tmp_path)[0:COUNT].tolist()
    (path,) = files(tmp_path)
    for count, key in ((COUNT, 7), (COUNT + 1, _key(*LABELS))):
        other = OrderFile(tmp_path, count, key)
        assert other[0:COUNT].tolist() != truth
        path.write_bytes(other.path.read_bytes())
        made.clear()
        assert opened(tmp_path)[0:COUNT].tolist() == truth
        assert made == [path]


@pytest.mark.usefixtures("small")
def test_a_file_that_is_damaged_while_it_is_used(tmp_path: Path, made: list[Path]) -> None:
    """It is made again, also where it was cut or removed."""
    truth = seeded_order(COUNT, *LABELS).tolist()
    for change in (
        lambda path: os.truncate(path, 200),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.unlink(),
    ):
        found = opened(tmp_path)
        made.clear()
        change(found.path)
        assert found[10:20].tolist() == truth[10:20], "its page was read"
        assert not made
        assert found[40:90].tolist() == truth[40:90]
        assert made == [found.path]


@pytest.mark.usefixtures("small")
def test_a_disk_that_forgets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = OrderFile._pages
    monkeypatch.setattr(OrderFile, "_pages", lambda self: [next(pages(self))[:-1]])
    with pytest.raises(DataError, match=r"an order cannot be written to .*\.order: it does not r"):
        opened(tmp_path, 20)


@pytest.mark.usefixtures("small")
def test_a_scratch_file_that_reads_otherwise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread

    def other(descriptor: int, size: int, place: int) -> bytes:
        found = pread(descriptor, size, place)
        if found and not os.fstat(descriptor).st_nlink and place == 0:
            return bytes([found[0] ^ 1]) + found[1:]
        return found

    monkeypatch.setattr(os, "pread", other)
    with pytest.raises(DataError, match="other pairs were read than were written"):
        opened(tmp_path)
    assert not files(tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("most", [0, 200, 16 * COUNT - 1])
def test_a_full_disk_is_named(tmp_path: Path, most: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cannot be written.* File too large"):
            opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    opened(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_disk_that_is_full_at_the_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"an order of 100 .*No space left.*data\.index_dir"):
            opened(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    opened(tmp_path)


def test_a_source_beyond_int32_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="a source of 2,147,483,648 samples"):
        OrderFile(tmp_path, 2**31, 1)


@pytest.mark.usefixtures("small")
def test_files_that_nobody_reads_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".0-100.order.host-1-2.tmp"  # of a writer that was killed
    mine = tmp_path / "mine"
    for path in (left, mine):
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    old, used = OrderFile(tmp_path, COUNT, 1), OrderFile(tmp_path, COUNT, 2)
    for file in (old, used):
        os.utime(file.path, (1, 1))
    used[60:70]
    OrderFile(tmp_path, COUNT, 3)
    assert [path.name[-5:] for path in files(tmp_path)] == ["order", "order"]
    assert used.path.exists() and not old.path.exists() and not left.exists() and mine.exists()


@pytest.mark.usefixtures("small")
def test_one_of_many_makes_it(tmp_path: Path, made: list[Path]) -> None:
    """Locks are of open files, so threads hold them as processes do."""
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(opened(tmp_path, 3000)[0:3000].tolist()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [seeded_order(3000, *LABELS).tolist()] * 6
    assert made == files(tmp_path)


@pytest.mark.usefixtures("small")
def test_a_launch_reads_the_orders_beside_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = write_shards(tmp_path, 60, per_shard=30)
    data = open_data(pattern, tmp_path / "i")
    assert isinstance(data.split.plan, Plan) and data.split.plan.filed == [60]
    walked = list(islice(data.split.plan.walk(Position()), 20))
    assert walked[-1].position.epoch == len(files(tmp_path / "i")) - 1 == 2
    monkeypatch.setattr(batches, "LARGE", 61)
    again = open_data(pattern, tmp_path / "j")
    assert list(islice(again.split.plan.walk(Position()), 20)) == walked
    assert again.identity == data.identity and not files(tmp_path / "j")


MEASURED = """
import json, os, sys, threading, time
from pathlib import Path
import numpy as np
from vlmpack.data.plan import batches, order

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

def peak(work):
    seen, ends = [anonymous()], threading.Event()
    def watch():
        while not ends.wait(0.002):
            seen.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    result = work()
    ends.set()
    thread.join()
    return max(seen) - seen[0], result

folder, count = Path(sys.argv[1]), int(sys.argv[2])
filed, found = peak(lambda: order.OrderFile(folder, count, batches._key("m")))
memory, truth = peak(lambda: batches.seeded_order(count, "m"))
same = all(np.array_equal(found[a : a + 10**6], truth[a : a + 10**6])
           for a in range(0, count, 10**6))
print(json.dumps([filed, memory, same]))
"""


@pytest.mark.slow
def test_little_memory_is_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, str(tmp_path), "5000000"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    filed, memory, same = json.loads(said)
    assert same
    assert filed < 64, "MiB"
    assert memory > 70, "control: the sort in memory has keys and places, of 8 bytes each"


PROCESS = """
import hashlib, os, signal, sys
from pathlib import Path
from vlmpack.data.plan import batches, order

folder, count, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
pages = order.OrderFile._pages
def noted(self):
    with open(folder / "log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    for number, page in enumerate(pages(self)):
        yield page
        if kind == "killed" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
order.OrderFile._pages = noted
found = order.OrderFile(folder, count, batches._key("m"))[0:count]
print(hashlib.blake2b(found.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_processes_share_one_file_and_replace_a_killed_writer(tmp_path: Path) -> None:
    count = 2_500_000

    def start(kind: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROCESS, str(tmp_path), str(count), kind]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start("killed") as killed:
        assert killed.wait(60) < 0
    assert not files(tmp_path)
    assert [path.suffix for path in tmp_path.glob("*.order*")] == [".tmp"], "half a file is left"
    readers = [start("other") for _ in range(3)]
    digests = {reader.communicate(timeout=60)[0] for reader in readers}
    assert len(digests) == 1 and "" not in digests
    assert len((tmp_path / "log").read_text().split()) == 2, "the killed one and one other"
    truth = seeded_order(count, "m")
    assert np.array_equal(OrderFile(tmp_path, count, _key("m"))[0:count], truth)
