"""Varlen kernels for CUDA: torch's own and flash-attn, behind the signature of `segment_attention`.

Both see physical boundaries. For a causal model an alignment gap counts as its segment's tail.
Neither has been run on a GPU by this version's tests unless docs/gpu.md says so.

`kernel_with_lse` gives them with their log-sum-exp and backward pass, for `merged_attention`. It
uses the operators behind `torch.nn.attention.varlen` and flash-attn's autograd function, which are
no public interface. So their arguments are checked first. Where a name differs, masks compute
shared prefixes instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlmpack.attention.blocks import BlockMasks
from vlmpack.attention.prefix_calls import Qkv, VarlenCall, VarlenKernel
from vlmpack.errors import CapabilityError
from vlmpack.packing.batch import PackedSeqParams

BLOCKS_NEED_MASKS = (
    "an image's tokens attend in both directions here, which takes a mask; segments has one"
)


HEAD_MULTIPLE = 8
"""torch's kernel, and flash-attn's without its public function, refuse heads of other widths."""


def whole_heads(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value padded to a head width that the kernels take, and the factor of their
    scores.

    Zeros after the channels change no score. The first channels of the output are the result.

    Args:
        query, key, value: (T, H, D) each, of one D.
        scale: 1 / sqrt(D) if None.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % HEAD_MULTIPLE
    if missing:
        query, key, value = (nn.functional.pad(part, (0, missing)) for part in (query, key, value))
    return query, key, value, scale


@cache
def _takes_groups(varlen_attn: Callable[..., object]) -> bool:
    """Whether this torch's has a grouped-query form; 2.11's has none."""
    return "enable_gqa" in signature(varlen_attn).parameters


def _varlen_attention(
    name: Literal["torch_varlen", "flash_attn"],
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
    """A kernel of CUDA, for bf16 or fp16.

    Arguments and result as `segment_attention`; refuses masks (CapabilityError).
    """
    if masks is not None:
        raise CapabilityError(f"{name} cannot run: {BLOCKS_NEED_MASKS}")
    if params.prefix_tree is not None:
        raise ValueError(f"segments that go on from others need more than one call of {name}")
    left = -1 if window is None else window - 1
    sides = (left, 0 if causal else left)
    cu = params.cu_seqlens_physical
    bounds = (cu, cu, params.max_seqlen_q, params.max_seqlen_kv)
    if name == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        output: Tensor = flash_attn_varlen_func(
            query, key, value, *bounds, softmax_scale=scale, causal=causal, window_size=sides
        )
        return output
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    grouped: dict[str, Any] = {}
    if groups > 1 and _takes_groups(varlen_attn):
        grouped = {"enable_gqa": True}
    elif groups > 1:  # as often in memory
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    own = query.shape[-1]
    query, key, value, scale = whole_heads(query, key, value, scale)
    found = varlen_attn(query, key, value, *bounds, scale=scale, window_size=sides, **grouped)
    assert isinstance(found, Tensor)  # a tuple only where the log-sum-exp was asked for
    return found[..., :own]


torch_varlen_attention = partial(_varlen_attention, "torch_varlen")
"""`torch.nn.attention.varlen.varlen_attn` (torch >= 2.10)."""

flash_attention = partial(_varlen_attention, "flash_attn")
"""`flash_attn.flash_attn_varlen_func` (the `flash-attn` extra)."""


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
        bounds = (call.cu_q, call.cu_k, call.max_q, call.max_k)
        out, lse, *_ = self.ops._flash_attention_forward(
            *qkv, *bounds, 0.0, call.causal, False, scale=scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> Qkv:
        """See VarlenKernel."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        unused = torch.empty(0, device=grad.device)
        bounds = (call.cu_q, call.cu_k, call.max_q, call.max_k)
        found = self.ops._flash_attention_backward(
            grad.contiguous(),
            *(*qkv, out, lse, *bounds, 0.0, call.causal, no_dropout, unused),
            scale=scale,
        )
        return Qkv(*found)


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """The package flash-attn; see `VarlenKernel`."""

    interface: Any

    def forward(self, qkv: Qkv, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See VarlenKernel."""
        out, lse, *_ = self.interface._flash_attn_varlen_forward(
            q=qkv.query.contiguous(),
            k=qkv.key.contiguous(),
            v=qkv.value.contiguous(),
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
        )
        return out, lse

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> Qkv:
        """See VarlenKernel."""
        empty = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in qkv)
        found = Qkv(*empty)
        self.interface._flash_attn_varlen_backward(
            dout=grad.contiguous(),
            q=qkv.query.contiguous(),
            k=qkv.key.contiguous(),
            v=qkv.value.contiguous(),
            out=out,
            softmax_lse=lse,
            dq=found.query,
            dk=found.key,
            dv=found.value,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
            rng_state=None,
        )
        return found


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
