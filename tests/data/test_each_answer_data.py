"""`data.learn: each_answer` through index, lengths, plan, loader, audit, lint and packs.

The reference is a shard that has each answer as a record of its own: the turns up to it, the
earlier answers excluded by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from support.answers import asks, dropping_folder, replies
from support.packed_splits import pack
from support.recorded import count_steps, launch
from support.shard_fakes import (
    assert_same_tensors,
    image_bytes,
    micro_batches,
    open_data,
    write_shard,
)
from support.shards import TINY_MODEL

from vlmpack.data.index.lengths import LengthsBuilder
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.tools.index_shards import parts_builder
from vlmpack.data.tools.lint import LintOne
from vlmpack.data.tools.stats import source_stats
from vlmpack.encode import Encoder
from vlmpack.errors import DataError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.packing.budget import RowBudget
from vlmpack.proof.audit import audit_run
from vlmpack.recipe.data import OnErrorSection
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard
from vlmpack.training.run_dir import RunDir

FETCHER = LocalFetcher()
ANSWERS = (3, 1, 4, 2, 3, 1, 2, 4)
"""Answers of each record."""
NUM_SAMPLES = sum(ANSWERS)
FROM_TURN = {0: 0, 2: 0, 3: 2, 5: 0, 6: 0}
"""Record -> the turn that shows its image; record 6 shows another one in its second question."""


def turns_of(record: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for number in range(ANSWERS[record]):
        shows = FROM_TURN.get(record, -1) == 2 * number or (record, number) == (6, 1)
        turns.append(asks(f"q{number} of {record}" + "?" * record, image=shows))
        turns.append(replies(f"I think of {record}", f"yes {number}"))
    return turns


def shard_records(record: int) -> tuple[dict[str, bytes], list[dict[str, bytes]]]:
    """The fields of a record, and of its answers as records of their own."""
    turns = turns_of(record)

    def fields(some: list[dict[str, Any]]) -> dict[str, bytes]:
        shown = sum(part == {"type": "image"} for turn in some for part in turn["content"])
        files = {f"{n}.png": image_bytes(56 + 28 * n, 56, seed=record) for n in range(shown)}
        return {"json": json.dumps({"messages": some}).encode(), **files}

    apart = []
    for at in range(1, len(turns), 2):
        before = [t | ({"loss": False} if t["role"] == "assistant" else {}) for t in turns[:at]]
        apart.append(fields([*before, turns[at]]))
    return fields(turns), apart


class Case:
    def __init__(self, folder: Path) -> None:
        self.index = folder / "index"
        self.model = dropping_folder(TINY_MODEL, folder / "model")
        together, alone = [], []
        for record in range(len(ANSWERS)):
            whole, parts = shard_records(record)
            together.append((f"r{record}", whole))
            alone += [(f"r{record}-{number}", part) for number, part in enumerate(parts)]
        for name, records in (("together", together), ("apart", alone)):
            half = len(records) // 2
            for shard, some in enumerate((records[:half], records[half:])):
                write_shard(folder / f"{name}-{shard}.tar", some)
        self.folder = folder
        self.encoder = Encoder(self.model).replace(learn="each_answer")

    def shard(self, number: int) -> str:
        return str(self.folder / f"together-{number}.tar")

    def opened(self, name: str = "together", **changes: Any) -> TrainData:
        ours = name == "together"
        settings = {
            "encoder": self.encoder if ours else Encoder(self.model),
            "learn": "each_answer" if ours else "all_turns",
            "shuffle": "global",
            "micro_batch_size": 1,
            "global_batch_size": 6,
        }
        return open_data(str(self.folder / f"{name}-*.tar"), self.index, **(settings | changes))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("answers"))


def apart_key(key: str) -> str:
    """The key of the reference's record."""
    return key.replace("#", "-") if "#" in key or "-" in key else f"{key}-0"


def order_of(data: TrainData) -> list[str]:
    """The keys of the first epoch in order."""
    return [
        data.ref(number).key
        for batch in data.planned(data.start(), data.steps_until(1, data.start()))
        for samples in batch.bins
        for number in samples
    ]


