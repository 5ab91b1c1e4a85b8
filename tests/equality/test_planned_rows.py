"""Rows as runs plan them compute what each sample would have computed alone.

A split of real digits is planned in mode online, saved as packs of each kind and read back; every
row of its epoch is compared with the stock model's samples, one by one.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from support.recipes import copy_samples, rewrite
from support.runs import find_differences, run_batch
from support.shards import ROOT, TINY_MODEL, read_shard
from support.stock import StockProcessor, run_one_by_one

from vlmpack.build.look import open_recipe
from vlmpack.data.packs.write import PackOrder
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe

COUNT = 10
ORDERS = {
    "plan": PackOrder(kind="plan"),
    "tokens": PackOrder(kind="tokens"),
    "shards": PackOrder(kind="shards"),
    "bfd": PackOrder(planner="bfd"),
}


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """A recipe's settings; the answers are unknown to the model, as `mixed_samples` explains."""
    folder = tmp_path_factory.mktemp("planned")
    shard = folder / "train-000000.tar"
    copy_samples(ROOT / "assets/digits/val-000000.tar", shard, COUNT, skip=8)
    draw = random.Random(0)

    def unknown(name, data):
        if not name.endswith(".json"):
            return data
        document = json.loads(data)
        answer = "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 20)))
        document["messages"][-1]["content"] = [{"type": "text", "text": answer}]
        return json.dumps(document).encode()

    rewrite(shard, unknown)
    return {
        "model": {"path": str(TINY_MODEL)},
        "data": {"train": str(shard), "num_workers": 0, "index_dir": str(folder / "index")},
        "packing": {"mode": "online"},
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "seq_length": 256,
            "num_epochs": 1,
            "seed": 3,
        },
        "optim": {"lr": 2e-4},
        "run_dir": str(folder / "run"),
    }


@pytest.fixture(scope="module")
def raw(online):
    """The split's samples by key."""
    return {sample.key: sample for sample in read_shard(Path(online["data"]["train"]))}


def packed(settings, folder, order):
    """The settings of a run on packs that are saved here."""
    pack_recipe(load_recipe(settings), folder, order)
    return settings | {"packing": {"mode": "offline", "path": str(folder)}}


def rows_of_an_epoch(settings):
    """Packed rows in the order of training."""
    data, _ = open_recipe(load_recipe(settings))
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_per_epoch())
    return [micro.batch for step in steps for micro in step.micro_batches if micro.samples]


def without_borders(batch):
    """All of a row as one segment."""
    return replace(
        batch,
        cu_seqlens=torch.tensor([0, batch.num_slots], dtype=torch.int32),
        cu_seqlens_padded=None,
        segment_lengths=(batch.num_slots,),
    ).packed_seq_params()


@pytest.mark.cases(quick="online", slow="bfd")
@pytest.mark.parametrize("kind", ["online", *ORDERS])
def test_every_row_equals_its_samples_alone(vlm, stock_model, online, raw, tmp_path, kind):
    settings = online if kind == "online" else packed(online, tmp_path / "packs", ORDERS[kind])
    rows = rows_of_an_epoch(settings)
    assert sorted(key for row in rows for key in row.keys) == sorted(raw)
    assert len(raw) == COUNT and 1 < len(rows) <= COUNT / 2, "rows of several samples"
    assert {len(raw[key].images) for row in rows for key in row.keys} >= {0, 1, 2}
    processor = StockProcessor(TINY_MODEL)
    for row in rows:
        reference = run_one_by_one(stock_model, {key: processor(raw[key]) for key in row.keys})
        assert find_differences(run_batch(vlm, row), reference) == [], row.keys
    broken = run_batch(vlm, row, without_borders(row))
    assert len(row.keys) > 1 and find_differences(broken, reference) != []
