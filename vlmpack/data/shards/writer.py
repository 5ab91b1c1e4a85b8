"""webdataset's TarWriter writes our shards, as users expect.

Only this module imports webdataset, when the first shard is written, since that imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO


class ShardWriter:
    """Samples as a tar. The stream stays open. Fixed time stamps, owners and modes keep the bytes
    the same. So does a `GzipFile` with `mtime=0`."""

    def __init__(self, stream: BinaryIO) -> None:
        from webdataset.writer import TarWriter

        fixed: dict[str, Any] = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
        self._writer = TarWriter(stream, encoder=False, **fixed)

    @property
    def size(self) -> int:
        """Bytes of all members so far. The stream may have fewer until the end."""
        return int(self._writer.tarstream.offset)

    def write(self, key: str, fields: Mapping[str, bytes]) -> None:
        """Append one sample, its members by name."""
        self._writer.write({"__key__": key, **fields})

    def close(self) -> None:
        """Write the archive's end."""
        self._writer.close()
