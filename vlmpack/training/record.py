"""The run's own record of what it trained: which samples, in which bin, at which step.

runs/demo/samples/
  launches.jsonl     one line a launch: its number, the global batch it began with, the data state
  rank-0000.jsonl    one line a step of model replica 0, written after its optimizer step

A line of a replica names its bins in order, each sample as "number of the shard/key". A shard's
number is given with its first use in a launch:

    {"launch": 1, "batch": 0, "epoch": 0, "shards": {"0": "a.tar"}, "bins": [["0/k1", "0/k2"], []],
     "holes": ["0/k3"], "crc32": "01234567"}

A launch that resumes at global batch n replaces everything that earlier launches wrote for n and
later ones. `standing_batches` reads what stands then as one stream, in order. `vlmpack.proof.audit`
compares the record with the plan.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vlmpack.data.loading.checked_lines import checked_line, damaged_lines, parse_lines
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.distributed import Ranks
from vlmpack.errors import RunDirError, writing
from vlmpack.file_format import SAMPLE_RECORD
from vlmpack.training.listener import Listener, TrainStep
from vlmpack.training.metrics import drop_rows_after
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted

LAUNCHES = "launches.jsonl"
_RANK_FILE = re.compile(r"rank-([0-9]{4,9})\.jsonl")


class SampleName(NamedTuple):
    shard: str
    key: str

    def __str__(self) -> str:
        return f"{self.key} ({self.shard})"


Bin = tuple[SampleName, ...]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples that one model replica trained in one optimizer step.

    Args:
        batch: the run's global batch, counted from 0.
        epoch: counted from 0.
        bins: the samples of each micro-batch, in row order; some may be empty.
        holes: samples that were planned for these bins and left out.
    """

    batch: int
    epoch: int
    bins: tuple[Bin, ...]
    holes: Bin

    @classmethod
    def of(cls, step: GlobalStep, *, is_skipped: bool = False) -> StepSamples:
        """The record of a step. One that the optimizer skipped has trained nothing."""
        bins = [
            tuple(SampleName(sample.shard, sample.key) for sample in micro_batch.samples)
            for micro_batch in step.micro_batches
        ]
        holes = [SampleName(sample.shard, sample.key) for sample in step.skipped]
        if is_skipped:
            holes += [name for samples in bins for name in samples]
            bins = [()] * len(bins)
        return cls(batch=step.batch, epoch=step.epoch, bins=tuple(bins), holes=tuple(holes))


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the run.

    Args:
        number: counted from 1.
        start: the global batch that it began with.
        state: JSON text of the data state that it began with.
    """

    number: int
    start: int
    dp_size: int
    state: str


class SampleRecord(Listener):
    """Appends the lines of one model replica."""

    def __init__(self, folder: Path, *, dp_rank: int, launch: int) -> None:
        self.path = rank_file(folder, dp_rank)
        self.launch = launch
        self._descriptor: int | None = None
        self._shards: dict[str, int] = {}

    def on_step(self, step: TrainStep) -> None:
        self.write(StepSamples.of(step.data, is_skipped=step.sums.is_skipped))

    def on_save(self) -> None:
        """The record of the steps that a checkpoint counts is on disk before it."""
        self.sync()

    def write(self, step: StepSamples) -> None:
        """One line, in the file when this returns.

        Raises:
            RunDirError: the file cannot be written.
        """
        known = len(self._shards)
        bins = [[self._short(name) for name in samples] for samples in step.bins]
        holes = [self._short(name) for name in step.holes]
        line: dict[str, Any] = {"launch": self.launch, "batch": step.batch, "epoch": step.epoch}
        if len(self._shards) > known:
            line["shards"] = {str(n): name for name, n in self._shards.items() if n >= known}
        line["bins"] = bins
        if holes:
            line["holes"] = holes
        data = checked_line(line, compact=True)
        with writing(self.path, RunDirError):
            if self._descriptor is None:
                self._descriptor = _open_whole_lines(self.path)
            while data:
                data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        """Flush to the disk, so that a checkpoint that counts these steps may follow.

        Raises:
            RunDirError: the disk refuses.
        """
        if self._descriptor is not None:
            with writing(self.path, RunDirError):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _short(self, name: SampleName) -> str:
        return f"{self._shards.setdefault(name.shard, len(self._shards))}/{name.key}"


def open_record(folder: Path, ranks: Ranks, *, start: int, state: str) -> SampleRecord | None:
    """Record a launch on the main rank, and open this replica's record on its lead. Collective.

    Args:
        start: the next global batch.
        state: JSON text of the data state there.

    Raises:
        RunDirError: on every rank, if the record cannot be written.
    """

    def write_launch() -> int:
        number = max((launch.number for launch in read_launches(folder)), default=0) + 1
        line = {"launch": number, "start": start, "dp": ranks.dp_size, "state": json.loads(state)}
        path = folder / LAUNCHES
        with writing(path, RunDirError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open_whole_lines(path)
            try:
                os.write(descriptor, checked_line(SAMPLE_RECORD.mark(line), compact=True))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return number

    number = ranks.on_main(write_launch)
    return SampleRecord(folder, dp_rank=ranks.dp_rank, launch=number) if ranks.is_lead else None


def rank_file(folder: Path, dp_rank: int) -> Path:
    return folder / f"rank-{dp_rank:04d}.jsonl"


def read_launches(folder: Path) -> list[Launch]:
    """All launches, oldest first; a line cut by a kill is left out.

    Raises:
        RunDirError: a line that is whole and no launch.
    """
    path = folder / LAUNCHES
    launches = []
    for number, line in _lines(path):
        try:
            SAMPLE_RECORD.take(line, path, RunDirError)
            launches.append(
                Launch(
                    _count(line["launch"]),
                    _count(line["start"]),
                    _count(line["dp"]),
                    json.dumps(line["state"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirError(f"{path}, line {number}: no launch ({error!r})") from error
    return launches


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]}; expected a count")
    return value


def read_steps(folder: Path, dp_rank: int) -> Iterator[tuple[int, StepSamples]]:
    """(launch, step) of every line that a replica wrote, in file order.

    Raises:
        RunDirError: a line that is whole and makes no sense.
    """
    path = rank_file(folder, dp_rank)
    current, shards = 0, dict[str, str]()
    for number, line in _lines(path):
        try:
            if line["launch"] != current:
                current, shards = _count(line["launch"]), {}
            shards.update(line.get("shards", {}))
            yield (
                current,
                StepSamples(
                    batch=_count(line["batch"]),
                    epoch=_count(line["epoch"]),
                    bins=tuple(_bin(samples, shards) for samples in line["bins"]),
                    holes=_bin(line.get("holes", ()), shards),
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunDirError(
                f"{path}, line {number}: no step of a run, or lines before it are missing "
                f"({error!r})"
            ) from error


def recorded_ranks(folder: Path) -> list[int]:
    """The replicas that wrote anything, in any launch."""
    matches = (_RANK_FILE.fullmatch(path.name) for path in folder.glob("rank-*.jsonl"))
    return sorted(int(match[1]) for match in matches if match is not None)


def _bin(samples: list[str], shards: dict[str, str]) -> Bin:
    parts = [text.partition("/") for text in samples]
    return tuple(SampleName(shards[number], key) for number, _, key in parts)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file of JSON lines; a last line without its end is left out."""
    for number, value in parse_lines(path):
        if isinstance(value, ValueError):
            raise RunDirError(
                f"{path}, line {number}: damaged ({value}). Restore the folder {path.parent}, or "
                "move it away: then a new record begins with the next launch"
            )
        yield number, value


