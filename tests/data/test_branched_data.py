"""Records that hold several samples, through index, lengths, plan, loader, audit and packs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from support.packed_splits import BUDGET, SIZES, PackEncoder, pack
from support.recorded import count_steps, launch
from support.shard_fakes import (
    FakeEncoder,
    assert_same_tensors,
    chat_json,
    image_bytes,
    micro_batches,
    open_data,
    write_shard,
)

from vlmpack.data.index.lengths import LengthsBuilder
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.data.tools.lint import LintOne
from vlmpack.errors import DataError
from vlmpack.proof.audit import audit_run
from vlmpack.recipe.data import OnErrorSection
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard
from vlmpack.training.run_dir import RunDir

RECORDS, QUESTIONS = 16, 3
FETCHER = LocalFetcher()


def question(record: int, number: int) -> tuple[str, str]:
    return f"q{number} of {record} " + "x" * (record % 5), "yes" * (number + 1)


def branched(record: int) -> bytes:
    turns = [{"role": "user", "content": [{"type": "image"}]}]
    branches = []
    for number in range(QUESTIONS):
        text, answer = question(record, number)
        branches.append(
            [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        )
    return json.dumps({"messages": turns, "branches": branches}).encode()


def write_both(folder: Path) -> tuple[str, str]:
    """The same samples twice: as branches of a record each, and as records of their own."""
    together, apart = [], []
    for record in range(RECORDS):
        image = image_bytes(20 + record, 20, seed=record)
        if record % 4 == 3:  # one that is a sample as ever stands between
            plain = {"json": chat_json(f"plain {record}", "ok", 1), "0.png": image}
            together.append((f"r{record}", plain))
            apart.append((f"r{record}", plain))
            continue
        together.append((f"r{record}", {"json": branched(record), "0.png": image}))
        for number in range(QUESTIONS):
            document = chat_json(*question(record, number), 1)
            apart.append((f"r{record}-{number}", {"json": document, "0.png": image}))
    for name, records in (("together", together), ("apart", apart)):
        for shard in range(2):
            half = len(records) // 2
            some = records[:half] if shard == 0 else records[half:]
            write_shard(folder / f"{name}-{shard}.tar", some)
    return str(folder / "together-*.tar"), str(folder / "apart-*.tar")


NUM_SAMPLES = RECORDS // 4 * (1 + 3 * QUESTIONS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("branches")
    return folder / "index", *write_both(folder)


def opened(shards: tuple[Path, str, str], which: int = 1, **changes: Any) -> TrainData:
    return open_data(str(shards[which]), shards[0], **({"shuffle": "global"} | changes))


def record_of(key: str) -> str:
    return key.partition("#")[0]


def order_of(data: TrainData) -> list[str]:
    """The keys of the first epoch in order."""
    return [
        data.ref(number).key
        for batch in data.planned(data.start(), data.steps_until(1, data.start()))
        for samples in batch.bins
        for number in samples
    ]


def test_the_index_lists_each_branch(shards: tuple[Path, str, str]) -> None:
    settings = BuildSettings(directory=shards[0])
    [index, _] = open_index(
        [shards[1].replace("*", str(n)) for n in range(2)], IndexBuilder(FETCHER), settings
    )
    rows = index.table.to_pylist()
    assert [row["key"] for row in rows[:4]] == ["r0#0", "r0#1", "r0#2", "r1#0"]
    assert [row["branch"] for row in rows[:4]] == [0, 1, 2, 0]
    assert len({(row["offset"], row["crc32"], *row["image_digests"]) for row in rows[:3]}) == 1
    [plain] = [row for row in rows if row["key"] == "r3"]
    assert plain["branch"] is None


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_branches_are_the_samples_that_records_of_their_own_are(
    shards: tuple[Path, str, str], shuffle: str
) -> None:
    ours, theirs = (opened(shards, which, shuffle=shuffle, micro_batch_size=1) for which in (1, 2))
    found, expected = (
        {micro.samples[0].key.replace("#", "-"): micro for micro in micro_batches(data, steps)}
        for data in (ours, theirs)
        for steps in [data.steps_until(1, data.start())]
    )
    assert found.keys() == expected.keys() and len(found) == NUM_SAMPLES
    for key, micro in found.items():
        batch, other = micro.batch, expected[key].batch
        assert batch.input_ids.equal(other.input_ids) and batch.labels.equal(other.labels)
        assert batch.media.pixel_values.equal(other.media.pixel_values)
    lengths = [
        {
            data.ref(n).key.replace("#", "-"): data.ref(n).num_tokens
            for _, ns in data.split.numbers()
            for n in ns.tolist()
        }
        for data in (ours, theirs)
    ]
    assert lengths[0] == lengths[1] and len(lengths[0]) == NUM_SAMPLES


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_branches_stand_together(shards: tuple[Path, str, str], shuffle: str) -> None:
    keys = order_of(opened(shards, shuffle=shuffle))
    assert sorted(Counter(map(record_of, keys)).values()) == [1] * 4 + [3] * 12
    assert len(list(groupby(map(record_of, keys)))) == RECORDS
    inside = {
        tuple(key[-1] for key in run) for r, run in groupby(keys, record_of) if "#" in keys[0]
    }
    assert len(inside) > 2, "always in one order"
    apart = order_of(opened(shards, 2, shuffle=shuffle))
    assert len(list(groupby(key.partition("-")[0] for key in apart))) > RECORDS + 5


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_a_run_over_branches_is_the_same_on_any_ranks_and_proven(
    shards: tuple[Path, str, str], tmp_path: Path, shuffle: str
) -> None:
    run_dir = RunDir(tmp_path / "run")
    data = opened(shards, shuffle=shuffle, ledger=Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=3, dp=2)
    *_, last = data.batches(data.start(), rank=0, dp=1, max_steps=3)
    resumed = DataState.from_json(last.state.to_json())
    again = opened(shards, shuffle=shuffle, resume=resumed)
    launch(run_dir, again, resumed, stop=8, dp=3)
    assert count_steps(run_dir) == 8
    audit = audit_run(run_dir, opened(shards, shuffle=shuffle))
    assert audit.problems == [] and audit.batches == 8


def test_lengths_are_measured_from_the_record_alone(shards: tuple[Path, str, str]) -> None:
    """What the pass over the shard measured, and what is measured again from the index."""
    data = opened(shards)
    index = IndexBuilder(FETCHER)
    builder = LengthsBuilder(index, shards[0], FakeEncoder())
    [first, _] = open_index(
        [shards[1].replace("*", str(n)) for n in range(2)],
        index,
        BuildSettings(directory=shards[0]),
    )
    rows = builder._rows(first.stamp, first.table.to_pylist())
    table = data.fitted.table
    assert [row["num_tokens"] for row in rows] == table.num_tokens[: first.num_samples].tolist()


def test_a_record_is_read_once_for_its_branches(shards: tuple[Path, str, str]) -> None:
    data = opened(shards)
    reads: list[int] = []

    class Counting(LocalFetcher):
        def read(self, stamp: Any, offset: int, length: int) -> bytes:
            reads.append(offset)
            return super().read(stamp, offset, length)

    refs = [data.fitted.table.ref(number) for number in (1, 0, 2, 3)]
    found = SampleReader(Counting()).read_all(refs)
    assert [sample.key for sample in found if not isinstance(sample, DataError)] == [
        "r0#1",
        "r0#0",
        "r0#2",
        "r1#0",
    ]
    assert len(reads) == 2


def test_a_bad_branch_makes_its_record_a_hole(tmp_path: Path) -> None:
    image = image_bytes(20, 20)
    bad = json.loads(branched(1))
    bad["branches"][2] = []
    fields = [
        {"json": branched(0), "0.png": image},
        {"json": json.dumps(bad).encode(), "0.png": image},
    ]
    path = str(write_shard(tmp_path / "s.tar", [("a", fields[0]), ("b", fields[1])]))
    policy = OnErrorSection(schema="skip")
    data = open_data(path, tmp_path / "i", on_error=policy, global_batch_size=4, micro_batch_size=4)
    [micro] = micro_batches(data, 1)
    assert [sample.key for sample in micro.samples] in (
        [key for key in order_of(data) if key != "b"],
    )
    [hole] = micro.skipped
    assert hole.key == "b" and "branches[2] is empty" in hole.reason


def test_a_key_that_a_branch_takes_is_no_key_of_another_record(tmp_path: Path) -> None:
    image = image_bytes(20, 20)
    records = [
        ("a", {"json": branched(0), "0.png": image}),
        ("a#1", {"json": chat_json("?", "x", 1), "0.png": image}),
    ]
    path = write_shard(tmp_path / "s.tar", records)
    rows = IndexBuilder(FETCHER).scan(FETCHER.head(str(path)))
    assert [row.key for row in rows if row.reason is not None] == ["a#1", "a#1"]
    report = LintOne(FETCHER, IndexBuilder(FETCHER).caps)(FoundShard(str(path), None))
    assert len(report.findings) == 2 and report.samples == 4


def test_lint_reads_every_branch_and_each_image_once(shards: tuple[Path, str, str]) -> None:
    path = shards[1].replace("*", "0")
    lint = LintOne(FETCHER, IndexBuilder(FETCHER).caps, FakeEncoder(), index_dir=shards[0])
    report = lint(FoundShard(path, None))
    assert report.findings == () and report.images == RECORDS // 2
    assert report.samples == RECORDS // 2 + (QUESTIONS - 1) * RECORDS // 2 * 3 // 4
    crashing = LintOne(
        FETCHER, IndexBuilder(FETCHER).caps, FakeEncoder(refuse=frozenset({"q2 of 1"}))
    )
    [finding] = crashing(FoundShard(path, None)).findings
    assert finding.key == "r1#2"


@pytest.mark.parametrize("kind", ["tokens", "shards"])
def test_packs_hold_branches(shards: tuple[Path, str, str], tmp_path: Path, kind: Any) -> None:
    order = {"mode": "online", "budget": BUDGET, "encoder": PackEncoder(), **SIZES}
    data = opened(shards, **order)
    pack(data, tmp_path / "packs", kind=kind)
    saved = opened(
        shards, **(order | {"mode": "offline", "path": str(tmp_path / "packs"), "max_tokens": 64})
    )
    steps = data.steps_until(1, data.start())
    ours, theirs = micro_batches(saved, steps), micro_batches(data, steps)
    assert len(ours) == len(theirs) > 8
    for one, other in zip(ours, theirs, strict=True):
        assert_same_tensors(one, other)
