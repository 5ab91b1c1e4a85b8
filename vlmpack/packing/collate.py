"""Samples of one bin -> one THD row, or padded rows in mode `none`, the baseline.

Packing two samples of 3 and 2 tokens with `pad_to_multiple_of=4`:

    input_ids          a a a . b b . .      (. is the pad token)
    labels             a a - - b - - -      (- is IGNORE_INDEX; shifted inside each sample)
    position_ids       0 1 2 0 0 1 0 0
    cu_seqlens         0 3 5                logical: who attends to whom
    cu_seqlens_padded  0 4 8                physical: where the data sits

The same two as a row of fixed shape, 12 slots and at most 4 samples (`FixedShape`):

    input_ids          a a a . b b . . . . . .      a ghost segment of 4, no sample's
    cu_seqlens         0 3 5 9 9 9                  4 + 2 entries, the last value repeated
    cu_seqlens_padded  0 4 8 12 12 12

The two sequences of a pair are two consecutive segments of a THD row, or two padded rows. The batch
has its images once. Lengths are explicit in the samples. Nothing is inferred from token ids or
masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from vlmpack.alignment import round_up
from vlmpack.errors import PackingError
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, Media, PackedBatch, PaddedBatch
from vlmpack.packing.limits import whole
from vlmpack.packing.media import check_media, each_once, image_blocks
from vlmpack.packing.pairs import sequences_of, with_pairs
from vlmpack.packing.prefix_rows import (
    PrefixSegment,
    check_shared,
    places_of,
    prefix_segments,
    shown_media,
)
from vlmpack.packing.prefix_tree import PrefixTree, prefix_levels
from vlmpack.packing.row_layout import FixedShape, RowLayout


def require_tensor(name: str, value: object) -> None:
    """Refuse anything but a tensor of integers with values.

    Raises:
        PackingError: it is something else, named.
    """
    if not isinstance(value, Tensor):
        raise PackingError(f"{name} is of the type {type(value).__name__}, expected a tensor")
    if value.is_meta:
        raise PackingError(f"{name} is on the meta device, which holds no values")


def check_sample(sample: EncodedSample) -> None:
    """Check one sample's invariants.

    Raises:
        PackingError: naming the sample, what was found and what was expected.
    """
    for name in ("input_ids", "labels", "position_ids", "media_positions"):
        require_tensor(f"sample {sample.key!r}: {name}", getattr(sample, name))
    length = sample.length if sample.input_ids.ndim else 0
    if sample.input_ids.ndim != 1 or length == 0:
        raise PackingError(
            f"sample {sample.key!r}: input_ids must be (s,) with s >= 1, "
            f"found shape {tuple(sample.input_ids.shape)}"
        )
    if sample.labels.shape != sample.input_ids.shape or (
        sample.position_ids.ndim != 2 or sample.position_ids.shape[1:] != (length,)
    ):
        raise PackingError(
            f"sample {sample.key!r}: {length} input_ids, but labels have shape "
            f"{tuple(sample.labels.shape)} and position_ids {tuple(sample.position_ids.shape)}; "
            f"expected ({length},) and (A, {length})"
        )
    for part in sequences_of(sample):
        if int(part.labels[-1]) != IGNORE_INDEX:
            raise PackingError(
                f"sample {sample.key!r}: the last label is {int(part.labels[-1])}, but the last "
                f"token has nothing to predict and must be labelled {IGNORE_INDEX}; shift the "
                f"labels inside the sample before packing (labels[i] = input_ids[i + 1])"
            )
        check_media(part)


def pack_batch_sequences(
    samples: Sequence[EncodedSample],
    *,
    pad_to_multiple_of: int = 1,
    pad_token_id: int,
    total_multiple_of: int = 1,
    fixed: FixedShape | None = None,
    share_prefix: bool = False,
) -> PackedBatch:
    """Concatenate samples into one THD row.

    Args:
        samples: at least one; each with its labels already shifted.
        pad_to_multiple_of: every segment's physical length becomes a multiple of this
            (2*CP under context parallelism).
        pad_token_id: the id that fills gaps. Its value never decides anything.
        total_multiple_of: the row's total becomes a multiple of this by one tail segment. Itself a
            multiple of `pad_to_multiple_of`, or 1.
        share_prefix: whether neighbours with an equal prefix store it once.

    Returns:
        The row, with logical and physical boundaries.

    Raises:
        PackingError: no samples, a sample whose lengths, labels or images do not fit, or more
            tokens or samples than a fixed shape has room for.
    """
    parts = _parts_of(samples, "pack")
    stretches = prefix_segments(parts, least=pad_to_multiple_of) if share_prefix else []
    is_shared = len(stretches) > len(parts)
    overflows = fixed is not None and not fixed.has_room_for(len(parts))
    layout = RowLayout(
        lengths=tuple(each.length for each in (stretches if is_shared else parts)),
        pad_to_multiple_of=pad_to_multiple_of,
        total_multiple_of=total_multiple_of,
        fixed=None if overflows else fixed,
    )
    if is_shared:
        _check_prefixes(parts, stretches, layout)
        cuts = [(parts[each.sequences[0]], slice(each.start, each.stop)) for each in stretches]
        places = places_of(parts, stretches)
        shown = shown_media(parts, stretches, places)
    else:
        cuts = [(part, slice(None)) for part in parts]
        places, shown = [part.media_positions for part in parts], [part.media for part in parts]
    media, sources = each_once(shown)
    row = pack_rows(
        [part.input_ids[cut] for part, cut in cuts],
        [part.labels[cut] for part, cut in cuts],
        [part.position_ids[:, cut] for part, cut in cuts],
        layout=layout,
        pad_token_id=pad_token_id,
        keys=tuple(s.key for s in samples),
        media=media,
        media_positions=places,
    )
    blocks = image_blocks(shown, row.media_positions)
    row = with_pairs(replace(row, image_blocks=blocks, media_sources=sources), samples, parts)
    if not is_shared:
        return replace(row, overflows=overflows)
    row = replace(row, lengths=tuple(part.length for part in parts))
    separate = sum(s.media.pixel_values.shape[0] for s in samples if s.media is not None)
    shared = separate - (0 if media is None else media.pixel_values.shape[0])
    return replace(_with_tree(row, stretches, layout), num_shared_patches=shared)


def _parts_of(samples: Sequence[EncodedSample], wanted: str) -> list[EncodedSample]:
    """The sequences of samples, which are checked."""
    if not samples:
        raise PackingError(f"nothing to {wanted}: the list of samples is empty")
    for sample in samples:
        check_sample(sample)
    return [part for sample in samples for part in sequences_of(sample)]


def _with_tree(
    row: PackedBatch, stretches: Sequence[PrefixSegment], layout: RowLayout
) -> PackedBatch:
    """A row of segments that go on from others, and which do."""
    tails = (*layout.physical, *layout.fillers)[len(stretches) :]
    tree = PrefixTree(
        parents=(*(each.parent for each in stretches), *(-1 for _ in tails)),
        lengths=(*layout.lengths, *tails),
        ends=tuple(place for place, each in enumerate(stretches) if each.ends),
    )
    levels = prefix_levels(tree, row.segment_lengths)
    return replace(row, prefix_tree=tree, prefix_levels=levels)


def _check_prefixes(
    parts: Sequence[EncodedSample], stretches: Sequence[PrefixSegment], layout: RowLayout
) -> None:
    if layout.fixed is not None:
        raise PackingError(
            "rows of fixed shape share no prefixes: set packing.share_prefix or "
            "packing.pad_to_max_length to false"
        )
    check_shared(parts, stretches)


def _with_gaps(pieces: Sequence[Tensor], layout: RowLayout, fill: int) -> Tensor:
    """Concatenate (..., s_i) pieces along the last axis, each filled up to its physical length, the
    last one to the row's end. A row without samples has one piece without tokens."""
    parts: list[Tensor] = []
    gaps = [p - n for p, n in zip(layout.physical, layout.lengths, strict=True)] or [0]
    gaps[-1] += layout.tail
    for piece, gap in zip(pieces, gaps, strict=True):
        parts.append(piece)
        if gap:
            parts.append(piece.new_full((*piece.shape[:-1], gap), fill))
    return torch.cat(parts, dim=-1)


