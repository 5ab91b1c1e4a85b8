"""Where column chunks lie is pyarrow's word for word, and no footer ends the process."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmpack.data.files.parquet_footer import read_chunks
from vlmpack.data.files.records import open_file
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher

ROWS = [
    {"image": f"{n}.png", "a.b": {"x": [n, None], "y": {"z": str(n % 3)}}, "q": "w" * n}
    for n in range(40)
]
OPTIONAL, REQUIRED = b"\x02\x18\x01q", b"\x00\x18\x01q"
"""The schema's entry of the column q, from its repetition on."""


def written(**options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=9, **options)
    return sink.getvalue()


def contradicting() -> bytes:
    """A footer whose column q is never null, with statistics of one that may be."""
    data = written()
    assert data.count(OPTIONAL) == 1
    return data.replace(OPTIONAL, REQUIRED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False, "compression": "none"},
        {"write_statistics": False, "write_page_index": True, "compression": "zstd"},
        {"version": "1.0", "data_page_version": "2.0", "store_schema": False},
        {"sorting_columns": [pq.SortingColumn(0)], "bloom_filter_options": {"q": True}},
    ],
    ids=("as is", "plain", "page index", "old", "sorted"),
)
def test_chunks_lie_where_pyarrow_says(options: dict[str, Any]) -> None:
    data = written(**options)
    found = read_chunks(io.BytesIO(data), len(data))
    said = pq.ParquetFile(io.BytesIO(data)).metadata
    assert len(found) == said.num_row_groups == 5
    for group, chunks in enumerate(found):
        theirs = [said.row_group(group).column(n) for n in range(said.num_columns)]
        assert len(chunks) == len(theirs) == 4
        for ours, stock in zip(chunks, theirs, strict=True):
            assert stock.path_in_schema.startswith(ours.column)
            assert ours.start == (stock.dictionary_page_offset or stock.data_page_offset)
            assert ours.compressed == stock.total_compressed_size
            assert ours.uncompressed == stock.total_uncompressed_size
    assert [chunk.column for chunk in found[0]] == ["image", "a.b", "a.b", "q"]


class Counting(io.BytesIO):
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


@pytest.mark.parametrize(("num_groups", "reads"), [(5, 1), (600, 2)])
def test_a_footer_is_read_at_once_where_it_is_not_long(num_groups: int, reads: int) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"q": ["w" * 99] * num_groups}), sink, row_group_size=1)
    file = Counting(sink.getvalue())
    assert len(read_chunks(file, len(sink.getvalue()))) == num_groups
    assert file.reads == reads


def test_a_footer_that_contradicts_itself_is_an_error_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(contradicting())
    fetcher = LocalFetcher()
    stamp = fetcher.head(str(path))
    file = open_file(fetcher, stamp, SampleCaps(), lambda names: ["image", "q"])
    with pytest.raises(DataError, match=r"row group 0 cannot be read as parquet: .*mismatch"):
        list(file.scan())
    file.close()
    others = open_file(fetcher, stamp, SampleCaps(), lambda names: ["image"])
    assert len(list(others.scan())) == len(ROWS), "what is sound is read"
    others.close()


@pytest.mark.slow
def test_pyarrow_ends_the_process_over_it(tmp_path: Path) -> None:
    """The reason for a reader of our own: where this fails, pyarrow's own figures will do."""
    path = tmp_path / "t.parquet"
    path.write_bytes(contradicting())
    code = "import sys, pyarrow.parquet as pq\nf = pq.ParquetFile(sys.argv[1])\n"
    code += "print(f.metadata.row_group(0).column(3))"
    ended = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT, ended.stderr


@pytest.mark.parametrize(
    ("footer", "why"),
    [
        (b"", "ends in the middle"),
        (b"\x49\xfc" + b"\x49\xfc" * 3, "ends in the middle"),
        (b"\x4c" + b"\x1c" * 100, "nested too deeply"),
        (b"\x46" + b"\xff" * 11, "longer than 64 bits"),
        (b"\x4e\x00", "kind 14"),
        (b"\x49\x1c\x00\x00", "row groups is damaged"),
        (b"\x46\x02\x00", "row groups is damaged"),
    ],
)
def test_a_footer_that_is_no_footer(footer: bytes, why: str) -> None:
    data = footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(ValueError, match=why):
        read_chunks(io.BytesIO(data), len(data))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"\0\0\0\0PARE"])
def test_no_end_of_a_parquet_file(data: bytes) -> None:
    with pytest.raises(ValueError, match="without the mark"):
        read_chunks(io.BytesIO(data), len(data))
