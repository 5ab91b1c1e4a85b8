"""Attention in rows that hold a shared prefix once.

A prompt with its image, and two answers that continue it. A row of the matrix is a query, and 1
marks what it sees:

    segment   0 0 0  1 1  2 2        parents (-1, 0, 0)
              p p p  a a  b b
    p         1 . .  . .  . .
    p         1 1 .  . .  . .
    p         1 1 1  . .  . .
    a         1 1 1  1 .  . .
    a         1 1 1  1 1  . .
    b         1 1 1  . .  1 .
    b         1 1 1  . .  1 1

A segment sees all of its prefix (its parent, that one's parent, ...), and itself causally. A
separate sample of prefix and segment would compute the same, because keys and values of the prefix
do not depend on what follows. Positions continue those of the prefix. Nothing after a prefix sees
its alignment gaps.

A CUDA kernel computes it in calls that are merged (`prefix_calls.py`). Kernels have no window that
reaches into a prefix, and not every version returns its log-sum-exp. Masks compute these cases on
any device, and are as exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.prefix_calls import PrefixCalls, kernel_with_lse, merged_attention
from vlmpack.attention.varlen import AttentionChoice, VarlenAttention, dense_attention, whole_heads
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams
from vlmpack.packing.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Neighbouring segments with the same parent and physical length.

    Args:
        path: slots of the segments that they continue, the first one's first.
    """

    path: tuple[slice, ...]
    length: int
    count: int

    @property
    def seen(self) -> int:
        """Tokens of the path."""
        return sum(place.stop - place.start for place in self.path)


class PrefixGroups:
    """The segments of a row that attend in one call, with masks that layers share.

    Args:
        segment_lengths: physical lengths of as many segments.
        device: of the queries. Masks are made there from host integers; nothing is read back.

    Raises:
        ValueError: forks of other segments, or a gap that is shorter than nothing.
    """

    def __init__(
        self, prefix_tree: PrefixTree, segment_lengths: Sequence[int], device: torch.device
    ) -> None:
        physical = tuple(segment_lengths)
        if len(physical) != len(prefix_tree.lengths) or any(
            logical > room for logical, room in zip(prefix_tree.lengths, physical, strict=True)
        ):
            raise ValueError(
                f"forks of segments of {prefix_tree.lengths} tokens, but the row's have room for "
                f"{physical}"
            )
        self.groups = tuple(_siblings(prefix_tree, physical))
        self._device = device
        self._made: dict[tuple[int, int, int | None], Tensor | None] = {}

    def mask(self, seen: int, length: int, window: int | None) -> Tensor | None:
        """(length, seen + length) bool, True where a token sees a key; None where it is plain
        causal attention of the segment alone.

        Args:
            seen: tokens of the path.
            window: sliding window in tokens along the path, the token itself included; None for
                all.
        """
        key = (seen, length, window)
        if key not in self._made:
            self._made[key] = _mask(*key, self._device)
        return self._made[key]


def _siblings(prefix_tree: PrefixTree, physical: tuple[int, ...]) -> Iterator[_Siblings]:
    starts = tuple(accumulate(physical, initial=0))
    alike = groupby(
        range(len(physical)), key=lambda each: (prefix_tree.parents[each], physical[each])
    )
    for (_, length), numbers in alike:
        first, *rest = numbers
        if length:
            path = (
                slice(starts[n], starts[n] + prefix_tree.lengths[n])
                for n in prefix_tree.path(first)
            )
            yield _Siblings(tuple(path), length, 1 + len(rest))


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: PrefixGroups,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each segment over its path and itself.

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        value: (T, Hkv, D).
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens along the path, the token itself included; None for all.

    Returns:
        (T, Hq, D).
    """
    sizes = [each.length * each.count for each in groups.groups]
    parts = zip(*(whole.split(sizes) for whole in (query, key, value)), strict=True)
    outputs: list[Tensor] = []
    for each, own in zip(groups.groups, parts, strict=True):
        q, k, v = (
            part.view(each.count, each.length, *part.shape[1:]).transpose(1, 2) for part in own
        )
        seen = each.seen
        if seen:
            k, v = (
                torch.cat((_shared(whole, each.path, each.count), mine), dim=2)
                for whole, mine in ((key, k), (value, v))
            )
        mask = groups.mask(seen, each.length, window)
        out = dense_attention(q, k, v, mask=mask, causal=True, scale=scale)
        outputs.append(out.transpose(1, 2).reshape(-1, *query.shape[1:]))
    return torch.cat(outputs)


def _shared(whole: Tensor, places: Sequence[slice], count: int) -> Tensor:
    """(count, H, path, D): keys or values of a path, for so many segments."""
    path = torch.cat([whole[place] for place in places])
    return path.transpose(0, 1).expand(count, -1, -1, -1)


def _mask(seen: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """See `PrefixGroups.mask`."""
    if not seen and (window is None or window >= length):
        return None
    mask = torch.ones(length, seen + length, dtype=torch.bool, device=device).tril_(seen)
    return mask if window is None else mask.triu_(seen + 1 - window)


_kernel = cache(kernel_with_lse)


@dataclass(frozen=True)
class PrefixRow:
    """A row with shared prefixes, and what a model's layers need of it, made once."""

    params: PackedSeqParams

    @cached_property
    def calls(self) -> PrefixCalls:
        """For kernels."""
        return PrefixCalls.of(self.params)

    @cached_property
    def groups(self) -> PrefixGroups:
        """For masks."""
        params = self.params
        assert params.prefix_tree is not None
        return PrefixGroups(params.prefix_tree, params.segment_lengths, params.cu_seqlens_q.device)


def attention_of_row(
    choice: AttentionChoice, params: PackedSeqParams, row: PrefixRow | None
) -> VarlenAttention:
    """The attention of a row; the choice itself if the row shares no prefix.

    Args:
        row: made from `params` for all layers. None computes shared prefixes with new masks.
    """
    return choice.function if params.prefix_tree is None else _PrefixAttention(choice, row)


@dataclass(frozen=True, slots=True)
class _PrefixAttention:
    """Attention over forks, with arguments and result of `segment_attention`."""

    choice: AttentionChoice
    row: PrefixRow | None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: PackedSeqParams,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        masks: BlockMasks | None = None,
    ) -> Tensor:
        """Refuses image blocks (CapabilityError)."""
        if masks is not None or not causal:
            raise CapabilityError(
                "the row shares prefixes, and some of its tokens attend in both directions; set "
                "packing.share_prefix: false"
            )
        row = self.row
        kernel = None if row is None or window is not None else _kernel(self.choice.name)
        if kernel is None or row is None:
            groups = (row or PrefixRow(params)).groups
            return prefix_attention(query, key, value, groups, scale=scale, window=window)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # torch's kernel has no grouped-query form
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        own = query.shape[-1]
        query, key, value, scale = whole_heads(query, key, value, scale)
        return merged_attention(query, key, value, row.calls, kernel, scale=scale)[..., :own]