def _open_whole_lines(path: Path) -> int:
    """A descriptor for appending, after cutting off what a kill left of a last line."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65536)
        line_end = os.pread(descriptor, end - start, start).rfind(b"\n")
        if line_end >= 0:
            end = start + line_end + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return descriptor


logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The records of all replicas for one global batch.

    Args:
        batch: the run's global batch, counted from 0.
        steps: replica -> its line.
        repeated: replicas that wrote the batch more than once.
    """

    batch: int
    steps: dict[int, StepSamples]
    num_ranks: int
    repeated: tuple[int, ...] = ()

    @property
    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.steps]

    @property
    def trained(self) -> list[SampleName]:
        return [name for step in self.steps.values() for bin_ in step.bins for name in bin_]

    @property
    def holes(self) -> list[SampleName]:
        return [name for step in self.steps.values() for name in step.holes]


def warn_of_damage(folder: Path) -> None:
    """Warn once at a launch of damaged lines in the record that it continues.

    Training does not need them, so it is not refused.
    """
    paths = (rank_file(folder, rank) for rank in recorded_ranks(folder))
    damaged = [(path, number, error) for path in paths for number, error in damaged_lines(path)]
    if not damaged:
        return
    path, line, error = damaged[0]
    more = f", and {counted(len(damaged) - 1, 'more line')} of the record" if damaged[1:] else ""
    logger.warning(
        "%s, line %d: damaged (%s)%s. Training goes on, but `vlmpack data audit` cannot prove what "
        "this run trained. Restore the folder %s from a copy. Or stop, move it away and resume. "
        "The new record lacks earlier steps",
        path,
        line,
        error,
        more,
        folder,
    )


