"""One micro-batch as training gets it, next to its samples encoded alone.

Offsets count the slots of the row. The rows of mode `none` are one after the other here: B segments
of S slots. What the checks of a row share stands behind it.

A row with shared prefixes is made into a row without them, which the other checks judge. Slots
follow from segment lengths and from which segment continues which, without the collator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vlmpack.alignment import Alignment, round_up
from vlmpack.errors import PackingError
from vlmpack.packing import Batch, EncodedSample, Media, PackedBatch, PaddedBatch
from vlmpack.packing.batch import ContextSlice
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.context import padded_as_row, slice_for_context
from vlmpack.packing.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """The rules that a row must obey.

    Args:
        context: CP.
        multiples: of segments and of the row, in tokens; padded rows are multiples of the latter.
        budget: of a planned row; None where no budget plans it.
    """

    context: int
    multiples: Alignment
    placeholder_ids: frozenset[int]
    pad_token_id: int
    budget: RowBudget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch and what must be in it.

    Args:
        alone: its samples, each encoded alone, in row order; of pairs, their sequences.
        planned: keys of the samples that were to be in it, in the plan's order.
        positions: (A, s) of each sample alone.
        slices: what each context-parallel rank holds; or why the row cannot be cut.
    """

    batch: Batch
    alone: tuple[EncodedSample, ...]
    rules: RowRules
    planned: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    positions: tuple[Tensor, ...] = ()
    counted_by: str = "the family's rule"
    slices: tuple[ContextSlice, ...] | str = ()
    sequences: int = 1
    """Sequences of each sample: 2 of pairs."""

    @property
    def flat(self) -> PackedBatch:
        batch = self.batch
        return padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch

    @property
    def is_padded(self) -> bool:
        return isinstance(self.batch, PaddedBatch)

    @property
    def num_slots(self) -> int:
        """T, the slots of the row."""
        return self.batch.num_slots

    @property
    def ends(self) -> tuple[int, ...]:
        """The slot after each sample's padding, from lengths and rules, not from the batch."""
        lengths = [item.length for item in self.alone]
        if self.is_padded:
            lengths = [round_up(max(lengths, default=0), self.rules.multiples.row)] * len(lengths)
        multiple = self.rules.multiples.sequence
        return tuple(accumulate(round_up(length, multiple) for length in lengths))

    @property
    def starts(self) -> tuple[int, ...]:
        """The slot at which each sample must begin."""
        return (0, *self.ends)[:-1]

    @property
    def boundaries(self) -> list[int]:
        """Physical offsets of the segments, first and last included, as the tensors have them."""
        return [int(place) for place in self.flat.packed_seq_params().cu_seqlens_physical.tolist()]


def cut_row(row: Batch, size: int) -> tuple[ContextSlice, ...] | str:
    """The slices of `size` context-parallel ranks, or why the row cannot be cut."""
    batch = padded_as_row(row) if isinstance(row, PaddedBatch) else row
    slices = []
    for rank in range(size):
        try:
            part = slice_for_context(batch, rank=rank, size=size).context
        except PackingError as error:
            return str(error)
        assert part is not None
        slices.append(part)
    return tuple(slices)


NO_LOSS = -100
"""The label of a slot without loss; defined again, so that a wrong constant elsewhere shows."""

COLLATOR = "the collator (vlmpack/packing/collate.py)"
BOUNDARIES = "cu_seqlens and segment_lengths of the row"

Counts = tuple[int, ...]
"""What a check counted in one row; of several rows the counts are added."""


class Broken(Exception):
    """A property that does not hold."""

    def __init__(self, detail: str, look_at: str = "") -> None:
        super().__init__(detail)
        self.look_at = look_at


def owners_of(row: Row) -> list[int]:
    """For each slot, its sample or -1; one extra slot belongs to no sample."""
    owners = [-1] * (row.num_slots + 1)
    for number, (item, start) in enumerate(zip(row.alone, row.starts, strict=True)):
        if start + item.length > row.num_slots:
            raise Broken(
                f"{item.key} must be at slots {start} to {start + item.length - 1}, the row has "
                f"{row.num_slots}",
                COLLATOR,
            )
        owners[start : start + item.length] = [number] * item.length
    return owners


