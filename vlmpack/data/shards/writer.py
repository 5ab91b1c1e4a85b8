"""webdataset's TarWriter writes our shards, as users expect of them.

This is the one module that imports webdataset, and only when a shard is begun: it brings torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO


class ShardWriter:
    """Samples as a tar. Time stamps, owners and modes are fixed, so the same samples give the same
    bytes.

    Args:
        stream: where to; it stays open. A `GzipFile` with `mtime=0` keeps a compressed shard's
            bytes the same too.
    """

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
