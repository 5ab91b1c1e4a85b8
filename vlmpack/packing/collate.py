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

`pack_padded_batch` takes a padded batch that other code already holds. Its arguments are those of
Megatron-Bridge's in-batch packing, whose bugs are the reason for every check there. It guessed real
lengths from the pad id, dropped real tokens of left-padded rows, and lost rows of padding alone.
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
from vlmpack.packing.pairs import sequences_of, with_pairs, with_rollouts
from vlmpack.packing.prefix_rows import (
    PrefixSegment,
    check_prefix_tokens,
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
                f"sample {sample.key!r}: the last label is {int(part.labels[-1])}. Expected "
                f"{IGNORE_INDEX}, since the last token has nothing to predict. Shift the labels "
                "inside the sample before packing (labels[i] = input_ids[i + 1])"
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
    segments = prefix_segments(parts, least=pad_to_multiple_of) if share_prefix else []
    is_shared = len(segments) > len(parts)
    overflows = fixed is not None and not fixed.has_room_for(len(parts))
    layout = RowLayout(
        lengths=tuple(each.length for each in (segments if is_shared else parts)),
        pad_to_multiple_of=pad_to_multiple_of,
        total_multiple_of=total_multiple_of,
        fixed=None if overflows else fixed,
    )
    if is_shared:
        _check_prefixes(parts, segments, layout)
        cuts = [(parts[each.sequences[0]], slice(each.start, each.stop)) for each in segments]
        places = places_of(parts, segments)
        shown = shown_media(parts, segments, places)
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
    row = replace(row, image_blocks=blocks, media_sources=sources)
    row = with_rollouts(with_pairs(row, samples, parts), samples)
    if not is_shared:
        return replace(row, overflows=overflows)
    row = replace(row, lengths=tuple(part.length for part in parts))
    separate = sum(s.media.pixel_values.shape[0] for s in samples if s.media is not None)
    shared = separate - (0 if media is None else media.pixel_values.shape[0])
    return replace(_with_tree(row, segments, layout), num_shared_patches=shared)


def _parts_of(samples: Sequence[EncodedSample], name: str) -> list[EncodedSample]:
    """The sequences of samples, which are checked."""
    if not samples:
        raise PackingError(f"nothing to {name}: the list of samples is empty")
    for sample in samples:
        check_sample(sample)
    return [part for sample in samples for part in sequences_of(sample)]


def _with_tree(
    row: PackedBatch, segments: Sequence[PrefixSegment], layout: RowLayout
) -> PackedBatch:
    """A row of segments that go on from others, and which do."""
    tails = (*layout.physical, *layout.fillers)[len(segments) :]
    tree = PrefixTree(
        parents=(*(each.parent for each in segments), *(-1 for _ in tails)),
        lengths=(*layout.lengths, *tails),
        ends=tuple(place for place, each in enumerate(segments) if each.ends),
    )
    levels = prefix_levels(tree, row.segment_lengths)
    return replace(row, prefix_tree=tree, prefix_levels=levels)


def _check_prefixes(
    parts: Sequence[EncodedSample], segments: Sequence[PrefixSegment], layout: RowLayout
) -> None:
    if layout.fixed is not None:
        raise PackingError(
            "rows of fixed shape share no prefixes: set packing.share_prefix or "
            "packing.pad_to_max_length to false"
        )
    check_prefix_tokens(parts, segments)


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
    return with_rollouts(with_pairs(batch, samples, parts), samples)


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


def pack_padded_batch(
    tokens: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    padding_mask: Tensor | None = None,
) -> PackedBatch:
    """Pack the rows of a right-padded batch into one THD row.

    Args:
        tokens: (B, S) int64.
        labels: (B, S) int64, already shifted. None, with `loss_mask` None, on pipeline stages
            without a loss. The row is then the same, with every label IGNORE_INDEX.
        loss_mask: (B, S), 1 where a token has loss and 0 elsewhere. It alone decides; a label where
            it is 0 is ignored.
        attention_mask: (B, S), 1 = real, or None.
        position_ids: (B, S) or (A, B, S) int64.
        lengths: (B,) real lengths; or give exactly one mask.
        pad_token_id: fills alignment gaps. It is never compared with the tokens.
        pad_to_multiple_of: multiple of each segment (2*CP under context parallelism).
        padding_mask: (B, S), 1 = real, Megatron-Bridge's name for the same mask.

    Returns:
        The row; keys are "row-0", "row-1", ...

    Raises:
        PackingError: shapes disagree. Without `lengths`, both masks are given or none. A mask is
            not two-dimensional, is left-padded, has a hole or an empty row, or disagrees with
            `lengths`. Padding or an ignored label has loss. Labels come without a loss mask, or a
            loss mask without labels.
    """
    given = {
        "tokens": tokens,
        "position_ids": position_ids,
        "labels": labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "padding_mask": padding_mask,
        "lengths": lengths,
    }
    for name, value in given.items():
        if value is not None or name in ("tokens", "position_ids"):
            require_tensor(name, value)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise PackingError(
            f"tokens must be (B, S) with B, S >= 1, found shape {tuple(tokens.shape)}"
        )
    labels, loss_mask = _both_or_neither(labels, loss_mask, tokens)
    for name, value in (("labels", labels), ("loss_mask", loss_mask)):
        if value.shape != tokens.shape:
            raise PackingError(
                f"{name} has shape {tuple(value.shape)}, expected {tuple(tokens.shape)} like tokens"
            )
    positions = _positions_of(position_ids, tokens)
    real = _real_lengths(tokens, attention_mask, padding_mask, lengths)
    clean_labels = _labels_where_loss(labels, loss_mask, real)
    return pack_rows(
        [tokens[row, :n] for row, n in enumerate(real)],
        [clean_labels[row, :n] for row, n in enumerate(real)],
        [positions[:, row, :n] for row, n in enumerate(real)],
        layout=RowLayout(lengths=real, pad_to_multiple_of=pad_to_multiple_of),
        pad_token_id=pad_token_id,
        keys=tuple(f"row-{row}" for row in range(len(real))),
    )


def _positions_of(position_ids: Tensor, tokens: Tensor) -> Tensor:
    """(A, B, S), of as many axes as there are."""
    positions = position_ids[None] if position_ids.ndim == 2 else position_ids
    if positions.ndim != 3 or positions.shape[1:] != tokens.shape:
        rows, width = tokens.shape
        raise PackingError(
            f"position_ids have shape {tuple(position_ids.shape)}, expected {tuple(tokens.shape)} "
            f"or (A, {rows}, {width})"
        )
    return positions


def _both_or_neither(
    labels: Tensor | None, loss_mask: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Labels and loss mask; without any loss where neither is given."""
    if labels is not None and loss_mask is not None:
        return labels, loss_mask
    if labels is None and loss_mask is None:
        return torch.full_like(tokens, IGNORE_INDEX), torch.zeros_like(tokens)
    given, missing = ("labels", "loss_mask") if loss_mask is None else ("loss_mask", "labels")
    raise PackingError(
        f"{given} without {missing}: give both, or neither (None) on a pipeline stage that has no "
        f"loss. Which tokens have loss is never guessed"
    )


def _real_lengths(
    tokens: Tensor,
    attention_mask: Tensor | None,
    padding_mask: Tensor | None,
    lengths: Tensor | None,
) -> tuple[int, ...]:
    """One length per row, from `lengths` or the one mask, both checked against each other."""
    rows, width = tokens.shape
    masks = {"attention_mask": attention_mask, "padding_mask": padding_mask}
    given = {name: mask for name, mask in masks.items() if mask is not None}
    if len(given) > 1:
        raise PackingError("give attention_mask or padding_mask, not both: they say the same")
    from_lengths: tuple[int, ...] | None = None
    if lengths is not None:
        if lengths.shape != (rows,):
            raise PackingError(
                f"lengths has shape {tuple(lengths.shape)}, expected ({rows},), one per row"
            )
        from_lengths = tuple(int(n) for n in lengths.tolist())
        for row, n in enumerate(from_lengths):
            if not 1 <= n <= width:
                raise PackingError(
                    f"row {row}: length {n} is not in 1..{width} (the width of tokens)"
                )
    if not given:
        if from_lengths is None:
            raise PackingError(
                "real lengths are unknown: pass lengths=, or one 2-D attention_mask or "
                "padding_mask (1 = real); they are never guessed from pad_token_id"
            )
        return from_lengths
    ((name, mask),) = given.items()
    from_mask = _lengths_of_mask(name, mask, tokens)
    if from_lengths is not None and from_lengths != from_mask:
        row = next(
            i for i, (a, b) in enumerate(zip(from_lengths, from_mask, strict=True)) if a != b
        )
        raise PackingError(
            f"row {row}: lengths says {from_lengths[row]} tokens, {name} says {from_mask[row]}"
        )
    return from_mask


def _lengths_of_mask(name: str, mask: Tensor, tokens: Tensor) -> tuple[int, ...]:
    if mask.ndim != 2 or mask.shape != tokens.shape:
        raise PackingError(
            f"{name} has shape {tuple(mask.shape)}, expected {tuple(tokens.shape)}: a 2-D mask "
            f"with 1 = real (a 4-D attention mask does not say where rows end; pass lengths=)"
        )
    ones = mask != 0
    if bool(((mask != 0) & (mask != 1)).any()):
        raise PackingError(f"{name} must hold only 0 and 1 (1 = real token)")
    counts = ones.sum(dim=1)
    right_padded = torch.arange(tokens.shape[1], device=mask.device)[None] < counts[:, None]
    for row in range(tokens.shape[0]):
        if int(counts[row]) == 0:
            raise PackingError(f"row {row}: {name} marks no real token; drop the row")
        if not torch.equal(ones[row], right_padded[row]):
            kind = "padded at the left" if not bool(ones[row, 0]) else "has a hole"
            raise PackingError(
                f"row {row}: {name} {kind}; real tokens must come first, then the padding"
            )
    return tuple(int(n) for n in counts.tolist())


def _labels_where_loss(labels: Tensor, loss_mask: Tensor, real: tuple[int, ...]) -> Tensor:
    """(B, S) labels with IGNORE_INDEX wherever the loss mask is 0."""
    if bool(((loss_mask != 0) & (loss_mask != 1)).any()):
        raise PackingError("loss_mask must hold only 0 and 1; weights per token are not supported")
    on = loss_mask != 0
    if bool((on & (labels == IGNORE_INDEX)).any()):
        raise PackingError(
            f"loss_mask is 1 on a token whose label is {IGNORE_INDEX}: nothing to predict there"
        )
    for row, n in enumerate(real):
        if bool(on[row, n:].any()):
            raise PackingError(f"row {row}: loss_mask is 1 on padding (beyond {n} real tokens)")
    return torch.where(on, labels, torch.full_like(labels, IGNORE_INDEX))
