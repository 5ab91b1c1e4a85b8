"""What hostile input costs, kind by kind, from the look at a source to its samples' lengths.

Each kind is a ladder: a count that doubles up to its limit. A step may take 2.5 times as long, all
of it 2 s and 1 ms a record, and 64 MiB beside the input. Quick runs count calls on a short ladder,
which is the same on every machine; the soak measures time and memory on the whole one.

Turns are no kind of these: the template is rendered anew for each answer, so their cost is their
square, which `limits.MAX_TURNS` bounds.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.shard_fakes import image_bytes

from vlmpack.convert.videos import VideoSettings, chosen_times
from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.index.shard_index import IndexBuilder, IndexRow
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, VlmpackError
from vlmpack.limits import (
    LONGEST_SECONDS,
    MAX_BRANCHES,
    MAX_FRAMES,
    MAX_IMAGES,
    MAX_MEMBERS,
    MAX_RECORD_KEYS,
)
from vlmpack.recipe import load_recipe
from vlmpack.storage.fetch import LocalFetcher

RATIO, LEAST_SECONDS = 2.5, 0.02
"""Of a doubling, over those from the first that takes so many seconds: one alone is noise, and the
square of a count is 4 each. What a table larger than the CPU's cache costs comes on top.
"""
SECONDS, SECONDS_OF_A_RECORD = 2.0, 1e-3
BYTES = 64 << 20
STEPS = 5
"""Doublings of a whole ladder."""

User = {"role": "user", "content": "q"}
Answer = {"role": "assistant", "content": "a"}
CHAT = [User, Answer]
PNG = image_bytes(8, 8)
Read = Callable[[Path, Encoder], Any]


def samples(path: Path, encoder: Encoder) -> str:
    """What a source is read as, and the first fault."""
    caps, fetcher, said = SampleCaps(), LocalFetcher(), [""]

    def note(row: IndexRow, sample: VLMSample | None) -> None:
        try:
            if sample is not None:
                encoder.length(sample, [(8, 8)] * len(row.images))
            else:
                said.append(row.reason or "")
        except DataError as error:
            said.append(error.reason)

    try:
        [stamp] = find_forms([fetcher.head(str(path))], FormOptions(), fetcher, caps)
        IndexBuilder(fetcher, caps).scan(stamp, note)
    except VlmpackError as error:
        said.append(str(error))
    return said[-1]


def recipe(path: Path, _: Encoder) -> str:
    try:
        load_recipe(path)
    except VlmpackError as error:
        return str(error)
    return ""


def overrides(path: Path, _: Encoder) -> str:
    try:
        load_recipe({}, path.read_text().split())
    except VlmpackError as error:
        return str(error)
    return ""


def ticks(path: Path, _: Encoder) -> str:
    chosen_times([0.0, 0.5, float(path.read_text())], VideoSettings(fps=1000))
    return ""


def lines(path: Path, *records: object) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def pairs(path: Path, names: Iterable[str]) -> Path:
    """A record with an object of these keys, which may stand twice."""
    inner = ",".join(f'"{name}":1' for name in names)
    return lines(path, f'{{"messages":{json.dumps(CHAT)},"m":{{{inner}}}}}')


def table(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def wide(path: Path, count: int, *more: str) -> Path:
    names = ["question", "answer", *(f"c{n:04d}" for n in range(count - 2)), *more]
    return table(path, [names, ["v"] * len(names)])


def columns(path: Path, count: int) -> Path:
    path = path.with_suffix(".parquet")
    record = {"question": "q", "answer": "a", **{f"c{n:04d}": "v" for n in range(count - 2)}}
    pq.write_table(pa.Table.from_pylist([record]), path)
    return path


def text(path: Path, suffix: str, content: str) -> Path:
    path = path.with_suffix(suffix)
    path.write_text(content)
    return path


def shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path = path.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def video(path: Path, count: int) -> Path:
    (path.parent / "i.png").write_bytes(PNG)
    part = {"type": "video", "frames": ["i.png"] * count, "fps": 2}
    return lines(path, {"messages": [{"role": "user", "content": [part]}, Answer]})


def images(path: Path, count: int) -> Path:
    (path.parent / "i.png").write_bytes(PNG)
    asked = {"role": "user", "content": "<image>" * count}
    return lines(path, {"messages": [asked, Answer], "images": ["i.png"] * count})


def one_sample(path: Path, count: int) -> Path:
    talk = json.dumps({"messages": CHAT}).encode()
    return shard(path, [("s.json", talk), *((f"s.{n}.txt", b"x") for n in range(count - 1))])


def sources(count: int) -> str:
    return "data:\n  train:\n" + "".join(f"  - {{path: {n}.tar, name: b}}\n" for n in range(count))


class Kind(NamedTuple):
    """An input by one count.

    Args:
        write: the input of a count, beside a path.
        most: the count where its ladder ends.
        read: what reads it.
        refused: a word of what is said of it; empty where it is read.
        records: of the input are as many as the count.
    """

    write: Callable[[Path, int], Path]
    most: int
    read: Read = samples
    refused: str = ""
    records: bool = False


KINDS = {
    "keys of an object, one twice": Kind(
        lambda p, n: pairs(p, [*(f"k{i}" for i in range(n)), "k0"]), 1 << 18, refused="twice"
    ),
    "keys of an object, all twice": Kind(
        lambda p, n: pairs(p, (f"k{i % n}" for i in range(2 * n))), 1 << 17, refused="twice"
    ),
    "keys of an inner object": Kind(lambda p, n: pairs(p, (f"k{i}" for i in range(n))), 1 << 18),
    "unknown keys of a record": Kind(
        lambda p, n: lines(p, {"messages": CHAT, **{f"im{i:04d}": 1 for i in range(n - 1)}}),
        MAX_RECORD_KEYS,
    ),
    "unknown keys of a turn": Kind(
        lambda p, n: lines(p, {"messages": [User, Answer | {f"k{i:06d}": 1 for i in range(n)}]}),
        1 << 17,
        refused="would be lost",
    ),
    "columns of a CSV": Kind(wide, MAX_RECORD_KEYS),
    "columns of a CSV, one twice": Kind(
        lambda p, n: wide(p, n - 1, "c0000"), MAX_RECORD_KEYS, refused="twice"
    ),
    "columns of a parquet file": Kind(columns, MAX_RECORD_KEYS),
    "rows of a CSV": Kind(
        lambda p, n: table(p, [["question", "answer"], *[["q", "a"]] * n]), 1 << 13, records=True
    ),
    "lines of a cell": Kind(
        lambda p, n: table(p, [["question", "answer"], ["q\n" * n, "a"]]), 1 << 17
    ),
    "lines without text": Kind(
        lambda p, n: text(p, ".jsonl", "\n" * n + json.dumps({"messages": CHAT}) + "\n"), 20 << 20
    ),
    "rows without text": Kind(
        lambda p, n: text(p, ".csv", "question,answer\n" + "\r\n" * n + "q,a\n"), 10 << 20
    ),
    "records of a JSONL": Kind(
        lambda p, n: lines(p, *[{"messages": CHAT}] * n), 1 << 13, records=True
    ),
    "items of a JSON": Kind(
        lambda p, n: text(p, ".json", json.dumps([{"messages": CHAT}] * n)), 1 << 13, records=True
    ),
    "spaces of a JSON": Kind(
        lambda p, n: text(p, ".json", f"[{' ' * n}{json.dumps({'messages': CHAT})}]"), 16 << 20
    ),
    "depth": Kind(lambda p, n: text(p, ".json", "[" * n + "]" * n), 4 << 20, refused="problem"),
    "parts of a turn": Kind(
        lambda p, n: lines(
            p,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}] * n},
                    Answer,
                ]
            },
        ),
        1 << 13,
    ),
    "branches": Kind(
        lambda p, n: lines(p, {"messages": [User], "branches": [[Answer]] * n}),
        MAX_BRANCHES,
        records=True,
    ),
    "images": Kind(images, MAX_IMAGES),
    "frames of a video": Kind(video, MAX_FRAMES),
    "members of a sample": Kind(one_sample, MAX_MEMBERS),
    "samples of a shard": Kind(
        lambda p, n: shard(
            p, ((f"{i}.json", json.dumps({"messages": CHAT}).encode()) for i in range(n))
        ),
        1 << 12,
        records=True,
    ),
    "seconds of a video": Kind(
        lambda p, n: text(p, ".txt", str(n)), int(LONGEST_SECONDS), read=ticks
    ),
    "unknown keys of a recipe": Kind(
        lambda p, n: text(p, ".yaml", "".join(f"k{i}: 1\n" for i in range(n))),
        1 << 14,
        read=recipe,
        refused="problems",
        records=True,
    ),
    "sources of a recipe, all with one name": Kind(
        lambda p, n: text(p, ".yaml", sources(n)),
        1 << 13,
        read=recipe,
        refused="problems",
        records=True,
    ),
    "overrides": Kind(
        lambda p, n: text(p, ".txt", "\n".join(f"data.chat.k{i}=1" for i in range(n))),
        1 << 13,
        read=overrides,
        refused="problems",
        records=True,
    ),
}


def num_calls(function: Callable[[], object]) -> int:
    """Functions called, of Python and of C."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.cases(
    quick=("*one twice", "unknown keys*", "members*", "lines without text", "seconds*"), slow="*"
)
@pytest.mark.parametrize("name", KINDS)
def test_calls_grow_with_the_count_alone(name: str, tmp_path: Path, encoder: Encoder) -> None:
    kind = KINDS[name]
    counts = [32, 64]
    paths = [kind.write(tmp_path / str(count), count) for count in counts]
    said = kind.read(paths[1], encoder)  # what is remembered of names is warm for both
    few, many = (num_calls(lambda path=path: kind.read(path, encoder)) for path in paths)  # type: ignore[misc]
    assert many <= 2.2 * few + 200
    assert kind.refused in said and bool(kind.refused) == bool(said)


