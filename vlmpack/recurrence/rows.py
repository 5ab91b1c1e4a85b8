"""Where the segments of a THD row begin, for layers that carry state from token to token.

Physical segments are what counts: an alignment gap is its segment's tail, which no real token comes
after, and the tail segment of a row is one of its own. Each starts from nothing and hands nothing
on, so neither carries anything in or out.

Shapes: T slots of a row, N segments, W taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlmpack.packing.batch import PackedSeqParams

ValueT = TypeVar("ValueT")


class RowSegments:
    """The segments of one row, and what the layers of a model derive from them, made once each.

    Nothing is read back from the device: whatever needs lengths takes the host integers, and what
    is derived from `cu_seqlens` has shapes that the row's width alone decides.

    Args:
        lengths: the N physical lengths, host integers that sum to T; 0 for those that only fill
            boundaries up.
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
    def of(params: PackedSeqParams) -> RowSegments:
        """The segments that `params` describes."""
        return RowSegments(params.segment_lengths, params.cu_seqlens_physical)

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
