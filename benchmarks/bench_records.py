"""Files of records against shards of the same samples, on a local disk, one process each.

- indexing: ROWS rows of a JSONL file, each with one picture in a file of its own, against shards
  with the same members. Each variant runs in a process of its own, whose largest memory is told
  too; what a process starts with is taken off.
- reading: samples of a shuffle window in their order, verified and cooked, from parquet with the
  pictures inside, in row groups of GROUP rows as `datasets` writes them, against shards.

Variants alternate, medians are compared; of reading in CPU seconds, which it is bound by. Page
caches are warm: our own work counts, not the disk's.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
import webdataset as wds
from first_batch import open_data
from loopback import picture
from timing import processor_medians

from vlmpack.data.loading.read import SampleReader
from vlmpack.storage.fetch import LocalFetcher

ROWS, PER_SHARD = 100_000, 10_000
SMALL_BYTES = 2_000
READ, GROUP = 8_192, 100
BIN = 16


def bench_records(rounds: int) -> dict[str, object]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory(prefix="vlmpack-bench-") as name:
        return _bench_index(Path(name) / "index", min(rounds, 3)) | _bench_reads(
            Path(name) / "read", rounds
        )


def _bench_index(folder: Path, rounds: int) -> dict[str, object]:
    shards = _write_shards(folder, ROWS, small=True)
    records = _write_lines(folder, ROWS)
    costs: dict[str, list[tuple[float, int]]] = {"shards": [], "records": []}
    for _ in range(rounds):
        for kind, paths in (("shards", shards), ("records", records)):
            costs[kind].append(_in_process(paths, folder / "i"))
    base = _in_process([], folder / "i")[1]
    seconds = {kind: median(cost[0] for cost in found) for kind, found in costs.items()}
    memory = {kind: median(cost[1] - base for cost in found) for kind, found in costs.items()}
    return {
        "index_rows": ROWS,
        "index_time_over_shards": seconds["records"] / seconds["shards"],
        "index_seconds": seconds["records"],
        "index_memory_over_shards": memory["records"] / memory["shards"],
        "index_memory_mib": memory["records"] / 1024,
    }


def _in_process(paths: list[str], index: Path) -> tuple[float, int]:
    """(seconds, largest memory in KiB) of indexing files in a fresh process."""
    shutil.rmtree(index, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_index, args=(paths, str(index), theirs))
    process.start()
    theirs.close()  # so that a process that fails is an end of the pipe
    found: tuple[float, int] = mine.recv()
    process.join()
    return found


def _index(paths: list[str], index: str, told: multiprocessing.connection.Connection) -> None:
    started = time.perf_counter()
    if paths:
        data, _ = open_data(paths, Path(index), None)
        data.split.index_all()
        data.split.close()
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text()  # ru_maxrss is the parent's, where that is more
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    told.send((seconds, int(peak)))


def _bench_reads(folder: Path, rounds: int) -> dict[str, object]:
    variants: dict[str, Callable[[], object]] = {}
    for kind, paths in (
        ("shards", _write_shards(folder, READ, small=False)),
        ("parquet", _write_table(folder, READ)),
    ):
        data, _ = open_data(paths, folder / "i", None)
        steps = data.planned(data.start(), data.steps_per_epoch())
        bins = [data.split.refs(samples) for step in steps for samples in step.bins]
        data.split.close()
        variants[kind] = lambda bins=bins: _read(bins)
    seconds = processor_medians(variants, rounds=rounds)
    return {
        "parquet_rate_of_shards": seconds["shards"] / seconds["parquet"],
        "parquet_samples_per_second": READ / seconds["parquet"],
    }


def _read(bins: list[list[object]]) -> None:
    """Every sample, as a loader's worker reads it, with nothing kept from the round before."""
    reader = SampleReader(LocalFetcher())
    count = 0
    for refs in bins:
        found = reader.read_all(refs)
        count += sum(len(sample.images) == 1 for sample in found)
    assert count == READ, count


def _chat(number: int, image: str | None) -> dict[str, object]:
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    asked = [part, {"type": "text", "text": f"What is on picture {number}?"}]
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "text", "text": f"It is picture {number}."}]},
    ]
    return {"messages": turns}


def _pictures(*, small: bool) -> list[bytes]:
    found = [picture(seed) for seed in range(40)]
    if not small:
        return found
    from io import BytesIO

    from PIL import Image

    shrunk = []
    for data in found:
        stream = BytesIO()
        Image.open(BytesIO(data)).resize((56, 42)).save(stream, "JPEG", quality=70)
        shrunk.append(stream.getvalue().ljust(SMALL_BYTES, b"\0"))
    return shrunk


def _write_shards(folder: Path, rows: int, *, small: bool) -> list[str]:
    pictures = _pictures(small=small)
    (folder / "shards").mkdir(parents=True)
    paths = []
    for first in range(0, rows, PER_SHARD):
        path = folder / "shards" / f"train-{first // PER_SHARD:06d}.tar"
        paths.append(str(path))
        with wds.TarWriter(str(path)) as writer:
            for number in range(first, min(rows, first + PER_SHARD)):
                fields = {
                    "json": json.dumps(_chat(number, None)).encode(),
                    "jpg": pictures[number % len(pictures)],
                }
                writer.write({"__key__": f"{number:09d}", **fields})
    return paths


def _write_lines(folder: Path, rows: int) -> list[str]:
    pictures = _pictures(small=True)
    path = folder / "records.jsonl"
    with path.open("w") as stream:
        for number in range(rows):
            name = f"pictures/{number // 1000}/{number}.jpg"
            if number % 1000 == 0:
                (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes(pictures[number % len(pictures)])
            stream.write(json.dumps(_chat(number, name)) + "\n")
    return [str(path)]


def _write_table(folder: Path, rows: int) -> list[str]:
    pictures = _pictures(small=False)
    records = [
        {**_chat(number, None), "images": [{"bytes": pictures[number % len(pictures)]}]}
        for number in range(rows)
    ]
    path = folder / "records.parquet"
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=GROUP)
    return [str(path)]
