"""Which samples are verified, and the micro-batches that hold them.

They are the first ones of the run's order, with and without images, in the run's own rows. If those
are padded, packed rows of other modes are verified too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from vlmpack.alignment import Alignment, round_up
from vlmpack.build.engine import EngineSpec
from vlmpack.data.index.table import SampleRef
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import Bin
from vlmpack.data.protocols import Collator
from vlmpack.encode import Encoder, VLMSample
from vlmpack.encode.coordinates import shapes_named
from vlmpack.errors import DataError, EmptyDataError
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.measure import Check
from vlmpack.proof.rows.row import Row, RowRules, cut_row
from vlmpack.recipe.derived import multiples
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")

LOOKED_AT = 16
"""Samples that are encoded for each one that is wanted, in search of a mixture."""

PLANNED = 1 << 16
"""Samples of the plan that are gone through by their sizes alone, in search of one with images."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sample that is verified.

    Args:
        messages: what it was encoded from, without its images; None where a pack has its tokens.
        misfit: as `misfit_of`.
    """

    ref: SampleRef
    sample: EncodedSample
    messages: VLMSample | None
    misfit: str | None = None

    @property
    def num_labels(self) -> int:
        return int((self.sample.labels >= 0).sum())

    @property
    def num_images(self) -> int:
        return self.sample.media.num_images if self.sample.media is not None else 0


def choose_samples(train: TrainData, count: int, *, min_labels: int = 0) -> list[Chosen]:
    """Samples of the first epoch in row order: without images, with one, and with several, in turn.

    If none of the first ones has an image, the plan's next samples with images are taken.

    Args:
        min_labels: more are taken until they have so many label tokens, if the split has them.

    Raises:
        EmptyDataError: the split has fewer than two usable samples; nothing could leak. Or those
            that were taken have no label.
        DataError: a bad sample whose class is not skipped.
    """
    kinds: tuple[list[Chosen], ...] = ([], [], [])
    for looked_at, sample in enumerate(_in_order(train), start=1):
        kinds[min(sample.num_images, 2)].append(sample)
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
            f"(the first is {picked[0].sample.key}), so there is no loss to compare. `vlmpack "
            "data show` says which tokens of a sample are labels. --samples takes more"
        )
    return picked


def _with_labels(train: TrainData, picked: Sequence[Chosen], min_labels: int) -> list[Chosen]:
    """Those, and the next ones of the order until there are enough label tokens."""
    chosen = list(picked)
    there = {(each.ref.shard, each.ref.key) for each in picked}
    labels = sum(each.num_labels for each in picked)
    for each in _in_order(train):
        if labels >= min_labels:
            break
        place = (each.ref.shard, each.ref.key)
        if place not in there:
            there.add(place)
            chosen.append(each)
            labels += each.num_labels
    return chosen


def _later_with_images(train: TrainData, count: int) -> list[Chosen]:
    """The plan's first samples with images, by the index."""
    samples_with_images: list[Chosen] = []
    for samples in _bins(train, most=PLANNED):
        _, patches = train.split.sizes(np.asarray(samples, dtype=np.int64))
        if patches.any():
            samples_with_images += [each for each in _read(train, samples) if each.num_images]
        if len(samples_with_images) >= count:
            break
    return samples_with_images[:count]


def _in_order(train: TrainData) -> Iterator[Chosen]:
    """The samples of the first epoch in order, without bad ones that the recipe skips."""
    for samples in _bins(train):
        yield from _read(train, samples)


def _bins(train: TrainData, most: int | None = None) -> Iterator[Bin]:
    """The bins of the first epoch, up to those that hold `most` samples."""
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
    request = train.request(samples)
    reads: Sequence[object] = train.dataset.read(request)
    for ref, read in zip(request.samples, reads, strict=True):
        try:
            if isinstance(read, DataError):
                raise read
            encoded = train.dataset.encode(ref, read)
            if encoded.prefixes:  # rows of samples by themselves, whatever the recipe's rows share
                encoded = replace(encoded, prefixes=())
        except DataError as error:
            if not train.config.data.on_error.skips(error.error_class):
                raise
            where = f"{ref.key} ({ref.shard})"
            logger.warning("left out: %s: %s: %s", where, error.error_class, error)
            continue
        messages = misfit = None
        if isinstance(read, VLMSample):
            misfit = misfit_of(train.dataset.encoder, read, encoded)
            written = train.dataset.encoder.written(read, ref.sizes)
            messages = replace(written, images=())
        yield Chosen(ref, encoded, messages, misfit)


def misfit_of(encoder: Encoder, sample: VLMSample, encoded: EncodedSample) -> str | None:
    """Which of a sample's objects its tokens place elsewhere on the images that its pixels show;
    empty where all are within a step of the family's grid. None without objects.

    Args:
        sample: with its images, before its objects are written.
    """
    objects, rule = sample.objects, encoder.coordinates
    if objects is None or rule is None or objects.space == "model" or encoded.media is None:
        return None
    named = "".join(turn.text for turns in sample.conversations for turn in turns)
    seen = [image.size for image in encoder.image_rule.pictures(encoded.media)]
    originals, text = encoder.sizes_of(sample), encoder.tokenizer.decode(encoded.input_ids)
    found = rule.read(text, polygons=bool(objects.polygons))
    for shape in shapes_named(named, objects):
        sides = [*zip(originals[shape.image], seen[shape.image], strict=True)]
        sides *= len(shape.numbers) // 2
        unit = {"norm1": 1, "norm1000": 1000}.get(objects.space)
        given = [x * W / (unit or W) for x, (W, _) in zip(shape.numbers, sides, strict=True)]
        step = [rule.original(1.001 * 10**-rule.decimals, *both) for both in sides]
        if not any(
            len(numbers) == len(given)
            and all(
                abs(rule.original(number, *both) - x) <= most
                for number, both, x, most in zip(numbers, sides, given, step, strict=True)
            )
            for numbers in found  # in order: what lies before is other text
        ):
            return (
                f"{sample.key}: the text has nothing at {given} of image {shape.image}, which has "
                f"{originals[shape.image]} pixels and is shown as {seen[shape.image]}"
            )
    return ""


