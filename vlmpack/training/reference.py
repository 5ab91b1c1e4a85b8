"""What a run's first model says of a split's answers, made once and kept.

Of a pair it is the log-probability of each answer, of a rollout those of its label tokens. The
engine computes them before training with the objective's function, in eval mode, without gradients
and random numbers. Existing numbers are kept, so a stopped pass continues.

    reference/reference.json   what they were made from: weights, tokenizer, template, ...
    reference/*.part           rows (number of the pair, chosen, rejected), or for each label token
                               (number of the rollout, log p); the digest of what they were made
                               from, and a checksum over both

A folder or part that was made from anything else is refused, with every difference. A damaged part
is computed again.

At a run's first step the policy equals the reference, so both must give the same log p. The bits
are the same if both ran the same row; else they differ by rounding (`Noise`). A larger difference
means other weights, other pairs, or a model that computes differently in training. A resumed run is
not checked, since its policy has moved.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.pipeline import KeptTable, TrainData
from vlmpack.distributed import Ranks
from vlmpack.encode.sample import PAIR_NAMES
from vlmpack.errors import ReferenceCacheError
from vlmpack.file_format import REFERENCE
from vlmpack.packing import Batch
from vlmpack.training.objective import Objective, forward_step
from vlmpack.training.preference import label_tokens, sequence_log_probabilities
from vlmpack.whole_file import read_json, regular_bytes, write_atomically

FACTS_NAME = "reference.json"

_ELSEWHERE = (
    "have this run's made in another folder: objective.reference_dir, by default `reference` in "
    "run_dir"
)

_DIGEST = 16
_ROW = np.dtype([("number", "<i8"), ("chosen", "<f8"), ("rejected", "<f8")])
_TOKEN = np.dtype([("number", "<i8"), ("log_p", "<f8")])

Row = tuple[float, ...]
"""A sample's number, and log-probabilities: of a pair's chosen and rejected answer, or of the label
tokens of a rollout."""

Rows = np.ndarray[tuple[int], np.dtype[np.void]]
"""Their dtype is `_ROW` or `_TOKEN`."""


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """A folder of log-probabilities.

    Args:
        facts: what they are made from, by name.
        of_tokens: whether samples are rollouts, and not pairs.
    """

    folder: Path
    facts: Mapping[str, str]
    num_samples: int
    of_tokens: bool = False

    def read(self) -> KeptTable:
        """The table by number of the sample.

        Raises:
            ReferenceCacheError: the folder was made from something else.
        """
        table: KeptTable = np.full((self.num_samples, 2), np.nan)
        if self.of_tokens:
            table = np.empty(self.num_samples, dtype=object)
            table.fill(np.array([np.nan]))
        for path, rows in self._own_parts():
            if rows is None:
                logger.warning("%s is damaged; its samples are computed again", path)
            elif self.of_tokens:
                starts = np.flatnonzero(np.diff(rows["number"], prepend=-1))
                for part in np.split(rows, starts[1:]):
                    table[part["number"][0]] = part["log_p"].copy()
            else:
                table[rows["number"], 0] = rows["chosen"]
                table[rows["number"], 1] = rows["rejected"]
        return table

    def write(self, rows: Sequence[Row]) -> None:
        """Add some samples.

        Raises:
            ReferenceCacheError: the folder cannot be written, or another run began one there.
        """
        if not rows:
            return
        flat: Sequence[Row] = rows
        if self.of_tokens:
            flat = [(number, value) for number, *values in rows for value in values]
        data = np.array([tuple(row) for row in flat], dtype=self._dtype).tobytes() + self._digest
        seal = _digest(data)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._record.exists():
                self._refuse_other_record()
            else:
                facts = REFERENCE.mark({"facts": dict(self.facts)})
                write_atomically(self._record, json.dumps(facts, indent=1) + "\n")
            name = f"{int(rows[0][0]):09d}-{seal.hex()[:8]}.part"
            write_atomically(self.folder / name, data + seal)
        except OSError as error:
            raise ReferenceCacheError(
                f"objective.reference_dir: {self.folder} cannot be written: "
                f"{error.strerror or error}; choose another folder"
            ) from error

    @property
    def is_there(self) -> bool:
        return self._record.exists() or any(self._parts)

    def refuse_other(self) -> None:
        """Compare what the folder's numbers were made from with this run's facts.

        The folder may be another run's, so no message suggests removing it.

        Raises:
            ReferenceCacheError: they differ, or the record is damaged or of another version.
        """
        for _ in self._own_parts():
            pass

    @property
    def _dtype(self) -> np.dtype[np.void]:
        return _TOKEN if self.of_tokens else _ROW

    @property
    def _record(self) -> Path:
        return self.folder / FACTS_NAME

    @property
    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.part"))

    @property
    def _digest(self) -> bytes:
        return _digest(json.dumps(REFERENCE.mark(self.facts), sort_keys=True).encode())

    def _own_parts(self) -> Iterator[tuple[Path, Rows | None]]:
        """Each part with its rows, or None if it is damaged."""
        if self._record.exists():
            self._refuse_other_record()
        for path in self._parts:
            content = regular_bytes(path)
            sealed, seal = content[:-_DIGEST], content[-_DIGEST:]
            data, made_from = sealed[:-_DIGEST], sealed[-_DIGEST:]
            if _digest(sealed) != seal:
                yield path, None
            elif made_from != self._digest:
                raise ReferenceCacheError(
                    f"{path} holds log-probabilities of another reference, although {FACTS_NAME} "
                    f"says otherwise. It may be another run's; {_ELSEWHERE}"
                )
            else:
                yield path, np.frombuffer(data, dtype=self._dtype)

    def _refuse_other_record(self) -> None:
        path = self._record
        try:
            content = read_json(path)
            REFERENCE.take(content, path, ReferenceCacheError)
            facts = dict(content["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceCacheError(
                f"{path} is damaged: {error}; put the file back, or {_ELSEWHERE}"
            ) from error
        lines = [
            f"  {name}: {facts.get(name, 'missing')} there, {self.facts.get(name, 'missing')} here"
            for name in sorted({*facts, *self.facts})
            if facts.get(name) != self.facts.get(name)
        ]
        if lines:
            listed = "\n".join(lines)
            raise ReferenceCacheError(
                f"{self.folder} holds log-probabilities of another reference:\n{listed}\nThey "
                "may be another run's. Train with the model and the recipe that they were made "
                f"from, or {_ELSEWHERE}"
            )


def unknown(table: KeptTable) -> npt.NDArray[np.bool_]:
    """(samples,) where nothing is known yet."""
    if table.ndim == 2:
        return np.asarray(np.isnan(table).any(axis=1))
    return np.fromiter((np.isnan(row[0]) for row in table), bool, len(table))


def put_row(table: KeptTable, row: Row) -> None:
    """Put a sample's numbers into a table."""
    number, *values = row
    table[int(number)] = np.array(values)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


