"""The data layer's front door: open a split, then take its global batches from any point.

A split is indexed as a whole when it is opened, or shard by shard as its plan needs them: see
vlmpack.data.splits.survey for which, and vlmpack.data.splits.split for the two.

data = TrainData.open(config, encoder, progress=bar)
state = data.start()
for step in data.batches(state, rank=0, dp=1, max_steps=100):
    train(step.micro_batches)      # equal numbers on every rank
    state = step.state             # save it with the checkpoint; resume by passing it in
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from vlmpack.data.config import DataConfig
from vlmpack.data.index.parts import Progress
from vlmpack.data.index.rollouts import Outcomes
from vlmpack.data.index.table import Fitted, Int64s, SampleRef
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import BinDataset, BinRequest, GlobalStep, MicroBatch, step_of
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.loading.replica import Steps, start_steps
from vlmpack.data.packs.open import SavedBins, open_packed, survey_data
from vlmpack.data.plan.batches import Plan, PlannedBatch
from vlmpack.data.plan.packers import Bin
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.rank_bins import Known, RankBins, assign, bins_by_rank
from vlmpack.data.plan.state import DataState, Era, Identity, admit
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.splits.indexed import open_indexed
from vlmpack.data.splits.split import (
    MIN_PROBED,
    Split,
    consecutive_bins,
    probe_lengths,
    probed_mark,
)
from vlmpack.data.splits.streamed import open_streamed
from vlmpack.data.splits.summary import DataSummary, EpochLength
from vlmpack.data.splits.survey import DataLaunch, build_settings, make_builder
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, ReferenceCacheError
from vlmpack.storage.fetch import Fetcher, LocalFetcher, ShardStamp

Float64s = npt.NDArray[np.float64]

KeptTable = npt.NDArray[Any]
"""What a model said of each sample. (samples, 2) float64 for pairs, NaN where nothing is known;
else (samples,) objects, each (l,) float64 of the sample's label tokens, [NaN] for nothing. What
answers earned is (samples, 1) float64."""


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """Adds to a micro-batch what is known of its samples besides their tokens.

    Args:
        sources: of each source of the split, its place among the recipe's names; empty with one
            name.
        source_of: (n,) sample numbers -> their source in the split.
        kept: column -> a table in the split's order. Tables are put in after workers begin to
            read.
        place_of: (n,) sample numbers -> their place in that order.
    """

    sources: Sequence[int]
    source_of: Callable[[Int64s], Int64s]
    kept: Mapping[str, KeptTable]
    place_of: Callable[[Int64s], Int64s]

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its columns.

        Raises:
            ReferenceCacheError: a sample of which a table says nothing.
        """
        if self.sources and micro_batch.batch.num_pairs:
            sources = np.array(self.sources, dtype=np.int64)[self.source_of(_numbers(micro_batch))]
            micro_batch = micro_batch.with_columns(sources=torch.from_numpy(sources))
        for name, table in self.kept.items():
            if micro_batch.samples:
                micro_batch = with_kept(micro_batch, name, table, self.place_of)
        return micro_batch


def with_kept(
    micro_batch: MicroBatch, name: str, table: KeptTable, place_of: Callable[[Int64s], Int64s]
) -> MicroBatch:
    """The micro-batch with what a model said of its samples.

    Args:
        name: of the column.
        table: in the split's order.

    Raises:
        ReferenceCacheError: a sample of which nothing is known.
    """
    rows = table[place_of(_numbers(micro_batch))]
    for sample, row in zip(micro_batch.samples, rows, strict=True):
        if np.isnan(row).any():
            raise ReferenceCacheError(
                f"sample {sample.key!r} of {sample.shard} has no log-probabilities of the "
                f"{name} model: it could not be read when they were made, and can be now. Run "
                "`vlmpack reference` again, then resume"
            )
    return micro_batch.with_columns(
        **{name: torch.from_numpy(np.concatenate([np.empty(0), *rows]))}
    )


