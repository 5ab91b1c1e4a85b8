"""Context parallelism by exchange of heads (Ulysses, arXiv:2309.14509): each rank holds a part of a
row's slots, and attends over the whole row with a part of the heads.

    slots of a rank, all heads -> all to all -> the whole row, heads of a rank -> attention -> back

The row is cut after the merge. Everything but attention works slot by slot, and attention has the
row in its true order. So boundaries, windows and image blocks are those of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpack.backends.collectives import gather_features, heads_to_slots, slots_to_heads, sum_parts
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
from vlmpack.recipe.shared_sizes import shares_heads, sizes_that_share


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchange of one row.

    Args:
        natural_order: (T,) int64, see `ContextSlice`.
    """

    group: dist.ProcessGroup
    natural_order: Tensor

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
        shared = groups[0].shape[1] if groups else number
        if not shares_heads(number, shared, 1, ranks):
            raise CapabilityError(
                f"parallelism.context: {ranks} does not divide the {number} heads of a layer "
                f"in {shared} groups. Sizes that do: {sizes_that_share(number, shared, 1)}"
            )
        copies = max(1, ranks // shared)
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
    """The ranks that share a row, of which this process is one."""

    group: dist.ProcessGroup

    @classmethod
    def of(cls, ranks: Ranks, size: int) -> ContextGroup | None:
        """Neighbouring ranks, as `start_process_group` lays them out; None for one. Collective."""
        if size == 1:
            return None
        group, _ = dist.new_subgroups(group_size=size)
        assert group is not None and group.rank() == ranks.replica_rank
        return cls(group)

    def take(self, vlm: Any) -> None:
        """Have these ranks share the rows of a `PackedLM`.

        Raises:
            CapabilityError: the model cannot be run so yet.
        """
        why = "has a router with a loss of whole rows" if vlm.router_loss is not None else ""
        why = "is run whole, by its class's own forward" if vlm.paths.whole is not None else why
        if why:
            raise CapabilityError(f"parallelism.context on the hf engine: the model {why}; use 1")
        vlm.context_group = self

    def part_of(self, batch: Batch) -> PackedBatch:
        """The row with what this rank holds of it, on CPU: slots, labels and images.

        Raises:
            PackingError: as `slice_for_context` and `deal_media`.
        """
        rank, size = self.group.rank(), self.group.size()
        row = padded_as_row(batch) if isinstance(batch, PaddedBatch) else batch
        all_sum = partial(sum_parts, group=self.group)
        row = slice_for_context(row, rank=rank, size=size, all_sum=all_sum)
        return deal_media(row, rank=rank, size=size)

    def exchange(self, part: ContextSlice) -> HeadExchange:
        """That of a row."""
        return HeadExchange(self.group, part.natural_order)

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