logger = logging.getLogger("vlmpack")

BATCHES_PER_PART = 64
"""Micro-batches of each rank between two writes: what a stop loses."""


def log_probabilities(engine: Engine, batch: Batch) -> list[float]:
    """log p of each sequence of a batch of pairs, or of each label token of rollouts, under the
    engine's present weights.

    [] on a rank that computes none, or the same ones as another rank of its replica.
    """
    found = model_values(engine, batch)
    values: list[float] = [] if found is None else found.tolist()
    return values


def token_values(losses: Tensor, batch: Batch) -> Tensor:
    """(L,) float64: log p of all label tokens of a row, whatever part of them this rank has.

    Args:
        losses: as of `sequence_log_probabilities`.
    """
    log_p, context = -losses.double(), batch.context
    if context is None:
        return log_p
    assert context.all_sum is not None
    whole = log_p.new_zeros(batch.num_label_tokens)
    return context.all_sum(whole.index_copy(0, context.label_places, log_p))


def without_adapters(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with reference values from the engine's model without its adapters.

    No random number is drawn, and nothing is read on the host.

    Raises:
        CapabilityError: see `Engine.adapters_off`.
    """
    ACTIVITY.enter("reference log-probabilities")
    with engine.adapters_off():
        return [_with_reference(engine, batch) for batch in batches]


def _with_reference(engine: Engine, batch: Batch) -> Batch:
    values = model_values(engine, batch, once=False)
    return batch if values is None else batch.with_columns(reference=values)


def model_values(engine: Engine, batch: Batch, *, once: bool = True) -> Tensor | None:
    """Float64 on the engine's device: (N,) log p of each sequence, or (L,) that of each label token
    where samples are rollouts. None for [].

    Args:
        once: of the ranks that share a row the first alone has them; all do without.
    """
    step = partial(forward_step, sums=_log_p, of_rows=once)
    [report] = engine.forward_backward(step, iter([batch]), num_microbatches=1, forward_only=True)
    return report.get("log_p")


def _log_p(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    of = sequence_log_probabilities if batch.rollouts is None else token_values
    return {"loss_sum": losses.sum(), "log_p": of(losses, batch)}


def make_reference(
    engine: Engine, train: TrainData, ranks: Ranks, file: ReferenceFile
) -> tuple[KeptTable, int]:
    """The whole table of a split, and how many samples were computed now. Collective.

    Args:
        engine: with the reference model's weights.
        file: where it is kept; the main rank reads and writes it.

    Raises:
        ReferenceCacheError: a folder of another reference, or one that cannot be written.
        DataError: a bad sample whose class is not skipped.
    """
    table = ranks.on_main(file.read)
    fitted = train.fitted
    missing = fitted.eligible & ~fitted.table.bad & unknown(table)
    numbers: list[int] = np.flatnonzero(missing).tolist()
    if not numbers:
        return table, 0
    started, done, pending = time.perf_counter(), 0, list[Row]()
    ACTIVITY.enter("reference log-probabilities")

    def keep() -> int:
        rows = [row for part in ranks.gather_objects(pending) for row in part]
        rows = sorted(set(rows))
        for row in rows:
            put_row(table, row)
        ranks.on_main(partial(file.write, rows))
        pending.clear()
        return len(rows)

    batches = train.numbered_batches(numbers, rank=ranks.dp_rank, dp=ranks.dp_size, replica=ranks)
    for place, micro in enumerate(batches, start=1):
        values = log_probabilities(engine, micro.batch)
        if values:
            pending.extend(_rows_of(micro, values))
        if place % BATCHES_PER_PART == 0:
            done += keep()
            if ranks.is_main:
                logger.info("%-14s %d of %d samples", "reference", done, len(numbers))
    done += keep()
    if ranks.is_main:
        seconds = time.perf_counter() - started
        logger.info("%-14s %d samples in %.1f s, in %s", "reference", done, seconds, file.folder)
    return table, done


def _rows_of(micro: MicroBatch, values: Sequence[float]) -> Iterator[Row]:
    """The number of each sample, and its log-probabilities."""
    batch = micro.batch
    if batch.rollouts is None:
        counts = [2 for _ in micro.samples]
    else:
        assert batch.label_sequences is not None
        counts = torch.bincount(batch.label_sequences, minlength=len(micro.samples)).tolist()
    left = iter(values)
    for sample, count in zip(micro.samples, counts, strict=True):
        yield (sample.number, *islice(left, count))


FLOORS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Differences of an answer's log p that are never more than rounding, by compute type."""

MEASURED_PAIRS = 8
"""Pairs of the first step that are run in two rows each."""

TOGETHER = 4
"""Most pairs of one of those rows."""

FACTOR = 8.0
"""The largest of a few differences, to the largest that many sequences may show."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far log p of a sequence may be off because it stood in another row.

    Args:
        floor: of the compute type.
        measured: over the square root of the sequence's label tokens: the largest difference
            between two packings of the same weights.
    """

    floor: float
    measured: float = 0.0

    def limit(self, tokens: float) -> float:
        """The most that rounding explains in a sequence; errors add up as a random walk."""
        return max(self.floor, FACTOR * self.measured * math.sqrt(tokens))


class _Sequence(NamedTuple):
    """A sequence that was compared."""

    replica: int
    micro_batch: int
    number: int
    log_p: float
    reference: float
    limit: float

    @property
    def off(self) -> float:
        """The distance from the reference; inf if it is no number."""
        difference = abs(self.log_p - self.reference)
        return difference if math.isfinite(difference) else math.inf

    @property
    def excess(self) -> float:
        return self.off / self.limit


@dataclass(slots=True, kw_only=True)
class StartCheck:
    """Looks at a run's first step.

    Args:
        cause: why the reference may be another model, for the message.
    """

    engine: Engine
    noise: Noise
    cause: str
    _seen: list[Tensor] = field(default_factory=list)

    def watched(self, objective: Objective) -> Objective:
        """The objective, which also shows each micro-batch's losses here."""
        self._seen.clear()
        return objective.shown_to(self._look)

    def _look(self, losses: Tensor, batch: Batch) -> None:
        """Keep (3, N) of a micro-batch on the device: log p, reference, label tokens."""
        log_p = sequence_log_probabilities(losses, batch)
        reference = log_p if batch.reference is None else batch.reference.to(log_p)
        self._seen.append(torch.stack([log_p, reference, label_tokens(batch)]))

    def judge(self, batches: Sequence[Batch]) -> None:
        """After the forward passes of the step, before any weight has changed. Collective.

        Raises:
            ReferenceCacheError: on all ranks alike, with the sequence that is furthest off.
        """
        ranks, sequences = self.engine.ranks, self._sequences()
        worst = max(sequences, key=lambda one: one.excess, default=None)
        counts = sum(one.excess > 1 for one in sequences), len(sequences)
        parts = ranks.gather_objects((worst, counts) if worst is not None else None)
        known = [part for part in parts if part is not None]
        if not known:
            return
        everywhere = [one for one, _ in known]
        by_replica = {one.replica: both for one, both in known}  # all ranks of one say the same
        num_off, total = (sum(column) for column in zip(*by_replica.values(), strict=True))
        worst = max(everywhere, key=lambda one: one.excess)
        if worst.excess > 1:
            message = self._message(worst, batches, f"{num_off} of {total}")
            raise ReferenceCacheError(message)
        if ranks.is_main:
            logger.info(
                "%-14s policy and reference say the same of %d sequences: log p within %.1e",
                "first step",
                total,
                max(one.off for one in everywhere),
            )

    def _sequences(self) -> list[_Sequence]:
        sequences = []
        for place, values in enumerate(self._seen):
            log_p, reference, tokens = values.tolist()
            for n, count in enumerate(tokens):
                limit = self.noise.limit(count)
                sequences.append(
                    _Sequence(self.engine.ranks.dp_rank, place, n, log_p[n], reference[n], limit)
                )
        self._seen.clear()
        return sequences

    def _message(self, worst: _Sequence, batches: Sequence[Batch], count: str) -> str:
        """Run the micro-batch of that place once more in eval mode, for the message. Collective."""
        ranks, batch = self.engine.ranks, batches[worst.micro_batch]
        values = log_probabilities(self.engine, batch)
        mine = None
        if ranks.dp_rank == worst.replica and worst.number < len(values):
            mine = (sequence_name(batch, worst.number), values[worst.number])
        name, evaluated = next(one for one in ranks.gather_objects(mine) if one is not None)
        cause = f"The likely cause: {self.cause}"
        if abs(evaluated - worst.reference) <= worst.limit:
            cause = (
                f"In eval mode the model says {evaluated:.6g}, so it computes otherwise while it "
                "trains. Look for dropout in the model folder's config.json (attention_dropout and "
                "the like), and set it to 0"
            )
        return (
            f"step 1: {name} has log p {worst.log_p:.6g}, and {worst.reference:.6g} under the "
            f"reference, {worst.off:.3g} apart. {count} sequences are too far off. Before the "
            f"first step policy and reference are the same model, and rounding explains "
            f"{worst.limit:.2g}. {cause}. No weight has changed"
        )


def sequence_name(batch: Batch, number: int) -> str:
    return f"the {PAIR_NAMES[number % 2]} answer of sample {batch.keys[number // 2]!r}"


def measured_noise(engine: Engine, train: TrainData, ranks: Ranks, dtype: torch.dtype) -> Noise:
    """The difference between two packings of the same pairs at the present weights. Collective.

    Rows have about as many pairs as those of the first step, and another number. No random number
    is drawn.

    Args:
        engine: with the reference model's weights.

    Raises:
        DataError: a bad sample whose class is not skipped.
    """
    floor = FLOORS.get(dtype, FLOORS[torch.bfloat16])
    first = next(train.planned(train.start(), None), None)
    if first is None:
        return Noise(floor)
    ACTIVITY.enter("rounding of log-probabilities")
    planned = [n for samples in first.bins for n in samples][:MEASURED_PAIRS]
    numbers: list[int] = train.split.places(np.array(planned, dtype=np.int64)).tolist()
    together = max(1, min(TOGETHER, len(first.bins[0])))
    apart = 1 if together > 1 else 2  # where the numbers were made in rows of pairs, or of one
    ours, theirs = (_measured(engine, train, ranks, numbers, part) for part in (together, apart))
    differences = [
        abs(a - b) / math.sqrt(max(1, count))
        for key, (a, count) in ours.items()
        for b, _ in [theirs.get(key, (a, count))]
    ]
    return Noise(floor, max(differences, default=0.0))


def _measured(
    engine: Engine, train: TrainData, ranks: Ranks, numbers: Sequence[int], together: int
) -> dict[tuple[int, int], tuple[float, int]]:
    """(number of the pair, side) -> log p and label tokens, of rows of so many pairs."""
    mine: dict[tuple[int, int], tuple[float, int]] = {}
    for micro in train.numbered_batches(
        numbers, rank=ranks.dp_rank, dp=ranks.dp_size, together=together, replica=ranks
    ):
        batch, of_batch = micro.batch, [sample.number for sample in micro.samples]
        values = log_probabilities(engine, batch)
        if batch.label_sequences is None:
            continue
        counts = torch.bincount(batch.label_sequences, minlength=len(batch.lengths)).tolist()
        for place, (log_p, count) in enumerate(zip(values, counts, strict=False)):
            mine[of_batch[place // 2], place % 2] = (log_p, count)
    return {key: value for part in ranks.gather_objects(mine) for key, value in part.items()}
