"""One packer in a process of its own: each line on stdin is one run, answered by its CPU seconds.

    python packer_process.py {vlmpack,trl,bridge} LENGTHS.npy CAPACITY [MORE]

MORE is for bridge its wheel, for vlmpack a file of second quantities and their budget.

The first answer, before any line, is the packer's version. What is timed is the choice of packs
from lengths alone: of TRL's packer, which packs a table, the time inside pyarrow.compute (reading
lengths, moving rows) is subtracted; of Megatron-Bridge the one file that packs is loaded from its
wheel. Each packs in one thread, so CPU seconds are its seconds on an idle core.
"""

from __future__ import annotations

import json
import sys
import time
import types
import zipfile
from collections.abc import Callable

import numpy as np

Packer = Callable[[], tuple[int, float]]
"""Packs once; the number of packs, and seconds to leave out."""


def vlmpack_packer(lengths: np.ndarray, capacity: int, *second: str) -> tuple[str, Packer]:
    """Ours."""
    import vlmpack
    from vlmpack.packing import plan_packs

    options = {"second": np.load(second[0]), "second_budget": int(second[1])} if second else {}
    return vlmpack.__version__, lambda: (len(plan_packs(lengths, capacity, **options)), 0.0)


class _Timed:
    """A module whose functions add up the seconds that they take."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._module, name)

        def timed(*arguments: object, **options: object) -> object:
            started = time.process_time()
            result = function(*arguments, **options)
            self.seconds += time.process_time() - started
            return result

        return timed


def trl_packer(lengths: np.ndarray, capacity: int) -> tuple[str, Packer]:
    """TRL's best-fit-decreasing."""
    import pyarrow as pa
    import trl
    from trl import data_utils

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.uint8)))
    table = pa.table({"input_ids": column})
    data_utils.pc = compute = _Timed(data_utils.pc)

    def pack() -> tuple[int, float]:
        compute.seconds = 0.0
        return len(data_utils._pack_bfd(table, capacity)), compute.seconds

    return trl.__version__, pack


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
    version = wheel.rsplit("/", 1)[-1].split("-")[1]
    return version, lambda: (len(pack(values, capacity)), 0.0)  # type: ignore[operator]


def main() -> None:
    """Serve runs until stdin ends."""
    name, path, capacity, *more = sys.argv[1:]
    makers = {"vlmpack": vlmpack_packer, "trl": trl_packer, "bridge": bridge_packer}
    version, pack = makers[name](np.load(path), int(capacity), *more)
    print(json.dumps({"version": version}), flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        packs, apart = pack()
        seconds = time.process_time() - started - apart
        print(json.dumps({"seconds": seconds, "packs": packs}), flush=True)


if __name__ == "__main__":
    main()
