"""Which samples are verified: the first of the run's own order, with and without images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.loader import BinRequest
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, EmptyDataError
from vlmpack.packing import EncodedSample

logger = logging.getLogger("vlmpack")

LOOKED_AT = 16
"""Samples that are encoded for each one that is wanted, in search of a mixture."""

LABELS_IN_BFLOAT16 = 1000
"""Label tokens that the comparison in bfloat16 is made over, if the data has them."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some samples of a split.

    Args:
        samples: encoded, in row order.
        shards: where each comes from.
    """

    samples: tuple[EncodedSample, ...]
    shards: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        """Label tokens in all of them."""
        return sum(labels_of(sample) for sample in self.samples)


def labels_of(sample: EncodedSample) -> int:
    """Label tokens of a sample."""
    return int((sample.labels >= 0).sum())


def choose_samples(train: TrainData, count: int, *, min_labels: int = 0) -> Chosen:
    """Some samples of the first epoch, in turn without, with one, and with several images.

    Args:
        train: the split.
        count: how many.
        min_labels: more are taken until they have so many label tokens, if the split has them.

    Raises:
        EmptyDataError: the split has fewer than two usable samples; nothing could leak. Or those
            that were taken have no label.
        DataError: a bad sample whose class is not skipped.
    """
    kinds: dict[int, list[tuple[SampleRef, EncodedSample]]] = {0: [], 1: [], 2: []}
    for looked_at, (ref, sample) in enumerate(_in_order(train), start=1):
        images = sample.media.num_images if sample.media is not None else 0
        kinds[min(images, 2)].append((ref, sample))
        full = looked_at >= count and all(len(found) >= -(-count // 3) for found in kinds.values())
        if full or looked_at >= LOOKED_AT * count:
            break
    picked = _in_turn(list(kinds.values()))[:count]
    if len(picked) < 2:
        raise EmptyDataError(
            f"verify needs at least 2 samples to share a row, data.train has {len(picked)} that "
            f"can be used"
        )
    if min_labels:
        picked = _with_labels(train, picked, min_labels)
    chosen = Chosen(tuple(sample for _, sample in picked), tuple(ref.shard for ref, _ in picked))
    if not chosen.num_labels:
        raise EmptyDataError(
            f"none of the {len(picked)} samples that verify took of data.train has a label token "
            f"(the first is {picked[0][1].key}): there is no loss to compare. `vlmpack data show` "
            f"says which tokens of a sample are labels; --samples takes more"
        )
    return chosen


def _with_labels(
    train: TrainData, picked: list[tuple[SampleRef, EncodedSample]], min_labels: int
) -> list[tuple[SampleRef, EncodedSample]]:
    """Those, and the next ones of the order until there are enough label tokens."""
    there = {(ref.shard, ref.offset) for ref, _ in picked}
    labels = sum(labels_of(sample) for _, sample in picked)
    for ref, sample in _in_order(train):
        if labels >= min_labels:
            break
        if (ref.shard, ref.offset) not in there:
            there.add((ref.shard, ref.offset))
            picked.append((ref, sample))
            labels += labels_of(sample)
    return picked


def _in_order(train: TrainData) -> Iterator[tuple[SampleRef, EncodedSample]]:
    """The samples of the first epoch as they are trained; bad ones are left out where the recipe
    skips them."""
    for planned in train.planned(train.start(), None):
        if planned.position.epoch > 0:
            return
        for samples in planned.bins:
            request = train.request(samples)
            for ref, read in zip(request.samples, _read(train, request), strict=True):
                try:
                    if isinstance(read, DataError):
                        raise read
                    encoded = train.dataset.encode(ref, read)
                except DataError as error:
                    if not train.config.on_error.skips(error.error_class):
                        raise
                    logger.warning("left out: %s", error)
                    continue
                yield ref, encoded


def _read(train: TrainData, request: BinRequest) -> Sequence[object]:
    return train.dataset.read(request)


def _in_turn(
    kinds: Sequence[list[tuple[SampleRef, EncodedSample]]],
) -> list[tuple[SampleRef, EncodedSample]]:
    """One of each kind, then the next of each, until all are used up."""
    longest = max(map(len, kinds))
    return [found[turn] for turn in range(longest) for found in kinds if turn < len(found)]
