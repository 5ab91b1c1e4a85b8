"""RoPE on a packed row, forward and backward: ours against megatron-core's packed op.

Ours builds cos and sin once per micro-batch and applies them in every layer; Megatron's op slices
and concatenates its frequencies per sequence, in every layer, for queries and for keys.
"""

from __future__ import annotations

import torch
from timing import medians
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.attention import RopeLayout, apply_rope, rope_cos_sin

TOKENS, HEADS, KV_HEADS, WIDTH, LAYERS = 8192, 16, 2, 128, 28


class _CountOps(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _count(run) -> int:
    with _CountOps() as counter:
        run()
    return counter.count


class _OneRank:
    """Megatron asks the group for its size and rank alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def bench_rope(rounds: int, *, sequences: int) -> dict[str, object]:
    """One layer's queries and keys; building cos and sin is shared by the layers of a model."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    length = TOKENS // sequences
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, WIDTH, generator=generator, requires_grad=True)
    key = torch.randn(TOKENS, KV_HEADS, WIDTH, generator=generator, requires_grad=True)
    upstream = [torch.randn(x.shape, generator=generator) for x in (query, key)]
    inv_freq = 1e6 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)
    positions = torch.arange(length).repeat(sequences)
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32) * length
    angles = torch.arange(length)[:, None].float() * inv_freq
    freqs = torch.cat((angles, angles), dim=-1)[:, None, None]

    def angles_once() -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions[None], inv_freq, RopeLayout())

    cos, sin = angles_once()

    def ours() -> list[Tensor]:
        rotated = apply_rope((query, key), cos, sin)
        torch.autograd.grad(rotated, (query, key), upstream)
        return rotated

    def megatron() -> list[Tensor]:
        rotated = [
            _apply_rotary_pos_emb_thd(x, cu_seqlens, freqs, cp_group=_OneRank())
            for x in (query, key)
        ]
        torch.autograd.grad(rotated, (query, key), upstream)
        return rotated

    for mine, theirs in zip(ours(), megatron(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    seconds = medians(
        {"ours": ours, "megatron": megatron, "angles": angles_once}, rounds=max(rounds, 15)
    )
    layer = seconds["ours"] + seconds["angles"] / LAYERS
    return {
        "tokens": TOKENS,
        "sequences": sequences,
        "heads": f"{HEADS} + {KV_HEADS} of {WIDTH}, float32",
        "speedup_over_megatron": seconds["megatron"] / layer,
        "ours_ms": layer * 1e3,
        "megatron_ms": seconds["megatron"] * 1e3,
        "ours_operations": _count(ours),
        "megatron_operations": _count(megatron),
    }
