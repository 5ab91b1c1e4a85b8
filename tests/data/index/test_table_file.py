"""One file has the index and lengths of a split for all processes of a node; see table_file."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.shard_fakes import (
    FakeEncoder,
    chat_json,
    micro_batches,
    open_data,
    sample_fields,
    write_shard,
    write_shards,
)

from vlmpack.data.index import columns_file, parts, table, table_file
from vlmpack.data.index.columns_file import ColumnsFile, ColumnsWriter, open_columns
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder, open_lengths
from vlmpack.data.index.parts import BuildSettings, open_part
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.index.table import chosen
from vlmpack.data.index.table_file import MOST_KEPT, open_table
from vlmpack.errors import DataError
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import expand_shards

SHARDS = 20
NAMES = ("offsets", "lengths", "crc32s", "num_tokens", "num_label_tokens", "num_patches")


@pytest.fixture
def opened(monkeypatch: Any) -> list[str]:
    """Names of the parts that are opened."""
    names: list[str] = []

    def spy(path: str) -> Any:
        names.append(Path(path).name)
        return open_part(path)

    monkeypatch.setattr(parts, "open_part", spy)
    return names


@pytest.fixture
def small(monkeypatch: Any) -> None:
    """Chunks of 7 samples, of which nothing stays in memory."""
    for module in (columns_file, table_file):
        monkeypatch.setattr(module, "CHUNK", 7)
    for module in (table, table_file):
        monkeypatch.setattr(module, "LARGE", 0)


def columns(data: Any) -> dict[str, Any]:
    """All that a split holds of its samples."""
    held = data.fitted.table
    found = {name: getattr(held, name)[:].tolist() for name in NAMES}
    return found | {"keys": held.keys[:], "shards": held.shards, "bad": held.faults}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.table"))


def mixed(folder: Path) -> str:
    """Shards of 1 to 9 samples, of which some have two images, none, or a text that is no JSON."""
    folder.mkdir()
    number = 0
    for shard in range(SHARDS):
        samples = []
        for _ in range(1 + shard * 5 % 9):
            fields = sample_fields(number)
            if number % 11 == 3:
                fields = {**fields, "json": b"{"}
            if number % 7 == 2:
                fields = {"json": chat_json(f"words {number} " * (1 + number % 5), "yes!", 0)}
            samples.append((f"key-{number:03d}", fields))
            number += 1
        write_shard(folder / f"s-{shard:04d}.tar", samples)
    return str(folder / "s-*.tar")


SKIPS: dict[str, Any] = {"on_error": OnErrorSection(schema="skip")}


@pytest.mark.parametrize("is_small", [True, False])
def test_columns_are_those_of_the_parts(
    tmp_path: Path, is_small: bool, request: pytest.FixtureRequest
) -> None:
    if is_small:
        request.getfixturevalue("small")
    pattern = mixed(tmp_path / "d")
    data = open_data(pattern, tmp_path / "i", **SKIPS)
    held = data.fitted.table
    index = IndexBuilder(LocalFetcher())
    settings = BuildSettings(directory=tmp_path / "i")
    shards = open_index(expand_shards([pattern], key="k"), index, settings)
    lengths = open_lengths(shards, LengthsBuilder(index, tmp_path / "i", FakeEncoder()), settings)
    rows = [row for shard in shards for row in shard.table.to_pylist()]
    measured = [row for each in lengths for row in each.table().to_pylist()]
    assert len(rows) == held.num_samples > 60
    assert held.keys[:] == [row["key"] for row in rows]
    for name, column in zip(("offset", "length", "crc32"), NAMES, strict=False):
        assert getattr(held, column)[:].tolist() == [row[name] for row in rows], name
    for name in ("num_tokens", "num_image_tokens", "num_label_tokens", "num_patches"):
        assert getattr(held, name)[:].tolist() == [row[name] for row in measured], name
    assert held.openings is not None
    never = 2**63 - 1
    given = [never if row["opening"] is None else row["opening"] for row in rows]
    assert held.openings[:].tolist() == given
    reasons = {n: (r["error_class"], r["reason"]) for n, r in enumerate(measured) if r["reason"]}
    assert held.faults == reasons and list(reasons) == np.flatnonzero(held.bad).tolist()
    assert len(reasons) > 3
    assert held.branches is None and held.rows is None and held.prefixes is None
    some = np.random.default_rng(1).integers(0, held.num_samples, 50)
    assert held.offsets[some].tolist() == [rows[n]["offset"] for n in some]
    assert [held.ref(n).key for n in some.tolist()] == [rows[n]["key"] for n in some]
    assert held.keys.find("key-017") == [17] and held.keys.find("key-01") == []
    assert isinstance(held.offsets, np.ndarray) is not is_small


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"over_long": "drop", "seq_length": 18},
        {"over_long": "shrink_images", "seq_length": 18},
        {"validation": "30%"},
    ],
    ids=["all", "drop", "shrink", "share"],
)
def test_a_split_is_the_same_from_its_file(
    tmp_path: Path, changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pattern = mixed(tmp_path / "d")

    def found() -> Any:
        data = open_data(pattern, tmp_path / "i", **SKIPS, **changes)
        batches = [(m.samples, m.batch.lengths) for m in micro_batches(data)]
        each = [(tokens.tolist(), other.tolist()) for tokens, other in data.split.usable_sizes()]
        sizes = [list(chain.from_iterable(part)) for part in zip(*each, strict=True)]
        shrunk = data.fitted.table.shrunk
        return columns(data), data.identity, data.summary(), batches, sizes, shrunk

    truth = found()
    request.getfixturevalue("small")
    assert found() == truth
    assert truth[2].num_usable > 10
    if "seq_length" in changes:
        assert truth[2].num_dropped + truth[2].num_shrunk > 3


def test_chosen_numbers_are_those_of_a_mask(monkeypatch: Any) -> None:
    random = np.random.default_rng(0)
    monkeypatch.setattr(table, "LARGE", 0)
    for size, part in ((1, 1.0), (40, 1.0), (500, 0.9), (500, 0.5), (500, 0.1), (9, 0.0)):
        mask = random.random(size) < part
        truth, found = np.flatnonzero(mask) + 30, chosen(mask, 30)
        assert found.shape == truth.shape
        assert found[:].tolist() == truth.tolist() == found[0 : truth.size].tolist()
        if truth.size:
            places = random.integers(0, truth.size, 70)
            assert found[places].tolist() == truth[places].tolist()


def test_a_second_launch_opens_the_table_alone(tmp_path: Path, opened: list[str]) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = open_data(pattern, tmp_path / "i")
    assert len(opened) == 2 * SHARDS
    opened.clear()
    again = open_data(pattern, tmp_path / "i")
    assert opened == [] and len(files(tmp_path / "i")) == 1
    assert columns(again) == columns(first)
    assert again.identity == first.identity
    assert len(columns(first)["keys"]) == 2 * SHARDS
    files(tmp_path / "i")[0].unlink()
    assert columns(open_data(pattern, tmp_path / "i")) == columns(first), "from the parts"


def test_a_changed_shard_is_read_again(tmp_path: Path, opened: list[str]) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = open_data(pattern, tmp_path / "i")
    shard = tmp_path / "s-0003.tar"
    was = shard.stat()
    write_shard(shard, [("new", sample_fields(6)), ("newer", sample_fields(7))])
    if shard.stat().st_size == was.st_size:
        os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    opened.clear()
    keys = columns(open_data(pattern, tmp_path / "i"))["keys"]
    assert keys[6:8] == ["new", "newer"]
    assert keys[:6] + keys[8:] == columns(first)["keys"][:6] + columns(first)["keys"][8:]
    assert len(opened) == 2 * SHARDS


def test_a_small_table_that_is_damaged_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = columns(open_data(pattern, tmp_path / "i"))
    [file] = files(tmp_path / "i")
    good = file.read_bytes()
    for place in (0, len(good) // 2, len(good) - 700, len(good) - 17, len(good) - 1):
        damaged = bytearray(good)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        caplog.clear()
        assert columns(open_data(pattern, tmp_path / "i")) == first
        assert "is damaged" in caplog.text
        assert file.read_bytes() == good, "written again"
    file.write_bytes(good[:-100])
    assert columns(open_data(pattern, tmp_path / "i")) == first


@pytest.mark.usefixtures("small")
def test_damage_of_a_large_table_ends_before_a_sample_is_trained(tmp_path: Path) -> None:
    """A checksum is compared when its part of the file is used; the next launch is whole."""
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = columns(open_data(pattern, tmp_path / "i"))
    [file] = files(tmp_path / "i")
    good = file.read_bytes()
    ended = 0
    for place in range(0, len(good), len(good) // 40):
        damaged = bytearray(good)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        try:
            found = columns(open_data(pattern, tmp_path / "i"))
        except DataError as error:
            assert error.error_class == "integrity" and f"{file} is damaged" in str(error)
            assert not file.exists()
            ended += 1
            found = columns(open_data(pattern, tmp_path / "i"))
            assert file.read_bytes() == good
        assert found == first
    assert ended > 5


@pytest.mark.usefixtures("small")
def test_a_table_that_is_cut_while_it_is_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    data = open_data(pattern, tmp_path / "i")
    [file] = files(tmp_path / "i")
    assert data.fitted.table.offsets[30] >= 0
    os.truncate(file, 200)
    with pytest.raises(DataError, match=r"\.table is damaged: .* \(it is shorter now\)"):
        data.fitted.table.ref(30)
    with pytest.raises(DataError, match="is damaged"):
        micro_batches(data, 20)


def test_a_table_of_other_shards_is_not_taken(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    first = columns(open_data(pattern, tmp_path / "i"))
    other = write_shards(tmp_path / "other", 2 * SHARDS + 2, per_shard=2)
    open_data(other, tmp_path / "j")
    [mine], [theirs] = files(tmp_path / "i"), files(tmp_path / "j")
    mine.write_bytes(theirs.read_bytes())
    assert columns(open_data(pattern, tmp_path / "i")) == first


def test_a_table_that_cannot_be_written_is_kept_in_memory(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    truth = columns(open_data(pattern, tmp_path / "i"))
    files(tmp_path / "i")[0].unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_file, "written_whole", full)
    data = open_data(pattern, tmp_path / "i")
    assert columns(data) == truth and files(tmp_path / "i") == []
    assert "No space left on device" in caplog.text
    assert "each process keeps it in memory" in caplog.text
    monkeypatch.setattr(table_file, "MOST_IN_MEMORY", 2 * SHARDS - 1)
    with pytest.raises(DataError, match=r"over 39 samples, which is too many .* data\.index_dir"):
        open_data(pattern, tmp_path / "i")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_that_became_read_only_is_no_end(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    """Its parts are whole; its table is missing, or damaged and stays."""
    pattern = write_shards(tmp_path, 4, per_shard=2)
    truth = columns(open_data(pattern, tmp_path / "i"))
    [file] = files(tmp_path / "i")
    file.write_bytes(b"other") if damaged else file.unlink()

    def refuse(name: Any) -> Any:
        kept = getattr(os, name)

        def refused(path: Any, flags: int = os.O_CREAT, *rest: Any, **more: Any) -> Any:
            if flags & os.O_CREAT and str(path).startswith(str(tmp_path / "i")):
                raise OSError(30, "Read-only file system", str(path))
            return kept(path, *((flags,) if name == "open" else ()), *rest, **more)

        monkeypatch.setattr(os, name, refused)

    refuse("open")
    refuse("unlink")
    data = open_data(pattern, tmp_path / "i", num_probed=0)
    assert columns(data) == truth
    assert file.exists() == damaged
    assert "set data.index_dir" in caplog.text and "each process keeps it in memory" in caplog.text


def test_old_ones_are_removed_and_those_in_use_are_kept(tmp_path: Path, opened: list[str]) -> None:
    used = write_shards(tmp_path / "used", 4, per_shard=2)
    open_data(used, tmp_path / "i")
    for number in range(MOST_KEPT + 2):
        open_data(write_shards(tmp_path / f"d{number}", 2, per_shard=1), tmp_path / "i")
        opened.clear()
        open_data(used, tmp_path / "i")
        assert opened == []
    assert len(files(tmp_path / "i")) == MOST_KEPT + 3, "all were used within a day"
    unfinished = tmp_path / "i" / ".0.table.host-1-1.tmp"
    unfinished.touch()
    for file in (unfinished, *files(tmp_path / "i")):
        os.utime(file, ns=(0, file.stat().st_mtime_ns - 25 * 3600 * 10**9))
    open_data(write_shards(tmp_path / "last", 3, per_shard=1), tmp_path / "i")
    assert len(files(tmp_path / "i")) == MOST_KEPT and not unfinished.exists()
    opened.clear()
    open_data(used, tmp_path / "i")
    assert opened == []


@pytest.mark.usefixtures("small")
def test_a_table_that_cannot_be_read_stays_and_so_does_one_of_its_name(
    tmp_path: Path, monkeypatch: Any
) -> None:
    data = open_data(write_shards(tmp_path, SHARDS, per_shard=2), tmp_path / "i")
    [file], held = files(tmp_path / "i"), data.fitted.table

    def stale(*_: Any) -> bytes:
        raise OSError(116, "Stale file handle")

    reader = held.offsets.file
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_read", stale)
        with pytest.raises(DataError, match=r"cannot be read: Stale file handle\. .* start again"):
            held.ref(3)
    assert held.ref(3).number == 3
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(held)
    monkeypatch.setattr(columns_file, "TOUCH_SECONDS", -1)
    os.utime(file, (0, 0))
    assert held.ref(3).number == 3 and file.stat().st_mtime > 0, "others see that it is in use"
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.truncate(file, 200)
    other.replace(file)
    with pytest.raises(DataError, match="is damaged"):
        [held.ref(n) for n in range(held.num_samples)]
    assert file.stat().st_size > 200, "another process has made it again"
    with pytest.raises(AssertionError):
        held.offsets[np.asarray([-1])]


def test_one_that_vanishes_while_old_ones_are_removed_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes may write their tables, and remove the same old ones, at once."""
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "gone.table").symlink_to(tmp_path / "gone")
    open_data(write_shards(tmp_path, 4, per_shard=2), tmp_path / "i")
    assert len(files(tmp_path / "i")) == 2 and "cannot be written" not in caplog.text


