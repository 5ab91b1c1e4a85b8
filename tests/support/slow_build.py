"""Parts of an index whose making takes a while and says who did it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from vlmpack.data.index.parts import Part, write_part
from vlmpack.errors import DataError
from vlmpack.storage.fetch import ShardStamp


@dataclass(frozen=True)
class SlowBuild:
    """Writes a part after a while, and says which process did it."""

    log: str
    seconds: float = 0.1
    fail: bool = False

    def __call__(self, part: Part) -> None:
        with open(self.log, "a", encoding="utf-8") as stream:
            stream.write(f"{os.getpid()} {Path(part.path).name}\n")
        time.sleep(self.seconds)
        if self.fail:
            raise DataError("damaged", error_class="integrity", shard=part.stamp.path)
        write_part(part.path, pa.table({"x": [1]}), {})


def parts_in(folder: Path, count: int = 4) -> list[Part]:
    return [
        Part(ShardStamp(f"s{n}", 1, "1"), str(folder / f"s{n}.index.part")) for n in range(count)
    ]
