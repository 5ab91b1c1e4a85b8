"""Run in ranks: what ranks send that share a row, by U and by what is computed again.

    torchrun --nproc-per-node N shared_bytes.py FOLDER MODEL U/KIND ...

The row has one segment. Writes FOLDER/<U>-<KIND>.json, by rank: its slots, and [group, kind, calls,
bytes] of each collective.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from backends.hf.context_rows import gradients, rows_of
from forecast import traffic as traffic_module
from forecast.traffic import Traffic
from support.engines import make_engine
from support.of_all_ranks import write_of_all_ranks

from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.encode import Encoder


def main(folder: Path, model: Path, cases: list[str]) -> None:
    ranks = start_process_group(context=4)
    row = next(one for one in rows_of(model) if len(one.segment_lengths) == 1)
    for case in cases:
        degree, kind = case.split("-")
        again: Any = int(kind) if kind.isdigit() else kind
        split = {"context": 4, "context_heads": int(degree)}
        engine = make_engine(
            model, Encoder(model), ranks=ranks, activation_checkpointing=again, **split
        )
        group = engine.context
        assert group is not None
        groups = SimpleNamespace(cp=group.group, cp_heads=group.heads, cp_ring=group.ring)
        counted = SimpleNamespace(groups=groups)
        with patch.object(traffic_module, "SMALL", 0), Traffic(counted) as traffic:
            gradients(engine, [row])
        sent = [[*key, calls, traffic.bytes[key]] for key, calls in traffic.calls.items()]
        facts = {"sent": sent, "slots": row.num_slots}
        write_of_all_ranks(facts, folder / f"{case}.json", ranks)
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
