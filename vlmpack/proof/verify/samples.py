"""Which samples are verified: the first of the run's own order, with and without images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from vlmpack.data.index.table import SampleRef
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import Bin
from vlmpack.encode import VLMSample
from vlmpack.errors import DataError, EmptyDataError
from vlmpack.packing import EncodedSample

logger = logging.getLogger("vlmpack")

LOOKED_AT = 16
"""Samples that are encoded for each one that is wanted, in search of a mixture."""

PLANNED = 1 << 16
"""Samples of the plan that are gone through by their sizes alone, in search of one with images."""

LABELS_IN_BFLOAT16 = 1000
"""Label tokens that the comparison in bfloat16 is made over, if the data has them."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sample that is verified.

    Args:
        ref: where it comes from.
        sample: as it is trained.
        messages: what it was encoded from, without its images; None where a pack has its tokens.
    """

    ref: SampleRef
    sample: EncodedSample
    messages: VLMSample | None

    @property
    def num_labels(self) -> int:
        """Its label tokens."""
        return int((self.sample.labels >= 0).sum())

    @property
    def num_images(self) -> int:
        """Its images."""
        return self.sample.media.num_images if self.sample.media is not None else 0


def choose_samples(train: TrainData, count: int, *, min_labels: int = 0) -> list[Chosen]:
    """Some samples of the first epoch, in turn without, with one, and with several images; in row
    order; where none of those that were looked at has an image, the plan's next that have some.

    Args:
        train: the split.
        count: how many.
        min_labels: more are taken until they have so many label tokens, if the split has them.

    Raises:
        EmptyDataError: the split has fewer than two usable samples; nothing could leak. Or those
            that were taken have no label.
        DataError: a bad sample whose class is not skipped.
    """
    kinds: tuple[list[Chosen], ...] = ([], [], [])
    for looked_at, found in enumerate(_in_order(train), start=1):
        kinds[min(found.num_images, 2)].append(found)
        full = looked_at >= count and all(len(some) >= -(-count // 3) for some in kinds)
        if full or looked_at >= LOOKED_AT * count:
            break
    if not kinds[1] and not kinds[2] and train.dataset.encoder.takes_images:
        kinds[1].extend(_later_with_images(train, -(-count // 3)))
    in_turn = [each for turn in zip_longest(*kinds) for each in turn if each is not None]
    picked = in_turn[:count]
    if len(picked) < 2:
        raise EmptyDataError(
            f"verify needs at least 2 samples to share a row, data.train has {len(picked)} that "
            f"can be used"
        )
    if min_labels:
        picked = _with_labels(train, picked, min_labels)
    if not any(each.num_labels for each in picked):
        raise EmptyDataError(
            f"none of the {len(picked)} samples that verify took of data.train has a label token "
            f"(the first is {picked[0].sample.key}): there is no loss to compare. `vlmpack data "
            f"show` says which tokens of a sample are labels; --samples takes more"
        )
    return picked


def _with_labels(train: TrainData, picked: Sequence[Chosen], min_labels: int) -> list[Chosen]:
    """Those, and the next ones of the order until there are enough label tokens."""
    found = list(picked)
    there = {(each.ref.shard, each.ref.key) for each in picked}
    labels = sum(each.num_labels for each in picked)
    for each in _in_order(train):
        if labels >= min_labels:
            break
        place = (each.ref.shard, each.ref.key)
        if place not in there:
            there.add(place)
            found.append(each)
            labels += each.num_labels
    return found


def _later_with_images(train: TrainData, count: int) -> list[Chosen]:
    """The first so many samples of the plan that have images, by what the index says of each."""
    found: list[Chosen] = []
    for samples in _bins(train, most=PLANNED):
        _, patches = train.split.sizes(np.asarray(samples, dtype=np.int64))
        if patches.any():
            found += [each for each in _read(train, samples) if each.num_images]
        if len(found) >= count:
            break
    return found[:count]


def _in_order(train: TrainData) -> Iterator[Chosen]:
    """The samples of the first epoch as they are trained; bad ones are left out where the recipe
    skips them."""
    for samples in _bins(train):
        yield from _read(train, samples)


def _bins(train: TrainData, most: int | None = None) -> Iterator[Bin]:
    """The bins of the first epoch, as many as hold `most` samples; of all without."""
    gone_by = 0
    for planned in train.planned(train.start(), None):
        if planned.position.epoch > 0:
            return
        for samples in planned.bins:
            yield samples
            gone_by += len(samples)
            if most is not None and gone_by >= most:
                return


def _read(train: TrainData, samples: Bin) -> Iterator[Chosen]:
    """Some samples of the plan, encoded."""
    request = train.request(samples)
    reads: Sequence[object] = train.dataset.read(request)
    for ref, read in zip(request.samples, reads, strict=True):
        try:
            if isinstance(read, DataError):
                raise read
            encoded = train.dataset.encode(ref, read)
            if encoded.cuts:  # rows of samples by themselves, whatever the recipe's rows share
                encoded = replace(encoded, cuts=())
        except DataError as error:
            if not train.config.data.on_error.skips(error.error_class):
                raise
            where = f"{ref.key} ({ref.shard})"
            logger.warning("left out: %s: %s: %s", where, error.error_class, error)
            continue
        messages = replace(read, images=()) if isinstance(read, VLMSample) else None
        yield Chosen(ref, encoded, messages)