def test_a_pipe_in_its_place_is_replaced(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 4, per_shard=2)
    truth = columns(open_data(pattern, tmp_path / "i"))
    [file] = files(tmp_path / "i")
    file.unlink()
    os.mkfifo(file)
    assert columns(open_data(pattern, tmp_path / "i")) == truth
    assert file.is_file()


def test_many_sources_share_one_table(tmp_path: Path, opened: list[str]) -> None:
    """A file for each would be more than are kept, and each launch would make all of them again."""
    sources = tuple(
        Source(name=f"s{number}", path=write_shards(tmp_path / f"d{number}", 4, per_shard=2))
        for number in range(MOST_KEPT + 2)
    )
    first = open_data("unused", tmp_path / "i", sources=sources)
    opened.clear()
    again = open_data("unused", tmp_path / "i", sources=sources)
    assert opened == []
    assert columns(again) == columns(first)
    assert len(columns(again)["keys"]) == 4 * len(sources)
    assert again.identity == first.identity


def test_numbers_and_texts_of_every_kind_come_back(tmp_path: Path) -> None:
    path = tmp_path / "any.table"
    rows = {
        "small": np.arange(5), "same": np.full(5, 9), "large": np.array([0, 2**62, 1, 2, 3]),
        "negative": np.array([-(2**63), 0, 2**63 - 1, -1, 5]), "edge": np.arange(5) * 64,
        "most": np.array([2**63 - 1, 0, 0, 0, 0]),
    }  # fmt: skip
    texts = ["", "ä", "a\nb", "", "long" * 99]
    with path.open("wb") as stream:
        writer = ColumnsWriter(stream, path.name)
        sliced = pa.array(["before", *texts])[1:]
        writer.add(rows, {"key": sliced})
        writer.finish({"bad": 0})
    file = open_columns(path)
    assert file is not None and file.num_rows == 5
    file.check()
    for name, values in rows.items():
        assert file.column(name, 0)[:].tolist() == values.tolist(), name
        assert [file.column(name, 0)[n] for n in range(5)] == values.tolist(), name
        mask = values > 1
        assert mask.any() and file.column(name, 0)[mask].tolist() == values[mask].tolist(), name
    assert file.column("none", -7)[1:3].tolist() == [-7, -7]
    keys = columns_file.Texts(file, "key")
    assert keys[:] == texts and keys[2:4] == texts[2:4] and keys[4:9] == texts[4:]
    assert path.stat().st_size < 1200, "equal values take no room, and few bits few bytes"


