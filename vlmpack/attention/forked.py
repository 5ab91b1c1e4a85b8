"""Which attention a row with forks gets: a kernel's two calls, merged, or masks.

The kernels have no window that reaches over a fork, and not each version of them says its
log-sum-exp: masks take these cases, on any device, and are as exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.forks import fork_attention
from vlmpack.attention.lse_kernels import kernel_with_lse
from vlmpack.attention.merged import ForkedCalls, merged_attention
from vlmpack.attention.varlen import AttentionChoice, VarlenAttention
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

_kernel = cache(kernel_with_lse)


def attention_of_row(
    choice: AttentionChoice, params: PackedSeqParams, calls: ForkedCalls | None
) -> VarlenAttention:
    """What computes a row: the choice itself where it has no forks.

    Args:
        choice: the run's implementation.
        params: of the row.
        calls: of its forks, where a kernel may take them.
    """
    return choice.function if params.forks is None else _Forked(choice, calls)


@dataclass(frozen=True, slots=True)
class _Forked:
    """Attention over forks, with arguments and result of `segment_attention`."""

    choice: AttentionChoice
    calls: ForkedCalls | None

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
        assert params.forks is not None
        if masks is not None or not causal:
            raise CapabilityError(
                "the row shares prefixes, and some of its tokens attend in both directions; set "
                "packing.share_prefix: false"
            )
        calls = self.calls if window is None else None
        kernel = None if calls is None else _kernel(self.choice.name)
        if kernel is None or calls is None:
            forks = params.forks
            return fork_attention(query, key, value, params, forks, scale=scale, window=window)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # torch's kernel has no grouped-query form
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        return merged_attention(query, key, value, calls, kernel, scale=scale)
