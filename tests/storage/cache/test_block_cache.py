"""The block cache: the same bytes as without it, whatever happens to its files."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

from vlmpack.data.forkserver import worker_context
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.data import CacheSection
from vlmpack.storage.cache.block_store import BlockStore, _locked
from vlmpack.storage.cache.cached import BackgroundFetch, BlockUse, CachedFetcher
from vlmpack.storage.fetch import LocalFetcher, ShardStamp

BLOCK = 64 << 10
BUCKET = "s3://bucket"


@dataclass
class FolderStore:
    """A store whose objects are files of a folder, and that writes down what it was asked for.

    Args:
        folder: `s3://bucket/x` is `folder/x`.
        log: a line per range, from every process.
        wait_seconds: per range.
    """

    folder: Path
    log: Path | None = None
    wait_seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def path(self, url: str) -> Path:
        return self.folder / url.removeprefix(f"{BUCKET}/")

    def head(self, path: str) -> ShardStamp:
        version = self.versions.get(path, "v1")
        return ShardStamp(path, self.path(path).stat().st_size, version)

    def open(self, stamp: ShardStamp) -> BinaryIO:
        return io.BytesIO(self.read(stamp, 0, stamp.size))

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        time.sleep(self.wait_seconds)
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(f"{stamp.path} {offset} {length}\n")
        try:
            whole = self.path(stamp.path).read_bytes()
        except OSError as error:
            raise DataError(str(error), error_class="transport", shard=stamp.path) from error
        data = whole[offset : offset + length]
        if len(data) != length:
            raise DataError("the shard ends too early", error_class="integrity", shard=stamp.path)
        return data

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(stamp, offset, length) for offset, length in ranges]

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        return [self.head(f"{prefix}{path.name}") for path in sorted(self.path(prefix).iterdir())]

    def requests(self) -> list[tuple[str, int, int]]:
        assert self.log is not None
        # A line over the end of a page is written in two parts: a reader may see the first alone,
        # and a killed writer leaves no more than that.
        lines = [line.split() for line in self.log.read_text().splitlines()]
        whole = [line for line in lines if len(line) == 3]
        assert len(lines) - len(whole) <= 1 + len(lines) // 100
        return [(url, int(offset), int(length)) for url, offset, length in whole]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """One object of ten blocks and a bit."""
    (tmp_path / "store").mkdir()
    (tmp_path / "log").touch()
    (tmp_path / "store" / "s.tar").write_bytes(random.Random(3).randbytes(10 * BLOCK + 777))
    return FolderStore(tmp_path / "store", tmp_path / "log")


def config(folder: Path, *, blocks: float = 64, ahead: int = 0) -> tuple[CacheSection, BlockUse]:
    cache = CacheSection(directory=str(folder / "cache"), max_bytes=int(blocks * BLOCK))
    return cache, BlockUse(block_bytes=BLOCK, read_ahead_bytes=ahead)


def block_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "cache" / "blocks").rglob("*") if path.is_file())


def random_ranges(size: int, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Short, long, empty, at the edges of blocks and of the shard."""
    draw = random.Random(seed)
    edges = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, size - 1, size]
    for _ in range(count):
        begin = draw.choice(edges) if draw.random() < 0.3 else draw.randrange(size + 1)
        longest = draw.choice((0, 1, 600, BLOCK, 3 * BLOCK, size))
        yield begin, min(size - begin, draw.randint(0, longest))


@pytest.mark.parametrize("blocks", [64, 3])
@pytest.mark.parametrize("ahead", [0, 4 * BLOCK])
def test_ranges_equal_direct_reads(
    store: FolderStore, tmp_path: Path, blocks: int, ahead: int
) -> None:
    cached = CachedFetcher(store, *config(tmp_path, blocks=blocks, ahead=ahead))
    stamp = store.head(f"{BUCKET}/s.tar")
    for turn in range(60):
        ranges = list(random_ranges(stamp.size, random.Random(turn).randint(0, 6), turn))
        assert cached.read_ranges(stamp, ranges) == store.read_ranges(stamp, ranges), turn
    assert cached.counters.served_bytes > stamp.size
    assert bool(cached.counters.fetched_bytes > stamp.size) == (blocks == 3), "3 blocks must thrash"


