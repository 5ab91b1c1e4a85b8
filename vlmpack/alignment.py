"""The one function for the multiples of lengths. It needs no torch, since recipes use it too."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal


@dataclass(frozen=True, slots=True)
class Alignment:
    """Multiples that a packed row obeys, in tokens.

    Args:
        sequence: every segment's physical length is a multiple of this.
        row: the row's total length is a multiple of this; always a multiple of `sequence`.
    """

    sequence: int
    row: int


def alignment(
    *,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    fp8: Literal["fp8", "mxfp8"] | None = None,
) -> Alignment:
    """Multiples for one parallel layout.

    Context parallelism cuts every segment into 2*CP chunks (zigzag), so each segment is a multiple
    of 2*CP. Sequence parallelism and FP8 constrain only the row's total, which one tail segment
    fills. Padding every segment to lcm(2*CP, CP*TP) would waste tokens.

    Args:
        sequence_parallel: whether activations are scattered over the TP ranks.
        fp8: the FP8 recipe; its kernels want 16 (FP8) or 32 (MXFP8) rows per CP rank.
    """
    sequence = 2 * context_parallel if context_parallel > 1 else 1
    row = sequence
    if sequence_parallel:
        row = lcm(row, context_parallel * tensor_parallel)
    if fp8 is not None:
        row = lcm(row, {"fp8": 16, "mxfp8": 32}[fp8] * context_parallel)
    return Alignment(sequence=sequence, row=row)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple
