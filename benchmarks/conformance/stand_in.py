"""An exact stand-in for flash-attn on a CPU, below transformers' own code.

Only the kernels are replaced: vlmpack's segments attention computes, in float32, what they would.
What decides over boundaries (an attention mask, keyword arguments, positions that begin anew) stays
transformers' `flash_attention_forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmpack.attention.varlen import segment_attention
from vlmpack.packing import PackedSeqParams

NAME = "flash_attention_2"


def varlen(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """(T, H, D), as flash_attn_varlen_func."""
    assert not dropout_p and not softcap and window_size == (-1, -1)
    assert torch.equal(cu_seqlens_q.cpu(), cu_seqlens_k.cpu())
    ends = cu_seqlens_q.to(torch.int32)
    assert int(ends[-1]) == len(q), "a boundary that is no end of the row"
    lengths = tuple(ends.diff().tolist())
    params = PackedSeqParams(
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=lengths,
    )
    return segment_attention(q, k, v, params, causal=causal, scale=softmax_scale)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """(B, S, H, D), as flash_attn_func."""
    rows = []
    for row in range(len(q)):
        ends = torch.tensor([0, q.shape[1]], dtype=torch.int32)
        rows.append(
            varlen(
                q[row], k[row], v[row], ends, ends, 0, 0, dropout_p, softmax_scale, causal,
                window_size, softcap, deterministic,
            )
        )  # fmt: skip
    return torch.stack(rows)


def install(model: Any) -> None:
    """The decoder attends as it would with flash-attn; a vision tower keeps sdpa."""
    from transformers import modeling_flash_attention_utils as utils

    utils._lazy_imports = lambda *_, **__: (
        dense,
        varlen,
        None,
        utils._pad_input,
        utils._unpad_input,
    )
    decoder = model.get_decoder()
    for module in decoder.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = NAME
    for tower in model.modules():
        named = type(tower).__name__
        if ("Vision" in named or "Visual" in named) and hasattr(tower, "config"):
            assert tower.config._attn_implementation == "sdpa", named