def test_the_index_has_a_row_for_each_answer(case: Case) -> None:
    rows = IndexBuilder(FETCHER, each_answer=True).scan(FETCHER.head(case.shard(0)))
    assert [row.key for row in rows] == [
        *(f"r0#{n}" for n in range(3)),
        "r1",
        *(f"r2#{n}" for n in range(4)),
        *(f"r3#{n}" for n in range(2)),
    ]
    assert [row.branch for row in rows if row.key.startswith(("r1", "r3"))] == [None, 0, 1]
    assert [len(row.images) for row in rows] == [1] * 3 + [0] + [1] * 4 + [0, 1]
    plain = IndexBuilder(FETCHER)
    assert len(plain.scan(FETCHER.head(case.shard(0)))) == 4
    assert plain.rule + "-each_answer" == IndexBuilder(FETCHER, each_answer=True).rule


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_each_answer_is_what_a_record_of_its_own_is(case: Case, shuffle: str) -> None:
    ours, theirs = (case.opened(name, shuffle=shuffle) for name in ("together", "apart"))
    found, expected = (
        {apart_key(micro.samples[0].key): micro.batch for micro in micro_batches(data, steps)}
        for data in (ours, theirs)
        for steps in [data.steps_until(1, data.start())]
    )
    assert found.keys() == expected.keys() and len(found) == NUM_SAMPLES
    decode = case.encoder.tokenizer.decode
    for key, batch in found.items():
        other = expected[key]
        assert batch.input_ids.equal(other.input_ids) and batch.labels.equal(other.labels)
        assert (batch.media is None) == (other.media is None)
        if batch.media is not None and other.media is not None:
            assert batch.media.pixel_values.equal(other.media.pixel_values)
        record, number = key[1:].split("-")
        assert decode(batch.labels[batch.labels != IGNORE_INDEX]) == (
            f"<think>\nI think of {record}\n</think>\n\nyes {number}<|im_end|>"
        )
    summary = ours.summary()
    assert summary.num_usable == NUM_SAMPLES and summary.epoch_samples == NUM_SAMPLES
    assert summary.num_label_tokens == sum(batch.num_label_tokens for batch in found.values())


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_answers_stand_together_in_turn(case: Case, shuffle: str) -> None:
    keys = order_of(case.opened(shuffle=shuffle))
    assert sorted(Counter(key.partition("#")[0] for key in keys).values()) == sorted(ANSWERS)
    runs = [list(run) for _, run in groupby(keys, lambda key: key.partition("#")[0])]
    assert len(runs) == len(ANSWERS) and all(run == sorted(run) for run in runs)
    assert [run[0] for run in runs] != sorted(run[0] for run in runs), "records are shuffled"


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_a_run_is_the_same_on_any_ranks_and_proven(
    case: Case, tmp_path: Path, shuffle: str
) -> None:
    run_dir = RunDir(tmp_path / "run")
    data = case.opened(shuffle=shuffle, ledger=Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=2, dp=2)
    *_, last = data.batches(data.start(), rank=0, dp=1, max_steps=2)
    resumed = DataState.from_json(last.state.to_json())
    again = case.opened(shuffle=shuffle, resume=resumed)
    launch(run_dir, again, resumed, stop=6, dp=3)
    assert count_steps(run_dir) == 6
    audit = audit_run(run_dir, case.opened(shuffle=shuffle))
    assert audit.problems == [] and audit.batches == 6
    shuffled = audit_run(run_dir, case.opened(shuffle=shuffle, learn="all_turns"))
    assert shuffled.problems, "in another order inside a record"


def test_lengths_are_measured_from_the_record_alone(case: Case) -> None:
    """What the pass over the shard measured, and what is measured again from the index."""
    data = case.opened()
    index = IndexBuilder(FETCHER, each_answer=True)
    builder = LengthsBuilder(index, case.index, case.encoder)
    [first] = open_index([case.shard(0)], index, BuildSettings(directory=case.index))
    rows = first.table.to_pylist()
    found = builder._rows(first.stamp, rows)
    table = data.fitted.table
    assert [row["num_tokens"] for row in found] == table.num_tokens[: len(rows)].tolist()


def write_bad(folder: Path, text: str) -> str:
    """A record whose third question is given, behind a good one."""
    turns = turns_of(2)
    turns[4]["content"] = text
    image = image_bytes(56, 56)
    bad = {"json": json.dumps({"messages": turns}).encode(), "0.png": image}
    return str(write_shard(folder / "s.tar", [("a", shard_records(4)[0]), ("b", bad)]))


