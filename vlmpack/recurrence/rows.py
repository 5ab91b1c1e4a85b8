"""The segments of a THD row for layers that carry state from token to token, and their chunks.

Physical segments count. An alignment gap is its segment's tail, which no real token follows, and
the tail of a row is a segment of its own. Each segment starts with an empty state and passes none
on.

A recurrence works on chunks of a row. Inside a chunk everything is a matrix product, and one state
is passed from chunk to chunk. A row can be cut in two ways:

`segment_chunks` pads every segment to whole chunks. The first chunks of all segments are
neighbours, then the second ones. One step of the scan then moves the states of all unfinished
segments, and there are as many steps as the longest segment has chunks. Three segments of 5, 2 and
3 slots in chunks of 2:

    chunks    a0 a1 | c0 c1 | b0 b1 || a2 a3 | c2 .  || a4 .
    steps     0                        1               2

`row_chunks` cuts the row at fixed places, regardless of segments. It says which other slots each
slot sees, and whether it sees the state that enters its chunk. What the last slot of a chunk does
not see never leaves the chunk. Shapes follow from the row's width alone, as a captured graph needs
it, with a step for every chunk of the row:

    chunks    a0 a1 | a2 a3 | a4 b0 | b1 c0 | c1 c2
    reads     .  .  | y  y  | y  .  | y  .  | y  y

Shapes: T slots of a row, N segments, W taps of a convolution, M chunks of C slots, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlmpack.packing.batch import PackedSeqParams

ValueT = TypeVar("ValueT")


class RowSegments:
    """The segments of one row, and what the layers of a model derive from them, made once each.

    Nothing is read back from the device. Whatever needs lengths uses the host integers, and what is
    derived from `cu_seqlens` has shapes that follow from the row's width alone.

    Args:
        lengths: the N physical lengths, host integers that sum to T; 0 for segments that only fill
            boundaries.
        cu_seqlens: (N + 1,) int32, the segments' offsets, on the row's device.
        width: T; None for the sum of `lengths`, which a captured graph does not know.
    """

    def __init__(
        self, lengths: tuple[int, ...], cu_seqlens: Tensor, *, width: int | None = None
    ) -> None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] != len(lengths) + 1:
            raise ValueError(
                f"{len(lengths)} segments have {len(lengths) + 1} boundaries, but cu_seqlens has "
                f"shape {tuple(cu_seqlens.shape)}"
            )
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.width = sum(lengths) if width is None else width
        self._made: dict[Hashable, Any] = {}

    @staticmethod
    def of(params: PackedSeqParams, *, width: int | None = None) -> RowSegments:
        """The segments that `params` describes; `width` as of the class."""
        return RowSegments(params.segment_lengths, params.cu_seqlens_physical, width=width)

    def once(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """What `make` gives, made when it is first asked for under this key."""
        if key not in self._made:
            self._made[key] = make()
        made: ValueT = self._made[key]
        return made

    def _slots(self) -> Tensor:
        return torch.arange(self.width, dtype=torch.int32, device=self.cu_seqlens.device)

    @property
    def seq_idx(self) -> Tensor:
        """(1, T) int32: which segment a slot lies in."""
        # One operator of a fixed shape. A boundary that repeats the last one owns no slot.
        return self.once(
            "seq_idx",
            lambda: torch.searchsorted(
                self.cu_seqlens[1:], self._slots(), right=True, out_int32=True
            )[None],
        )

    @property
    def offsets(self) -> Tensor:
        """(T,) int32: how many slots of its own segment lie before a slot."""
        return self.once(
            "offsets",
            lambda: self._slots() - self.cu_seqlens.index_select(0, self.seq_idx[0]),
        )

    @property
    def cu_seqlens_host(self) -> Tensor:
        """(N + 1,) int32 on CPU: `cu_seqlens`, made from host integers."""
        return self.once(
            "cu_seqlens_host",
            lambda: torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32),
        )

    def chunk_indices(self, size: int) -> Tensor:
        """(ceil(T / size) + N, 2) int32: of every chunk of every segment, in order, the segment's
        number and the chunk's in it.

        The shape follows from T and N alone. Rows that no chunk fills say a chunk behind the last
        segment's end, where a kernel that masks by lengths reads and writes nothing.
        """
        return self.once(("chunk_indices", size), lambda: self._chunk_indices(size))

    def _chunk_indices(self, size: int) -> Tensor:
        device, segments = self.cu_seqlens.device, len(self.lengths)
        counts = (self.cu_seqlens.diff() + (size - 1)) // size
        ends = counts.cumsum(0, dtype=torch.int32)
        most = -(-self.width // size) + segments
        number = torch.arange(most, dtype=torch.int32, device=device)
        segment = torch.searchsorted(ends, number, right=True, out_int32=True)
        segment = segment.clamp(max=segments - 1)
        inside = number - (ends - counts).index_select(0, segment)
        return torch.stack((segment, inside), dim=1)

    def check(self, slots: int) -> None:
        """Raise ValueError where a tensor of `slots` slots is not this row."""
        if slots != self.width:
            raise ValueError(
                f"the row's segments sum to {self.width} slots, the tensor has {slots}"
            )


class _Spread(torch.autograd.Function):
    """Rows of a tensor to their places among zeros; no two share one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Gather(torch.autograd.Function):
    """Rows of a tensor from distinct places; the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        grad: Tensor = grads[0]
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, places, grad), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """How a row is cut; made by `segment_chunks` or `row_chunks`.

    Args:
        steps: chunks of each step of the scan, host integers that sum to M and never grow. The
            first chunks of a step continue the first of the step before.
        places: (T,) int64, where each slot lies among the M * C; None where they are the first T.
        visible: (M, C, C) bool, whether slot i (rows) sees slot j, which is not after it and in its
            segment. (1, C, C) where that is the same in all chunks.
        reads: (M, C) bool, whether a slot sees the state that enters its chunk; None for all.
    """

    size: int
    count: int
    steps: tuple[int, ...]
    places: Tensor | None
    visible: Tensor
    reads: Tensor | None

    def split(self, x: Tensor) -> Tensor:
        """(T, H, ...) -> (M, H, C, ...), zeros where no slot lies."""
        slots = self.count * self.size
        if self.places is not None:
            x = _Spread.apply(x, self.places, slots)  # type: ignore[no-untyped-call]
        elif slots > x.shape[0]:
            x = torch.cat((x, x.new_zeros(slots - x.shape[0], *x.shape[1:])))
        return x.view(self.count, self.size, *x.shape[1:]).transpose(1, 2)

    def join(self, x: Tensor, slots: int) -> Tensor:
        """(M, H, C, ...) -> (T, H, ...)."""
        whole = x.transpose(1, 2).reshape(self.count * self.size, x.shape[1], *x.shape[3:])
        if self.places is None:
            return whole[:slots]
        joined: Tensor = _Gather.apply(whole, self.places)  # type: ignore[no-untyped-call]
        return joined


def chunk_size(device: torch.device) -> int:
    """Slots of a chunk; results differ by rounding alone.

    Work inside chunks grows with it, and the steps between them become fewer. The kernels for CUDA
    take 64. On a CPU 32 was the fastest of 16 to 128, or within 15% of it, for heads of 32 and 64.
    In scans it was 2 to 3 times as fast as 64, because a chunk then stays in the cache.
    """
    return 32 if device.type == "cpu" else 64


def segment_chunks(row: RowSegments, size: int) -> Chunks:
    """Every segment in chunks of its own, the last of them padded; made once a row and size.

    Args:
        size: the most slots of a chunk; fewer where no segment is that long.
    """
    return row.once(("segment_chunks", size), lambda: _segment_chunks(row, size))


def _segment_chunks(row: RowSegments, size: int) -> Chunks:
    lengths = [length for length in row.lengths if length]
    size = min(size, max(lengths, default=1))
    chunks = [-(-length // size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda n: -chunks[n])
    steps = [sum(count > step for count in chunks) for step in range(max(chunks, default=0))]
    # A slot lies in chunk `starts[step] + rank`: rank of its segment by length, step in it.
    rank = torch.empty(len(lengths), dtype=torch.int64)
    rank[order] = torch.arange(len(lengths))
    starts = torch.tensor([0, *steps], dtype=torch.int64).cumsum(0)
    inside = torch.cat([torch.arange(length) for length in lengths] or [torch.arange(0)])
    ranks = rank.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    places = (starts[inside // size] + ranks) * size + inside % size
    device = row.cu_seqlens.device
    return Chunks(
        size=size,
        count=sum(steps),
        steps=tuple(steps),
        places=places.to(device, non_blocking=True),
        visible=_causal(size, device)[None],
        reads=None,
    )


def row_chunks(row: RowSegments, size: int) -> Chunks:
    """The row cut every `size` slots, wherever its segments lie; made once a row and size.

    `lengths` are not read beyond their sum.
    """
    return row.once(("row_chunks", size), lambda: _row_chunks(row, size))


def _row_chunks(row: RowSegments, size: int) -> Chunks:
    count = -(-row.width // size)
    seq_idx = row.seq_idx[0]
    pad = count * size - row.width
    # Slots after the row's end are a segment of their own, which nothing follows.
    padded = torch.cat((seq_idx, seq_idx.new_full((pad,), -1))).view(count, size)
    before = torch.cat((padded.new_full((1,), -2), padded[:-1, -1]))
    reads = padded == before[:, None]
    same = padded[:, :, None] == padded[:, None, :]
    return Chunks(
        size=size,
        count=count,
        steps=(1,) * count,
        places=None,
        visible=same & _causal(size, seq_idx.device),
        reads=reads,
    )


def _causal(size: int, device: torch.device) -> Tensor:
    """(C, C) bool: whether slot i (rows) does not lie before slot j."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril_()


