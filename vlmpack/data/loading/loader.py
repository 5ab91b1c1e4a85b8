"""Batches from bins: a map-style DataLoader whose sampler is the plan itself.

A request has the SampleRefs of its bin, so workers hold no index, shuffle buffer or state. A run
resumes where the requests begin, and batches come back in order. Workers start by forkserver, never
by fork. Errors travel back as values, since an exception loses its fields on the way out of a
worker.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from PIL.Image import Image, fromarray, new
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import redacted
from vlmpack.data.forkserver import DEFAULT_PRELOAD, signals_blocked, worker_context
from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.read import SampleReader, SkippedSample
from vlmpack.data.loading.workers import LOOK_SECONDS, WorkerWatch, next_item, start_worker
from vlmpack.data.plan.batches import PlannedBatch
from vlmpack.data.plan.state import DataState
from vlmpack.data.protocols import Collator
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, DataError, integrity_error, or_raise
from vlmpack.packing.batch import EncodedSample, PackedBatch, PaddedBatch
from vlmpack.packing.digest import digest_of
from vlmpack.packing.image_owners import RowOwners, SampleOwners
from vlmpack.packing.media import LevelScale, as_levels, pin_batch, tell_tower
from vlmpack.recipe.data import DataSection, OnErrorSection
from vlmpack.words import counted

SIDE = 64
"""Width and height in pixels of the images that a processor is tried with."""
LOADER_SEED = 0
"""Seed of the private generator that the DataLoader draws its workers' seeds from."""


@dataclass(frozen=True, slots=True)
class BinRequest:
    """One bin to load; empty for a bin that only fills up a rank's part of the step.

    Args:
        row: which of the row's images this process makes pixels of; None for all of them.
    """

    samples: tuple[SampleRef, ...]
    row: RowOwners | None = None
    holes: tuple[SkippedSample, ...] = ()

    @property
    def owners(self) -> list[SampleOwners | None]:
        """Who makes the pixels of each sample's images; None if this process makes all of them."""
        if self.row is None:
            return [None for _ in self.samples]
        ends = [0, *accumulate(ref.num_patches for ref in self.samples)]
        return [SampleOwners(self.row, before, ends[-1]) for before in ends[:-1]]


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample that is in a batch."""

    number: int
    key: str
    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The micro-batch made of one bin.

    Args:
        batch: the tensors; an empty batch where no sample is left.
        samples: those in the batch, in row order.
        read_seconds: spent on bytes, checksums and JSON.
        encode_seconds: spent on decoding, tokenising and packing.
        digest: of what all processes of a replica have in common; empty for one process.
    """

    batch: PackedBatch | PaddedBatch
    samples: tuple[TrainedSample, ...]
    skipped: tuple[SkippedSample, ...]
    num_images: int
    read_seconds: float
    encode_seconds: float
    digest: bytes = b""

    def with_columns(self, **columns: Tensor) -> MicroBatch:
        """The same with more CPU columns in its batch, by field name. The digest covers them."""
        digest = self.digest and digest_of(tuple(columns.items()), seed=self.digest)
        return replace(self, batch=self.batch.with_columns(**columns), digest=digest)

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory; the hook that torch's DataLoader looks for."""
        return replace(self, batch=pin_batch(self.batch))


Loaded = MicroBatch | SkippedSample
"""What a bin became: a SkippedSample is the one whose error ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How loader workers are kept going; a recipe's data section says how many there are."""

    timeout_seconds: float = 600.0
    """The longest wait for one bin."""
    watch_seconds: float = 60.0
    """The longest time that a worker may wait for its storage without progress."""
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    """Modules that workers are forked with. An import that is missing here runs in each worker."""


