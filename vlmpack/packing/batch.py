"""The typed batches that travel from the collator to the model.

Shape letters:

- T tokens of a packed row, N segments in it, s tokens of one sample.
- B rows and S columns of a padded batch.
- A position axes (1, or 3 for MRoPE).
- P vision patches, L label tokens, M media (placeholder) tokens.

A sample is one sequence, or a pair of two that share its images.

Everything here is built on CPU, checked once, and moved to the device once. Counts, grids and
`max_seqlen` are kept as host integers, because the step would otherwise read them back from the
device.

`TowerInputs` is what a vision tower would otherwise compute from grids, image by image, while the
device waits. An example has two images of 4 x 4 and 2 x 4 patches. 2 x 2 patches are merged into a
token, and windows have 2 x 2 tokens:

    position_ids   (row, column) of each patch, in the order of the tower
    images         lengths 16, 8                    where attention over a whole image ends
    windows        lengths 16, 8                    where attention inside windows ends
    window_index   0 1 2 3 | 4 5                    the tokens, window by window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import torch
from torch import Tensor

from vlmpack.packing.prefix_tree import PrefixLevel, PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelTable:
    """Restores the pixels of a batch from the uint8 levels that it travels with.

    Args:
        values: (K * 256,) float32, the pixel of each level in each of K kinds of columns.
        kinds: (D,) int32, the kind of each column of `Media.pixel_values`.
    """

    values: Tensor
    kinds: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSegments:
    """Where the attention of a vision tower ends: after each image, or each attention window.

    Args:
        cu_seqlens: (n + 1,) int32, cumulative lengths in patches.
        lengths: the n lengths, host integers.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TowerSegments:
        """Segments of these lengths, on CPU."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(cu_seqlens=ends, lengths=tuple(lengths))

    @property
    def max_seqlen(self) -> int:
        """The longest of them."""
        return max(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerInputs:
    """The inputs of a vision tower besides the pixels of a batch's images. P patches lie in the
    order of `Media.pixel_values`.

    Args:
        position_ids: (P, 2) int64, row and column of each patch in its image.
        images: where images end; each frame counts as one.
        windows: where attention windows end, in the order of `window_index`; None for a tower
            without.
        window_index: (P / merged,) int64, the tokens in the order of attention windows.
        interp_indices: (P, taps) int64, the rows of a learned position table that each patch's
            position is interpolated from; None for a tower without such a table.
        interp_weights: (P, taps) float32, their weights.
    """

    position_ids: Tensor
    images: TowerSegments
    windows: TowerSegments | None = None
    window_index: Tensor | None = None
    interp_indices: Tensor | None = None
    interp_weights: Tensor | None = None


TowerRule = Callable[[Sequence[tuple[int, int, int]]], TowerInputs]
"""Grids of images, (t, h, w) in patches -> inputs of their tower."""


IGNORE_INDEX = -100
"""Label of a token that has no loss (the value transformers and PyTorch use)."""

GridTHW = tuple[int, int, int]
"""Patches of one image along time, height and width, before the spatial merge."""

Span = tuple[int, int]
"""Start and end, the end not included."""


@dataclass(frozen=True, slots=True)
class ImageOwners:
    """The owners of some images among `size` processes. `rank` is None without a vision tower."""

    ranks: tuple[int, ...]
    rank: int | None
    size: int

    @property
    def mine(self) -> tuple[bool, ...]:
        """Whether the pixels of each image are made here."""
        return tuple(rank == self.rank for rank in self.ranks)

    def by_rank(self) -> list[list[int]]:
        """Image numbers by rank, ascending."""
        return [
            [number for number, rank in enumerate(self.ranks) if rank == of]
            for of in range(self.size)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The images of one sample, or of one batch in sample order.

    Args:
        pixel_values: (P, D) float32, the patches of all images one after the other. With `owners`
            only those of this process's images. With `table` their uint8 levels.
        grid_thw: one (t, h, w) per image, host integers; their products sum to P.
        num_tokens: placeholder tokens of each image, host integers; they sum to M.
        image_sizes: (width, height) of each image in pixels before it was resized, for families
            whose feature count follows from it; None for the others.
        blocks: placeholder tokens of each run of each image, host integers that sum to
            `num_tokens`, for families whose tokens attend in both directions inside a run; None
            for the others.
        seconds: time between a video's patches, and None for a still image. None where all are
            still. A video counts as one image everywhere, of t > 1.
        tower: what the vision tower must know besides pixels; None until it is made.
        owners: which process of a replica makes the pixels of each image; None where each makes
            all.
        table: restores the pixels from levels; None where the pixels are there.
    """

    pixel_values: Tensor
    grid_thw: tuple[GridTHW, ...]
    num_tokens: tuple[int, ...]
    image_sizes: tuple[tuple[int, int], ...] | None = None
    blocks: tuple[tuple[int, ...], ...] | None = None
    seconds: tuple[float | None, ...] | None = None
    tower: TowerInputs | None = None
    owners: ImageOwners | None = None
    table: PixelTable | None = None

    @property
    def num_images(self) -> int:
        """Number of images."""
        return len(self.grid_thw)

    @property
    def patches_here(self) -> list[int]:
        """Rows of `pixel_values` that each image has: none where another process makes them."""
        counts = [prod(grid) for grid in self.grid_thw]
        if self.owners is None:
            return counts
        return [n if mine else 0 for n, mine in zip(counts, self.owners.mine, strict=True)]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence, which a row may hold once for several sequences.

    They have no label, and all images are among them.
    """

    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAnswer:
    """What a sampler said of the answer that a sample learns.

    Args:
        log_p: (l,) float32 or wider, log-probabilities of the sample's label tokens, in order.
        temperature: of the draw, above 0.
        is_raw: whether `log_p` are of logits that were not divided by it.
    """

    log_p: Tensor
    temperature: float
    is_raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Columns of a row whose samples are rollouts: answers that a policy has drawn.

    Args:
        sampler: (L,) float32 or wider, log-probabilities of the label tokens when they were drawn.
        temperatures: (N,) float64, of each answer's draw; None where all are 1.
        is_raw: whether any of `sampler` are of logits that were not divided by a temperature.
        advantages: (N,) float64, of each answer within its group; None until they are known.
        rewards: (N,) float64; None until they are known.
        old: (L,) log-probabilities at the start of the round; None where nothing was computed.
        reference: (L,) the same under the reference model; None unless requested.
    """

    sampler: Tensor
    temperatures: Tensor | None = None
    is_raw: bool = False
    advantages: Tensor | None = None
    rewards: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One sample as token ids, before any packing.

    Args:
        input_ids: (s,) int64, image placeholders expanded to their true count.
        labels: (s,) int64, already shifted inside the sample: `labels[i]` is the token that
            position i must predict, IGNORE_INDEX where there is no loss. The last is always
            IGNORE_INDEX.
        position_ids: (A, s) int64, counted from the sample's own start.
        media_positions: (M,) int64, the indices of the placeholder tokens in `input_ids`.
        sequences: lengths of the sequences of a pair, one after the other. Labels and positions are
            each one's own, and each shows all images. Empty for a sample of one sequence.
        prefixes: those that a row may hold once for several samples, the shortest first, counted
            from the start of each sequence. Empty unless requested.
        drawn: what a sampler said of the answer; None for a sample that is no rollout.
    """

    key: str
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    media: Media | None = None
    media_positions: Tensor
    sequences: tuple[int, ...] = ()
    prefixes: tuple[Prefix, ...] = ()
    drawn: DrawnAnswer | None = None

    @property
    def length(self) -> int:
        """s, the number of tokens, of all sequences together."""
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSeqParams:
    """Where the segments of a THD row begin and end; field names are Megatron's.

    Args:
        qkv_format: always "thd": tokens, heads, head width, without a batch dimension.
        cu_seqlens_q: (N + 1,) int32, cumulative logical (real) lengths: who attends to whom.
        cu_seqlens_q_padded: (N + 1,) int32, cumulative physical lengths: where the data sits.
            None where it would equal `cu_seqlens_q`.
        max_seqlen_q: a bound on the physical segments, a Python int. It is the longest of them, or
            the row's width where its shape is fixed.
        segment_lengths: the N physical lengths as host integers, so that a loop over segments never
            reads the device. Segments that only fill `cu_seqlens` have 0.
        prefix_levels: the prefix tree in slots, as varlen calls take it; empty where no segment has
            a parent.
    """

    qkv_format: Literal["thd"] = "thd"
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int
    max_seqlen_kv: int
    segment_lengths: tuple[int, ...]
    prefix_tree: PrefixTree | None = None
    prefix_levels: tuple[PrefixLevel, ...] = ()

    @property
    def cu_seqlens_physical(self) -> Tensor:
        """(N + 1,) int32: the offsets of the segments in the row."""
        return self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlice:
    """The part of a row that one context-parallel rank holds, computed on CPU; see
    `packing.context`.

    Args:
        row_index: (T / CP,) int64, the row's tokens of this rank, in its own order.
        natural_order: (T,) int64, where each token of the row lies in the concatenation of all
            ranks' slices.
        heads_order: (T U / CP,) int64, the same of the U ranks that exchange heads with this one;
            None where all do.
        by_row: whether the row was cut into chunks, and not each segment.
        label_positions: (l,) int64, indices into the slice that carry a label.
        targets: (l,) int64, their labels.
        media_positions: (m,) int64, indices into the slice of its placeholders.
        media_sources: (m,) int64, which of the features of the row's images each gets.
        label_places: (l,) int64, which of the whole row's label tokens each is.
        all_sum: sums a tensor, element by element, over the ranks that share the row. The gradient
            of the sum is that of each rank's own part. None where nobody sums.
    """

    rank: int
    size: int
    row_index: Tensor
    natural_order: Tensor
    label_positions: Tensor
    targets: Tensor
    media_positions: Tensor
    media_sources: Tensor
    label_places: Tensor
    heads_order: Tensor | None = None
    by_row: bool = False
    all_sum: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """How ranks divide the images of a row; see `packing.image_owners`.

    Args:
        order: (M,) int64, where each placeholder's feature lies in the ranks' outputs, each padded
            to the largest of `counts`.
        counts: features by rank, host integers.
    """

    order: Tensor
    counts: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """What a packed row and padded rows have in common."""

    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    label_positions: Tensor
    media: Media | None
    media_positions: Tensor
    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    image_blocks: tuple[Span, ...] = ()
    media_sources: Tensor | None = None
    label_sequences: Tensor | None = None
    reference: Tensor | None = None
    num_shared_patches: int = 0
    sources: Tensor | None = None
    rollouts: Rollouts | None = None
    overflows: bool = False

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        """The sample of each sequence: those of a pair have the same."""
        each = len(self.lengths) // len(self.keys) if self.keys else 1
        return tuple(key for key in self.keys for _ in range(each))

    @property
    def num_pairs(self) -> int:
        """Samples that are pairs: of all or of none."""
        return len(self.keys) if len(self.lengths) > len(self.keys) else 0

    @property
    def num_features(self) -> int:
        """Image features that the placeholders take; the sequences of a pair take the same."""
        if self.media_sources is None or self.media is None:
            return int(self.media_positions.shape[0])
        return sum(self.media.num_tokens)

    def with_columns(self, **columns: Tensor) -> Self:
        """With more columns, by field name; of `Rollouts` where samples are rollouts."""
        if self.rollouts is None:
            return replace(self, **cast(Any, columns))
        return replace(self, rollouts=replace(self.rollouts, **cast(Any, columns)))

    def own_labels(self) -> tuple[Tensor, Tensor]:
        """(L,) positions and targets of the label tokens; of a part of a row, those in it."""
        return self.label_positions, self.labels.flatten().index_select(0, self.label_positions)

    def own_part(self, values: Tensor) -> Tensor:
        """(L, ...) of the label tokens -> those of `own_labels`."""
        return values

    def own_temperatures(self) -> Tensor | None:
        """What the logits of `own_labels` are divided by; None for nothing."""
        if self.rollouts is None or self.rollouts.temperatures is None:
            return None
        assert self.label_sequences is not None
        return self.rollouts.temperatures[self.own_part(self.label_sequences)]

    @property
    def num_tokens(self) -> int:
        """Tokens of samples as each is alone, without any padding."""
        return sum(self.lengths)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that are not computed again: another sequence of the row begins with them too."""
        return 0

    @property
    def num_slots(self) -> int:
        """T or B * S, what the model computes."""
        return int(self.input_ids.numel())

    @property
    def num_padded_slots(self) -> int:
        """Slots that the same sequences take in rows padded to the longest (mode `none`)."""
        return len(self.lengths) * max(self.lengths, default=0)

    @property
    def num_label_tokens(self) -> int:
        """L, the tokens that carry loss."""
        return int(self.label_positions.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(_Slots):
    """One THD row: the samples of a bin, one after the other.

    Alignment pads the end of each segment, so a segment has a logical length (its sample's) and a
    physical one. For a causal model the gap may count as the segment's tail, because no real token
    attends to what follows it. A tail segment that rounds the row's total up is a segment without a
    key. Boundaries of fixed size end in segments of length 0 (`collate.FixedShape`).

    Args:
        loss_mask: (1, T) bool, always `labels != IGNORE_INDEX`.
        cu_seqlens_padded: (N + 1,) int32, cumulative physical lengths. None where equal, except in
            rows of one shape with aligned segments, which all have it.
        segment_lengths: N physical lengths, host integers.
        label_positions: (L,) int64, indices into the flattened row that carry a label.
        media_positions: (M,) int64, indices into the flattened row of the placeholders.
        lengths: the sequences' logical lengths, host integers, in row order. There is one a sample
            and two a pair, each counted without sharing.
        context: this rank's slice under context parallelism; None where rows are whole.
        media_part: where ranks divide the vision work. `media` then holds only this rank's images
            (None for none). None where each rank has all images.
        padding_mask: (1, T) bool, True for slots of no sample; None unless requested.
        prefix_tree: which segments continue which, and where each sequence ends; None where nothing
            is shared.
        num_shared_patches: patches that the tower does not encode again, since another sample of
            the row has the same image.
        fixed_shape: whether all rows of the run have T slots. `max_seqlen` is then T, since a CUDA
            graph keeps the number that it was captured with.
        image_blocks: where runs of placeholders lie in the flattened row whose tokens attend to one
            another in both directions, host integers; empty where attention is causal throughout.
        media_sources: (M,) int64, which of the images' features each placeholder gets; None for
            them in their order. Both sequences of a pair get the same.
        label_sequences: (L,) int64, the sequence of each label token; None unless samples are pairs
            or rollouts.
        reference: (N,) float64, log-probabilities of the sequences under the reference model; None
            unless requested.
        sources: (samples,) int64, the source of each sample, in the order of the recipe's names;
            None unless requested.
        rollouts: what is known of the samples' draws; None where they are no rollouts.
        overflows: whether the row has too many sequences for the run's fixed shape.
    """

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    segment_lengths: tuple[int, ...]
    context: ContextSlice | None = None
    media_part: MediaPart | None = None
    padding_mask: Tensor | None = None
    fixed_shape: bool = False
    prefix_tree: PrefixTree | None = None
    prefix_levels: tuple[PrefixLevel, ...] = ()

    @property
    def num_shared_tokens(self) -> int:
        """See _Slots."""
        return 0 if self.prefix_tree is None else self.num_tokens - self.prefix_tree.num_tokens

    @property
    def segments_of_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The segments that hold each sequence, in its own order."""
        if self.prefix_tree is None:
            return tuple((place,) for place in range(len(self.lengths)))
        return tuple(map(self.prefix_tree.whole, range(len(self.lengths))))

    @property
    def segment_tokens(self) -> tuple[int, ...]:
        """Logical lengths of the segments that hold tokens of samples."""
        prefix_tree = self.prefix_tree
        return (
            self.lengths if prefix_tree is None else prefix_tree.lengths[: prefix_tree.num_segments]
        )

    @property
    def max_seqlen(self) -> int:
        """The longest physical segment, T where the shape is fixed; a Python int, never read from
        the device."""
        return self.num_slots if self.fixed_shape else max(self.segment_lengths)

    def own_labels(self) -> tuple[Tensor, Tensor]:
        """See _Slots; of this rank's part, positions in it."""
        if self.context is None:
            return _Slots.own_labels(self)
        return self.context.label_positions, self.context.targets

    def own_part(self, values: Tensor) -> Tensor:
        """See _Slots."""
        return values if self.context is None else values[self.context.label_places]

    def own_slots(self) -> PackedBatch:
        """The row with ids, positions and placeholders of this rank's slots alone."""
        part = self.context
        if part is None:
            return self
        return replace(
            self,
            input_ids=self.input_ids.index_select(1, part.row_index),
            position_ids=self.position_ids.index_select(-1, part.row_index),
            media_positions=part.media_positions,
            media_sources=part.media_sources,
        )

    def packed_seq_params(self) -> PackedSeqParams:
        """The segment boundaries in the form that the model takes."""
        return PackedSeqParams(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens_padded,
            cu_seqlens_kv_padded=self.cu_seqlens_padded,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            segment_lengths=self.segment_lengths,
            prefix_tree=self.prefix_tree,
            prefix_levels=self.prefix_levels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch(_Slots):
    """Rows of one width, padded at the right: mode `none`, the baseline.

    Fields are those of PackedBatch with (B, S) for (1, T); `label_positions`, `media_positions` and
    `image_blocks` index the flattened B * S slots.
    """

    context: ClassVar[None] = None
    media_part: ClassVar[None] = None

    def packed_seq_params(self) -> None:
        """A padded batch has no segments."""
        return


Batch = PackedBatch | PaddedBatch
BatchT = TypeVar("BatchT", bound=Batch)