def least_seconds(function: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return min(found)


def cache_factor(few: int, many: int) -> float:
    """How much dearer a name of an object is where `many` of them lie, by Python's own parser."""
    texts = {count: json.dumps({f"k{i:06d}": 1 for i in range(count)}) for count in (few, many)}
    each = {n: least_seconds(lambda text=text: json.loads(text)) / n for n, text in texts.items()}  # type: ignore[misc]
    return max(1.0, each[many] / each[few])


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_time_and_memory_grow_with_the_count_alone(
    name: str, tmp_path: Path, encoder: Encoder
) -> None:
    kind, first = KINDS[name], None
    samples(lines(tmp_path / "first", {"messages": CHAT}), encoder)
    for step in range(STEPS, -1, -1):
        count = max(1, kind.most >> step)
        path = kind.write(tmp_path / "a", count)
        seconds = least_seconds(lambda path=path: kind.read(path, encoder))  # type: ignore[misc]
        print(f"{name}: {count:,} in {seconds:.3f} s")
        assert seconds <= SECONDS + SECONDS_OF_A_RECORD * (count if kind.records else 1)
        if first is None and seconds >= LEAST_SECONDS:
            first = seconds, step
        if first is not None and (doublings := first[1] - step) > 1:
            allowed = RATIO**doublings * first[0]
            if seconds > allowed:
                allowed *= cache_factor(count >> doublings, count)
            assert seconds <= min(allowed, 3.5**doublings * first[0])
    size = path.stat().st_size
    tracemalloc.start()
    try:
        kind.read(path, encoder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{name}: {peak >> 20} MiB for {size >> 20} MiB")
    assert peak <= BYTES + 32 * size  # parsed JSON takes up to 27 times its bytes


def test_a_quadratic_reader_is_seen() -> None:
    def slow(count: int) -> None:
        for first in range(count):
            for second in range(first):
                max(first, second)

    few, many = (num_calls(lambda count=count: slow(count)) for count in (128, 256))  # type: ignore[misc]
    assert many > 2.2 * few + 200