def decays(log_decay: Tensor, visible: Tensor) -> Tensor:
    """How much of what slot j wrote is left at slot i of its chunk.

    Each sum runs only over the slots between the two, never as a difference of longer sums. So
    earlier decays cause no rounding error, and a decay to zero (minus infinity) is no `inf - inf`.

    Args:
        log_decay: (M, H, C), at most 0.
        visible: (M or 1, C, C) bool.

    Returns:
        (M, H, C, C): exp(log_decay[j + 1] + ... + log_decay[i]), 0 where i does not see j.
    """
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril_(-1)
    between = torch.where(later, log_decay[..., None], 0).cumsum(dim=-2)
    seen = visible[:, None]
    # Of two slots of different segments the sum means nothing: it must not reach the exponential,
    # whose gradient is itself.
    return torch.where(seen, torch.where(seen, between, 0).exp(), 0)


def entry_decays(log_decay: Tensor, reads: Tensor | None) -> Tensor:
    """How much of the state that enters a chunk is left at each slot.

    Args:
        log_decay: (M, H, C), at most 0.
        reads: (M, C) bool, or None for all.

    Returns:
        (M, H, C): exp(log_decay[0] + ... + log_decay[i]), 0 where a slot does not see that state.
    """
    if reads is None:
        return log_decay.cumsum(dim=-1).exp()
    seen = reads[:, None]
    # The slots that see it come first, so no other enters their sums.
    return torch.where(seen, torch.where(seen, log_decay, 0).cumsum(dim=-1).exp(), 0)
