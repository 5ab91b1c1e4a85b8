"""Context parallelism by exchange of heads (Ulysses, arXiv:2309.14509): each rank holds a part of a
row's slots, and attends over the whole row with a part of the heads.

    slots of a rank, all heads -> all to all -> the whole row, heads of a rank -> attention -> back

The row is cut after the merge. Everything but attention works slot by slot, and attention has the
row in its true order. So boundaries, windows and image blocks are those of the whole row.

Where fewer ranks exchange heads than share the row, CP = U x R. U neighbours exchange heads, and
then have the slots of one place of a ring of R (`ring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpack.attention import VarlenAttention
from vlmpack.backends.collectives import gather_features, heads_to_slots, slots_to_heads, sum_parts
from vlmpack.backends.hf.ring import CELLS_OF_A_SLOT, RingRow, cuts_by_row, ring_attention
from vlmpack.distributed import Ranks
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ImageFeatures
from vlmpack.packing import (
    Batch,
    ContextSlice,
    MediaPart,
    PackedBatch,
    PaddedBatch,
    deal_media,
    padded_as_row,
    slice_for_context,
)
from vlmpack.recipe.head_degrees import (
    head_copies,
    shared_by,
    shares_heads,
    sizes_that_share,
)


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchange of one row.

    Args:
        natural_order: (T,) int64, see `ContextSlice`; (T / R,) before a ring.
        heads: the exchange before attention on a ring; None where no ranks exchange heads there.
        ring: the row on a ring; None where ranks attend over the whole row.
    """

    group: dist.ProcessGroup
    natural_order: Tensor
    heads: HeadExchange | None = None
    ring: RingRow | None = None

    def around(self, attention: VarlenAttention, kernel: str | None) -> VarlenAttention:
        """Attention of this rank's slots, by that of whole rows or on the ring.

        Args:
            kernel: the implementation whose kernel a ring may use; None for none.
        """
        exchange: HeadExchange | None = self
        if self.ring is not None:
            exchange = self.heads
            attention = partial(ring_attention, row=self.ring, attention=kernel)
        if exchange is None:
            return attention

        def attend(query: Tensor, key: Tensor, value: Tensor, *row: Any, **how: Any) -> Tensor:
            given = exchange.to_heads(query, key, value)
            return exchange.to_slots(attention(*given, *row, **how))

        return attend

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, H / CP, D) each, from (T / CP, H, D); raises as `whole_row`."""
        query, key, value = self.whole_row((query,), (key, value))
        return query, key, value

    def whole_row(self, heads: Sequence[Tensor], groups: Sequence[Tensor] = ()) -> list[Tensor]:
        """(T, H / CP, ...) each, from (T / CP, H, ...). Of fewer groups than ranks each rank has
        one, which several ranks then share.

        Args:
            heads: what each head has of its own.
            groups: what several heads share: keys and values.

        Raises:
            CapabilityError: the ranks do not divide the heads.
        """
        ranks, number = self.group.size(), heads[0].shape[1]
        assert heads[0].shape[0] * ranks == self.natural_order.shape[0], "inputs were not cut"
        shared = groups[0].shape[1] if groups else number
        if not shares_heads(number, shared, 1, ranks):
            raise CapabilityError(
                f"parallelism.context: {ranks} does not divide the {number} heads of a layer "
                f"in {shared} groups. Sizes that do: {sizes_that_share(number, shared, 1)}"
            )
        copies = head_copies(shared, ranks)
        parts = [*heads, *(part.repeat_interleave(copies, dim=1) for part in groups)]
        flat = [part.flatten(1) for part in parts]
        whole = slots_to_heads(flat, self.natural_order, group=self.group)
        each = [(-1, part.shape[1] // ranks, *part.shape[2:]) for part in parts]
        return [part.reshape(shape) for part, shape in zip(whole, each, strict=True)]

    def own(self, channels: Tensor) -> Tensor:
        """This rank's part of what each channel or head has one of, (C, ...)."""
        return channels.chunk(self.group.size())[self.group.rank()]

    def to_slots(self, output: Tensor) -> Tensor:
        """(T / CP, H, ...), from (T, H / CP, ...)."""
        local = heads_to_slots(output.flatten(1), self.natural_order, group=self.group)
        slots: Tensor = local.unflatten(1, (-1, *output.shape[2:]))
        return slots


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share a row, of which this process is one.

    Args:
        heads: those of them that exchange heads; None for this one alone.
        ring: those that have the same heads of other slots; None where each has the whole row.
        slot: see `cuts_by_row`.
    """

    group: dist.ProcessGroup
    heads: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None = None
    slot: float = CELLS_OF_A_SLOT

    @classmethod
    def of(
        cls, ranks: Ranks, size: int, heads: int, slot: float = CELLS_OF_A_SLOT
    ) -> ContextGroup | None:
        """Neighbouring ranks, as `start_process_group` lays them out; None for one. Collective.

        Args:
            heads: U, which divides `size`.
        """
        if size == 1:
            return None
        group, _ = dist.new_subgroups(group_size=size)
        assert group is not None and group.rank() == ranks.replica_rank
        if heads == size:
            return cls(group, group)
        of_heads = dist.new_subgroups(group_size=heads)[0] if heads > 1 else None
        rings = [
            list(range(first + place, first + size, heads))
            for first in range(0, ranks.world_size, size)
            for place in range(heads)
        ]
        ring, _ = dist.new_subgroups_by_enumeration(rings)
        assert ring is not None
        # NCCL wants a first call of all ranks, and steps may be of two.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=ring)
        return cls(group, of_heads, ring, slot)

    def described(self) -> str:
        """In words."""
        heads = self.heads.size() if self.heads is not None else 1
        return shared_by(self.group.size(), heads)

    def part_of(self, batch: Batch, *, deals_images: bool = True) -> PackedBatch:
        """The row with what this rank holds of it, on CPU: slots, labels and images.

        Args:
            deals_images: False for a model that runs whole: it merges all images of the row.

        Raises:
            PackingError: as `slice_for_context` and `deal_media`.
        """
        rank, size = self.group.rank(), self.group.size()
        row = padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch
        all_sum = partial(sum_parts, group=self.group)
        cut: dict[str, Any] = {}
        if self.ring is not None:
            places, lengths = self.ring.size(), row.segment_lengths
            by_row = cuts_by_row(lengths, size=places, slot=self.slot)
            cut = {"heads": size // places, "by_row": by_row}
        row = slice_for_context(row, rank=rank, size=size, all_sum=all_sum, **cut)
        return deal_media(row, rank=rank, size=size) if deals_images else row

    def exchange(self, part: ContextSlice, lengths: tuple[int, ...]) -> HeadExchange:
        """That of a row of segments of these physical lengths."""
        if self.ring is None or part.heads_order is None:
            return HeadExchange(self.group, part.natural_order)
        order = part.heads_order
        heads = None if self.heads is None else HeadExchange(self.heads, order)
        ring = RingRow(self.ring, lengths, part.by_row, order.device)
        return HeadExchange(self.group, part.natural_order, heads, ring)

    def all_features(self, images: ImageFeatures, part: MediaPart) -> ImageFeatures:
        """Features of all images of a row, from those of this rank's. Collective."""
        layers = (images.features, *images.deep)
        first, *deep = gather_features(
            torch.cat(layers, dim=1),
            part.order,
            part.counts,
            group=self.group,
            cp_group=self.group,
        ).split([layer.shape[1] for layer in layers], dim=1)
        return replace(images, features=first, deep=tuple(deep))