def check_coordinates(chosen: Sequence[Chosen]) -> Check | None:
    """Objects are where the pixels show them; None where no sample has objects."""
    found = [each.misfit for each in chosen if each.misfit is not None]
    if not found:
        return None
    first = next(filter(None, found), None)
    return Check(
        name="coordinates fit the images",
        status="pass" if first is None else "fail",
        detail=first
        or f"{counted(len(found), 'sample')} with objects, read back from their tokens",
        look_at="data.coordinates, and the processor's size of the images",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow(Row):
    """A row of some of the samples.

    Args:
        samples: that were collated; pairs, or those of `alone`.
        numbers: of its sequences among all that are verified.
    """

    samples: tuple[EncodedSample, ...]
    numbers: tuple[int, ...]

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """(name, start, end) of each sequence's slots, padding included; the tail's at the end."""
        sequences = zip(self.names, self.starts, self.ends, strict=True)
        return [*sequences, ("the tail", self.ends[-1], self.num_slots)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.key for part in in_sequences(self.samples))


def in_sequences(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """The samples, or the sequences of pairs in turn, each with its images and a name."""
    sequences = []
    for sample in samples:
        parts = sequences_of(sample)
        sides = ("",) if len(parts) == 1 else (" (chosen)", " (rejected)")
        named = zip(parts, sides, strict=True)
        sequences += [replace(part, key=sample.key + side) for part, side in named]
    return sequences


def make_row(
    collator: Collator,
    samples: Sequence[EncodedSample],
    numbers: Sequence[int],
    encoder: Encoder,
    *,
    row_multiple: int,
    context: int = 1,
) -> VerifiedRow:
    """Some of the samples as one micro-batch.

    Args:
        samples: all that are verified; pairs, or none of them.
        numbers: of those that are in it, in its order.
        row_multiple: of the row's slots, as the parallel layout needs it, whatever the collator
            makes them.
    """
    chosen = [samples[number] for number in numbers]
    batch = collator(chosen)
    sequences = max(1, len(chosen[0].sequences))
    return VerifiedRow(
        batch=batch,
        alone=tuple(part for sample in chosen for part in sequences_of(sample)),
        rules=RowRules(
            context=context,
            multiples=Alignment(collator.pad_to_multiple_of, row_multiple),
            placeholder_ids=encoder.placeholder_ids,
            pad_token_id=encoder.pad_token_id,
        ),
        planned=tuple(sample.key for sample in chosen),
        slices=cut_row(batch, context) if context > 1 else (),
        sequences=sequences,
        samples=tuple(chosen),
        numbers=tuple(n * sequences + k for n in numbers for k in range(sequences)),
    )


def layouts(spec: EngineSpec, train: TrainData) -> list[tuple[str, Collator]]:
    """The run's own rows; for padded ones also the packed row that other modes would make.

    Returns:
        The prefix of the names of a layout's checks, and its collator.
    """
    own = train.dataset.collator
    if not train.config.mode.facts.pads:
        return [("", own)]
    encoder, multiple = spec.encoder, multiples(spec.parallelism)
    packed = PackCollator(
        pad_token_id=encoder.pad_token_id,
        num_position_axes=encoder.num_position_axes,
        pad_to_multiple_of=multiple.sequence,
        total_multiple_of=multiple.row,
    )
    return [("padded: ", own), ("packed: ", packed)]


def group_samples(
    samples: Sequence[EncodedSample],
    count: int,
    collator: Collator,
    *,
    budget: RowBudget | None,
) -> list[list[int]]:
    """Which samples share a row, at most `count` of them, as far as the row has room.

    More than two pairs are in two rows or more.

    Args:
        samples: by number.
        budget: of a row; None for no bound. A longer sample has a row of its own.
    """
    if collator.fixed is not None and collator.fixed.max_sequences is not None:
        count = min(count, collator.fixed.max_sequences)
    groups: list[list[int]] = [[]]
    filled = 0
    for number, sample in enumerate(samples):
        lengths = sample.sequences or (sample.length,)
        slots = sum(round_up(length, collator.pad_to_multiple_of) for length in lengths)
        over = budget is not None and not budget.takes(filled + slots)
        if groups[-1] and (over or len(groups[-1]) == count):
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += slots
    if len(groups) == 1 and len(samples) > 2 and samples[0].sequences:
        # Two rows of unlike numbers of pairs: a mean of their means is another one.
        cut = len(samples) - len(samples) // 3
        return [groups[0][:cut], groups[0][cut:]]
    return groups


def rows_in_words(count: int, *, padded: bool) -> str:
    if padded:
        return f"{counted(count, 'batch', 'batches')} of padded rows"
    return counted(count, "packed row")