class BinDataset(Dataset[MicroBatch | SkippedSample]):
    """Request -> MicroBatch, or the SkippedSample whose class ends the run."""

    def __init__(
        self, reader: SampleReader, encoder: Encoder, collator: Collator, policy: OnErrorSection
    ) -> None:
        self.reader = reader
        self.encoder = encoder
        self.collator = collator
        self.policy = policy
        # Made here, so that no worker reads the model folder for its first row.
        self._tower_rule = encoder.family.tower_rule_of(encoder.folder)
        # A class that runs whole merges all images of a row on each process that shares it.
        self._shares_images = encoder.family.modules.whole is None

    def read(self, request: BinRequest) -> Sequence[Any]:
        """What is read of each sample of a bin; what fails is a DataError in its place."""
        return self.reader.read_all(request.samples)

    def encode(
        self, ref: SampleRef, reading: Any, owners: SampleOwners | None = None
    ) -> EncodedSample:
        """Encode what was read of a sample.

        Raises:
            DataError: class `decode` or `schema`.
        """
        if owners is None:
            return self.encoder.encode(reading, ref.sizes)
        return self.encoder.encode(reading, ref.sizes, owners)

    def __getitem__(self, request: BinRequest) -> MicroBatch | SkippedSample:
        if not ACTIVITY.is_mine:  # a thread that reads ahead: the training thread is elsewhere
            return self.load(request)
        with ACTIVITY.during("loading samples", [ref.key for ref in request.samples]):
            return self.load(request)

    def load(self, request: BinRequest) -> MicroBatch | SkippedSample:
        """The micro-batch of a bin, or the sample whose error ends the run."""
        encoded: list[EncodedSample] = []
        samples: list[TrainedSample] = []
        skipped: list[SkippedSample] = []
        encode_seconds = 0.0
        agreed = {hole.number: hole for hole in request.holes}
        references = tuple(ref for ref in request.samples if ref.number not in agreed)
        started = time.perf_counter()
        readings = iter(self.read(replace(request, samples=references)))
        read_seconds = time.perf_counter() - started
        for ref, owner in zip(request.samples, request.owners, strict=True):
            owners = owner if self._shares_images else None
            if ref.number in agreed:
                skipped.append(agreed[ref.number])
                continue
            started = time.perf_counter()
            sample = next(readings)
            try:
                item = self.encode(ref, or_raise(sample), owners)
                check_length(item, ref)
            except DataError as error:
                was_read = error is not sample
                hole = SkippedSample.from_error(ref, error, was_read=was_read)
                if not self.policy.skips(hole.error_class):
                    return hole
                skipped.append(hole)
                continue
            encoded.append(item)
            samples.append(TrainedSample(ref.number, ref.key, ref.shard))
            encode_seconds += time.perf_counter() - started
        started = time.perf_counter()
        batch = self.collator(encoded) if encoded else self.collator.empty()
        if batch.media is not None:
            batch = tell_tower(batch, self._tower_rule)
        encode_seconds += time.perf_counter() - started
        return MicroBatch(
            batch=batch,
            samples=tuple(samples),
            skipped=tuple(skipped),
            num_images=sum(item.media.num_images for item in encoded if item.media is not None),
            read_seconds=read_seconds,
            encode_seconds=encode_seconds,
            digest=digest_of(batch) if request.row is not None else b"",
        )


def check_length(encoded: EncodedSample, ref: SampleRef) -> None:
    """Raise DataError (integrity) unless a sample is as long as planned, so that no row overflows.

    Raises:
        DataError: class `integrity`.
    """
    if encoded.length != ref.num_tokens:
        raise integrity_error(
            f"encoded to {encoded.length} tokens, planned were {ref.num_tokens}; the length rule "
            "of the model family and its encoder disagree on this sample"
        )


class _Requests(Sampler[BinRequest]):
    """The plan as the loader's sampler. It remembers the requests in progress."""

    def __init__(self, requests: Iterable[BinRequest], most: int) -> None:
        self.requests = requests
        self._asked: deque[tuple[int, BinRequest]] = deque(maxlen=most)

    def __iter__(self) -> Iterator[BinRequest]:
        for numbered in enumerate(self.requests):
            self._asked.append(numbered)
            yield numbered[1]

    def in_words(self, number: int) -> str:
        """The samples of a request on its way, counted from 0."""
        found = [request for number_of, request in list(self._asked) if number_of == number]
        if not found or not found[0].samples:
            return "an empty bin"
        samples = found[0].samples
        last = samples[-1]
        return (
            f"{counted(len(samples), 'sample')}, the last asked for {last.key!r} of "
            f"{redacted(last.shard)}"
        )


def start_bins(
    dataset: BinDataset, requests: Iterable[BinRequest], data: DataSection, settings: WorkerSettings
) -> Generator[MicroBatch | SkippedSample]:
    """The batches of the requests, in order. A sample whose error ends the run takes its bin's
    place.

    Workers are at work when this returns, and end when the generator is closed.

    Raises:
        DataError: no bin within the timeout, or a worker has died.
    """
    bins = _loaded_bins(dataset, requests, data, settings)
    next(bins)  # None: the workers are at work
    return cast(Generator[MicroBatch | SkippedSample], bins)


