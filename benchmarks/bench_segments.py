"""A row of 4,096 tokens in 16, 64 and 256 segments: what the number of segments costs.

Attention alone (forward and backward) and the whole of a model (embeddings to loss and back), the
segments' lengths all drawn at random, so that few share a call. `sliced` is the loop with slices of
the row in place of a split, whose backward fills a row with zeros for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from bench_step import build
from models import TINY
from timing import medians
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlmpack.attention import segment_attention
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample, PackedSeqParams, pack_batch_sequences

TOKENS, COUNTS = 4096, (16, 64, 256)
HEADS, WIDTH = 8, 64


def row_lengths(count: int) -> list[int]:
    """Lengths that add up to the row, Dirichlet-distributed."""
    shares = np.random.default_rng(0).dirichlet(np.full(count, 4.0))
    lengths = np.maximum(1, (shares * TOKENS).astype(int))
    lengths[lengths.argmax()] += TOKENS - lengths.sum()
    return lengths.tolist()


def bench_segments(rounds: int) -> dict[str, object]:
    """Milliseconds by number of segments, and each over that of 16."""
    attention = {
        f"{name}_{count}": _attention(count, function)
        for count in COUNTS
        for name, function in (("attention", segment_attention), ("sliced", _sliced))
    }
    vlm = build(Encoder(TINY), width=None)
    model = {f"model_{count}": _model(vlm, count) for count in COUNTS}
    seconds = medians(attention | model, rounds=rounds, warm_up=1)
    figures: dict[str, object] = {"row": f"{TOKENS} tokens; attention of {HEADS} heads x {WIDTH}"}
    for name in ("attention", "sliced", "model"):
        for count in COUNTS:
            own = seconds[f"{name}_{count}"]
            figures[f"{name}_{count}_segments_ms"] = own * 1e3
            figures[f"{name}_{count}_over_16"] = own / seconds[f"{name}_16"]
    return figures


def _attention(count: int, function: Callable[..., Tensor]) -> Callable[[], None]:
    lengths = row_lengths(count)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    params = PackedSeqParams(
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        segment_lengths=tuple(lengths),
    )
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(TOKENS, HEADS, WIDTH, generator=draw, requires_grad=True) for _ in range(3)]

    def run() -> None:
        torch.autograd.grad(function(*qkv, params).sum(), qkv)

    return run


def _sliced(query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
    outputs = []
    for stop, length in zip(
        accumulate(params.segment_lengths), params.segment_lengths, strict=True
    ):
        q, k, v = (part[stop - length : stop].transpose(0, 1)[None] for part in (query, key, value))
        outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(outputs)


def _model(vlm: torch.nn.Module, count: int) -> Callable[[], None]:
    samples = []
    for number, length in enumerate(row_lengths(count)):
        ids = torch.arange(length) % 200
        sample = EncodedSample(
            key=str(number),
            input_ids=ids,
            labels=torch.cat([ids[1:], torch.tensor([-100])]),
            position_ids=torch.arange(length).expand(3, -1),
            media_positions=torch.empty(0, dtype=torch.int64),
        )
        samples.append(sample)
    batch = pack_batch_sequences(samples, pad_token_id=0)

    def run() -> None:
        vlm.zero_grad(set_to_none=True)
        vlm(batch, batch.packed_seq_params()).sum().backward()

    return run
