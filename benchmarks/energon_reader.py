"""Energon's own reader over a prepared dataset: `FOLDER-OR-msc://...`, for bench_data.

Runs in the Python that Energon is installed in. For each line that it reads it reads every sample
once, in the order of the tars, and prints samples, seconds, and CPU seconds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.metadata import get_dataset_info
from megatron.energon.flavors.webdataset.structs import ShardInfo


def read_all(folder: EPath) -> int:
    """How many samples have their image."""
    counts = get_dataset_info(folder)["shard_counts"]
    shards = [ShardInfo(name=name, path=folder / name, count=n) for name, n in counts.items()]
    reader = ShardInfosITarReader(folder, shards)
    found = sum(bool(reader[place]["jpg"]) for place in range(len(reader)))
    reader.close()
    return found


def main() -> None:
    """Until the input ends."""
    folder = EPath(sys.argv[1])
    for _ in sys.stdin:
        cpu, started = os.times(), time.perf_counter()
        count = read_all(folder)
        seconds = time.perf_counter() - started
        spent = sum(os.times()[:4]) - sum(cpu[:4])
        print(json.dumps({"samples": count, "seconds": seconds, "cpu": spent}), flush=True)


if __name__ == "__main__":
    main()
