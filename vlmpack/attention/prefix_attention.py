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

A CUDA kernel computes it in two calls that are merged. One runs over the segments, the other over
the prefixes that they continue. Each call returns its outputs and the logarithm of the sum of its
exponentiated scores (lse). Two softmaxes over parts of the keys become one over all of them
(2205.14135, section 3.1, as in ring attention, 2310.01889):

    lse = log(exp(lse_own) + exp(lse_prefix));   out = sum of exp(lse_part - lse) * out_part

The backward pass of each call is the kernel's own, with the merged output and lse as its arguments.
Its weights are then those of the whole softmax, and so is the term that is subtracted from their
gradients. All segments after a prefix read it in one call, as one run of queries.

Kernels have no window that reaches into a prefix, and not every version returns its lse.
`kernel_with_lse` uses the operators behind `torch.nn.attention.varlen` and flash-attn's autograd
function, which are no public interface. So their arguments are checked first. Masks compute all
other cases on any device, and are as exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.varlen import (
    LARGEST_HEAD,
    AttentionChoice,
    dense_attention,
    whole_heads,
)
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams
from vlmpack.packing.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """The boundaries of one varlen call.

    Args:
        cu_q, cu_k: (N + 1,) int32, boundaries of the runs of queries and of keys.
        max_q, max_k: the longest of them, host integers.
        causal: whether a token sees only itself and earlier ones; only in a square call.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """As torch's kernel takes them."""
        return self.cu_q, self.cu_k, self.max_q, self.max_k


class Qkv(NamedTuple):
    """The queries of a call, and the keys and values that they attend to: slots of a row, all or
    some.

    Args:
        query: (T, Hq, D).
        key, value: (S, Hkv, D), as many heads as the kernel takes.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class VarlenKernel(Protocol):
    """A varlen attention kernel with its lse, and its backward pass."""

    def forward(self, qkv: Qkv, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """(T, Hq, D) outputs and (Hq, T) float32 lse."""

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> Qkv:
        """Gradients of query, key and value, for outputs and lse that may be those of more keys
        than the call's."""


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Segments that continue a prefix, with that prefix.

    Args:
        branches: (B,) int64, slots of the queries.
        prefixes: (P,) int64, slots of the keys, without gaps.
    """

    call: VarlenCall
    branches: Tensor
    prefixes: Tensor

    def of(self, qkv: Qkv) -> Qkv:
        """What the call takes of a whole row."""
        return Qkv(
            qkv.query.index_select(0, self.branches),
            qkv.key.index_select(0, self.prefixes),
            qkv.value.index_select(0, self.prefixes),
        )


@dataclass(frozen=True, slots=True)
class PrefixCalls:
    """The varlen calls of a row: `own` of each segment with itself, `prefixes` of each level."""

    own: VarlenCall
    prefixes: tuple[PrefixCall, ...]

    @classmethod
    def of(cls, params: PackedSeqParams) -> PrefixCalls:
        """The calls of a row, with tensors on the device of `params`.

        Raises:
            CapabilityError: no branch.
        """
        if not params.prefix_levels:
            raise CapabilityError("a row without shared prefixes needs one varlen call, not two")
        cu = params.cu_seqlens_physical
        prefixes = []
        for each in params.prefix_levels:
            bounds = (each.cu_branches, each.cu_prefixes, each.max_branches, each.max_prefixes)
            prefixes.append(
                PrefixCall(VarlenCall(*bounds, causal=False), each.branches, each.prefixes)
            )
        own = VarlenCall(cu, cu, params.max_seqlen_q, params.max_seqlen_kv, causal=True)
        return cls(own, tuple(prefixes))


def merge_lse(
    own: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor], branches: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the outputs and lse of two calls into those over all keys.

    Args:
        own: (T, Hq, D) outputs and (Hq, T) lse of every slot with its own segment.
        prefix: (B, Hq, D) and (Hq, B) of the branches' slots with their prefixes.
        branches: (B,) int64, which slots these are.
    """
    out, lse = own[0].clone(), own[1].clone()
    mine = lse.index_select(1, branches)
    both = torch.logaddexp(mine, prefix[1])
    own_part, added = ((part - both).exp().T[..., None] for part in (mine, prefix[1]))
    merged = own[0].index_select(0, branches) * own_part + prefix[0] * added
    return (
        out.index_copy_(0, branches, merged.to(out.dtype)),
        lse.index_copy_(1, branches, both),
    )