def test_the_stream_fills_the_cache_for_the_ranges(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    with cached.open(stamp) as stream:
        assert stream.read(512) == store.path(stamp.path).read_bytes()[:512]
        assert stream.read() == store.path(stamp.path).read_bytes()[512:]
    assert store.requests() == [(stamp.path, 0, stamp.size)], "one request for the whole shard"
    for offset, length in random_ranges(stamp.size, 40, seed=1):
        cached.read(stamp, offset, length)
    other = CachedFetcher(store, *config(tmp_path))  # another process, another run
    with other.open(stamp) as stream:
        stream.read()
    assert len(store.requests()) == 1
    assert cached.counters.fetched_bytes == stamp.size and other.counters.fetched_bytes == 0


def test_a_stream_closes_the_gaps_only(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    cached.read(stamp, 4 * BLOCK, 1)
    with cached.open(stamp) as stream:
        assert stream.read() == store.path(stamp.path).read_bytes()
    assert [request[1:] for request in store.requests()] == [
        (4 * BLOCK, BLOCK),
        (0, 4 * BLOCK),
        (5 * BLOCK, stamp.size - 5 * BLOCK),
    ]


def test_neighbouring_ranges_cost_one_request(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    for offset in range(0, BLOCK, 1000):
        cached.read(stamp, offset, 1000)
    assert [request[1:] for request in store.requests()] == [(0, BLOCK), (BLOCK, BLOCK)]


def test_reading_ahead_is_one_request(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path, ahead=4 * BLOCK))
    stamp = store.head(f"{BUCKET}/s.tar")
    cached.read(stamp, 2 * BLOCK + 5, 10)
    cached.read(stamp, 5 * BLOCK + 5, 10)
    cached.read(stamp, 0, 10)
    assert [r[1:] for r in store.requests()] == [(2 * BLOCK, 4 * BLOCK), (0, 2 * BLOCK)]


def test_shards_come_before_they_are_read(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path, ahead=20 * BLOCK))
    stamp = store.head(f"{BUCKET}/s.tar")
    cached.read(stamp, 3 * BLOCK, 1)
    before = len(store.requests())
    cached.prefetch([ShardStamp(f"{BUCKET}/gone.tar", BLOCK, "v1"), stamp])
    cached._background.wait()
    assert len(store.requests()) > before, "the missing shard before it changed nothing"
    after = len(store.requests())
    assert cached.read(stamp, 0, stamp.size) == store.path(stamp.path).read_bytes()
    assert len(store.requests()) == after
    with pytest.raises(DataError, match="No such file"):
        cached.read(ShardStamp(f"{BUCKET}/gone.tar", BLOCK, "v1"), 0, 1)


def test_what_would_fill_the_cache_is_not_fetched_ahead(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path, blocks=12))
    cached.prefetch([store.head(f"{BUCKET}/s.tar")])
    cached._background.wait()
    assert store.requests() == []


def test_what_a_small_cache_cannot_keep_is_read_by_itself(
    store: FolderStore, tmp_path: Path
) -> None:
    """Random order over data far above the bound: few blocks are fetched more than once."""
    cached = CachedFetcher(store, *config(tmp_path, blocks=3))
    stamp = store.head(f"{BUCKET}/s.tar")
    draw = random.Random(0)
    for _ in range(300):
        cached.read(stamp, draw.randrange(10) * BLOCK, 100)
    whole = [length for _, _, length in store.requests() if length == BLOCK]
    assert 10 <= len(whole) <= 25
    assert len(store.requests()) > 100, "the cache was large enough: the test shows nothing"


