"""What Transformer Engine's attention would compute of what it is handed: who sees whom.

Written anew from its rule, after `attention/dot_product_attention/context_parallel.py` of the
versions in `te_signatures.json`, without vlmpack's code. Under context parallelism a rank holds two
chunks of each segment, r and 2 * CP - 1 - r. In step i of the ring it meets the keys of rank r - i:

    i = 0      diagonal: both chunks of both, causally
    i <= r     all of its queries, the first halves of those keys
    else       its second halves, all of those keys

Where tensors lie is cut by the padded boundaries, and how many of a segment's tokens are real
follows from the others: chunk by chunk where it knows of gaps, and else simply divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from backends.mcore.played_te import numbers
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """What became of a row.

    Args:
        pairs: (T, T) bool, True where a query (row) sees a key of the row.
        host_reads: how often each layer compares tensors on the host.
        gaps: whether it takes segments to have gaps, which switches FlashAttention off.
    """

    pairs: Tensor
    host_reads: int
    gaps: bool


def kept_slots(padded: list[int], rank: int, size: int) -> list[int]:
    """The row's slots that a rank holds, in its own order."""
    slots: list[int] = []
    for start, stop in pairwise(padded):
        chunk = (stop - start) // (2 * size)
        for which in (rank, 2 * size - 1 - rank) if size > 1 else (0, 1):
            slots += range(start + which * chunk, start + (which + 1) * chunk)
        if size == 1:
            slots += range(start + 2 * chunk, stop)
    return slots


def gaps_of(version: str, call: dict[str, Any]) -> tuple[bool, int]:
    """Whether it takes the row to have gaps, and the host reads that finding out takes."""
    if call.get("pad_between_seqs") is not None:
        return call["pad_between_seqs"], 0
    sides = [(call[f"cu_seqlens_{w}"], call.get(f"cu_seqlens_{w}_padded")) for w in ("q", "kv")]
    if numbers(version) >= (2, 18):
        same = all(padded is plain for plain, padded in sides)
        return not same and any(padded is not None for _, padded in sides), 0
    reads = 0
    for plain, padded in sides:
        if padded is not None:
            reads += 1
            if not torch.equal(padded[:-1], plain[:-1]):
                return True, reads
    return False, reads


def ring(version: str, call: dict[str, Any], slots: list[list[int]], *, flash: bool) -> Seen:
    """Who sees whom in the whole row.

    Args:
        version: of Transformer Engine.
        call: what each rank's attention was handed; the same on all.
        slots: the row's slots that each rank holds, as it was cut.
        flash: FlashAttention, which takes `cu_seqlens` for where tensors lie, too; else cuDNN's.

    Raises:
        AssertionError: where it raises one.
    """
    size = len(slots)
    total = sum(map(len, slots))
    gaps, reads = gaps_of(version, call)
    real = [call[f"cu_seqlens_{w}"].tolist() for w in ("q", "kv")]
    padded = [call.get(f"cu_seqlens_{w}_padded") for w in ("q", "kv")]
    assert call["cu_seqlens_q"].dtype is torch.int32
    if size > 1:
        assert all(each is not None for each in padded), "cu_seqlens_padded can not be None"
    lying = [r if p is None else p.tolist() for r, p in zip(real, padded, strict=True)]
    found = torch.zeros(total, total, dtype=torch.bool)
    for rank in range(size):
        for step in range(size):
            other = (rank - step) % size
            halves = ("both", "both")
            if 0 < step <= rank:
                halves = ("both", "first")
            elif step > rank:
                halves = ("second", "both")
            places = [
                _places(real[side], lying[side], size, holder, half, gaps=gaps, flash=flash)
                for side, holder, half in zip((0, 1), (rank, other), halves, strict=True)
            ]
            for queries, keys in zip(*places, strict=True):
                sees = torch.ones(len(queries), len(keys), dtype=torch.bool)
                if step == 0:
                    sees = sees.tril()
                at = [slots[rank][n] for n in queries if n < len(slots[rank])]
                to = [slots[other][n] for n in keys if n < len(slots[other])]
                found[_slots(at)[:, None], _slots(to)] |= sees[: len(at), : len(to)]
    return Seen(found, reads, gaps)


def _slots(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _places(
    real: list[int],
    lying: list[int],
    size: int,
    rank: int,
    half: str,
    *,
    gaps: bool,
    flash: bool,
) -> list[list[int]]:
    """Of each segment, where in a rank's tensor its tokens are looked for."""
    found, part = [], (size if half == "both" else 2 * size)
    for number, ((a, b), (start, stop)) in enumerate(
        zip(pairwise(real), pairwise(lying), strict=True)
    ):
        chunk = (stop - start) // (2 * size)
        if gaps and size > 1:
            fills = [min(max(b - a - c * chunk, 0), chunk) for c in (rank, 2 * size - 1 - rank)]
            count = {"both": sum(fills), "first": fills[0], "second": fills[1]}[half]
        elif size > 1:
            count = real[number + 1] // part - real[number] // part
        else:
            count = b - a
        offset = start // size if size > 1 else start
        if flash and size > 1:
            packed = real[number] // part  # in what it was given, the whole or a half of it
            here = _unpacked(lying, size, half)
            found.append(here[packed : packed + count])
        elif flash:
            found.append(list(range(a, a + count)))
        else:
            offset += chunk if half == "second" else 0
            found.append(list(range(offset, offset + count)))
    return found


def _unpacked(lying: list[int], size: int, half: str) -> list[int]:
    """Where the slots of a rank's tensor, or of its halves laid end to end, are."""
    found: list[int] = []
    for start, stop in pairwise(lying):
        offset, chunk = start // size, (stop - start) // (2 * size)
        found += {
            "both": range(offset, offset + 2 * chunk),
            "first": range(offset, offset + chunk),
            "second": range(offset + chunk, offset + 2 * chunk),
        }[half]
    return found
