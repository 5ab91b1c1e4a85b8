"""A split whose shards are indexed in plan order, ahead of use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.forkserver import start_server
from vlmpack.data.index.lengths import LENGTHS_RULE, ShardBuilder
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.table import Fitted, Int64s, SampleRef
from vlmpack.data.plan.batches import Cursors, Position
from vlmpack.data.plan.packers import Bin, PlannedSamples
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.plan.windows import WINDOW_RULE, StreamSource, WindowPlan
from vlmpack.data.splits.growing_index import HELPER_MIN_BYTES, SHARD_STRIDE, GrowingIndex
from vlmpack.data.splits.indexed import prepare_split
from vlmpack.data.splits.split import MIN_PROBED, OnDropped, consecutive_bins
from vlmpack.data.splits.summary import (
    DataSummary,
    EpochLength,
    blended_draws,
    check_not_empty,
    short_digest,
    split_identity,
    summarise,
)
from vlmpack.data.splits.survey import DataLaunch, Survey
from vlmpack.errors import RecipeError
from vlmpack.storage.fetch import ShardStamp

MAX_SPREAD = 8
"""Shards that ranks index at the same time before any count is known."""

FEW_CORES = 2
"""With so few cores, the helpers' server starts only when the first window is indexed. Its imports
take as long as the indexing, and would delay the first batch."""

MAX_COUNTED = 2000
"""Parts that are read for the length of an epoch alone."""


@dataclass(slots=True)
class StreamedSplit:
    """Shards are indexed in plan order, ahead of use.

    Args:
        position, cursors: the window that this launch begins with; figures are taken from it.
    """

    config: DataConfig
    survey: Survey
    index: GrowingIndex
    plan: WindowPlan
    identity: Identity
    position: Position = field(default_factory=Position)
    cursors: Cursors = ()
    _fitted: Fitted | None = None
    _asked: bool = False
    _steps: int | None = None

    def start(self, epoch: int = 0, first_pass: int = 0) -> Cursors:
        """See Split."""
        return self.plan.start(first_pass)

    def ref(self, number: int) -> SampleRef:
        """See Split."""
        return self.index.ref(number)

    def refs(self, samples: Bin) -> tuple[SampleRef, ...]:
        """See Split."""
        return tuple(self.ref(number) for number in samples)

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """See Split."""
        return self.index.sizes(numbers)

    def sequence_tokens(self, numbers: Int64s) -> Int64s:
        """See Split."""
        return self.index.sequence_tokens(numbers)

    @property
    def planned(self) -> PlannedSamples | None:
        """See Split."""
        encoder = self.index.builder.lengths.encoder
        return self.index.planned if encoder.settings.share_prefix else None

    def places(self, numbers: Int64s) -> Int64s:
        """See Split. Every shard is indexed first."""
        shards, rows = np.divmod(numbers, SHARD_STRIDE)
        places: Int64s = self.fitted.table.shard_starts[shards] + rows
        return places

    def pass_bins(self, places: Sequence[int], each: int) -> list[Bin]:
        """See Split."""
        return consecutive_bins(places, each)

    def fitted_ref(self, place: int) -> SampleRef:
        """See Split. Every shard is indexed first."""
        return self.fitted.table.ref(place)

    def sources(self, numbers: Int64s) -> Int64s:
        """See Split. No shard is indexed for it."""
        firsts = [source.first for source in self.plan.sources]
        return np.searchsorted(firsts, numbers // SHARD_STRIDE, side="right") - 1

    def epoch_length(self) -> EpochLength:
        """See Split. Exact where every shard has its parts, unless they are many and `index_all`
        was not called."""
        if self.plan.weighted:
            size = sum(source.num_draws or 0 for source in self.plan.sources)
            return self._length_of(size, exact=True)
        shards = range(len(self.index.stamps))
        few = len(shards) <= MAX_COUNTED or self._asked
        if self.index.num_known == len(shards) or (few and self.index.all_made()):
            total = sum(self.index.exact_count(shard) for shard in shards)
            return self._length_of(total, exact=True)
        self._first_order()
        known = [shard for shard in shards if self.index.count(shard) is not None]
        num_bytes = sum(stamp.size for stamp in self.index.stamps)
        rate = sum(self.index.count(shard) or 0 for shard in known) / sum(
            max(1, self.index.stamps[shard].size) for shard in known
        )
        total = max(1, round(rate * num_bytes))
        return self._length_of(total, exact=False)

    def steps_until(self, epochs: int, state: DataState) -> int:
        """See Split. Without a token budget no window is planned for it."""
        plan = self.plan
        per_window = plan.packer.num_batches(plan.window)
        if per_window is None:
            return plan.steps_until(epochs, state.position, state.cursors)
        done = state.window * per_window + state.batch
        return (epochs - state.epoch) * self.epoch_length().num_steps - done

    def _length_of(self, num_samples: int, *, exact: bool) -> EpochLength:
        """Under a token budget steps are extrapolated from the first window, unless the whole epoch
        is asked for."""
        steps = self.plan.packer.num_batches(num_samples)
        if steps is not None:
            return EpochLength(num_samples, steps, exact)
        if self._asked:
            if self._steps is None:
                self._steps = self.plan.steps_until(1, Position(), self.start())
            return EpochLength(num_samples, self._steps, exact)
        order = self._first_order()
        rows = sum(len(batch) for batch in self.plan.packer(order))
        expected = num_samples * rows / max(1, order.size) / self.config.training.global_batch_size
        return EpochLength(num_samples, max(1, round(expected)), exact=False)

    def index_all(self) -> None:
        """See Split."""
        self.index.make_all()
        self._asked = True

    @property
    def fitted(self) -> Fitted:
        """See Split: every shard is indexed first."""
        if self._fitted is None:
            index = self.index
            prepared = prepare_split(self.config, self.survey, index.builder, index.settings)
            self._fitted = prepared.fitted
        return self._fitted

    def numbers(self) -> list[tuple[str, Int64s]]:
        """See Split."""
        numbered = []
        for source in self.plan.sources:
            shards = range(source.first, source.first + source.num_shards)
            numbered.append(
                (source.name, np.concatenate([self.index.look_up(s).numbers for s in shards]))
            )
        return numbered

    def usable_sizes(self) -> Iterator[tuple[Int64s, Int64s]]:
        """See Split: of the shards that the first window needed."""
        self._first_order()
        return chain.from_iterable(one.sizes() for one in self.index.kept())

    def probed(self, count: int, state: DataState) -> list[SampleRef]:
        """See Split. Samples of the window that the run begins with, which is indexed first. At
        most MIN_PROBED of them, since their bytes are not here yet.

        Raises:
            EmptyDataError: that window needs every shard, and none has a usable sample.
        """
        self.position, self.cursors = state.position, state.cursors
        order = self._first_order()
        if _has_helpers(self.index.stamps):
            start_server(self.index.settings.preload)  # it imports during the first batch
        loaded = self.index.kept()
        if len(loaded) == len(self.index.stamps):  # else there may be usable samples further on
            check_not_empty(loaded, self.config)
        count = min(count, MIN_PROBED, order.size)
        places = np.linspace(0, order.size - 1, num=count).astype(np.int64)
        refs = [self.ref(number) for number in sorted(order[places].tolist())]
        return [ref for ref in refs if ref.reason is None]

    def summary(self) -> DataSummary:
        """See Split."""
        rows = PackArrays.of([self.plan.packer(self._first_order())])
        summary = summarise(
            self.index.kept(),
            num_shards=len(self.index.stamps),
            epoch=self.epoch_length(),
            tokens=self.sequence_tokens(rows.numbers),
            bins=rows.sizes,
        )
        self.index.name_keys_from_now(summary.unknown_keys)
        return summary

    def close(self) -> None:
        """See Split."""
        self.index.close()

    def _first_order(self) -> Int64s:
        cursors = self.cursors or self.start()
        window = self.plan.plan_window(self.position.epoch, self.position.window, cursors)
        return window.order


def open_streamed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
    launch: DataLaunch,
) -> StreamedSplit:
    """Plan without an index.

    The identity holds the shards' sizes and versions, since nothing else is known of them. So a
    local folder that was copied without its time stamps counts as other data.

    Raises:
        RecipeError: weights without `epoch_size`, while the number of samples is unknown; weights
            of tokens, while the number of tokens is unknown; rollouts, whose rewards are unknown.
    """
    stamps = [stamp for shards in survey.sources for stamp in shards]
    if len(os.sched_getaffinity(0)) > FEW_CORES and _has_helpers(stamps):
        start_server(settings.preload)  # it imports while the first window is indexed
    settings = replace(settings, rank=launch.rank, world_size=launch.world_size)
    index = GrowingIndex(config, stamps, builder, settings, on_dropped)
    if builder.lengths.encoder.settings.rollouts and not index.all_made():
        raise RecipeError(
            "data.shuffle: window, but advantages of rollouts need all rewards before the first "
            f"step, and the {len(stamps)} files of {config.key} are not all indexed. Run "
            "`vlmpack index --recipe` first, or set data.shuffle: global"
        )
    draws: Sequence[int | None] = [None] * len(survey.sources)
    if config.weighted:
        held = None
        if config.weights == "tokens":
            held = _samples_and_tokens(config, index, [len(shards) for shards in survey.sources])
        size = config.epoch_size or _count_all(config, index)
        draws = blended_draws(config, size, held)
    sources, first = [], 0
    for source, shards, count in zip(config.sources, survey.sources, draws, strict=True):
        sizes = tuple(max(1, stamp.size) for stamp in shards)
        sources.append(StreamSource(source.name, first, sizes, count))
        first += len(shards)
    planned = index.planned if builder.lengths.encoder.settings.share_prefix else None
    cutting = config.mode.cut(config.uncut(index.sizes, None, index.aligned_sizes, planned))
    plan = WindowPlan(
        sources,
        index,
        seed=config.training.seed,
        window=cutting.window,
        packer=cutting.packer,
        spread=min(launch.world_size, MAX_SPREAD),
        key=config.key,
        groups=index.groups,
        in_turn=config.keeps_turns,
    )
    contents = [
        (
            f"{len(shards)} shards, {sum(stamp.size for stamp in shards)} bytes",
            short_digest("\n".join(f"{stamp.size} {stamp.version}" for stamp in shards)),
        )
        for shards in survey.sources
    ]
    identity = split_identity(
        config,
        survey.shuffle,
        builder.lengths.encoder,
        rule=WINDOW_RULE,
        lengths=LENGTHS_RULE,
        contents=contents,
    )
    return StreamedSplit(config, survey, index, plan, {**identity, **config.mode.identity(cutting)})


def _has_helpers(stamps: Sequence[ShardStamp]) -> bool:
    """Whether processes will index ahead."""
    return sum(stamp.size for stamp in stamps) >= HELPER_MIN_BYTES


def _count_all(config: DataConfig, index: GrowingIndex) -> int:
    if not index.all_made():
        raise RecipeError(
            "data.epoch_size: missing. With weights an epoch is a number of draws, by default "
            f"the sum of all samples, but {len(index.stamps)} files of {config.key} are not all "
            "indexed. Set data.epoch_size, or run `vlmpack index --recipe` first"
        )
    return sum(index.exact_count(shard) for shard in range(len(index.stamps)))


def _samples_and_tokens(
    config: DataConfig, index: GrowingIndex, num_shards: Sequence[int]
) -> list[tuple[int, int]]:
    """(usable samples, their tokens) of each source, with `num_shards` of each."""
    if not index.all_made():
        raise RecipeError(
            "data.weights: tokens, which needs the mean length of each source, but the "
            f"{len(index.stamps)} files of {config.key} are not all indexed. Run "
            "`vlmpack index --recipe` first, or set data.weights: samples"
        )
    shards = iter(range(len(index.stamps)))
    counts = []
    for count in num_shards:
        parts = [index.glance_contents(shard) for shard in islice(shards, count)]
        counts.append((sum(samples for samples, _ in parts), sum(tokens for _, tokens in parts)))
    return counts
