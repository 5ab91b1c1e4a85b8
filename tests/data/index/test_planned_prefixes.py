"""Where samples fork is known before they are read, and planned rows are as large as those made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.shard_fakes import chat_json, config_for, image_bytes, write_shard
from support.shards import TINY_MODEL

from vlmpack.data.index.groups import SamplePrefixes
from vlmpack.data.index.lengths import PREFIXES, LengthsBuilder
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import planned_samples
from vlmpack.encode import Encoder
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.collate import PackCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.packing.prefix_rows import planned_tokens
from vlmpack.storage.fetch import LocalFetcher

PICTURES, QUESTIONS = 6, 5
WORDS = ("what", "where is it", "why", "how many of them are there", "who")


@pytest.fixture(scope="module")
def cutting() -> Encoder:
    return Encoder(TINY_MODEL).replace(share_prefix=True)


def branched(picture: int) -> bytes:
    """Two answers to one prompt with an image."""
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why"}]}
    branches = [f"as {picture}", [{"role": "assistant", "content": "who knows"}]]
    return json.dumps({"messages": [asked], "branches": branches}).encode()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("prefixes")
    records = []
    for question in range(QUESTIONS):
        for picture in range(PICTURES):
            image = image_bytes(40 + 16 * picture, 56, seed=picture)
            fields = {"json": chat_json(WORDS[question], f"a {picture}", 1), "0.png": image}
            records.append((f"q{picture}-{question}", fields))
        records.append((f"t{question}", {"json": chat_json("no picture", "ok")}))
    for picture in range(3):
        image = image_bytes(64, 64, seed=50 + picture)
        records.append((f"b{picture}", {"json": branched(picture), "0.png": image}))
    for shard in range(3):
        write_shard(folder / f"s-{shard}.tar", records[13 * shard : 13 * (shard + 1)])
    return str(folder / "s-*.tar"), folder / "index"


def opened(shards: tuple[str, Path], encoder: Encoder, **changes: Any) -> TrainData:
    settings: dict[str, Any] = {
        "shuffle": "global",
        "group_by": "image",
        "mode": "online",
        "scope": "batch",
        "micro_batch_size": 1,
        "global_batch_size": 12,
        "seq_length": 96,
        "budget": RowBudget(max_tokens=96, alignment=4),
    }
    return TrainData.open(config_for(*shards, **(settings | changes)), encoder)


def test_the_columns_hold_the_cuts_of_each_sample() -> None:
    rows = [
        [{"length": 3, "digest": -7}],
        [],
        [{"length": 2, "digest": 5}, {"length": 4, "digest": 1}],
    ]
    found = SamplePrefixes.of(
        pa.chunked_array([pa.array(rows[:1], PREFIXES), pa.array(rows[1:], PREFIXES)])
    )
    assert found.lengths.tolist() == [[3, 0], [0, 0], [2, 4]]
    assert found.digests.tolist() == [[-7, 0], [0, 0], [5, 1]]
    changed = found.replaced({2: [(9, 8)]})
    assert changed.lengths.tolist() == [[3, 0], [0, 0], [9, 0]]
    assert found.lengths[2].tolist() == [2, 4]


def test_planned_prefixes_are_those_that_samples_are_encoded_with(
    shards: tuple[str, Path], cutting: Encoder
) -> None:
    data = opened(shards, cutting)
    table = data.fitted.table
    numbers = np.arange(table.num_samples)
    planned = planned_samples(table, numbers)
    counts: dict[int, int] = {}
    for number, expected in zip(numbers.tolist(), planned, strict=True):
        sample = data.dataset.reader.read(table.ref(number))
        parts = sequences_of(cutting.encode(sample))
        assert [(part.length, part.prefixes) for part in parts] == [
            (sequence.length, sequence.prefixes) for sequence in expected
        ]
        counts[len(expected[0].prefixes)] = counts.get(len(expected[0].prefixes), 0) + 1
    assert counts == {0: 5, 1: 30, 2: 6}
    of_branches = [sample[0].prefixes for n, sample in enumerate(planned) if table.key(n)[0] == "b"]
    assert of_branches[0] == of_branches[1] != of_branches[2]


def test_shrunk_images_are_cut_where_they_are_encoded(
    shards: tuple[str, Path], cutting: Encoder
) -> None:
    data = opened(shards, cutting, seq_length=20, over_long="shrink_images")
    table = data.fitted.table
    shrunk = np.asarray(sorted(table.shrunk))
    assert len(shrunk) > 5
    for number, [planned] in zip(shrunk.tolist(), planned_samples(table, shrunk), strict=True):
        ref = table.ref(number)
        found = cutting.encode(data.dataset.reader.read(ref), ref.sizes)
        assert (found.length, found.prefixes) == (planned.length, planned.prefixes)


@pytest.mark.cases(quick="stream-global", slow="batch-window")
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("scope", ["batch", "stream"])
def test_rows_are_as_large_as_planned(
    shards: tuple[str, Path], cutting: Encoder, scope: str, shuffle: str
) -> None:
    whole = 12 if scope == "batch" else 3
    settings = {"scope": scope, "shuffle": shuffle, "global_batch_size": whole}
    data = opened(shards, cutting, **settings)
    plain = opened(shards, Encoder(TINY_MODEL), **settings)
    assert data.identity["packing.share_prefix"] is True
    assert "packing.share_prefix" not in plain.identity
    collate = PackCollator(
        pad_token_id=0,
        num_position_axes=cutting.num_position_axes,
        pad_to_multiple_of=4,
        share_prefix=True,
    )
    data.dataset.collator = collate
    steps = data.steps_until(1, data.start())
    table, places = data.fitted.table, data.split.places
    slots = alone = 0
    planned = data.planned(data.start(), steps)
    for batch, step in zip(
        planned, data.batches(data.start(), rank=0, dp=1, max_steps=steps), strict=True
    ):
        for samples, micro in zip(batch.bins, step.micro_batches, strict=True):
            numbers = places(np.asarray(samples))
            size = planned_tokens(planned_samples(table, numbers), 4)
            assert micro.batch.num_slots == size <= 96
            slots += size
            alone += int((-(-table.num_tokens[numbers] // 4) * 4).sum())
    assert alone > 1.2 * slots
    rows = [
        sum(len(b.bins) for b in one.planned(one.start(), one.steps_until(1, one.start())))
        for one in (data, plain)
    ]
    assert rows[0] < rows[1]
    if scope == "batch":
        members = [
            [
                sorted(n for bin_ in batch.bins for n in bin_)
                for batch in one.planned(one.start(), steps)
            ]
            for one in (data, plain)
        ]
        assert members[0] == members[1]


def test_lengths_with_prefixes_are_parts_of_their_own(cutting: Encoder) -> None:
    """So a run without sharing finds the parts that it always had."""
    builder = LengthsBuilder(IndexBuilder(LocalFetcher()), Path(), cutting)
    plain = replace(builder, encoder=Encoder(TINY_MODEL))
    assert builder.rule == f"{plain.rule}-prefixes"
