"""Tables and saved data sets that are damaged by lot end in an error with a name.

They are read in a process of its own, which pyarrow's C++ code may end.

Tables and data sets with damage by lot, read in a process of its own: C++ may end it.

    python test_damaged_tables.py FOLDER COUNT KIND ...

Each line is a kind, an input's number, and how it ended: read, named or bare.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fuzz import changed, damaged
from support.record_data import ROWS_OF_A_GROUP, record, save_to_disk, write_pictures

from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.record import Place
from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import VlmpackError
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import stamped_shards

ROWS = 20
KINDS = ("parquet", "footer", "names", "arrow", "arrow-names", "state")
NAMES = (b"messages", b"images", b"content", b"role", b"id")


def write_table(folder: Path, kind: str) -> tuple[Path, Path]:
    """A small table, or a saved data set; its path, and that of the file to damage."""
    write_pictures(folder, range(ROWS))
    table = pa.Table.from_pylist([record(number) for number in range(ROWS)])
    if kind in ("arrow", "arrow-names", "state"):
        saved = save_to_disk(folder / "saved", table)
        return saved, saved / "state.json" if kind == "state" else min(saved.glob("*.arrow"))
    path = folder / "train.parquet"
    pq.write_table(table, path, row_group_size=ROWS_OF_A_GROUP, write_page_index=True)
    return path, path


def broken(data: bytes, kind: str, draw: random.Random) -> bytes:
    """A file's bytes with damage of a kind."""
    if kind == "state" and draw.random() < 0.5:
        try:
            return json.dumps(changed(json.loads(data), draw)).encode()
        except ValueError:  # a value that was put into itself
            return b""
    if kind in ("parquet", "arrow", "state"):
        return damaged(data, draw, [data])
    whole = bytearray(data)
    if kind == "footer":
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for _ in range(draw.choice((1, 1, 2, 4))):
            whole[draw.randrange(start, len(data) - 8)] = draw.randrange(256)
    else:
        name = draw.choice(NAMES)
        whole[draw.choice([at for at in range(len(data)) if data.startswith(name, at)])] = 0xFF
    return bytes(whole)


def read(path: Path) -> int:
    """Every sample of the files, by a scan and then by its place; how many there are."""
    fetcher, caps = LocalFetcher(), SampleCaps(max_image_pixels=1 << 20)
    stamps = stamped_shards([str(path)], key="data.train", fetcher=fetcher)
    options = FormOptions(image_root=str(path.parent))
    count = 0
    for stamp in find_forms(stamps, options, fetcher, caps):
        files = RecordFiles(fetcher, caps)
        found = list(files.samples(stamp))
        places = [Place(int(raw.key), raw.offset, raw.length, raw.row or 0) for raw in found]
        files.read(stamp, places, [()] * len(places))
        count += len(found)
    return count


def go(folder: Path, kind: str, draw: random.Random) -> str:
    """Damage a copy and read it: how that ended."""
    path, file = write_table(folder, kind)
    file.write_bytes(broken(file.read_bytes(), kind, draw))
    try:
        return f"read {read(path)}"
    except VlmpackError as error:
        return f"named {type(error).__name__} {ascii(str(error))[:200]}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"bare {ascii(error)[:200]} {last.filename}:{last.lineno}"


def main(folder: Path, count: int, kinds: list[str]) -> None:
    """A line for each input, whose beginning is there before it is read."""
    logging.disable()
    for kind in kinds:
        for number in range(count):
            print(kind, number, end=" ", flush=True)
            print(go(folder / "table", kind, random.Random(f"{kind}|{number}")), flush=True)
            shutil.rmtree(folder / "table")


def check(folder: Path, kinds: tuple[str, ...], count: int) -> None:
    """Read so many damaged copies of each kind."""
    command = [sys.executable, __file__, str(folder), str(count), *kinds]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines = ended.stdout.splitlines()
    assert not ended.returncode, (ended.returncode, lines[-1:], ended.stderr[-1000:])
    assert not [line for line in lines if line.split()[2] == "bare"]
    ends = Counter(tuple(line.split()[:3:2]) for line in lines)
    print(ends)
    assert sum(ends.values()) == count * len(kinds)
    for kind in kinds:
        assert ends[kind, "named"] > count / 10, "vacuous: nothing was damaged"
        assert ends[kind, "read"] or count < 100, "vacuous: nothing came through the first check"


def test_no_bare_exception_and_no_end_of_the_process(tmp_path: Path) -> None:
    check(tmp_path, KINDS, 12)


@pytest.mark.slow
def test_more_of_them(tmp_path: Path) -> None:
    check(tmp_path, KINDS, 100)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_them(tmp_path: Path, kind: str) -> None:
    check(tmp_path, (kind,), 5000)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