class _PrefixVarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: PrefixCalls,
        kernel: VarlenKernel,
        scale: float,
    ) -> Tensor:
        whole = Qkv(query, key, value)
        out, lse = kernel.forward(whole, calls.own, scale)
        for each in calls.prefixes:
            prefix = kernel.forward(each.of(whole), each.call, scale)
            out, lse = merge_lse((out, lse), prefix, each.branches)
        ctx.save_for_backward(*whole, out, lse)
        ctx.calls, ctx.kernel, ctx.scale = calls, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, out, lse = ctx.saved_tensors
        whole, calls, kernel = Qkv(*qkv), ctx.calls, ctx.kernel
        gradients = kernel.backward(grad, whole, out, lse, calls.own, ctx.scale)
        for each in calls.prefixes:
            prefix = kernel.backward(
                grad.index_select(0, each.branches),
                each.of(whole),
                out.index_select(0, each.branches),
                lse.index_select(1, each.branches).contiguous(),
                each.call,
                ctx.scale,
            )
            places = (each.branches, each.prefixes, each.prefixes)
            gradients = [
                mine.index_add(0, at, more)
                for mine, at, more in zip(gradients, places, prefix, strict=True)
            ]
        return *gradients, None, None, None


def prefix_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: PrefixCalls,
    kernel: VarlenKernel,
    *,
    scale: float | None = None,
) -> Tensor:
    """Compute `prefix_attention` by calls of a varlen kernel.

    One call covers what segments see of themselves. One more call covers each depth of shared
    prefixes.

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D), as many heads as the kernel takes.
        value: (T, Hkv, D).
        kernel: with its lse.
        scale: factor on the scores; 1 / sqrt(D) if None.

    Returns:
        (T, Hq, D).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _PrefixVarlenAttention.apply(query, key, value, calls, kernel, scale)  # type: ignore[no-untyped-call]
    return output


_TORCH = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal return_debug_mask scale",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal rng_state unused scale",
}
_FLASH = {
    "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p softmax_scale causal",
    "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right "
    "softcap alibi_slopes deterministic rng_state",
}


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """Torch's flash attention; see `VarlenKernel`. Queries, keys and values have as many heads."""

    ops: Any

    def forward(self, qkv: Qkv, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See VarlenKernel."""
        out, lse, *_ = self.ops._flash_attention_forward(
            *qkv, *call.bounds, 0.0, call.causal, False, scale=scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> Qkv:
        """See VarlenKernel."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        unused = torch.empty(0, device=grad.device)
        gradients = self.ops._flash_attention_backward(
            grad.contiguous(),
            *(*qkv, out, lse, *call.bounds, 0.0, call.causal, no_dropout, unused),
            scale=scale,
        )
        return Qkv(*gradients)


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """The package flash-attn; see `VarlenKernel`."""

    interface: Any

    @staticmethod
    def _arguments(qkv: Qkv, call: VarlenCall, scale: float) -> dict[str, Any]:
        bounds = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {
            **{name: part.contiguous() for name, part in zip("qkv", qkv, strict=True)},
            **dict(zip(bounds, call.bounds, strict=True)),
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "causal": call.causal,
        }

    def forward(self, qkv: Qkv, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See VarlenKernel."""
        given = self._arguments(qkv, call, scale)
        out, lse, *_ = self.interface._flash_attn_varlen_forward(**given)
        return out, lse

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> Qkv:
        """See VarlenKernel."""
        empty = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in qkv)
        gradients = Qkv(*empty)
        self.interface._flash_attn_varlen_backward(
            dout=grad.contiguous(),
            out=out,
            softmax_lse=lse,
            dq=gradients.query,
            dk=gradients.key,
            dv=gradients.value,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
            rng_state=None,
            **self._arguments(qkv, call, scale),
        )
        return gradients


def kernel_with_lse(name: str) -> VarlenKernel | None:
    """The kernel of an implementation (`model.attention`); None where it has none that we know."""
    if name == "torch_varlen":
        ops = torch.ops.aten
        return TorchKernel(ops) if _all_take(_TORCH, lambda each: _of_operator(ops, each)) else None
    if name != "flash_attn":
        return None
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError):
        return None
    known = _all_take(_FLASH, lambda each: set(signature(getattr(interface, each)).parameters))
    return FlashKernel(interface) if known else None


def _of_operator(ops: Any, name: str) -> set[str]:
    return {argument.name for argument in getattr(ops, name).default._schema.arguments}


def _all_take(wanted: dict[str, str], arguments: Callable[[str], set[str]]) -> bool:
    """Whether each function takes what it will be called with."""
    try:
        return all(set(names.split()) <= arguments(name) for name, names in wanted.items())
    except (AttributeError, ValueError, TypeError):
        return False


@dataclass(frozen=True, slots=True)
class _PrefixGroup:
    """Neighbouring segments with the same parent and physical length.

    Args:
        prefix: slots of the segments that they continue, the first one's first.
    """

    prefix: tuple[slice, ...]
    length: int
    count: int

    @property
    def seen(self) -> int:
        """Tokens of the prefix."""
        return sum(place.stop - place.start for place in self.prefix)


class PrefixGroups:
    """The segments of a row that attend in one call, with masks that layers share.

    Args:
        segment_lengths: physical lengths of as many segments.
        device: of the queries. Masks are made there from host integers; nothing is read back.

    Raises:
        ValueError: shared prefixes of other segments, or a gap that is shorter than nothing.
    """

    def __init__(
        self, prefix_tree: PrefixTree, segment_lengths: Sequence[int], device: torch.device
    ) -> None:
        physical = tuple(segment_lengths)
        if len(physical) != len(prefix_tree.lengths) or any(
            logical > room for logical, room in zip(prefix_tree.lengths, physical, strict=True)
        ):
            raise ValueError(
                f"shared prefixes of segments of {prefix_tree.lengths} tokens, but the row's have "
                f"room for {physical}"
            )
        self.groups = tuple(_prefix_groups(prefix_tree, physical))
        self._device = device
        self._made: dict[tuple[int, int, int | None], Tensor | None] = {}

    def mask(self, seen: int, length: int, window: int | None) -> Tensor | None:
        """(length, seen + length) bool, True where a token sees a key; None where it is plain
        causal attention of the segment alone.

        Args:
            seen: tokens of the prefix.
            window: sliding window in tokens along prefix and segment, the token included; None for
                all.
        """
        key = (seen, length, window)
        if key not in self._made:
            self._made[key] = _mask(*key, self._device)
        return self._made[key]


def _prefix_groups(prefix_tree: PrefixTree, physical: tuple[int, ...]) -> Iterator[_PrefixGroup]:
    starts = tuple(accumulate(physical, initial=0))
    alike = groupby(
        range(len(physical)), key=lambda each: (prefix_tree.parents[each], physical[each])
    )
    for (_, length), numbers in alike:
        first, *rest = numbers
        if length:
            prefix = (
                slice(starts[n], starts[n] + prefix_tree.lengths[n])
                for n in prefix_tree.path(first)
            )
            yield _PrefixGroup(tuple(prefix), length, 1 + len(rest))


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: PrefixGroups,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each segment over its prefix and itself.

    Args:
        query: (T, Hq, D).
        key: (T, Hkv, D); Hq is a multiple of Hkv (grouped-query attention).
        value: (T, Hkv, D).
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens along prefix and segment, the token included; None for all.

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
                torch.cat((_repeated_prefix(whole, each.prefix, each.count), mine), dim=2)
                for whole, mine in ((key, k), (value, v))
            )
        mask = groups.mask(seen, each.length, window)
        out = dense_attention(q, k, v, mask=mask, causal=True, scale=scale)
        outputs.append(out.transpose(1, 2).reshape(-1, *query.shape[1:]))
    return torch.cat(outputs)


def _repeated_prefix(whole: Tensor, places: Sequence[slice], count: int) -> Tensor:
    """(count, H, prefix, D): keys or values of a prefix, for so many segments."""
    prefix = torch.cat([whole[place] for place in places])
    return prefix.transpose(0, 1).expand(count, -1, -1, -1)


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


@dataclass(frozen=True, slots=True)
class PrefixAttention:
    """Attention in a row with shared prefixes; arguments and result as `segment_attention`.

    Args:
        row: made from the row's `params` for all layers. None makes new masks in each call.
    """

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
        is_masked = window is not None or query.shape[-1] > LARGEST_HEAD
        kernel = None if row is None or is_masked else _kernel(self.choice.name)
        if kernel is None or row is None:
            groups = (row or PrefixRow(params)).groups
            return prefix_attention(query, key, value, groups, scale=scale, window=window)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # torch's kernel has no grouped-query form
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        own = query.shape[-1]
        query, key, value, scale = whole_heads(query, key, value, scale)
        return prefix_varlen_attention(query, key, value, row.calls, kernel, scale=scale)[..., :own]
