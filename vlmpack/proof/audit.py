"""The proof that a run trained what it planned: every draw of an epoch once, or accounted for.

Four accounts of a run are compared. They are the plan (made again from recipe and index), the
replicas' records (`samples/`), the ledger of skipped samples (`data-errors.jsonl`), and the
training loop's counters (metrics.jsonl, the newest checkpoint, result.json). For every epoch:

    trained + skipped + pending == planned == what the index holds, and no sample is there twice

The index must list every sample of the shards. Whatever it does not list is read and must not be a
sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vlmpack.data.files.samples import record_number_key
from vlmpack.data.index.table import SampleTable
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.packs.open import PackedSplit
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import PlannedBatch, PlanSource
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.state import DataState, identity_differences
from vlmpack.data.plan.windows import StreamSource
from vlmpack.data.shards.turns import record_key
from vlmpack.data.shards.unlisted import unlisted_samples
from vlmpack.data.splits.streamed import StreamedSplit
from vlmpack.errors import DataError, RunDirError
from vlmpack.file_format import RESULT
from vlmpack.storage.fetch import ShardStamp
from vlmpack.training.checkpoint import STATE, list_checkpoints, read_verified
from vlmpack.training.metrics import read_rows
from vlmpack.training.record import (
    Launch,
    RecordedBatch,
    SampleName,
    read_launches,
    standing_batches,
)
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json
from vlmpack.words import some_of

NAMED = 5
"""Samples that a message names at most."""

MAX_PROBLEMS = 50
"""Problems that are listed; the rest is counted."""


@dataclass(slots=True)
class EpochCount:
    """One epoch in numbers of samples. `lost` is neither trained nor skipped nor to come."""

    epoch: int
    planned: int = 0
    trained: int = 0
    skipped: int = 0
    pending: int = 0
    lost: int = 0


@dataclass(slots=True)
class Audit:
    """The result of an audit.

    Args:
        problems: one line each; empty for a run that is proven.
        notes: remarks that limit what could be proven, and are no problems.
        num_problems: all of them, those above MAX_PROBLEMS too.
    """

    batches: int = 0
    launches: int = 0
    epochs: list[EpochCount] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_problems: int = 0

    def fault(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def fault_of(self, names: Counter[SampleName], what: str) -> list[SampleName]:
        """A fault that names samples, where there are some."""
        if listed := list(names.elements()):
            self.fault(f"{what}: {some_of(listed, NAMED)}")
        return listed

    def as_json(self) -> dict[str, Any]:
        return {"proven": not self.num_problems, **asdict(self)}


class IndexedNames:
    def __init__(self, train: TrainData) -> None:
        self.train = train

    @cached_property
    def usable(self) -> list[Counter[SampleName]]:
        """Samples per source that an epoch may draw. Bad ones count, since they become holes."""
        table, eligible = self.train.fitted.table, self.train.fitted.eligible
        counters = []
        for first, last in zip(table.source_starts[:-1], table.source_starts[1:], strict=True):
            numbers = (eligible[first:last].nonzero()[0] + first).tolist()
            counters.append(Counter(self._name(number) for number in numbers))
        return counters

    def check_epoch(self, audit: Audit, epoch: int, planned: Mapping[SampleName, int]) -> None:
        """Every usable sample is planned once in an epoch."""
        expected: Counter[SampleName] = Counter()
        for source in self.usable:
            expected.update(source)
        drawn = Counter(planned)
        audit.fault_of(expected - drawn, f"epoch {epoch}: in the index, but not planned")
        audit.fault_of(drawn - expected, f"epoch {epoch}: planned more often than the index has")

    def check_draws(self, audit: Audit, epoch: int, planned: Mapping[SampleName, int]) -> None:
        """With weights, a source's draws since the start are spread evenly over its samples."""
        counts = Counter(name for source in self.usable for name in source)
        sources: Sequence[PlanSource | StreamSource] = self.train.plan.sources
        for source, names in zip(sources, self.usable, strict=True):
            if any(counts[name] > 1 for name in names):
                audit.notes.append(f"{source.name} shares shards with another source: not compared")
                continue
            draws, size = (epoch + 1) * (source.num_draws or 0), sum(names.values())
            total = sum(planned.get(name, 0) for name in names)
            if total != draws:
                audit.fault(
                    f"epoch {epoch}: {source.name}: {total} samples are planned since the start, "
                    f"expected {draws}"
                )
            # A plan goes on in an epoch where the one before stopped; saved packs begin anew.
            times = epoch + 1 if isinstance(self.train.plan, PackPlan) else 1
            part = draws // times
            least, most = times * (part // max(1, size)), times * -(-part // max(1, size))
            unexpected = [
                name
                for name, copies in names.items()
                if not least * copies <= planned.get(name, 0) <= most * copies
            ]
            if unexpected:
                audit.fault(
                    f"epoch {epoch}: {source.name}: not planned {least} or {most} times since the "
                    f"start: {some_of(unexpected, NAMED)}"
                )

    def check_dropped(self, audit: Audit, lines: Sequence[Mapping[str, Any]]) -> None:
        """Over-long samples that the plan leaves out are in the ledger, and no others."""
        if not self.train.epoch_length().exact:
            return
        fitted = self.train.fitted
        expected = {self._name(item.number) for item in fitted.dropped}
        shards = {stamp.path for stamp in fitted.table.shards}
        found = {
            SampleName(line["shard"], line["key"])
            for line in lines
            if line["batch"] is None and line["class"] == "too_long" and line["shard"] in shards
        }
        if missing := sorted(expected - found):
            audit.fault(f"left out as too long, but not in the ledger: {some_of(missing, NAMED)}")
        if extra := sorted(found - expected):
            audit.fault(
                f"the ledger calls these too long, the plan does not: {some_of(extra, NAMED)}"
            )

    def _name(self, number: int) -> SampleName:
        ref = self.train.fitted.table.ref(number)
        return SampleName(ref.shard, ref.key)


def check_shards(audit: Audit, train: TrainData) -> None:
    """Every sample of every indexed shard is in the index.

    Packs that hold their images need no shards, and have a digest of their own.
    """
    for stamp, table, rows in _shards(train):
        try:
            known, keys = _unlisted(train.dataset.reader, stamp, table, rows)
        except DataError as error:
            audit.fault(f"the samples of a shard cannot be counted: {error}")
            continue
        if keys:
            audit.fault(
                f"{stamp.path} holds {known + len(keys)} samples, its index {known}: never drawn "
                f"were {some_of(keys, NAMED)}"
            )


def _unlisted(
    reader: SampleReader, stamp: ShardStamp, table: SampleTable, rows: slice
) -> tuple[int, list[str]]:
    """(records that the index has, keys of those that it lacks) of a shard, or of another file."""
    if stamp.holds_records:
        branches = None if table.branches is None else table.branches[rows].tolist()
        known = {
            record_key(key, None if branches is None or branches[place] < 0 else branches[place])
            for place, key in enumerate(table.keys[rows])
        }
        numbers = map(record_number_key, reader.files.numbers(stamp))
        return len(known), [key for key in numbers if key not in known]
    offsets, lengths = table.offsets[rows], table.lengths[rows]
    first = np.diff(offsets, prepend=-1) != 0  # the branches of a record have one span
    keys = unlisted_samples(reader.fetcher, stamp, offsets[first], lengths[first])
    return int(first.sum()), keys


def _shards(train: TrainData) -> Iterator[tuple[ShardStamp, SampleTable, slice]]:
    """(shard, table with its samples, which of it) of each shard that is indexed."""
    split = train.split
    if isinstance(split, StreamedSplit):
        for shard in split.index.made():
            yield from _table_shards(split.index.look_up(shard).fitted.table)
    elif not (isinstance(split, PackedSplit) and split.manifest.kind == "shards"):
        yield from _table_shards(split.fitted.table)


def _table_shards(table: SampleTable) -> Iterator[tuple[ShardStamp, SampleTable, slice]]:
    for place, stamp in enumerate(table.shards):
        rows = slice(int(table.shard_starts[place]), int(table.shard_starts[place + 1]))
        yield stamp, table, rows


def audit_run(run_dir: RunDir, train: TrainData) -> Audit:
    """Compare all accounts of a run.

    Args:
        run_dir: the run's folder; nothing in it is changed.
        train: `data.train` of the run's recipe, opened without its ledger.

    Raises:
        RunDirError: a record that cannot be read.
    """
    audit = Audit()
    launches = read_launches(run_dir.samples)
    audit.launches = len(launches)
    if not launches:
        audit.fault(f"{run_dir.samples} holds no record: nothing was trained, or it was deleted")
        return audit
    start = _first_of_this_plan(audit, launches, train)
    if start is None:
        return audit
    comparison = _Comparison(audit, run_dir, train)
    comparison.run(start, standing_batches(run_dir.samples, launches))
    ledger = Ledger(run_dir.data_errors)
    comparison.index.check_dropped(audit, ledger.lines())
    if damaged := ledger.damaged_lines():
        audit.notes.append(
            f"{run_dir.data_errors}: {len(damaged)} lines are cut or damaged and do not count; the "
            f"first is line {damaged[0]}"
        )
    check_shards(audit, train)
    _compare_totals(audit, run_dir, torn=comparison.torn)
    return audit


def _first_of_this_plan(audit: Audit, launches: list[Launch], train: TrainData) -> DataState | None:
    """The oldest launch whose plan can be made again from today's recipe and index."""
    states = [DataState.from_json(launch.state) for launch in launches]
    if lines := identity_differences(states[-1].identity, train.identity):
        audit.fault(
            "the plan cannot be made again, the data or the recipe changed since: "
            + "; ".join(lines)
        )
        return None
    start = states[-1]
    for state in reversed(states):  # as far back as the plan is the same
        if identity_differences(state.identity, train.identity):
            break
        if state.batches < start.batches:
            start = state
    if start.batches:
        audit.notes.append(
            f"the first {start.batches} global batches have another plan, or no record; only "
            "later ones are compared"
        )
    return start


class _Comparison:
    def __init__(self, audit: Audit, run_dir: RunDir, train: TrainData) -> None:
        self.audit = audit
        self.train = train
        self.index = IndexedNames(train)
        self.ledger = _ledger_lines(run_dir)
        self.rows = {row["step"] - 1: row for row in read_rows(run_dir.metrics) if "loss" in row}
        self.planned: Counter[SampleName] = Counter()
        self.seen: dict[SampleName, int] = {}
        self.epoch = EpochCount(-1)
        self.is_whole = True
        """Whether the epoch is compared from its first batch on."""
        self.is_open = False
        """Whether the epoch has started and was not checked yet."""
        self.torn = 0
        """1 where not every replica recorded the last batch."""

    def run(self, start: DataState, records: Iterator[RecordedBatch]) -> None:
        """Compare every recorded batch, then count what the last epoch has left."""
        audit, batch = self.audit, start.batches
        self.is_whole = start.window == 0 and start.batch == 0
        record = next((item for item in records if item.batch >= batch), None)
        audit.batches = batch
        if record is None:
            return
        for planned in self.train.planned(start, None):
            if self.is_open and planned.position.epoch > self.epoch.epoch:
                self._end_epoch(start)  # its last window had no batch
                if record is None:
                    return
            self._enter(planned)
            names = [self._name(number) for samples in planned.bins for number in samples]
            self.epoch.planned += len(names)
            self.planned.update(names)
            if record is None:
                self.epoch.pending += len(names)
            elif record.batch > batch:
                audit.fault(f"batch {batch} has no record: {some_of(names, NAMED)}")
                self.epoch.lost += len(names)
                audit.batches = batch + 1
            else:
                following = next(records, None)
                self._compare(planned, names, record, is_last=following is None)
                record = following
            batch += 1
            if planned.following.epoch != planned.position.epoch:
                self._end_epoch(start)
                if record is None:
                    return
            elif record is None and not self.train.epoch_length().exact:
                self._estimate_rest()
                return

    def _enter(self, planned: PlannedBatch) -> None:
        epoch = planned.position.epoch
        if epoch != self.epoch.epoch:
            self.epoch = EpochCount(epoch)
            self.audit.epochs.append(self.epoch)
            self.is_open = True
            self.seen = {}
            if not self.train.config.weighted:
                self.planned = Counter()

    def _estimate_rest(self) -> None:
        """The epoch's samples are not known while shards are not indexed."""
        total = self.train.epoch_length().num_samples
        rest = max(0, total - self.epoch.planned)
        self.epoch.planned += rest
        self.epoch.pending += rest
        self.audit.notes.append(
            f"epoch {self.epoch.epoch}: not every shard is indexed yet, so about {rest} of its "
            "pending samples are an estimate"
        )

    def _name(self, number: int) -> SampleName:
        ref = self.train.split.ref(number)
        return SampleName(ref.shard, ref.key)

    def _compare(
        self,
        planned: PlannedBatch,
        names: list[SampleName],
        record: RecordedBatch,
        *,
        is_last: bool,
    ) -> None:
        audit, batch = self.audit, record.batch
        if record.missing_ranks and is_last:
            audit.notes.append(
                f"batch {batch} was recorded by {len(record.steps)} of {record.num_ranks} replicas "
                "when the run stopped; it counts as pending"
            )
            self.epoch.pending += len(names)
            self.torn = 1
            return
        for rank in record.missing_ranks:
            audit.fault(f"batch {batch}: replica {rank} recorded nothing")
        for rank in record.repeated:
            audit.fault(f"batch {batch}: replica {rank} recorded it more than once")
        trained, holes = record.trained, record.holes
        epochs = {step.epoch for step in record.steps.values()}
        if epochs != {planned.position.epoch}:
            audit.fault(
                f"batch {batch} is recorded in epoch {sorted(epochs)}, planned in "
                f"{planned.position.epoch}"
            )
        expected, found = Counter(names), Counter(trained + holes)
        missed = audit.fault_of(expected - found, f"batch {batch}: planned, but not recorded")
        if extra := list((found - expected).elements()):
            before = [f"{name} in batch {self.seen[name]}" for name in extra if name in self.seen]
            again = f" (trained already in this epoch: {some_of(before, NAMED)})" if before else ""
            audit.fault(f"batch {batch}: recorded, but not planned: {some_of(extra, NAMED)}{again}")
        self.seen.update((name, batch) for name in trained)
        self._compare_ledger(batch, holes)
        self._compare_metrics(batch, len(trained), len(holes))
        self.epoch.trained += len(trained)
        self.epoch.skipped += len(holes)
        self.epoch.lost += len(missed)
        audit.batches = batch + 1

    def _compare_ledger(self, batch: int, holes: list[SampleName]) -> None:
        expected, found = Counter(holes), self.ledger.get(batch, Counter())
        for missing in (expected - found).elements():
            self.audit.fault(f"batch {batch}: {missing} was skipped, but the ledger has no line")
        for extra in (found - expected).elements():
            self.audit.fault(f"batch {batch}: the ledger says that {extra} was skipped, not so")

    def _compare_metrics(self, batch: int, trained: int, skipped: int) -> None:
        row = self.rows.get(batch)
        if row is None:
            return
        counted = (row.get("num_samples"), row.get("num_skipped"))  # a damaged row may lack them
        if counted != (trained, skipped):
            self.audit.fault(
                f"batch {batch}: the record has {trained} trained and {skipped} skipped samples, "
                f"metrics.jsonl counted {counted[0]} and {counted[1]}"
            )

    def _end_epoch(self, start: DataState) -> None:
        """The plan itself has drawn every sample of the index, equally often."""
        is_whole, self.is_whole, self.is_open = self.is_whole, True, False
        if not is_whole:
            return
        if not self.train.config.weighted:
            self.index.check_epoch(self.audit, self.epoch.epoch, self.planned)
        elif start.batches == 0:
            self.index.check_draws(self.audit, self.epoch.epoch, self.planned)


def _compare_totals(audit: Audit, run_dir: RunDir, *, torn: int) -> None:
    """Compare the numbers of steps in checkpoints, metrics and the result.

    Args:
        torn: steps after the record that the main rank may have counted before the run stopped.
    """
    for folder in reversed(list_checkpoints(run_dir.checkpoints)):
        try:
            steps = int(read_verified(folder, STATE)["totals"]["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            audit.notes.append(
                f"{folder.name} is unfinished or damaged, the one before counts: {error}"
            )
            continue
        if steps > audit.batches:
            audit.fault(
                f"{folder.name} holds {steps} steps, the record {audit.batches}: the rest is "
                "missing"
            )
        break
    metrics = max((row["step"] for row in read_rows(run_dir.metrics) if "loss" in row), default=0)
    if metrics > audit.batches + torn:
        audit.fault(
            f"metrics.jsonl has {metrics} steps, the record {audit.batches}: the rest is missing"
        )
    if not run_dir.result.is_file():
        return
    try:
        result = read_json(run_dir.result)
        RESULT.take(result, run_dir.result, RunDirError)
        counts = {key: int(result[key]) for key in ("steps", "samples", "skipped_samples")}
    except RunDirError as error:
        audit.fault(str(error))
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        audit.fault(f"{run_dir.result} cannot be read: {error!r}")
        return
    _compare_result(audit, counts)


def _compare_result(audit: Audit, result: Mapping[str, int]) -> None:
    if result["steps"] > audit.batches:
        audit.fault(
            f"result.json counts {result['steps']} steps, the record {audit.batches}: the rest is "
            "missing"
        )
    complete = not any("compared" in note for note in audit.notes)
    for name, key in (("trained", "samples"), ("skipped", "skipped_samples")):
        counted = sum(getattr(epoch, name) for epoch in audit.epochs)
        if complete and audit.batches == result["steps"] and counted != result[key]:
            audit.fault(f"result.json counts {result[key]} {name} samples, the record {counted}")


def _ledger_lines(run_dir: RunDir) -> dict[int, Counter[SampleName]]:
    """The holes of each global batch by the ledger."""
    lines: defaultdict[int, Counter[SampleName]] = defaultdict(Counter)
    for line in Ledger(run_dir.data_errors).lines():
        if line["batch"] is not None:
            lines[line["batch"]][SampleName(line["shard"], line["key"])] += 1
    return dict(lines)
