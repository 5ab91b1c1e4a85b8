"""The data layer's front door: open a split, then take its global batches from any point.

data = TrainData.open(config, encoder, collator, progress=bar)
state = data.start()
for step in data.batches(state, rank=0, dp=1, max_steps=100):
    train(step.micro_batches)      # equal numbers on every rank
    state = step.state             # save it with the checkpoint; resume by passing it in
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from vlmpack.data.config import DataConfig
from vlmpack.data.fetch import Fetcher, LocalFetcher
from vlmpack.data.ledger import Ledger
from vlmpack.data.loader import BinDataset, BinRequest, MicroBatch, load_bins
from vlmpack.data.overlong import Fitted
from vlmpack.data.parts import Progress
from vlmpack.data.plan import Bin, Plan, PlannedBatch, assign
from vlmpack.data.prepare import dropped_samples, make_plan, prepare_split, probe_lengths
from vlmpack.data.protocols import Collator, Encoder
from vlmpack.data.read import SampleReader, SkippedSample
from vlmpack.data.state import DataState, Identity, Segment, check_identity
from vlmpack.data.summary import DataSummary, summarise
from vlmpack.errors import DataError
from vlmpack.families.sample import VLMSample


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One global batch, as one rank sees it.

    Args:
        epoch: counted from 0.
        batch: the run's global batch, counted from 0.
        num_samples: planned in it, over all ranks, holes included.
        micro_batches: this rank's share; every rank has equally many, some perhaps empty.
        state: of the run after this batch.
    """

    epoch: int
    batch: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]
    state: DataState

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """This rank's holes."""
        return tuple(hole for micro_batch in self.micro_batches for hole in micro_batch.skipped)


