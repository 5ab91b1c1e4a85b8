"""Which attention a row with forks gets: a kernel's two calls, merged, or masks.

The kernels have no window that reaches over a fork, and not each version of them says its
log-sum-exp: masks take these cases, on any device, and are as exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.forks import ForkGroups, fork_attention
from vlmpack.attention.kernels import whole_heads
from vlmpack.attention.lse_kernels import kernel_with_lse
from vlmpack.attention.merged import ForkedCalls, merged_attention
from vlmpack.attention.varlen import AttentionChoice, VarlenAttention
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

_kernel = cache(kernel_with_lse)


@dataclass(frozen=True)
class ForkedRow:
    """A row with forks, and what the layers of a model need of it, made once.

    Args:
        params: of the row.
    """

    params: PackedSeqParams

    @cached_property
    def calls(self) -> ForkedCalls:
        """For kernels."""
        return ForkedCalls.of(self.params)

    @cached_property
    def groups(self) -> ForkGroups:
        """For masks."""
        params = self.params
        assert params.forks is not None
        return ForkGroups(params.forks, params.segment_lengths, params.cu_seqlens_q.device)


def attention_of_row(
    choice: AttentionChoice, params: PackedSeqParams, row: ForkedRow | None
) -> VarlenAttention:
    """What computes a row: the choice itself where it has no forks.

    Args:
        choice: the run's implementation.
        params: of the row.
        row: made of `params` for all layers; where it is None, the row's forks are computed with
            masks that are made anew.
    """
    return choice.function if params.forks is None else _Forked(choice, row)


@dataclass(frozen=True, slots=True)
class _Forked:
    """Attention over forks, with arguments and result of `segment_attention`."""

    choice: AttentionChoice
    row: ForkedRow | None

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
            groups = (row or ForkedRow(params)).groups
            return fork_attention(query, key, value, groups, scale=scale, window=window)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # torch's kernel has no grouped-query form
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        own = query.shape[-1]
        query, key, value, scale = whole_heads(query, key, value, scale)
        return merged_attention(query, key, value, row.calls, kernel, scale=scale)[..., :own]
