"""What a run's record says stands: later launches replace what earlier ones wrote past their start.

Files of all replicas -> one RecordedBatch a global batch, in order, read as a stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpack.data.loading.checked_lines import damaged_lines
from vlmpack.training.metrics import drop_rows_after
from vlmpack.training.record import (
    Launch,
    SampleName,
    StepSamples,
    rank_file,
    read_steps,
    recorded_ranks,
)
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """What all replicas recorded of one global batch.

    Args:
        batch: the run's global batch, counted from 0.
        steps: replica -> its line.
        num_ranks: replicas that the launch had.
        repeated: replicas that wrote the batch more than once.
    """

    batch: int
    steps: dict[int, StepSamples]
    num_ranks: int
    repeated: tuple[int, ...] = ()

    @property
    def missing_ranks(self) -> list[int]:
        """Replicas without a line."""
        return [rank for rank in range(self.num_ranks) if rank not in self.steps]

    @property
    def trained(self) -> list[SampleName]:
        """All samples of all bins."""
        return [name for step in self.steps.values() for bin_ in step.bins for name in bin_]

    @property
    def holes(self) -> list[SampleName]:
        """All samples that were left out."""
        return [name for step in self.steps.values() for name in step.holes]


def warn_of_damage(folder: Path) -> None:
    """At a launch: damaged lines of the record that it goes on with, in one warning.

    Training needs none of them, so it is not refused; only the audit would tell, perhaps days on.

    Args:
        folder: `samples` of the run folder.
    """
    paths = (rank_file(folder, rank) for rank in recorded_ranks(folder))
    found = [(path, number, error) for path in paths for number, error in damaged_lines(path)]
    if not found:
        return
    path, line, error = found[0]
    more = f", and {counted(len(found) - 1, 'more line')} of the record" if found[1:] else ""
    logger.warning(
        "%s, line %d: damaged (%s)%s. Training goes on and needs none of it, but `vlmpack data "
        "audit` cannot prove what this run trained as long as it is so. Restore the folder %s from "
        "a copy; or stop, move it away and resume: then a new record begins with that launch, and "
        "what was trained before it has none",
        path,
        line,
        error,
        more,
        folder,
    )


def take_back(run_dir: RunDir, steps: int) -> None:
    """Before a launch is noted: what earlier ones counted past its start is lost work, and a result
    is that of a run that was at its end, which this one is not. It is kept as `result.json.old`. An
    audit is one of the run as it stood, and goes.

    Args:
        steps: that the launch begins with.
    """
    if run_dir.metrics.exists():
        drop_rows_after(run_dir.metrics, steps)
    if run_dir.result.is_file():
        run_dir.result.replace(run_dir.result.with_name(f"{run_dir.result.name}.old"))
    run_dir.audit.unlink(missing_ok=True)


def standing_batches(folder: Path, launches: Sequence[Launch]) -> Iterator[RecordedBatch]:
    """The recorded global batches that no later launch replaced, in order; perhaps with gaps.

    Args:
        folder: `samples` of the run folder.
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
    """A replica's lines that stand. Within a launch they are in order, so all of them are."""
    replaced_from: dict[int, int] = {}
    for place, launch in enumerate(launches):
        later = [other.start for other in launches[place + 1 :]]
        replaced_from[launch.number] = min(later, default=1 << 62)
    for number, step in read_steps(folder, rank):
        if step.batch < replaced_from.get(number, 1 << 62):
            yield step


def _joined(one: StepSamples, two: StepSamples) -> StepSamples:
    """Both lines of a batch that was written twice: the audit then finds its samples twice."""
    return StepSamples(one.batch, one.epoch, one.bins + two.bins, one.holes + two.holes)