def pack_rows(
    input_ids: Sequence[Tensor],
    labels: Sequence[Tensor],
    position_ids: Sequence[Tensor],
    *,
    layout: RowLayout,
    pad_token_id: int,
    keys: tuple[str, ...],
    media: Media | None = None,
    media_positions: Sequence[Tensor] = (),
) -> PackedBatch:
    """Lay checked pieces out as one row. Every way of packing ends here.

    Args:
        input_ids: (s_i,) int64 pieces, at least one.
        labels: (s_i,) int64 pieces, shifted.
        position_ids: (A, s_i) int64 pieces.
        media_positions: (M_i,) int64 pieces, counted from each piece's start.

    Raises:
        PackingError: as `RowLayout.check`.
    """
    layout.check()
    whole("pad_token_id", pad_token_id)
    physical, fillers = layout.physical, layout.fillers
    label_row = _with_gaps(labels, layout, IGNORE_INDEX)
    loss_mask = label_row != IGNORE_INDEX
    starts = (0, *accumulate(physical))
    offset_positions = [
        piece + start for piece, start in zip(media_positions, starts, strict=False)
    ]
    slots = torch.cat(offset_positions) if offset_positions else torch.empty(0, dtype=torch.int64)
    logical_cu = torch.tensor((0, *accumulate((*layout.lengths, *fillers))), dtype=torch.int32)
    padded_cu = None
    if physical != layout.lengths or layout.shows_physical:
        padded_cu = torch.tensor((0, *accumulate((*physical, *fillers))), dtype=torch.int32)
    return PackedBatch(
        input_ids=_with_gaps(input_ids, layout, pad_token_id)[None],
        labels=label_row[None],
        loss_mask=loss_mask[None],
        position_ids=_with_gaps(position_ids, layout, 0)[:, None],
        cu_seqlens=logical_cu,
        cu_seqlens_padded=padded_cu,
        segment_lengths=(*physical, *fillers),
        label_positions=loss_mask.nonzero().squeeze(1),
        media=media,
        media_positions=slots,
        keys=keys,
        lengths=layout.lengths,
        fixed_shape=layout.fixed is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollator:
    """Packing: the samples of one bin become one row. `num_position_axes` is A, for empty bins."""

    pad_token_id: int
    num_position_axes: int
    pad_to_multiple_of: int = 1
    total_multiple_of: int = 1
    fixed: FixedShape | None = None
    share_prefix: bool = False

    def __call__(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        """Pack one bin; an empty one becomes `empty()`."""
        if not samples:
            return self.empty()
        return pack_batch_sequences(
            samples,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=self.pad_token_id,
            total_multiple_of=self.total_multiple_of,
            fixed=self.fixed,
            share_prefix=self.share_prefix,
        )

    def empty(self) -> PackedBatch:
        """A row without samples: one tail segment, no label, so that collectives stay aligned."""
        layout = RowLayout(
            lengths=(),
            pad_to_multiple_of=self.pad_to_multiple_of,
            total_multiple_of=max(self.pad_to_multiple_of, self.total_multiple_of),
            fixed=self.fixed,
        )
        none = torch.empty(0, dtype=torch.int64)
        return pack_rows(
            [none],
            [none],
            [none.expand(self.num_position_axes, 0)],
            layout=layout,
            pad_token_id=self.pad_token_id,
            keys=(),
        )


def pad_batch_sequences(
    samples: Sequence[EncodedSample], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PaddedBatch:
    """Pad samples at the right to one width: mode `none`.

    Args:
        samples: at least one; each with its labels already shifted.
        pad_to_multiple_of: the width S becomes a multiple of this.

    Returns:
        (B, S) rows, S being the longest sequence rounded up.

    Raises:
        PackingError: as `pack_batch_sequences`.
    """
    parts = _parts_of(samples, "pad")
    width = round_up(max(part.length for part in parts), pad_to_multiple_of)

    def rows(pieces: list[Tensor], fill: int) -> Tensor:
        out = pieces[0].new_full((*pieces[0].shape[:-1], len(pieces), width), fill)
        for row, piece in enumerate(pieces):
            out[..., row, : piece.shape[-1]] = piece
        return out

    labels = rows([part.labels for part in parts], IGNORE_INDEX)
    loss_mask = labels != IGNORE_INDEX
    slots = torch.cat([part.media_positions + row * width for row, part in enumerate(parts)])
    media, sources = each_once([part.media for part in parts])
    batch = PaddedBatch(
        input_ids=rows([part.input_ids for part in parts], pad_token_id),
        labels=labels,
        loss_mask=loss_mask,
        position_ids=rows([part.position_ids for part in parts], 0),
        label_positions=loss_mask.flatten().nonzero().squeeze(1),
        media=media,
        media_positions=slots,
        keys=tuple(s.key for s in samples),
        lengths=tuple(part.length for part in parts),
        image_blocks=image_blocks([part.media for part in parts], slots),
        media_sources=sources,
    )
    return with_pairs(batch, samples, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadCollator:
    """Mode `none`: a bin's samples become rows of one width. `num_position_axes` is A, for empty
    bins.
    """

    pad_token_id: int
    num_position_axes: int
    pad_to_multiple_of: int = 1

    @property
    def fixed(self) -> None:
        """Padded rows are as wide as their longest sample."""

    def __call__(self, samples: Sequence[EncodedSample]) -> PaddedBatch:
        """Pad one bin; an empty one becomes `empty()`."""
        if not samples:
            return self.empty()
        return pad_batch_sequences(
            samples, pad_token_id=self.pad_token_id, pad_to_multiple_of=self.pad_to_multiple_of
        )

    def empty(self) -> PaddedBatch:
        """One row of padding without a label, so that collectives stay aligned."""
        width = self.pad_to_multiple_of
        return PaddedBatch(
            input_ids=torch.full((1, width), self.pad_token_id),
            labels=torch.full((1, width), IGNORE_INDEX),
            loss_mask=torch.zeros(1, width, dtype=torch.bool),
            position_ids=torch.zeros(self.num_position_axes, 1, width, dtype=torch.int64),
            label_positions=torch.empty(0, dtype=torch.int64),
            media=None,
            media_positions=torch.empty(0, dtype=torch.int64),
            keys=(),
            lengths=(),
        )