@pytest.mark.slow
def test_processes_that_start_at_once_write_one_table(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, 2 * SHARDS, per_shard=2)
    code = (
        "import sys; from pathlib import Path; from support.shard_fakes import open_data\n"
        "data = open_data(sys.argv[1], Path(sys.argv[2]), num_probed=0)\n"
        "import os; print(data.fitted.table.keys[:], os.stat(next(Path(sys.argv[2])"
        ".glob('*.table'))).st_ino)"
    )
    command = [sys.executable, "-c", code, pattern, str(tmp_path / "i")]
    paths = os.pathsep.join(path for path in sys.path if path)
    surroundings = {**os.environ, "PYTHONPATH": paths}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings)
        for _ in range(4)
    ]
    found = {process.communicate()[0] for process in started}
    assert all(process.returncode == 0 for process in started)
    assert len(found) == 1, "one file, which nobody writes twice"
    assert found.pop().count("'") == 2 * 2 * SHARDS
    assert not [path for path in (tmp_path / "i").iterdir() if path.name.endswith(".tmp")]


def test_images_in_two_samples_have_one_digest(tmp_path: Path) -> None:
    image = sample_fields(0, num_images=1)["0.png"]
    fields = [{**sample_fields(n, num_images=1), "0.png": image} for n in range(3)]
    samples = [(f"k{n}", each) for n, each in enumerate(fields)]
    write_shard(tmp_path / "s.tar", [*samples, ("other", sample_fields(5, num_images=1))])
    held = open_data(str(tmp_path / "s.tar"), tmp_path / "i").fitted.table
    assert held.images_digests is not None
    digests = held.images_digests[:].tolist()
    assert len(set(digests[:3])) == 1 and digests[3] != digests[0] != 0


