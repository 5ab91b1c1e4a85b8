"""The varlen kernels of CUDA with their log-sum-exp and backward pass, for `merged_attention`.

`torch_varlen`: torch's operators that `torch.nn.attention.varlen` is made of. `flash_attn`: the two
functions that its own autograd function is made of. Neither is a public interface, so what they
take is looked up before they are called: where an argument has another name there is no kernel,
and forks are computed with masks instead. Neither has been run on a GPU by this version's tests
unless docs/gpu.md says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from vlmpack.attention.merged import Qkv, VarlenCall, VarlenKernel

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
    """Torch's flash attention; see `VarlenKernel`. Keys and values have as many heads as queries.

    Args:
        ops: where its operators are.
    """

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
    """The package flash-attn; see `VarlenKernel`.

    Args:
        interface: its module `flash_attn.flash_attn_interface`.
    """

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
