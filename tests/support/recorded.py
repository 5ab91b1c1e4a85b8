"""Splits, and records as the replicas of a run leave them, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from support.shard_fakes import (
    FakeEncoder,
    config_for,
    key_of,
    sample_fields,
    write_shard,
)

from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.file_format import RESULT, SAMPLE_RECORD
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.sources import Source
from vlmpack.training.record import (
    StepSamples,
    open_record,
    read_launches,
    standing_batches,
)
from vlmpack.training.run_dir import RunDir

BAD = (key_of(4), key_of(11))


def open_split(
    root: Path, ledger: Ledger, *, seed: int = 7, weighted: bool = False, **more: Any
) -> TrainData:
    """The split; its shards are written where they are not there."""
    for shard, first in enumerate((0, 5, 10)):
        path = root / f"data/s-{shard}.tar"
        if not path.exists():
            numbers = range(first, min(first + 5, 14))
            write_shard(path, ((key_of(n), _fields(n)) for n in numbers))
    settings: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "seed": seed}
    settings["on_error"] = OnErrorSection(schema="skip")
    settings.update(more)
    if weighted:
        settings["sources"] = tuple(
            Source(name=f"s{n}", path=str(root / f"data/s-{n}.tar"), weight=weight)
            for n, weight in ((0, 1.0), (2, 4.0))
        )
        settings["epoch_size"] = 10
    config = config_for(str(root / "data/s-*.tar"), root / "index", **settings)
    return TrainData.open(config, FakeEncoder(), ledger=ledger)


def _fields(number: int) -> dict[str, bytes]:
    return {"json": b"{}"} if key_of(number) in BAD else sample_fields(number)


def ranks_of(rank: int, dp: int) -> Ranks:
    """One of `dp` replicas, without a process group: launches are noted by the caller."""
    return Ranks(
        rank=rank,
        world_size=1,
        dp_rank=rank,
        dp_size=dp,
        device=torch.device("cpu"),
    )


def launch(
    run_dir: RunDir, data: TrainData, start: DataState, *, stop: int, dp: int, torn: int = 0
) -> None:
    """Record batches up to `stop`, as `dp` replicas do it; of one more, `torn` replicas do."""
    first = open_record(
        run_dir.samples, ranks_of(0, dp), start=start.batches, state=start.to_json()
    )
    assert first is not None
    number = read_launches(run_dir.samples)[-1].number
    for rank in range(dp):
        record = type(first)(run_dir.samples, dp_rank=rank, launch=number)
        for step in data.batches(start, rank=rank, dp=dp, max_steps=stop + (rank < torn)):
            record.write(StepSamples.of(step))
        record.sync()
        record.close()


def count_steps(run_dir: RunDir) -> int:
    """metrics.jsonl and result.json as the loop would have left them; the steps."""
    rows = [
        {
            "step": record.batch + 1,
            "loss": 1.0,
            "num_samples": len(record.trained),
            "num_skipped": len(record.holes),
        }
        for record in standing_batches(run_dir.samples, read_launches(run_dir.samples))
    ]
    write_lines(run_dir.metrics, rows)
    totals = {
        "steps": len(rows),
        "samples": sum(row["num_samples"] for row in rows),
        "skipped_samples": sum(row["num_skipped"] for row in rows),
    }
    run_dir.result.write_text(json.dumps(RESULT.mark(totals)))
    return len(rows)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(map(checked_line, lines)))


def write_record(folder: Path, steps: list[list[str]], replicas: int = 1) -> None:
    """The `samples` folder of a run whose steps trained these keys, dealt out to the replicas."""
    folder.mkdir()
    launch = {"launch": 1, "start": 0, "dp": replicas, "state": {}}
    (folder / "launches.jsonl").write_bytes(checked_line(SAMPLE_RECORD.mark(launch), compact=True))
    for rank in range(replicas):
        lines = b""
        for batch, keys in enumerate(steps):
            line: dict[str, Any] = {"launch": 1, "batch": batch, "epoch": 0}
            if not batch:
                line["shards"] = {"0": f"/disk/{rank}/a.tar"}
            line["bins"] = [[f"0/{key}" for key in keys[rank::replicas]]]
            lines += checked_line(line, compact=True)
        (folder / f"rank-{rank:04d}.jsonl").write_bytes(lines)