def check_prefixes(row: Row) -> Counts:
    """Check that each sequence ends in a segment of its own, which alone has labels.

    Boundaries are where the lengths put them, and slots between segments hold nothing.

    Raises:
        Broken: what does not hold.
    """
    batch = row.batch
    assert isinstance(batch, PackedBatch)
    prefix_tree = batch.prefix_tree
    if prefix_tree is None:
        return 0, 0
    _check_ends(row, prefix_tree)
    _check_bounds(row, batch, prefix_tree)
    owned = set(prefix_tree.ends)
    starts = [*accumulate(batch.segment_lengths, initial=0)]
    labels, ids = batch.labels.flatten().tolist(), batch.input_ids.flatten().tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        tokens = prefix_tree.lengths[number] if number < prefix_tree.num_segments else 0
        for slot in range(start, end):
            if labels[slot] != NO_LOSS and (number not in owned or slot >= start + tokens):
                raise Broken(
                    f"slot {slot} of segment {number}, which no sequence has alone, learns "
                    f"{labels[slot]}",
                    COLLATOR,
                )
            if slot >= start + tokens and ids[slot] != row.rules.pad_token_id:
                raise Broken(f"slot {slot} of no sample: token {ids[slot]}", COLLATOR)
    shared = set(range(prefix_tree.num_segments)) - owned
    return len(shared), batch.num_shared_tokens


def _check_ends(row: Row, prefix_tree: PrefixTree) -> None:
    if len(prefix_tree.ends) != len(row.alone) or len(set(prefix_tree.ends)) != len(
        prefix_tree.ends
    ):
        raise Broken(
            f"{len(row.alone)} sequences end in the segments {list(prefix_tree.ends)}; "
            "expected one each",
            COLLATOR,
        )
    used = Counter(n for place in range(len(prefix_tree.ends)) for n in prefix_tree.whole(place))
    for number in range(prefix_tree.num_segments):
        least = 1 if number in prefix_tree.ends else 2
        if used[number] < least or (least == 1 and used[number] > 1):
            raise Broken(
                f"segment {number} is of {used[number]} sequences; expected "
                + ("its own alone" if least == 1 else "two or more"),
                COLLATOR,
            )


def _check_bounds(row: Row, batch: PackedBatch, prefix_tree: PrefixTree) -> None:
    multiple, physical = row.rules.multiples.sequence, [0]
    for length in prefix_tree.lengths[: prefix_tree.num_segments]:
        physical.append(physical[-1] + round_up(length, multiple))
    if row.boundaries[: len(physical)] != physical:
        raise Broken(f"segments end at {row.boundaries}, their lengths say {physical}", BOUNDARIES)
    logical = batch.cu_seqlens.tolist()
    if [end - start for start, end in pairwise(logical)] != [*prefix_tree.lengths]:
        raise Broken(
            f"cu_seqlens are {logical}, the segments have {prefix_tree.lengths}", BOUNDARIES
        )
    if [*accumulate(batch.segment_lengths, initial=0)] != row.boundaries:
        raise Broken("segment_lengths are not the differences of the boundaries", BOUNDARIES)
    if row.num_slots != row.boundaries[-1] or row.num_slots % row.rules.multiples.row:
        raise Broken(f"the row has {row.num_slots} slots", BOUNDARIES)


def without_prefixes(row: Row) -> Row:
    """The same row with nothing shared: each sequence's slots along its path, in turn.

    Raises:
        Broken: a sequence's placeholders stand for parts of images.
    """
    batch = row.batch
    if not isinstance(batch, PackedBatch) or batch.prefix_tree is None:
        return row
    slots = _slots(batch)
    lengths = tuple(map(len, slots))
    physical = tuple(round_up(length, row.rules.multiples.sequence) for length in lengths)
    tail = round_up(max(sum(physical), 1), max(row.rules.multiples.row, 1)) - sum(physical)
    fillers = (tail,) if tail else ()

    def gathered(values: Tensor, fill: int) -> Tensor:
        parts = []
        for place, size in zip(slots, physical, strict=True):
            own = values[..., place]
            gap = own.new_full((*own.shape[:-1], size - len(place)), fill)
            parts += [own, gap]
        parts.append(values.new_full((*values.shape[:-1], tail), fill))
        return torch.cat(parts, dim=-1)

    labels = gathered(batch.labels, NO_LOSS)
    mask = gathered(batch.loss_mask.long(), 0).bool()
    cu = [
        torch.tensor([*accumulate((*each, *fillers), initial=0)]).int()
        for each in (lengths, physical)
    ]
    media, sources, places = _images(row, batch, slots, physical)
    flat = replace(
        batch,
        input_ids=gathered(batch.input_ids, row.rules.pad_token_id),
        labels=labels,
        loss_mask=mask,
        position_ids=gathered(batch.position_ids, 0),
        cu_seqlens=cu[0],
        cu_seqlens_padded=None if physical == lengths else cu[1],
        segment_lengths=(*physical, *fillers),
        label_positions=mask.flatten().nonzero()[:, 0],
        media=media,
        media_positions=places,
        media_sources=sources,
        prefix_tree=None,
        prefix_levels=(),
    )
    return replace(row, batch=flat)