def test_an_answer_that_cannot_be_asked_is_a_hole_alone(case: Case, tmp_path: Path) -> None:
    path = write_bad(tmp_path, "a token: <|im_end|>")
    settings = {
        "encoder": case.encoder,
        "learn": "each_answer",
        "on_error": OnErrorSection(schema="skip"),
    }
    data = open_data(path, tmp_path / "i", global_batch_size=7, micro_batch_size=7, **settings)
    [micro] = micro_batches(data, 1)
    assert sorted(sample.key for sample in micro.samples) == ["a#0", "a#1", "a#2", "b#0", "b#1"]
    assert sorted(hole.key for hole in micro.skipped) == ["b#2", "b#3"]
    assert all("special token" in hole.reason for hole in micro.skipped)


def test_an_answer_that_is_too_long_is_left_out_alone(case: Case, tmp_path: Path) -> None:
    path = write_bad(tmp_path, "x " * 120)
    settings = {"encoder": case.encoder, "learn": "each_answer", "seq_length": 200}
    data = open_data(path, tmp_path / "i", over_long="drop", **settings)
    table = data.fitted.table
    assert [table.key(item.number) for item in data.fitted.dropped] == ["b#2", "b#3"]
    assert data.summary().num_usable == 5
    with pytest.raises(DataError, match=r"2 of 7 samples are longer .*'b#3' \d+, 'b#2' \d+"):
        open_data(path, tmp_path / "i", **settings)


def test_lint_and_stats_count_answers_and_each_image_once(case: Case) -> None:
    stamps = [FETCHER.head(case.shard(number)) for number in (0, 1)]
    lint = LintOne(FETCHER, IndexBuilder(FETCHER).caps, case.encoder, index_dir=case.index)
    reports = [lint(FoundShard(case.shard(number), None)) for number in (0, 1)]
    assert [report.findings for report in reports] == [(), ()]
    assert sum(report.samples for report in reports) == NUM_SAMPLES
    assert sum(report.images for report in reports) == 6
    builder = parts_builder(FETCHER, IndexBuilder(FETCHER).caps, case.index, case.encoder)
    assert builder.each_answer
    *_, stats = source_stats(stamps, builder, case.index)  # type: ignore[attr-defined]
    assert stats.samples == NUM_SAMPLES and stats.sizes.shape == (6, 2)
    assert stats.lengths["num_tokens"].size == NUM_SAMPLES
    assert stats.keys == {"messages": len(ANSWERS)}


@pytest.mark.parametrize("kind", ["plan", "tokens", "shards"])
def test_packs_that_share_are_the_rows_of_online(case: Case, tmp_path: Path, kind: Any) -> None:
    order = {
        "mode": "online",
        "scope": "batch",
        "budget": RowBudget(max_tokens=512, alignment=4),
        "seq_length": 512,
        "share_prefix": True,
        "encoder": case.encoder.replace(share_prefix=True),
    }
    data = case.opened(**order)
    manifest = pack(data, tmp_path / "packs", kind=kind)
    saved = case.opened(
        **(order | {"mode": "offline", "path": str(tmp_path / "packs"), "max_tokens": 512})
    )
    steps = data.steps_until(1, data.start())
    ours, theirs = micro_batches(saved, steps), micro_batches(data, steps)
    assert len(ours) == len(theirs) == manifest.num_packs
    for one, other in zip(ours, theirs, strict=True):
        assert_same_tensors(one, other)
        assert one.batch.prefix_tree == other.batch.prefix_tree
    held = sum(micro.batch.num_tokens for micro in theirs)
    shared = sum(micro.batch.num_shared_tokens for micro in theirs)
    assert manifest.num_tokens == held - shared and shared > 0.2 * held
    with_all = Encoder(case.model).replace(share_prefix=True)
    with pytest.raises(Exception, match=r"data.learn: each_answer in the packs, not set now"):
        case.opened(
            **(order | {"mode": "offline", "path": str(tmp_path / "packs"), "max_tokens": 512})
            | {"encoder": with_all, "learn": "all_turns"}
        )