def test_every_flipped_or_cut_file_is_found(store: FolderStore, tmp_path: Path) -> None:
    stamp = store.head(f"{BUCKET}/s.tar")
    truth = store.path(stamp.path).read_bytes()
    CachedFetcher(store, *config(tmp_path)).read(stamp, 0, stamp.size)
    files = block_files(tmp_path)
    assert len(files) == 11
    draw = random.Random(5)
    for path in files:
        good = path.read_bytes()
        faults = [bytearray(good) for _ in range(12)]
        for fault, place in zip(faults, (0, len(good) - 1, len(good) - 17), strict=False):
            fault[place] ^= 1 << draw.randrange(8)
        for fault in faults[3:]:
            fault[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        cuts = [good[:cut] for cut in (0, 1, len(good) // 2, len(good) - 1)]
        others = [b"", bytes(len(good)), good + b"\0", files[0].read_bytes()[: len(good)]]
        for bad in [*map(bytes, faults), *cuts, *others]:
            if bad == good:
                continue
            path.write_bytes(bad)
            before = len(store.requests())
            cached = CachedFetcher(store, *config(tmp_path))
            assert cached.read(stamp, 0, stamp.size) == truth
            assert cached.counters.damaged_blocks == 1
            assert len(store.requests()) == before + 1, "fetched again"
            assert path.read_bytes() == good


def test_damage_is_found_after_the_checksums_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in memory: the second read of a block does not look at the file's end."""
    cache, name, data = BlockStore(tmp_path, 1 << 20), "ab" * 16, random.Random(3).randbytes(BLOCK)
    assert cache.write(name, data)
    reads, pread = [], os.pread
    monkeypatch.setattr("os.pread", lambda *place: reads.append(place) or pread(*place))
    for count in (2, 3):
        assert cache.read(name, BLOCK, 100, 900) == data[100:900]
        assert len(reads) == count
    (path,) = tmp_path.glob("blocks/*/*")
    content = path.read_bytes()
    for damaged in (content[:500] + b"?!" + content[502:], content[:700]):
        path.write_bytes(damaged)
        assert cache.read(name, BLOCK, 100, 900) is None
        assert not path.exists()
        path.write_bytes(content)
        assert cache.read(name, BLOCK, 100, 900) == data[100:900]
    assert cache.damaged == 2


def test_a_block_under_anothers_name_is_no_block(store: FolderStore, tmp_path: Path) -> None:
    stamp = store.head(f"{BUCKET}/s.tar")
    cached = CachedFetcher(store, *config(tmp_path))
    truth = cached.read(stamp, 0, stamp.size)
    first, second = [path for path in block_files(tmp_path) if path.stat().st_size > BLOCK][:2]
    second.write_bytes(first.read_bytes())
    assert cached.read(stamp, 0, stamp.size) == truth
    assert cached.counters.damaged_blocks == 1


def test_same_base_name_in_two_folders(store: FolderStore, tmp_path: Path) -> None:
    for name, value in (("a", b"A"), ("b", b"B")):
        (store.folder / name).mkdir()
        (store.folder / name / "s.tar").write_bytes(value * 3000)
    cached = CachedFetcher(store, *config(tmp_path))
    stamps = [store.head(f"{BUCKET}/{name}/s.tar") for name in "ab"]
    for _ in range(2):
        assert [cached.read(stamp, 10, 5) for stamp in stamps] == [b"AAAAA", b"BBBBB"]


def test_a_changed_etag_is_another_shard(store: FolderStore, tmp_path: Path) -> None:
    url = f"{BUCKET}/s.tar"
    cached = CachedFetcher(store, *config(tmp_path))
    old = cached.read(store.head(url), 0, 100)
    data = bytearray(store.path(url).read_bytes())
    data[50] ^= 1
    store.path(url).write_bytes(data)
    assert cached.read(store.head(url), 0, 100) == old, "guard: the old version is cached"
    store.versions[url] = "v2"
    assert cached.read(store.head(url), 0, 100) == bytes(data[:100]) != old


def test_local_files_and_shards_without_a_version_are_not_kept(
    store: FolderStore, tmp_path: Path
) -> None:
    local = CachedFetcher(LocalFetcher(), *config(tmp_path))
    stamp = local.head(str(store.folder / "s.tar"))
    with local.open(stamp) as stream:
        assert len(stream.read()) == stamp.size
    assert len(local.read(stamp, 5, 70)) == 70
    store.versions[f"{BUCKET}/s.tar"] = ""
    cached = CachedFetcher(store, *config(tmp_path))
    for _ in range(2):
        cached.read(cached.head(f"{BUCKET}/s.tar"), 0, 10)
    assert len(store.requests()) == 2
    assert not (tmp_path / "cache" / "blocks").exists()


def test_a_range_behind_the_end_is_the_stores_error(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    with pytest.raises(DataError, match="ends too early"):
        cached.read(stamp, stamp.size - 5, 6)


def test_the_bound_is_kept_and_the_oldest_go(store: FolderStore, tmp_path: Path) -> None:
    bound = config(tmp_path, blocks=5)
    cached = CachedFetcher(store, *bound)
    stamp = store.head(f"{BUCKET}/s.tar")
    for number in range(8):
        cached.read(stamp, number * BLOCK, 10)
        cached.read(stamp, 0, 10)  # used all the time: it stays
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= bound[0].max_bytes
    assert len(block_files(tmp_path)) >= 3
    assert [request[1] for request in store.requests()].count(0) == 1


def test_processes_that_start_together_count_the_blocks_once(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting 1 TB takes a second under the lock of all writers, and a node has 64 of them."""
    scans, own = [], BlockStore._scan
    monkeypatch.setattr(BlockStore, "_scan", lambda self: scans.append(1) or own(self))
    bound, stamp = config(tmp_path, blocks=5), store.head(f"{BUCKET}/s.tar")
    for number in range(3):
        CachedFetcher(store, *bound).read(stamp, number * BLOCK, 10)
    assert len(scans) == 1
    size = tmp_path / "cache" / "locks" / "size"
    whole = sum(path.stat().st_size for path in block_files(tmp_path))
    assert int(size.read_text()) == whole > 3 * BLOCK
    for number, age in ((3, 61), (4, -3600)):  # a clock that went back is no reason to trust it
        size.write_text("7")
        os.utime(tmp_path / "cache" / "locks" / "counted", (time.time() - age,) * 2)
        CachedFetcher(store, *bound).read(stamp, number * BLOCK, 10)
        assert int(size.read_text()) == sum(p.stat().st_size for p in block_files(tmp_path))
        assert int(size.read_text()) > 3 * BLOCK
    assert len(scans) > 3


def many_shards(folder: Path, count: int) -> tuple[FolderStore, list[ShardStamp]]:
    """A store of shards of four blocks each."""
    (folder / "many").mkdir()
    (folder / "log").unlink(missing_ok=True)
    (folder / "log").touch()
    for number in range(count):
        content = random.Random(number).randbytes(4 * BLOCK)
        (folder / "many" / f"{number:03d}.tar").write_bytes(content)
    store = FolderStore(folder / "many", folder / "log")
    return store, store.list_shards(f"{BUCKET}/")


SAMPLE = BLOCK // 64


@pytest.mark.parametrize("order", ["global", "window"])
def test_a_cache_of_a_tenth_of_the_data_serves_pass_after_pass(tmp_path: Path, order: str) -> None:
    """The samples' bytes in order, the bound kept at every read, and the downloads bounded."""
    store, stamps = many_shards(tmp_path, 10)
    bodies = [store.path(stamp.path).read_bytes() for stamp in stamps]
    data = sum(map(len, bodies))
    bound = config(tmp_path, blocks=4)
    assert bound[0].max_bytes * 10 == data
    cached = CachedFetcher(store, *bound)
    fetched = []
    for turn in range(3):
        places = [(s, at) for s in range(len(stamps)) for at in range(0, 4 * BLOCK, SAMPLE)]
        draw = random.Random(turn)
        if order == "global":
            draw.shuffle(places)
        else:  # two blocks' samples together
            for first in range(0, len(places), 128):
                part = places[first : first + 128]
                places[first : first + 128] = draw.sample(part, len(part))
        before = cached.counters.fetched_bytes
        for place, (shard, at) in enumerate(places):
            assert cached.read(stamps[shard], at, SAMPLE) == bodies[shard][at : at + SAMPLE]
            if place % 64 == 0:
                held = sum(path.stat().st_size for path in block_files(tmp_path))
                assert held <= bound[0].max_bytes
        fetched.append(cached.counters.fetched_bytes - before)
    assert data <= fetched[0], "each block was fetched whole at least once"
    if order == "window":  # a block is used up before it has to go, but for ticks of the clock
        assert max(fetched) <= 1.5 * data
    else:  # of the 64 samples of a block each would cost a block, and every second one did
        assert max(fetched) < 8 * data


@pytest.mark.parametrize("nodes", [1, 4])
def test_an_epoch_downloads_what_the_guide_says(tmp_path: Path, nodes: int) -> None:
    """docs/guides/how-large.md: every node downloads each shard that it has a sample of, in pieces
    of READ_AHEAD_BYTES, unless its cache holds it from the epoch before."""
    store, stamps = many_shards(tmp_path, 12)
    data = sum(stamp.size for stamp in stamps)
    places = [(s, at) for s in range(len(stamps)) for at in range(0, 4 * BLOCK, SAMPLE)]
    for blocks, epochs in ((12, 2), (60, 1)):  # a quarter of the data, and more than all
        log = tmp_path / "log"
        log.write_text("")
        for node in range(nodes):
            bound = config(tmp_path / f"{blocks}-{node}", blocks=blocks, ahead=2 * BLOCK)
            cached = CachedFetcher(store, *bound)
            for _ in range(2):
                for shard, stamp in enumerate(stamps):
                    cached.fetch_shard(stamp)
                    for at in [at for s, at in places[node::nodes] if s == shard]:
                        cached.read(stamp, at, SAMPLE)
        asked = store.requests()
        assert sum(length for _, _, length in asked) == nodes * epochs * data
        assert len(asked) == nodes * epochs * data // (2 * BLOCK)


def test_a_fetcher_travels_without_its_files(store: FolderStore, tmp_path: Path) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    truth = cached.read(stamp, 7, 9999)
    copy = pickle.loads(pickle.dumps(cached))
    assert copy.read(stamp, 7, 9999) == truth
    assert (copy.counters.fetched_bytes, copy.cache) == (0, cached.cache)


def test_a_full_disk_costs_the_cache_only(
    store: FolderStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    cached.read(stamp, 0, 10)
    (tmp_path / "cache" / "incoming").rmdir()
    (tmp_path / "cache" / "incoming").write_text("a file where the folder was")
    for block in (3, 4, 5):
        assert cached.read(stamp, block * BLOCK, 10) == store.read(stamp, block * BLOCK, 10)
    assert caplog.text.count("cannot keep a block") == 1, "said once, not for every block"


@pytest.mark.parametrize(
    ("given", "file_mode", "folder_mode"),
    [(None, 0o600, 0o700), (0o755, 0o600, 0o700), (0o2770, 0o660, 0o770)],
)
def test_a_cache_is_its_users_own_or_its_groups(
    store: FolderStore, tmp_path: Path, given: int | None, file_mode: int, folder_mode: int
) -> None:
    """Given: the mode of a folder that was there before."""
    place, before = tmp_path / "cache", os.umask(0)
    try:
        if given is not None:
            place.mkdir()
            place.chmod(given)
        cached = CachedFetcher(store, *config(tmp_path))
        cached.read(store.head(f"{BUCKET}/s.tar"), 0, 10)
    finally:
        os.umask(before)
    if given is None:
        assert place.stat().st_mode & 0o777 == 0o700
    made = [path for path in place.rglob("*") if path.is_file()]
    assert len(made) > 2 and {path.stat().st_mode & 0o777 for path in made} == {file_mode}
    folders = {path.stat().st_mode & 0o777 for path in place.rglob("*") if path.is_dir()}
    assert folders == {folder_mode}


def test_a_folder_that_cannot_be_used_is_said_at_the_start(
    store: FolderStore, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RecipeError, match=r"data\.cache\.directory.*File exists"):
        CachedFetcher(store, *config(tmp_path))
    with pytest.raises(RecipeError, match=r"data\.cache\.max_bytes"):
        CachedFetcher(store, *config(tmp_path, blocks=1))


def test_what_a_killed_writer_left_is_swept_up_by_age(tmp_path: Path) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    old, new = f"{'0' * 32}.host-1-2", f"{'1' * 32}.host-1-2"
    for name, age in ((old, 4000), (new, 60)):
        (incoming / name).write_bytes(b"half a block")
        os.utime(incoming / name, (time.time() - age,) * 2)
    assert BlockStore(tmp_path, 10**6).write("ab" * 16, b"x")
    assert [path.name for path in incoming.iterdir()] == [new]


def read_all(fetcher: CachedFetcher, url: str, seed: int, rounds: int, failures: Path) -> None:
    """Random ranges from one process; writes down what was wrong."""
    stamp = fetcher.head(url)
    truth = fetcher.inner.path(url).read_bytes()  # type: ignore[attr-defined]
    for offset, length in random_ranges(stamp.size, rounds, seed):
        if fetcher.read(stamp, offset, length) != truth[offset : offset + length]:
            failures.write_text(f"{offset} {length}")
            return


def start(target: object, *arguments: object) -> object:
    process = worker_context().Process(target=target, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [64, 4])
def test_processes_share_a_cache(store: FolderStore, tmp_path: Path, blocks: int) -> None:
    """Three at once: the right bytes, the bound kept; with room, each block is fetched once."""
    store.wait_seconds = 0.01
    bound = config(tmp_path, blocks=blocks)
    cached = CachedFetcher(store, *bound)
    url, failures = f"{BUCKET}/s.tar", tmp_path / "failures"
    processes = [start(read_all, cached, url, seed, 60, failures) for seed in range(3)]
    while any(process.is_alive() for process in processes):  # type: ignore[attr-defined]
        sizes = []
        for path in block_files(tmp_path):
            with contextlib.suppress(FileNotFoundError):  # a file may go while it is counted
                sizes.append(path.stat().st_size)
        assert sum(sizes) <= bound[0].max_bytes + BLOCK
        time.sleep(0.01)
    assert [process.exitcode for process in processes] == [0, 0, 0]  # type: ignore[attr-defined]
    assert not failures.exists(), failures.read_text()
    fetched = sum(length for _, _, length in store.requests())
    size = store.head(url).size
    assert fetched == size if blocks == 64 else fetched > size


def read_whole(fetcher: CachedFetcher, stamp: ShardStamp, seed: int, failures: Path) -> None:
    """Each sample of a shard, in an order of its own; writes down what was wrong."""
    truth = fetcher.inner.path(stamp.path).read_bytes()  # type: ignore[attr-defined]
    places = list(range(0, stamp.size, SAMPLE))
    random.Random(seed).shuffle(places)
    if seed % 2:
        fetcher.fetch_shard(stamp)
    for at in places:
        if fetcher.read(stamp, at, min(SAMPLE, stamp.size - at)) != truth[at : at + SAMPLE]:
            failures.write_text(f"{at}")
            return


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 4 * BLOCK])
def test_one_shard_that_eight_processes_want_is_downloaded_once(
    store: FolderStore, tmp_path: Path, ahead: int
) -> None:
    store.wait_seconds = 0.05  # longer than the processes' starts are apart
    cached = CachedFetcher(store, *config(tmp_path, ahead=ahead))
    stamp, failures = store.head(f"{BUCKET}/s.tar"), tmp_path / "failures"
    processes = [start(read_whole, cached, stamp, seed, failures) for seed in range(8)]
    for process in processes:
        process.join()  # type: ignore[attr-defined]
    assert [process.exitcode for process in processes] == [0] * 8  # type: ignore[attr-defined]
    assert not failures.exists(), failures.read_text()
    ranges = sorted((offset, length) for _, offset, length in store.requests())
    ends = [offset + length for offset, length in ranges]
    assert [0, *ends[:-1]] == [offset for offset, _ in ranges] and ends[-1] == stamp.size


@pytest.mark.parametrize(
    "rounds", [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.soak)]
)
def test_killed_writers_leave_a_cache_that_works(
    store: FolderStore, tmp_path: Path, rounds: int
) -> None:
    """kill -9 while blocks are written, over and over: the next reader gets the right bytes."""
    bound = config(tmp_path, blocks=4)
    cached = CachedFetcher(store, *bound)
    url, failures = f"{BUCKET}/s.tar", tmp_path / "failures"
    draw = random.Random(2)
    killed = 0
    for seed in range(rounds):
        process = start(read_all, cached, url, seed, 10**6, failures)
        before = len(store.requests())
        while len(store.requests()) < before + 5 and process.is_alive():  # type: ignore[attr-defined]
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        process.join()  # type: ignore[attr-defined]
        killed += process.exitcode == -signal.SIGKILL  # type: ignore[attr-defined]
        read_all(cached, url, 1000 + seed, 20, failures)
        assert not failures.exists(), failures.read_text()
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= bound[0].max_bytes
    assert killed == rounds
    left = list((tmp_path / "cache" / "incoming").iterdir())
    assert len(left) <= rounds


def test_a_block_of_another_user_is_used_and_kept(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its owner may touch a file's times; that says nothing about the block."""
    cached = CachedFetcher(store, *config(tmp_path))
    stamp = store.head(f"{BUCKET}/s.tar")
    first = cached.read(stamp, 100, 50)
    before, requests = block_files(tmp_path), len(store.requests())

    def denied(*args: object) -> None:
        raise PermissionError("not the owner")

    monkeypatch.setattr("vlmpack.storage.cache.block_store.os.utime", denied)
    assert cached.read(stamp, 100, 50) == first
    assert block_files(tmp_path) == before and before
    assert len(store.requests()) == requests


def test_a_broken_prefetch_is_over_and_the_next_one_runs() -> None:
    """Whatever ended the thread, `wait` returns and the next call starts another."""
    fetched: list[str] = []

    def fetch(stamp: ShardStamp) -> None:
        if stamp.path == "broken":
            raise OSError("of no known kind")
        fetched.append(stamp.path)

    background = BackgroundFetch(fetch)
    hook, threading.excepthook = threading.excepthook, lambda *args: None
    try:
        background.start([ShardStamp("broken", 1, "1"), ShardStamp("after", 1, "1")])
        background.wait()
    finally:
        threading.excepthook = hook
    background.start([ShardStamp("next", 1, "1")])
    background.wait()
    assert fetched == ["next"]


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"), _locked(tmp_path / "lock", 0.0, 0o700):
        pass
    assert not (tmp_path / "other").exists()


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    """A cache may be put into a folder that has such names already."""
    others = [tmp_path / name for name in ("blocks/mine.txt", "blocks/ab/mine.txt", "incoming/me")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine" * 2000)
        os.utime(path, (1, 1))
    left = tmp_path / "incoming" / f"{'0' * 32}.host-1-2"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    store = BlockStore(tmp_path, max_bytes=9000)
    for number in range(4):
        assert store.write(f"{number:032x}", bytes(4000))
    assert 0 < store.total_bytes() <= 9000
    assert [path.read_bytes() for path in others] == [b"mine" * 2000] * 3 and not left.exists()
