"""The order of a large source, in a file beside the index that all processes of a node read.

    blocks of the key stream    parted by the keys' top bits        -> scratch: (key, place)
    one bucket at a time        its pairs of all blocks, sorted     -> places, in order
    order file                  <int32 places, 4 MiB> <seal of the file's name, page and places> ...

It is made as parts are. It is never mapped, so one that is cut or removed in use is made again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from vlmpack.data.index import parts
from vlmpack.data.index.columns_file import Int64s
from vlmpack.errors import CapabilityError, refuse_full_table
from vlmpack.storage.fetch import ShardStamp
from vlmpack.whole_file import open_regular, sync_folder, written_whole

BLOCK, PAGE = 1 << 19, 4 << 20
"""Keys in memory at once, and bytes under one seal."""
PAIR = np.dtype([("key", "<u8"), ("place", "<i4")])


class OrderFile:
    """(count,) the order by Philox's stream of a key, made where it is missing or damaged.

    Raises:
        CapabilityError: more samples than int32 counts.
        DataError: it cannot be written or read back, or another process makes it for too long.
    """

    def __init__(self, folder: Path, count: int, key: int) -> None:
        if count >= 1 << 31:
            raise CapabilityError(f"a source of {count:,} samples; make sources of less than 2**31")
        self.count, self.key = count, key
        self.path = folder / f"{key:032x}-{count}.order"
        self.page = lru_cache(1)(self._page)
        self.page(0)

    def __getitem__(self, places: slice) -> Int64s:
        """(n,) what stands at n places in a row."""
        start, stop, _ = places.indices(self.count)
        first = 4 * start // PAGE
        pages = b"".join(map(self.page, range(first, -(-4 * stop // PAGE))))
        found = np.frombuffer(pages, "<i4", stop - start, 4 * start - first * PAGE)
        return found.astype(np.int64)

    def _page(self, number: int) -> bytes:
        part = parts.Part(ShardStamp(str(self.path), 4 * self.count, ""), str(self.path))
        for _ in range(3):
            found, is_there = b"", self.path.exists()
            try:
                with open_regular(self.path) as file:
                    file.seek(number * (PAGE + parts.SEAL_BYTES))
                    found = file.read(min(PAGE, 4 * self.count - number * PAGE) + parts.SEAL_BYTES)
                os.utime(self.path)  # others are removed before it
            except OSError as error:
                refuse_full_table(error)
            if found == self._sealed(number, found[: -parts.SEAL_BYTES]):
                return found[: -parts.SEAL_BYTES]
            if is_there:
                parts.logger.warning("the order file %s is damaged; it is made again", self.path)
                with suppress(OSError):
                    self.path.unlink()
            parts.build_parts_together([part], self._write, parts.BuildSettings(), what="order")
        raise parts.unwritable(part.path, OSError("it does not read back"), "an order")

    def _sealed(self, number: int, page: bytes) -> bytes:
        return page + parts.seal(f"{self.path.name}-{number}", page)

    def _write(self, part: parts.Part) -> None:
        try:
            with written_whole(self.path) as file:
                file.writelines(self._pages())
            sync_folder(self.path.parent)
        except OSError as error:
            raise parts.unwritable(part.path, error, f"an order of {self.count:,}") from error
        with suppress(OSError):
            for old in self.path.parent.glob("*.order*"):
                if old.stat().st_mtime < time.time() - 86_400:  # nobody has read it for a day
                    old.unlink()

    def _pages(self) -> Iterator[bytes]:
        stream, bits = np.random.Philox(key=self.key), (self.count // BLOCK).bit_length() + 1
        starts, rest = [], 0
        with tempfile.TemporaryFile(dir=self.path.parent) as scratch:  # has no name to be left
            for first in range(0, self.count, BLOCK):
                keys = stream.random_raw(min(BLOCK, self.count - first))
                top = (keys >> np.uint64(64 - bits)).astype(np.uint16)
                order = np.argsort(top, kind="stable")
                pairs = np.empty(keys.shape[0], PAIR)
                pairs["key"], pairs["place"] = keys[order], order + first
                scratch.write(pairs.data)
                starts.append(first + np.searchsorted(top[order], np.arange((1 << bits) + 1)))
                rest += int(pairs.view("<u4").sum())
            scratch.flush()
            for low, high in pairwise(PAIR.itemsize * np.stack(starts, axis=1)):
                spans = zip((high - low).tolist(), low.tolist(), strict=True)
                read = b"".join(os.pread(scratch.fileno(), *span) for span in spans)
                pairs = np.frombuffer(read, PAIR)
                keys = np.ascontiguousarray(pairs["key"])
                # Numpy sorts 16 bits by radix, and what is nearly in order in linear time.
                top = (keys << np.uint64(bits) >> np.uint64(48)).astype(np.uint16)
                order = np.argsort(top, kind="stable")
                order = order[np.argsort(keys[order], kind="stable")]
                scratch.write(pairs["place"][order].data)
                rest -= int(pairs.view("<u4").sum())
            if rest:
                raise OSError("other pairs were read than were written")
            scratch.seek(PAIR.itemsize * self.count)
            for number, page in enumerate(iter(partial(scratch.read, PAGE), b"")):
                yield self._sealed(number, page)
