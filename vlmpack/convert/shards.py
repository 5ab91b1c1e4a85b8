"""Shards as webdataset writes them, each whole or not there, indexed as soon as it is closed.

A shard is written under another name, synced and renamed.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vlmpack.convert.settings import ConvertSettings
from vlmpack.data.index.parts import part_for
from vlmpack.data.index.shard_index import IndexBuilder, load_index
from vlmpack.data.shards.writer import ShardWriter
from vlmpack.errors import VlmpackError, writing
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.whole_file import sync_folder
from vlmpack.words import counted

PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """One finished shard.

    Args:
        name: of its file.
        samples: in it.
        num_bytes: its size.
    """

    name: str
    samples: int
    num_bytes: int


class ShardFolder:
    """Writes the shards `PREFIX-000000.tar`, ... of one folder.

    Args:
        settings: the folder, made if missing; the prefix; the size of a shard.
    """

    def __init__(self, settings: ConvertSettings) -> None:
        self.settings = settings
        self.folder, self.prefix = settings.folder, settings.prefix
        self.manifest = self.folder / f"{self.prefix}-manifest.json"
        self.builder = IndexBuilder(LocalFetcher(), settings.caps)
        self.shards: list[WrittenShard] = []
        self._tar: ShardWriter | None = None
        self._stream: BinaryIO | None = None
        self._samples = self._bytes = 0

    def existing(self) -> list[Path]:
        """Shards and unfinished shards of this prefix, and what says that they are whole; no other
        file with such a beginning."""
        shard = re.escape(self.prefix) + r"-\d{6,}\.tar"
        manifest = re.escape(self.manifest.name)
        ours = re.compile(rf"{shard}|\.{shard}{re.escape(PARTIAL)}|{manifest}", re.ASCII)
        return sorted(path for path in self.folder.glob("*") if ours.fullmatch(path.name))

    def prepare(self) -> None:
        """Make the folder; nobody else's shards may lie in the way.

        Raises:
            VlmpackError: there are some and none may be overwritten, or the folder cannot be made.
        """
        found = self.existing()
        if found and not self.settings.overwrite:
            raise VlmpackError(
                f"{self.folder} holds {counted(len(found), 'file')} named {self.prefix}-*, perhaps "
                "of an unfinished conversion; choose another OUT, or --overwrite"
            )
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in found:
                path.unlink()

    def write(self, key: str, fields: dict[str, bytes]) -> None:
        """Append one sample, its members by name."""
        most = self.settings
        if self._samples >= most.max_shard_samples or self._bytes >= most.max_shard_bytes:
            self.close()
        if self._tar is None:
            path = self.folder / f".{self._name()}{PARTIAL}"
            self._stream = path.open("xb")
            self._tar = ShardWriter(self._stream)
        self._tar.write(key, fields)
        self._bytes += sum(map(len, fields.values()))
        self._samples += 1

    def close(self) -> None:
        """Finish the last shard."""
        if self._tar is not None:
            self._tar.close()
            self._finish(self._name())
            self._tar = None
            self._samples = self._bytes = 0

    def abandon(self) -> None:
        """Drop the unfinished shard; finished ones stay."""
        if self._stream is not None:
            if self._tar is not None:
                with suppress(OSError):  # a full disk takes no end either
                    self._tar.close()
            self._stream.close()
            Path(self._stream.name).unlink(missing_ok=True)
            self._stream = None

    def _name(self) -> str:
        return f"{self.prefix}-{len(self.shards):06d}.tar"

    def _finish(self, name: str) -> None:
        """Put the closed tar on disk under its own name, and its index beside it."""
        assert self._stream is not None
        path = (self.folder / name).absolute()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        Path(self._stream.name).rename(path)
        self._stream = None
        sync_folder(path.parent)
        stamp = LocalFetcher().head(str(path))
        part = part_for(self.settings.index_dir, stamp, self.builder.rule)
        self.settings.index_dir.mkdir(parents=True, exist_ok=True)
        self.builder(part)
        table = load_index(part, self.builder).table
        reasons = table.column("reason").drop_null()
        assert not len(reasons), f"a converted sample is bad: {reasons[0]}"
        self.shards.append(WrittenShard(path.name, table.num_rows, stamp.size))