def test_builders_of_the_same_parts_share_a_name(tmp_path: Path) -> None:
    """The name follows from the parts alone, so that all ranks want one file."""
    pattern = write_shards(tmp_path, SHARDS, per_shard=1)
    index = IndexBuilder(LocalFetcher(), processes=3)
    lengths = LengthsBuilder(index, tmp_path / "i", FakeEncoder())
    stamps = [index.fetcher.head(path) for path in expand_shards([pattern], key="k")]
    settings = BuildSettings(directory=tmp_path / "i")
    one = table_file.open_table(stamps, ShardBuilder.of(lengths), settings)
    open_data(pattern, tmp_path / "i")
    assert one.path == files(tmp_path / "i")[0] and len(files(tmp_path / "i")) == 1


def test_a_table_that_is_only_written_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `vlmpack index` leaves it. A launch is the control."""
    pattern = write_shards(tmp_path, 4, per_shard=2)
    lengths = LengthsBuilder(IndexBuilder(LocalFetcher()), tmp_path / "i", FakeEncoder())
    stamps = [LocalFetcher().head(path) for path in expand_shards([pattern], key="k")]
    settings, builder = BuildSettings(directory=tmp_path / "i"), ShardBuilder.of(lengths)
    kept: list[int] = []
    monkeypatch.setattr(ColumnsFile, "keep_in_memory", lambda file: kept.append(file.num_rows))
    for _ in range(2):
        assert open_table(stamps, builder, settings, keep=False).num_rows == 4 and not kept
    open_table(stamps, builder, settings)
    assert kept == [4]