def _numbers(micro_batch: MicroBatch) -> Int64s:
    return np.array([sample.number for sample in micro_batch.samples], dtype=np.int64)


__all__ = ["GlobalStep", "TrainData"]

logger = logging.getLogger("vlmpack")

ALONE = Ranks()

READ_TOGETHER = 64
"""Samples that are asked for at once where no bin says so."""


@dataclass(eq=False)
class TrainData:
    """One split, measured and planned, made by `open`. Training and validation open one each."""

    config: DataConfig
    split: Split
    dataset: BinDataset
    ledger: Ledger
    shards: tuple[ShardStamp, ...] = ()

    def __post_init__(self) -> None:
        self.kept: dict[str, KeptTable] = {}
        self.outcomes: Outcomes | None = None
        if self.dataset.encoder.settings.rollouts:
            fitted, scale = self.fitted, self.config.objective.advantage_scale
            columns = fitted.table.rollouts
            assert columns is not None  # of every table that such an encoder has measured
            self.outcomes = Outcomes.of(columns, scale, fitted.eligible)
            self.kept["advantages"] = self.outcomes.advantages[:, None]
            self.kept["rewards"] = self.outcomes.rewards[:, None]
        self._sources = self.config.data.places_of(self.config.sources)

    @classmethod
    def open(
        cls,
        config: DataConfig,
        encoder: Encoder,
        *,
        ledger: Ledger | None = None,
        fetcher: Fetcher | None = None,
        list_dropped: bool = True,
        progress: Progress | None = None,
        launch: DataLaunch | None = None,
    ) -> TrainData:
        """Index what is needed now, compute lengths, apply the policies, probe and plan.

        Every rank may call it at once, outside any collective. While one process indexes, others
        wait with a timeout.

        Args:
            ledger: where skipped samples are listed.
            fetcher: where shards are read from; local files by default.
            list_dropped: whether this process writes the over-long samples down (one rank does).

        Raises:
            RecipeError, DataError, EmptyDataError: what is wrong with the split.
            RunIdentityError: the launch resumes a run of other data.
        """
        fetcher = LocalFetcher() if fetcher is None else fetcher
        ledger = Ledger(None) if ledger is None else ledger
        launch = DataLaunch() if launch is None else launch
        builder, settings = make_builder(config, encoder, fetcher), build_settings(config, progress)
        survey = launch.survey or survey_data(config, encoder, fetcher, launch.resume)

        def on_dropped(samples: Sequence[SkippedSample]) -> None:
            if list_dropped:
                ledger.record(samples, epoch=None, batch=None)

        split: Split
        dataset = BinDataset
        if config.mode.facts.reads_packs:
            split = open_packed(config, survey, builder, settings, on_dropped)
            dataset = SavedBins
        elif survey.shuffle == "window":
            split = open_streamed(config, survey, builder, settings, on_dropped, launch)
        else:
            split = open_indexed(config, survey, builder, settings, on_dropped)
        reader = SampleReader(fetcher, config.caps, encoder.each_answer)
        config = replace(config, mode=config.mode.resolved(split.plan.packer))
        collator = config.mode.collator(
            pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
        )
        bins = dataset(reader, encoder, collator, config.data.on_error)
        data = cls(config, split, bins, ledger, tuple(chain(*survey.sources)))
        start = data.start() if launch.resume is None else data.admit(launch.resume)
        mark = probed_mark(settings.directory, split.identity)
        count = config.num_probed
        if mark.exists():
            count = min(count, MIN_PROBED)
        probe_lengths(config, split.probed(count, start), reader, encoder)
        if count:
            with suppress(OSError):
                mark.touch()
        return data

    @property
    def plan(self) -> Plan | WindowPlan | PackPlan:
        """The plan of the split's global batches."""
        return self.split.plan

    @property
    def identity(self) -> Identity:
        """What decides its order."""
        return self.split.identity

    @property
    def fitted(self) -> Fitted:
        """All its samples, numbered from 0; what is not indexed yet is indexed first."""
        return self.split.fitted

    def ref(self, number: int) -> SampleRef:
        """A sample by its number in the plan (and in the ledger)."""
        return self.split.ref(number)

    def epoch_length(self) -> EpochLength:
        """How long an epoch is: exact once every shard is indexed, an estimate before."""
        return self.split.epoch_length()

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; the last may be short.

        All epochs have equally many, but under a token budget this counts the first epoch. It is an
        estimate where `epoch_length` is one.
        """
        return self.epoch_length().num_steps

    def steps_until(self, epochs: int, state: DataState) -> int:
        """Global batches from a state to the end of the last of `epochs` epochs.

        Under a token budget that takes a plan of them all, and an index of every shard.
        """
        return self.split.steps_until(epochs, state)

    def summary(self) -> DataSummary:
        """The split's figures, and the padding that packing removes from its first epoch."""
        return self.split.summary()

    def start(self) -> DataState:
        """The state of a run that has not started."""
        return DataState(0, 0, 0, 0, self.split.start(), (Era(0, self.identity),))

    def admit(self, state: DataState) -> DataState:
        """The state to go on from: the same, or that of a new era where the data changed.

        Raises:
            RunIdentityError: other data and `on_data_change: refuse`, or another order.
        """
        return admit(
            state,
            self.identity,
            key=self.config.key,
            new_era=self.config.new_era,
            start=self.split.start,
        )

    def planned(self, state: DataState, max_steps: int | None) -> Iterator[PlannedBatch]:
        """The global batches from a state on, for all ranks, without reading a sample."""
        remaining = None if max_steps is None else max_steps - state.batches
        if remaining is not None and remaining <= 0:
            return
        walk = self.plan.walk(state.position, state.cursors, state.shards)
        for done, batch in enumerate(walk, start=1):
            yield batch
            if done == remaining:
                return

    def batches(
        self, state: DataState, *, rank: int, dp: int, max_steps: int | None, replica: Ranks = ALONE
    ) -> Generator[GlobalStep]:
        """This data-parallel rank's bins of every global batch from `state` on.

        Workers read the first bins when this returns. Closing it ends them. Holes are written to
        the ledger only when their global batch is taken. The caller counts them (`SkipLimiter`).

        Args:
            state: where to begin; `start()` for a new run.
            rank, dp: the data-parallel coordinate and size. Tensor, pipeline and context ranks of
                one coordinate pass the same.
            max_steps: the run's total of global batches, those before `state` included; None for no
                end.
            replica: this process within its replica. It makes pixels of its own images alone, and
                all agree on every global batch.

        Raises:
            RunIdentityError: the state belongs to other data.
            DataError: a bad sample whose class is not skipped.
        """
        steps = self._global_steps(self.admit(state), rank, dp, max_steps, replica)
        next(steps)  # None: the workers are at work
        return cast(Generator[GlobalStep], steps)

    def _global_steps(
        self, state: DataState, rank: int, dp: int, max_steps: int | None, replica: Ranks
    ) -> Iterator[GlobalStep | None]:
        """First None, once the workers are at work; then the global batches."""
        coming: deque[tuple[PlannedBatch, RankBins]] = deque()

        def requests() -> Iterator[Sequence[BinRequest]]:
            for planned in self.planned(state, max_steps):
                dealt = self.rank_bins(planned.bins, dp)
                coming.append((planned, dealt))
                yield [self.request(samples) for samples in dealt.bins[rank]]

        try:
            split = self.split
            columns = self._sample_columns(split.sources, split.places)
            with closing(self._start_steps(requests(), replica, columns, ahead=True)) as steps:
                yield None
                for micro_batches in steps:
                    planned, dealt = coming.popleft()
                    step = step_of(planned, state, tuple(micro_batches), dealt.imbalance)
                    if replica.is_lead:
                        self.ledger.record(step.skipped, epoch=step.epoch, batch=step.batch)
                    state = step.state
                    yield step
        finally:
            self.split.close()

    def eval_batches(
        self, *, rank: int, dp: int, max_samples: int | None = None, replica: Ranks = ALONE
    ) -> Iterator[MicroBatch]:
        """Every sample once, in index order; ranks take equal steps, the last perhaps empty.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        numbers = self.fitted.eligible.nonzero()[0][:max_samples].tolist()
        columns = self._sample_columns(self.fitted.table.sources, lambda numbers: numbers)
        steps = self._start_steps(self._one_by_one(numbers, rank, dp), replica, columns)
        for micro_batch in chain.from_iterable(steps):
            if replica.is_lead:
                self.ledger.record(micro_batch.skipped, epoch=None, batch=None)
            yield micro_batch

    def numbered_batches(
        self,
        numbers: Sequence[int],
        *,
        rank: int,
        dp: int,
        together: int | None = None,
        replica: Ranks = ALONE,
    ) -> Iterator[MicroBatch]:
        """Some samples (places in `fitted`) once, in their order or as packs hold them.

        Ranks take equal steps, the last perhaps empty. Holes are not written down, since training
        meets them again.

        Args:
            together: samples of a micro-batch, in rows of this pass's own; None for the recipe's.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        steps = self._one_by_one(numbers, rank, dp, together)
        yield from chain.from_iterable(self._start_steps(steps, replica))

    def _start_steps(
        self,
        steps: Steps,
        replica: Ranks,
        columns: SampleColumns | None = None,
        *,
        ahead: bool = False,
    ) -> Generator[list[MicroBatch]]:
        start = partial(start_steps, self.dataset, steps, self.config.data, self.config.workers)
        return start(replica, add_columns=columns, ahead=ahead)

    def _sample_columns(
        self, source_of: Callable[[Int64s], Int64s], place_of: Callable[[Int64s], Int64s]
    ) -> SampleColumns:
        return SampleColumns(self._sources, source_of, self.kept, place_of)

    def _one_by_one(
        self, numbers: Sequence[int], rank: int, dp: int, together: int | None = None
    ) -> Steps:
        """One rank's bins of a pass over samples, each a step of its own."""
        cut = consecutive_bins if together else self.split.pass_bins
        bins = cut(numbers, together or self.config.training.micro_batch_size)
        for samples in assign(bins, dp)[rank]:
            yield [BinRequest(tuple(map(self.split.fitted_ref, samples)))]

    def samples(self) -> Iterator[VLMSample]:
        """Every usable sample once, in index order, cooked but not encoded.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        fitted = self.fitted
        numbers = fitted.eligible.nonzero()[0].tolist()
        for at in range(0, len(numbers), READ_TOGETHER):
            refs = [fitted.table.ref(number) for number in numbers[at : at + READ_TOGETHER]]
            for ref, sample in zip(refs, self.dataset.reader.read_all(refs), strict=True):
                if not isinstance(sample, DataError):
                    yield sample
                    continue
                if not self.config.data.on_error.skips(sample.error_class):
                    raise sample
                hole = SkippedSample.from_error(ref, sample)
                self.ledger.record([hole], epoch=None, batch=None)

    def rank_bins(self, bins: Sequence[Bin], dp: int) -> RankBins:
        """Which data-parallel rank trains which bins of a global batch."""
        split, mode = self.split, self.config.mode
        known = Known(split.sizes, split.sequence_tokens, split.planned, mode.multiples.sequence)
        even = mode.packing.balance == "cost"
        return bins_by_rank(bins, dp, known=known, row_cost=self.config.row_cost, balanced=even)

    def alone(self, number: int) -> MicroBatch:
        """A sample of the plan in a row of its own.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        loaded = self.dataset[self.request((number,))]
        if isinstance(loaded, SkippedSample):
            raise loaded.to_error()
        return self._sample_columns(self.split.sources, self.split.places)(loaded)

    def request(self, samples: Bin) -> BinRequest:
        """What a worker needs to load a bin of the plan."""
        return BinRequest(self.split.refs(samples))
