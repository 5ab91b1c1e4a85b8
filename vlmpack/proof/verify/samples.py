"""Which samples are verified: the first of the run's own order, with and without images."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vlmpack.data.index.table import SampleRef
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import VLMSample
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
        messages: what each was encoded from, without its images; None where a pack has its tokens.
    """

    samples: tuple[EncodedSample, ...]
    shards: tuple[str, ...]
    messages: tuple[VLMSample | None, ...]

    @property
    def num_labels(self) -> int:
        """Label tokens in all of them."""
        return sum(labels_of(sample) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A sample that was picked."""

    ref: SampleRef
    sample: EncodedSample
    messages: VLMSample | None


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
    kinds: dict[int, list[_Picked]] = {0: [], 1: [], 2: []}
    for looked_at, found in enumerate(_in_order(train), start=1):
        media = found.sample.media
        kinds[min(media.num_images if media is not None else 0, 2)].append(found)
        full = looked_at >= count and all(len(some) >= -(-count // 3) for some in kinds.values())
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
    chosen = Chosen(
        tuple(each.sample for each in picked),
        tuple(each.ref.shard for each in picked),
        tuple(each.messages for each in picked),
    )
    if not chosen.num_labels:
        raise EmptyDataError(
            f"none of the {len(picked)} samples that verify took of data.train has a label token "
            f"(the first is {picked[0].sample.key}): there is no loss to compare. `vlmpack data "
            f"show` says which tokens of a sample are labels; --samples takes more"
        )
    return chosen


def _with_labels(train: TrainData, picked: list[_Picked], min_labels: int) -> list[_Picked]:
    """Those, and the next ones of the order until there are enough label tokens."""
    there = {(each.ref.shard, each.ref.offset) for each in picked}
    labels = sum(labels_of(each.sample) for each in picked)
    for each in _in_order(train):
        if labels >= min_labels:
            break
        if (each.ref.shard, each.ref.offset) not in there:
            there.add((each.ref.shard, each.ref.offset))
            picked.append(each)
            labels += labels_of(each.sample)
    return picked


def _in_order(train: TrainData) -> Iterator[_Picked]:
    """The samples of the first epoch as they are trained; bad ones are left out where the recipe
    skips them."""
    for planned in train.planned(train.start(), None):
        if planned.position.epoch > 0:
            return
        for samples in planned.bins:
            request = train.request(samples)
            reads: Sequence[object] = train.dataset.read(request)
            for ref, read in zip(request.samples, reads, strict=True):
                try:
                    if isinstance(read, DataError):
                        raise read
                    encoded = train.dataset.encode(ref, read)
                except DataError as error:
                    if not train.config.data.on_error.skips(error.error_class):
                        raise
                    logger.warning("left out: %s", error)
                    continue
                messages = replace(read, images=()) if isinstance(read, VLMSample) else None
                yield _Picked(ref, encoded, messages)


def _in_turn(kinds: Sequence[list[_Picked]]) -> list[_Picked]:
    """One of each kind, then the next of each, until all are used up."""
    longest = max(map(len, kinds))
    return [found[turn] for turn in range(longest) for found in kinds if turn < len(found)]
