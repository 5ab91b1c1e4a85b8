"""Packs of short samples: chosen from as many as two packs hold, which pack.json keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packed_splits import SIZES, PackEncoder, online, pack
from support.shard_fakes import open_data, write_shards

from vlmpack.data.packs.manifest import read_manifest
from vlmpack.packing.budget import RowBudget

COUNT = 300
BUDGET = RowBudget(max_tokens=4096, alignment=4)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    write_shards(folder, COUNT, per_shard=150)
    return folder


@pytest.mark.parametrize("planner", ["stream", "bfd"])
def test_packs_keep_the_buffer_that_they_were_chosen_from(
    short: Path, tmp_path: Path, planner: str
) -> None:
    data = online(short, tmp_path / "index", budget=BUDGET)
    manifest = pack(data, tmp_path / "packs", planner=planner)
    lengths = -(-data.fitted.table.num_tokens // 4) * 4
    assert manifest.budget.buffer == -(-2 * 4096 * COUNT // int(lengths.sum())) > 64
    assert manifest.budget.max_sequences is not None and manifest.budget.max_sequences > 64
    assert read_manifest(tmp_path / "packs") == manifest
    saved: dict[str, Any] = {"mode": "offline", "path": str(tmp_path / "packs")}
    values = {**SIZES, **saved, "max_tokens": 4096, "encoder": PackEncoder()}
    train = open_data(str(short / "s-*.tar"), tmp_path / "index", **values)
    start = train.start()
    rows = [
        row for batch in train.planned(start, train.steps_until(1, start)) for row in batch.bins
    ]
    assert max(map(len, rows)) > 64
    assert sorted(np.concatenate(rows).tolist()) == list(range(COUNT))
