"""A shard cut into blocks: arithmetic and names.

a range    offset ......... offset + length
blocks  |    0    |    1    |    2    |  3 |      the last one is shorter
spans         [begin, end of 0] [all of 1] [begin, end of 2]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vlmpack.storage.fetch import ShardStamp

BLOCK_RULE = "block-1"

Bytes = bytes | memoryview


class Span(NamedTuple):
    """A part of one block.

    Args:
        block: its number in the shard.
        begin, end: bytes within the block.
    """

    block: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """The blocks of one version of a shard.

    Args:
        stamp: the shard.
        block_bytes: of every block but the last.
    """

    stamp: ShardStamp
    block_bytes: int

    @property
    def count(self) -> int:
        """Blocks of the shard."""
        return -(-self.stamp.size // self.block_bytes)

    def size(self, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_bytes, self.stamp.size - block * self.block_bytes)

    def name(self, block: int) -> str:
        """32 hexadecimal digits: path, version, size and place, so nothing else has this name."""
        stamp = self.stamp
        place = (BLOCK_RULE, stamp.path, stamp.version, stamp.size, self.block_bytes, block)
        return hashlib.blake2b(repr(place).encode(), digest_size=16).hexdigest()

    def spans(self, offset: int, length: int) -> list[Span]:
        """The parts of blocks that make up a range inside the shard, in order."""
        if not length:
            return []
        size, end = self.block_bytes, offset + length
        return [
            Span(block, max(offset - block * size, 0), min(end - block * size, size))
            for block in range(offset // size, -(-end // size))
        ]

    def range_of(self, span: Span) -> tuple[int, int]:
        """(offset, length) of a span in the shard."""
        return span.block * self.block_bytes + span.begin, span.end - span.begin

    def range_of_run(self, run: list[int]) -> tuple[int, int]:
        """(offset, length) of neighbouring blocks."""
        return run[0] * self.block_bytes, sum(self.size(block) for block in run)


def runs(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Neighbours together: 1 2 3 7 8 -> [1 2 3] [7 8]."""
    run: list[int] = []
    for block in blocks:
        if run and block != run[-1] + 1:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