class TrainData:
    """One split, indexed, measured and planned. Training and validation open one each.

    Args: see `open`, which makes it.
    """

    def __init__(
        self,
        config: DataConfig,
        fitted: Fitted,
        plan: Plan,
        dataset: BinDataset,
        identity: Identity,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.fitted = fitted
        self.plan = plan
        self.dataset = dataset
        self.identity = identity
        self.ledger = ledger

    @classmethod
    def open(
        cls,
        config: DataConfig,
        encoder: Encoder,
        collator: Collator,
        *,
        ledger: Ledger | None = None,
        fetcher: Fetcher | None = None,
        list_dropped: bool = True,
        progress: Progress | None = None,
    ) -> TrainData:
        """Indexes what is new, computes lengths, applies the policies, probes, plans.

        Every rank may call it at once, outside any collective: one process builds the index, the
        others wait for its files with a finite timeout.

        Args:
            config: the split.
            encoder, collator: picklable, sent to the workers.
            ledger: where skipped samples are listed.
            fetcher: where shards are read from; local files by default.
            list_dropped: whether this process writes the over-long samples down (one rank does).
            progress: told about index and lengths parts.

        Raises:
            RecipeError, DataError, EmptyDataError: what is wrong with the split.
        """
        fetcher = LocalFetcher() if fetcher is None else fetcher
        ledger = Ledger(None) if ledger is None else ledger
        prepared = prepare_split(config, encoder, fetcher, progress)
        plan = make_plan(config, prepared.fitted)
        reader = SampleReader(fetcher, config.caps)
        probe_lengths(config, prepared.fitted, reader, encoder)
        if list_dropped:
            ledger.record(dropped_samples(prepared.fitted), epoch=None, batch=None)
        dataset = BinDataset(reader, encoder, collator, config.on_error)
        return cls(config, prepared.fitted, plan, dataset, prepared.identity, ledger)

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Global batches in an epoch; the last may be short. The same for every epoch."""
        return -(-self.plan.epoch_size // self.config.global_batch_size)

    def summary(self) -> DataSummary:
        """The split's figures, and the padding that packing removes from its first epoch."""
        whole, part = self.config.global_batch_size, self.config.micro_batch_size
        bins = [
            min(part, stop - at)
            for start in range(0, self.plan.epoch_size, whole)
            for stop in (min(start + whole, self.plan.epoch_size),)
            for at in range(start, stop, part)
        ]
        return summarise(self.fitted, self.plan, epoch_steps=self.steps_per_epoch(), bins=bins)

    def start(self) -> DataState:
        """The state of a run that has not begun."""
        return DataState(0, 0, 0, 0, self.plan.cursors(0, 0), (Segment(0, self.identity),))

    def check(self, state: DataState) -> None:
        """Refuses a state of other data or another order.

        Raises:
            RunIdentityError: with every difference.
        """
        check_identity(state, self.identity)

    def planned(self, state: DataState, max_steps: int | None) -> Iterator[PlannedBatch]:
        """The global batches from a state on, for all ranks, without reading a sample."""
        left = None if max_steps is None else max_steps - state.batches
        if left is not None and left <= 0:
            return
        for done, batch in enumerate(self.plan.walk(state.position), start=1):
            yield batch
            if done == left:
                return

    def batches(
        self, state: DataState, *, rank: int, dp: int, max_steps: int | None
    ) -> Iterator[GlobalStep]:
        """This data-parallel rank's share of every global batch from `state` on.

        Holes are written to the ledger as they come; the caller counts them (`SkipLimiter`).

        Args:
            state: where to begin; `start()` for a new run.
            rank, dp: the data-parallel coordinate and size. Tensor, pipeline and context ranks of
                one coordinate ask for the same.
            max_steps: the run's total of global batches, those before `state` included; None for
                no end.

        Raises:
            RunIdentityError: the state belongs to other data.
            DataError: a bad sample whose class is not skipped.
        """
        self.check(state)
        coming: deque[PlannedBatch] = deque()

        def requests() -> Iterator[BinRequest]:
            for planned in self.planned(state, max_steps):
                coming.append(planned)
                for samples in assign(planned.bins, dp)[rank]:
                    yield self.request(samples)

        loaded = load_bins(self.dataset, requests(), self.config.loader)
        share: list[MicroBatch] = []
        for micro_batch in loaded:
            share.append(micro_batch)
            planned = coming[0]
            if len(share) < -(-len(planned.bins) // dp):
                continue
            coming.popleft()
            step = self._step(planned, state, tuple(share))
            self.ledger.record(step.skipped, epoch=step.epoch, batch=step.batch)
            state, share = step.state, []
            yield step

    def eval_batches(
        self, *, rank: int, dp: int, max_samples: int | None = None
    ) -> Iterator[MicroBatch]:
        """Every sample once, in index order; ranks take equal steps, the last perhaps empty.

        Args:
            rank, dp: the data-parallel coordinate and size.
            max_samples: only the first so many.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        numbers = self.fitted.eligible.nonzero()[0][:max_samples].tolist()
        part = self.config.micro_batch_size
        bins: list[Bin] = [tuple(numbers[at : at + part]) for at in range(0, len(numbers), part)]
        requests = (self.request(samples) for samples in assign(bins, dp)[rank])
        for micro_batch in load_bins(self.dataset, requests, self.config.loader):
            self.ledger.record(micro_batch.skipped, epoch=None, batch=None)
            yield micro_batch

    def samples(self) -> Iterator[VLMSample]:
        """Every usable sample once, in index order, cooked but not encoded.

        Raises:
            DataError: a bad sample whose class is not skipped.
        """
        for number in self.fitted.eligible.nonzero()[0].tolist():
            ref = self.fitted.table.ref(number)
            try:
                sample = self.dataset.reader.read(ref)
            except DataError as error:
                if not self.config.on_error.skips(error.error_class):
                    raise
                hole = SkippedSample.from_error(ref, error)
                self.ledger.record([hole], epoch=None, batch=None)
                continue
            yield sample

    def request(self, samples: Bin) -> BinRequest:
        """What a worker needs to load a bin."""
        return BinRequest(tuple(self.fitted.table.ref(number) for number in samples))

    def _step(
        self, planned: PlannedBatch, before: DataState, share: tuple[MicroBatch, ...]
    ) -> GlobalStep:
        following = planned.following
        after = DataState(
            epoch=following.epoch,
            window=following.window,
            batch=following.batch,
            batches=before.batches + 1,
            cursors=self.plan.cursors(following.epoch, following.window),
            segments=before.segments,
        )
        return GlobalStep(
            epoch=planned.position.epoch,
            batch=before.batches,
            num_samples=planned.num_samples,
            micro_batches=share,
            state=after,
        )
