"""The per-segment loop against one call with a block-diagonal mask, and the collator's cost."""

from __future__ import annotations

from itertools import accumulate

import torch
from timing import medians
from torch.nn.functional import scaled_dot_product_attention

from vlmpack.attention import segment_attention
from vlmpack.packing import EncodedSample, PackedSeqParams, pack_batch_sequences

SEGMENTS, LENGTH, HEADS, WIDTH = 16, 512, 8, 64


def _params(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=tuple(lengths),
    )


def _variants(lengths: list[int]) -> dict[str, object]:
    params = _params(lengths)
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(total, HEADS, WIDTH, generator=generator, requires_grad=True) for _ in range(3)
    )
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (segment[:, None] == segment[None]) & torch.ones(total, total, dtype=torch.bool).tril()

    def loop() -> torch.Tensor:
        out = segment_attention(q, k, v, params)
        out.sum().backward()
        return out

    def masked() -> torch.Tensor:
        out = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask
        )
        out = out[0].transpose(0, 1)
        out.sum().backward()
        return out

    worst = float((loop() - masked()).detach().abs().max())
    assert worst < 1e-5, f"the two variants differ by {worst}"
    return {"loop": loop, "masked": masked}


def bench_attention(rounds: int) -> dict[str, float]:
    """Forward and backward of causal attention over packed segments."""
    equal = medians(_variants([LENGTH] * SEGMENTS), rounds=rounds, warm_up=1)
    # The same number of tokens in segments of different lengths: no two share a call.
    mixed_lengths = [LENGTH + (index - 8) * 16 + 8 for index in range(SEGMENTS)]
    mixed = medians(_variants(mixed_lengths), rounds=rounds, warm_up=1)
    return {
        "segments x tokens": f"{SEGMENTS} x {LENGTH}, {HEADS} heads x {WIDTH}, fwd + bwd",
        "loop_ms": equal["loop"] * 1e3,
        "block_diagonal_mask_ms": equal["masked"] * 1e3,
        "loop_speedup": equal["masked"] / equal["loop"],
        "loop_speedup_mixed_lengths": mixed["masked"] / mixed["loop"],
    }


def bench_collator(rounds: int) -> dict[str, float]:
    """pack_batch_sequences on 16 samples of 512 tokens."""
    ids = torch.arange(512)
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    samples = [
        EncodedSample(
            key=str(index),
            input_ids=ids,
            labels=labels,
            position_ids=ids.expand(3, -1),
            media_positions=torch.empty(0, dtype=torch.int64),
        )
        for index in range(16)
    ]
    seconds = medians(
        {
            str(multiple): lambda m=multiple: pack_batch_sequences(
                samples, pad_token_id=0, pad_to_multiple_of=m
            )
            for multiple in (1, 16)
        },
        rounds=rounds * 20,
    )
    return {
        "samples x tokens": "16 x 512",
        "pack_batch_sequences_ms": seconds["1"] * 1e3,
        "pack_batch_sequences_aligned_16_ms": seconds["16"] * 1e3,
    }