def take_back(run_dir: RunDir, steps: int) -> None:
    """Remove what earlier launches counted after this launch's start.

    The result is kept as `result.json.old`, and the audit is removed.
    """
    if run_dir.metrics.exists():
        drop_rows_after(run_dir.metrics, steps)
    if run_dir.result.is_file():
        run_dir.result.replace(run_dir.result.with_name(f"{run_dir.result.name}.old"))
    run_dir.audit.unlink(missing_ok=True)


def standing_batches(folder: Path, launches: Sequence[Launch]) -> Iterator[RecordedBatch]:
    """The recorded global batches that no later launch replaced, in order; perhaps with gaps.

    Args:
        launches: all of them, oldest first.

    Raises:
        RunDirError: a file that is no record.
    """
    streams = {rank: _standing(folder, rank, launches) for rank in recorded_ranks(folder)}
    heads = {rank: next(stream, None) for rank, stream in streams.items()}
    while waiting := [step.batch for step in heads.values() if step is not None]:
        batch = min(waiting)
        steps: dict[int, StepSamples] = {}
        repeated: list[int] = []
        for rank, stream in streams.items():
            while (step := heads[rank]) is not None and step.batch == batch:
                if rank in steps:
                    repeated.append(rank)
                    steps[rank] = _joined(steps[rank], step)
                else:
                    steps[rank] = step
                heads[rank] = next(stream, None)
        launch = [item for item in launches if item.start <= batch][-1:]
        num_ranks = launch[0].dp_size if launch else len(steps)
        yield RecordedBatch(batch, steps, num_ranks, tuple(repeated))


def _standing(folder: Path, rank: int, launches: Sequence[Launch]) -> Iterator[StepSamples]:
    """A replica's lines that no later launch replaced, in order."""
    replaced_from: dict[int, int] = {}
    for place, launch in enumerate(launches):
        later = [other.start for other in launches[place + 1 :]]
        replaced_from[launch.number] = min(later, default=1 << 62)
    for number, step in read_steps(folder, rank):
        if step.batch < replaced_from.get(number, 1 << 62):
            yield step


def _joined(one: StepSamples, two: StepSamples) -> StepSamples:
    """Both lines of a batch that was written twice, so that the audit finds its samples twice."""
    return StepSamples(one.batch, one.epoch, one.bins + two.bins, one.holes + two.holes)
