"""One packer in a process of its own: each line on stdin is one run, answered by its seconds.

    python packer_process.py {vlmpack,trl,bridge} LENGTHS.npy CAPACITY [BRIDGE_WHEEL]

The first answer, before any line, is the packer's version. What is timed is the choice of packs
from lengths alone: TRL packs a column of empty values, so that no token is copied, all rows at
once; of Megatron-Bridge the one file that packs is loaded from its wheel.
"""

from __future__ import annotations

import json
import sys
import time
import types
import zipfile
from collections.abc import Callable

import numpy as np

Packer = Callable[[], int]
"""Packs once; the number of packs."""


def vlmpack_packer(lengths: np.ndarray, capacity: int) -> tuple[str, Packer]:
    """Ours."""
    import vlmpack
    from vlmpack.packing import plan_packs

    return vlmpack.__version__, lambda: len(plan_packs(lengths, capacity))


def trl_packer(lengths: np.ndarray, capacity: int) -> tuple[str, Packer]:
    """TRL's best-fit-decreasing."""
    import pyarrow as pa
    import trl
    from trl import data_utils

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": column})
    return trl.__version__, lambda: len(data_utils._pack_bfd(table, capacity))


def bridge_packer(lengths: np.ndarray, capacity: int, wheel: str) -> tuple[str, Packer]:
    """Megatron-Bridge's first-fit-decreasing."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read("megatron/bridge/data/packing/algorithms.py").decode()
    pickles = types.ModuleType("megatron.bridge.utils.safe_pickle")
    pickles.safe_load_npy = None  # type: ignore[attr-defined]  # what reads files; not packing
    sys.modules[pickles.__name__] = pickles
    names: dict[str, object] = {"__name__": "algorithms"}
    exec(compile(source, "algorithms.py", "exec"), names)
    pack = names["first_fit_decreasing"]
    values = lengths.tolist()
    return wheel.rsplit("/", 1)[-1].split("-")[1], lambda: len(pack(values, capacity))  # type: ignore[operator]


def main() -> None:
    """Serve runs until stdin ends."""
    name, path, capacity, *wheel = sys.argv[1:]
    makers = {"vlmpack": vlmpack_packer, "trl": trl_packer, "bridge": bridge_packer}
    version, pack = makers[name](np.load(path), int(capacity), *wheel)
    print(json.dumps({"version": version}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        packs = pack()
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "packs": packs}), flush=True)


if __name__ == "__main__":
    main()