def _loaded_bins(
    dataset: BinDataset, requests: Iterable[BinRequest], data: DataSection, settings: WorkerSettings
) -> Generator[MicroBatch | SkippedSample | None]:
    """First None, once the workers are at work; then the batches."""
    workers = data.workers
    generator = torch.Generator()
    generator.manual_seed(LOADER_SEED)
    as_pixels = data.pixels != "levels" or not dataset.encoder.takes_images
    scale = None if as_pixels else level_scale(dataset.encoder)
    start = partial(start_worker, trainer=os.getpid(), watch_seconds=settings.watch_seconds)
    sampler = _Requests(requests, most=workers * data.prefetch_batches + 1)
    loader = DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        collate_fn=partial(_sent, scale),
        worker_init_fn=start if workers else None,
        multiprocessing_context=worker_context(settings.preload) if workers else None,
        prefetch_factor=data.prefetch_batches if workers else None,
        timeout=min(LOOK_SECONDS, settings.timeout_seconds) if workers else 0,
        generator=generator,
        # The DataLoader's own thread calls MicroBatch.pin_memory, off the training thread.
        pin_memory=torch.cuda.is_available(),
    )
    with signals_blocked():
        batches: Any = iter(loader)
    watch = WorkerWatch(batches, workers)

    def waits_for() -> str | None:
        awaited = watch.awaited()
        if awaited is None:
            return None
        return f"waiting for {awaited[1]}, which was asked for {sampler.in_words(awaited[0])}"

    try:
        yield None
        while True:
            try:
                with ACTIVITY.waiting(waits_for):
                    item = next_item(batches, watch, settings.timeout_seconds, waits_for)
            except StopIteration:
                return
            yield item
    finally:
        watch.close()


def _sent(scale: LevelScale | None, item: Loaded) -> Loaded:
    """What the process that made a micro-batch does with it before it travels."""
    if scale is None or not isinstance(item, MicroBatch):
        return item
    return replace(item, batch=as_levels(item.batch, scale))


def level_scale(encoder: Encoder) -> LevelScale:
    """How pixels of the model's images lie between black and white.

    Raises:
        CapabilityError: they are no levels, so that `data.pixels: levels` has nothing to send.
    """
    rule = encoder.image_rule
    sides = (SIDE, SIDE)
    try:
        ends = [rule.preprocess([new("RGB", sides, colour)]) for colour in ("black", "white")]
        scale = LevelScale(*(media.pixel_values for media in ends))
        if scale.levels_of(rule.preprocess([_noise()]).pixel_values) is None:
            raise ValueError("an image resized by it has values between two levels")
    except ValueError as error:
        raise CapabilityError(
            f"data.pixels is levels, but those of {encoder.family.name} in {encoder.folder} cannot "
            f"be sent so: {error}; set data.pixels to float32"
        ) from error
    return scale


def _noise() -> Image:
    """An image of all levels that every processor has to resize."""
    levels = np.random.default_rng(0).integers(0, 256, (SIDE + 9, SIDE * 2 + 5, 3), dtype=np.uint8)
    return fromarray(levels)


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One global batch, as one rank sees it.

    Args:
        batch: the run's global batch, counted from 0.
        num_samples: planned over all ranks, holes included.
        num_rows: non-empty bins planned over all ranks.
        imbalance: the largest planned cost of a rank over the mean.
        micro_batches: this rank's; every rank has equally many, some perhaps empty.
    """

    epoch: int
    batch: int
    num_samples: int
    num_rows: int
    imbalance: float
    micro_batches: tuple[MicroBatch, ...]
    state: DataState

    @property
    def names(self) -> list[list[str]]:
        """The samples of each micro-batch, as messages name them."""
        return [
            [f"{sample.key} ({sample.shard})" for sample in micro_batch.samples]
            for micro_batch in self.micro_batches
        ]

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The holes in this rank's micro-batches."""
        return tuple(hole for micro_batch in self.micro_batches for hole in micro_batch.skipped)


def step_of(
    planned: PlannedBatch,
    before: DataState,
    micro_batches: tuple[MicroBatch, ...],
    imbalance: float,
) -> GlobalStep:
    """A global batch of the plan, loaded."""
    following = planned.following
    after = DataState(
        epoch=following.epoch,
        window=following.window,
        batch=following.batch,
        batches=before.batches + 1,
        cursors=planned.cursors,
        eras=before.eras,
        shards=planned.shards,
    )
    return GlobalStep(
        epoch=planned.position.epoch,
        batch=before.batches,
        num_samples=planned.num_samples,
        num_rows=len(planned.bins),
        imbalance=imbalance,
        micro_batches=micro_batches,
        state=after,
    )
