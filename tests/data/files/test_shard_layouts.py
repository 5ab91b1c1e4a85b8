"""Shards in other layouts than turns: the batches of the same samples as turns, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shard_fakes import (
    FakeEncoder,
    Fields,
    image_bytes,
    key_of,
    loading,
    micro_batches,
    open_data,
    write_shard,
    write_shards,
)

from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.source_form import describe_forms, find_forms, find_shard_forms
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder, open_lengths
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.unlisted import unlisted_samples
from vlmpack.data.tools.stats import source_stats
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher, ShardStamp
from vlmpack.storage.sources import FoundShard, find_shards, stamped_shards

COUNT = 21
FETCHER = LocalFetcher()


def pictures(number: int) -> Fields:
    count = 1 + number % 2
    return {
        f"{place}.png": image_bytes(8 + number % 40, 20, seed=number * 10 + place)
        for place in range(count)
    }


def spoken(number: int) -> tuple[str, str]:
    return f"q{number} " + "x" * (number % 7), f"ä{number}"


def vqa(number: int) -> Fields:
    question, answer = spoken(number)
    record = {"question": question, "answer": answer, "where": "web", "task": "read"}
    return {**pictures(number), "json": json.dumps(record).encode()}


def cauldron(number: int) -> Fields:
    question, answer = spoken(number)
    rounds = [{"user": question, "assistant": answer, "source": "s"}]
    return {**pictures(number), "json": json.dumps({"texts": rounds, "where": "web"}).encode()}


def caption(number: int) -> Fields:
    return {**pictures(number), "txt": f"{spoken(number)[1]}\n".encode()}


def turns(number: int, make: Callable[[int], Fields]) -> Fields:
    """The same sample as a shard of turns has it, by hand."""
    question, answer = spoken(number)
    asked = [] if make is caption else [{"type": "text", "text": question}]
    images = pictures(number)
    messages = [
        {"role": "user", "content": [{"type": "image"}] * len(images) + asked},
        {"role": "assistant", "content": answer},
    ]
    record: dict[str, Any] = {"messages": messages}
    if make is not caption:
        record["where"] = "web"
    if make is vqa:
        record["task"] = "read"
    return {**images, "json": json.dumps(record).encode()}


MAKES: dict[str, Callable[[int], Fields]] = {"vqa": vqa, "cauldron": cauldron, "caption": caption}


def write(folder: Path, make: Callable[[int], Fields], *, per_shard: int = 8) -> str:
    for shard, first in enumerate(range(0, COUNT, per_shard)):
        numbers = range(first, min(first + per_shard, COUNT))
        samples = ((key_of(number), make(number)) for number in numbers)
        write_shard(folder / f"s-{shard:04d}.tar", samples)
    return str(folder / "s-*.tar")


def both(folder: Path, name: str) -> tuple[str, str]:
    """Shards of a layout, and of the same samples as turns."""
    make = MAKES[name]
    ours = write(folder / "ours", make)
    return ours, write(folder / "theirs", lambda number: turns(number, make))


def settled(pattern: str, columns: str | dict[str, str] | None = None) -> tuple[ShardStamp, ...]:
    stamps = stamped_shards([pattern], key="data.train", fetcher=FETCHER)
    return find_forms(stamps, FormOptions(columns=columns), FETCHER, SampleCaps())


def opened(path: str, index_dir: Path, **changes: Any) -> TrainData:
    columns = changes.pop("columns", None)
    source = Source(name="d", path=path, columns=columns)
    return open_data("", index_dir, sources=(source,), **{"shuffle": "global", **changes})


def assert_same_batches(ours: TrainData, theirs: TrainData) -> None:
    one, two = micro_batches(ours, 6), micro_batches(theirs, 6)
    assert len(one) == len(two) > 6
    for mine, other in zip(one, two, strict=True):
        assert [s.key for s in mine.samples] == [s.key for s in other.samples]
        assert not mine.skipped and not other.skipped
        assert torch.equal(mine.batch.input_ids, other.batch.input_ids)
        assert torch.equal(mine.batch.labels, other.batch.labels)
        assert mine.batch.media is not None and other.batch.media is not None
        assert torch.equal(mine.batch.media.pixel_values, other.batch.media.pixel_values)


@pytest.mark.cases(quick="caption", slow="vqa")
@pytest.mark.parametrize("name", MAKES)
def test_a_layout_gives_the_batches_of_the_same_turns(name: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, name)
    assert describe_forms(settled(ours)).startswith(f"tar, read as {name} (")
    assert_same_batches(opened(ours, tmp_path / "a"), opened(theirs, tmp_path / "b"))


@pytest.mark.slow
def test_workers_read_a_layout_alike(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, "caption")
    data = opened(ours, tmp_path / "a", **loading(2))
    assert_same_batches(data, opened(theirs, tmp_path / "b"))


@pytest.mark.cases(quick="vqa", slow="caption")
@pytest.mark.parametrize("name", MAKES)
def test_lengths_are_those_of_the_turns_in_one_pass_and_apart(name: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, name)
    index = IndexBuilder(FETCHER)

    def lengths(pattern: str, folder: Path, *, apart: bool) -> tuple[Any, Any]:
        settings, stamps = BuildSettings(directory=folder), settled(pattern)
        builder = LengthsBuilder(index, folder, FakeEncoder())  # type: ignore[arg-type]
        found = open_index(stamps, index if apart else ShardBuilder.of(builder), settings)
        made = len(list(folder.glob("*.lengths.part")))
        assert made == (0 if apart else len(stamps))
        return found, [t.table().to_pylist() for t in open_lengths(found, builder, settings)]

    _, wanted = lengths(theirs, tmp_path / "t", apart=True)
    found, measured = lengths(ours, tmp_path / "o", apart=True)
    assert measured == wanted and sum(map(len, wanted)) == COUNT
    assert {row["reason"] for rows in wanted for row in rows} == {None}
    assert lengths(ours, tmp_path / "p", apart=False)[1] == wanted
    unread = [dict(each.unknown_keys) for each in found]
    assert unread == [({} if name == "caption" else {"where": n}) for n in (8, 8, 5)]


def test_columns_are_named_for_shards(tmp_path: Path) -> None:
    def renamed(number: int) -> Fields:
        record = json.loads(vqa(number)["json"])
        record["q"] = record.pop("question")
        return {**pictures(number), "json": json.dumps(record).encode()}

    ours = write(tmp_path / "ours", renamed)
    theirs = write(tmp_path / "theirs", lambda number: turns(number, vqa))
    data = opened(ours, tmp_path / "a", columns={"question": "q"})
    assert_same_batches(data, opened(theirs, tmp_path / "b"))
    with pytest.raises(DataError):
        opened(ours, tmp_path / "c")  # no layout fits: read as turns, which it has not
    with pytest.raises(RecipeError, match="reads 'question' from the column 'z'"):
        settled(ours, {"question": "z"})


def test_two_readings_are_both_named(tmp_path: Path) -> None:
    def both_of(number: int) -> Fields:
        record = json.loads(turns(number, vqa)["json"]) | json.loads(vqa(number)["json"])
        return {**pictures(number), "json": json.dumps(record).encode()}

    path = write(tmp_path / "ours", both_of)
    with pytest.raises(RecipeError, match=r"as messages \('messages'\) and as vqa"):
        opened(path, tmp_path / "i")
    theirs = write(tmp_path / "theirs", lambda number: turns(number, vqa))
    for columns in ("messages", "vqa"):
        data = opened(path, tmp_path / columns, columns=columns)
        assert_same_batches(data, opened(theirs, tmp_path / "b"))


def test_shards_of_turns_have_no_form_whatever_stands_beside(tmp_path: Path) -> None:
    def beside(number: int) -> Fields:
        fields = turns(number, vqa)
        record = json.loads(fields["json"]) | {"text": "t", "caption": "c"}
        return fields | {"json": json.dumps(record).encode(), "txt": b"a note"}

    for pattern in (
        write_shards(tmp_path / "plain", 9, per_shard=4),
        write(tmp_path / "beside", beside),
        write(tmp_path / "odd", lambda _: {"json": b'{"odd": 1}'}),
    ):
        before = stamped_shards([pattern], key="data.train", fetcher=FETCHER)
        assert [(s, s.form) for s in settled(pattern)] == [(s, "") for s in before]


def test_a_shard_in_a_store_is_asked_only_where_columns_are_named(tmp_path: Path) -> None:
    class Untouched(LocalFetcher):
        def open(self, stamp: ShardStamp) -> Any:
            raise AssertionError("a request")

    write(tmp_path, vqa)
    [stamp] = stamped_shards([str(tmp_path / "s-0000.tar")], key="k", fetcher=FETCHER)
    remote = (replace(stamp, path="s3://bucket/s-0000.tar"),)
    assert find_forms(remote, FormOptions(), Untouched(), SampleCaps()) == remote
    assert remote[0].form == ""
    with pytest.raises(AssertionError, match="a request"):
        find_forms(remote, FormOptions(columns="vqa"), Untouched(), SampleCaps())


def test_a_damaged_shard_is_the_indexs_error(tmp_path: Path) -> None:
    path = Path(write(tmp_path, vqa, per_shard=COUNT).replace("*", "0000"))
    path.write_bytes(path.read_bytes()[:700])
    assert settled(str(path))[0].form == ""
    with pytest.raises(DataError, match=r"cut|ends|short"):
        opened(str(path), tmp_path / "i")


def test_a_bad_sample_is_a_hole_and_a_changed_one_an_error(tmp_path: Path) -> None:
    def some(number: int) -> Fields:
        if number == 12:
            return {**pictures(number), "txt": b"\xff\xfe"}
        if number == 13:
            return {**pictures(number)}
        return caption(number)

    path = write(tmp_path / "s", some)
    data = opened(path, tmp_path / "i", on_error={"schema": "skip", "integrity": "skip"})
    holes = {h.key: h.reason for m in micro_batches(data, 3) for h in m.skipped}
    assert holes.keys() == {key_of(12), key_of(13)}
    assert "no UTF-8" in holes[key_of(12)] and "no '.json' member" in holes[key_of(13)]

    file = tmp_path / "s" / "s-0000.tar"
    stamp, content = file.stat(), file.read_bytes()
    assert content.count("ä3\n".encode()) == 1
    file.write_bytes(content.replace("ä3\n".encode(), "ä4\n".encode()))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    changed = opened(path, tmp_path / "i", on_error={"schema": "skip", "integrity": "skip"})
    reasons = {h.key: h.reason for m in micro_batches(changed, 3) for h in m.skipped}
    assert reasons.keys() == {key_of(3), key_of(12), key_of(13)}
    assert "checksum" in reasons[key_of(3)]


def test_commands_without_a_recipe_settle_shards_as_a_launch_does(tmp_path: Path) -> None:
    pattern = write(tmp_path, caption)
    found = find_shards([pattern], key="SHARDS", fetcher=FETCHER)
    named = find_shard_forms(found, FormOptions(key="SHARDS"), FETCHER, SampleCaps())
    assert [shard.seen(FETCHER).form for shard in named] == [s.form for s in settled(pattern)]
    assert all(shard.form for shard in named)
    gone = [FoundShard(str(tmp_path / "gone.tar"))]
    assert find_shard_forms(gone, FormOptions(), FETCHER, SampleCaps()) == gone


def test_a_shard_of_another_layout_is_counted_and_listed_by_its_own_keys(tmp_path: Path) -> None:
    index = IndexBuilder(FETCHER)
    settings = BuildSettings(directory=tmp_path / "i")
    [stamp, *_] = settled(write(tmp_path / "s", vqa))
    [shard] = open_index([stamp], index, settings)
    table = shard.table
    spans = [table.column(name).to_numpy() for name in ("offset", "length")]
    assert unlisted_samples(FETCHER, stamp, *spans) == []
    assert unlisted_samples(FETCHER, stamp, *(span[:-1] for span in spans)) == [key_of(7)]
    [stats] = source_stats([stamp], index, settings.directory)
    assert {"question", "answer", "where", "task"} <= stats.keys.keys()
    assert "messages" not in stats.keys