def free_slots(row: Row) -> list[int]:
    """The slots that hold nothing of any sequence: gaps of alignment and the tail."""
    batch = row.batch
    if not isinstance(batch, PackedBatch) or batch.prefix_tree is None:
        return [slot for slot, owner in enumerate(owners_of(row)[:-1]) if owner == -1]
    held = {slot for sequence in _slots(batch) for slot in sequence}
    return [slot for slot in range(row.num_slots) if slot not in held]


def _slots(batch: PackedBatch) -> list[list[int]]:
    """The slots of each sequence, along its path."""
    starts = [*accumulate(batch.segment_lengths, initial=0)]
    tokens = batch.segment_tokens
    return [
        [slot for n in segments for slot in range(starts[n], starts[n] + tokens[n])]
        for segments in batch.segments_of_sequences
    ]


def _images(
    row: Row, batch: PackedBatch, slots: list[list[int]], physical: tuple[int, ...]
) -> tuple[Media | None, Tensor | None, Tensor]:
    """The samples' images, each once, the features of each sequence's placeholders, and their
    slots."""
    starts = [*accumulate(physical, initial=0)]
    given = batch.media_positions.tolist()
    own = [*range(len(given))] if batch.media_sources is None else batch.media_sources.tolist()
    feature_of = dict(zip(given, own, strict=True))
    places, wanted = [], []
    for start, sequence in zip(starts, slots, strict=False):
        shown = [place for place, slot in enumerate(sequence) if slot in feature_of]
        places += [start + place for place in shown]
        wanted.append([feature_of[sequence[place]] for place in shown])
    media = batch.media
    if media is None:
        return None, None, torch.tensor(places, dtype=torch.int64)
    images, sources, total = list[int](), list[int](), 0
    for first in range(0, len(wanted), row.sequences):
        numbers, at = _whole_images(media, wanted[first]), {}
        for place, feature in enumerate(wanted[first], start=total):
            at[feature] = place
        for features in wanted[first : first + row.sequences]:
            sources += [at.get(feature, -1) for feature in features]
        images += numbers
        total += len(wanted[first])
    kept = _of_images(media, images)
    alone = torch.tensor(sources)
    in_order = torch.equal(alone, torch.arange(len(sources)))
    return kept, None if in_order else alone, torch.tensor(places)


def _whole_images(media: Media, features: list[int]) -> list[int]:
    """The numbers of the images that these features are all of, in order."""
    starts = [*accumulate(media.num_tokens, initial=0)]
    numbers, place = list[int](), 0
    while place < len(features):
        number = next((n for n, start in enumerate(starts[:-1]) if start == features[place]), None)
        count = 0 if number is None else media.num_tokens[number]
        stop = place + count
        if number is None or features[place:stop] != [
            *range(starts[number], starts[number] + count)
        ]:
            raise Broken(f"placeholder {place} of a sequence begins no whole image", COLLATOR)
        numbers.append(number)
        place = stop
    return numbers


def _of_images(media: Media, numbers: list[int]) -> Media | None:
    if not numbers:
        return None
    patches = media.pixel_values.split([t * h * w for t, h, w in media.grid_thw])
    return Media(
        pixel_values=torch.cat([patches[n] for n in numbers]),
        grid_thw=tuple(media.grid_thw[n] for n in numbers),
        num_tokens=tuple(media.num_tokens[n] for n in numbers),
    )
