"""The proof that a run trained what it planned: every draw of an epoch once, or accounted for.

Four accounts of the same run are compared: the plan (made again from recipe and index), the record
of each replica (`samples/`), the ledger of skipped samples (`data-errors.jsonl`), and the counters
that the training loop kept (metrics.jsonl, the newest checkpoint, result.json). For every epoch:

    trained + skipped + pending == planned == what the index holds, and no sample is there twice

And the index holds every sample that the shards hold: what it does not list is read and must be no
sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import PlannedBatch
from vlmpack.data.plan.state import DataState, identity_differences
from vlmpack.proof.audit.findings import Audit, EpochCount, listed
from vlmpack.proof.audit.indexed_names import IndexedNames
from vlmpack.proof.audit.shard_count import check_shards
from vlmpack.training.checkpoint import STATE, list_checkpoints, read_verified
from vlmpack.training.metrics import read_rows
from vlmpack.training.record import Launch, SampleName, read_launches
from vlmpack.training.record_history import RecordedBatch, standing_batches
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json


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
    begin = _first_of_this_plan(audit, launches, train)
    if begin is None:
        return audit
    comparison = _Comparison(audit, run_dir, train)
    comparison.run(begin, standing_batches(run_dir.samples, launches))
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
    states = [train.taken_over(DataState.from_json(launch.state)) for launch in launches]
    if identity_differences(states[-1].identity, train.identity):
        lines = identity_differences(states[-1].identity, train.identity)
        audit.fault(
            "the plan cannot be made again, the data or the recipe changed since: "
            + "; ".join(lines)
        )
        return None
    begin = states[-1]
    for state in reversed(states):  # as far back as the plan is the same
        if identity_differences(state.identity, train.identity):
            break
        if state.batches < begin.batches:
            begin = state
    if begin.batches:
        audit.notes.append(
            f"the first {begin.batches} global batches have another plan, or no record; only "
            "later ones are compared"
        )
    return begin


class _Comparison:
    """Walks through plan and record side by side."""

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
        """Whether the epoch has begun and was not checked yet."""
        self.torn = 0
        """1 where not every replica recorded the last batch."""

    def run(self, begin: DataState, records: Iterator[RecordedBatch]) -> None:
        """Compare every recorded batch, then count what the last epoch has left."""
        audit, batch = self.audit, begin.batches
        self.is_whole = begin.window == 0 and begin.batch == 0
        record = next((item for item in records if item.batch >= batch), None)
        audit.batches = batch
        if record is None:
            return
        for planned in self.train.planned(begin, None):
            if self.is_open and planned.position.epoch > self.epoch.epoch:
                self._end_epoch(begin)  # its last window had no batch
                if record is None:
                    return
            self._enter(planned)
            names = [self._name(number) for samples in planned.bins for number in samples]
            self.epoch.planned += len(names)
            self.planned.update(names)
            if record is None:
                self.epoch.pending += len(names)
            elif record.batch > batch:
                audit.fault(f"batch {batch} has no record: {listed(names)}")
                self.epoch.lost += len(names)
                audit.batches = batch + 1
            else:
                following = next(records, None)
                self._compare(planned, names, record, is_last=following is None)
                record = following
            batch += 1
            if planned.following.epoch != planned.position.epoch:
                self._end_epoch(begin)
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
        """Not every shard is indexed: how many samples the epoch has is not known."""
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
        """One global batch: who recorded it, which samples, which holes, how many."""
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
        wanted, found = Counter(names), Counter(trained + holes)
        missed, extra = list((wanted - found).elements()), list((found - wanted).elements())
        if missed:
            audit.fault(f"batch {batch}: planned, but not recorded: {listed(missed)}")
        if extra:
            before = [f"{name} in batch {self.seen[name]}" for name in extra if name in self.seen]
            again = f" (trained already in this epoch: {listed(before)})" if before else ""
            audit.fault(f"batch {batch}: recorded, but not planned: {listed(extra)}{again}")
        self.seen.update((name, batch) for name in trained)
        self._compare_ledger(batch, holes)
        self._compare_metrics(batch, len(trained), len(holes))
        self.epoch.trained += len(trained)
        self.epoch.skipped += len(holes)
        self.epoch.lost += len(missed)
        audit.batches = batch + 1

    def _compare_ledger(self, batch: int, holes: list[SampleName]) -> None:
        wanted, found = Counter(holes), self.ledger.get(batch, Counter())
        for missing in (wanted - found).elements():
            self.audit.fault(f"batch {batch}: {missing} was skipped, but the ledger has no line")
        for extra in (found - wanted).elements():
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

    def _end_epoch(self, begin: DataState) -> None:
        """The plan itself has drawn every sample of the index, equally often."""
        is_whole, self.is_whole, self.is_open = self.is_whole, True, False
        if not is_whole:
            return
        if not self.train.config.weighted:
            self.index.check_epoch(self.audit, self.epoch.epoch, self.planned)
        elif begin.batches == 0:
            self.index.check_draws(self.audit, self.epoch.epoch, self.planned)


def _compare_totals(audit: Audit, run_dir: RunDir, *, torn: int) -> None:
    """What checkpoints, metrics and the result say of the number of steps.

    Args:
        torn: steps behind the record that the main rank may have counted before the run stopped.
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
        counts = {key: int(result[key]) for key in ("steps", "samples", "skipped_samples")}
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
    """Global batch -> its holes by the ledger."""
    lines: defaultdict[int, Counter[SampleName]] = defaultdict(Counter)
    for line in Ledger(run_dir.data_errors).lines():
        if line["batch"] is not None:
            lines[line["batch"]][SampleName(line["shard"], line["key"])] += 1
    return dict(lines)
