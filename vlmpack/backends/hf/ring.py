"""Attention over a row whose slots lie on a ring of R ranks (Ring Attention, arXiv:2310.01889).

A rank keeps its queries. In step j it reads keys and values of the rank j places before it, and
those of the ranks between never pass through it. So an owner sends a reader only the slots that
some query there sees: nothing where no segment crosses, and nothing from outside a window.

    R = 2, a segment of 8 tokens, cut in 2 R chunks       keys  0 1 2 3 4 5 6 7
    rank 0 has 0 1 6 7, and reads 2 3 4 5                  0 1   o . . .     . .
    rank 1 has 2 3 4 5, and reads 0 1                      6 7   o x x x x x o .

Each step gives outputs and the logarithm of the sum of exponentiated scores (lse). `merge_lse`
makes one softmax of two. The backward pass reads the keys again, and sends their gradients back.

A kernel with lse computes a step where there is one. `TiledKernel` computes windows, heads that are
too wide, and everything on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlmpack.attention import BlockMasks
from vlmpack.attention.prefix_attention import (
    Qkv,
    VarlenCall,
    VarlenKernel,
    kernel_with_lse,
    merge_lse,
)
from vlmpack.attention.varlen import HALVES, LARGEST_HEAD, whole_heads
from vlmpack.packing import PackedSeqParams, zigzag_index

TILE = 512
"""Queries that `TiledKernel` takes at a time."""

CELLS_OF_A_SLOT = 1143
"""Scores of one query head that a GPU computes while keys and values of one head of a slot arrive.

A slot has 2 D numbers of 2 bytes, and goes three times over a link of 300 GB/s: forward, again for
the backward pass, and its gradient back. A score costs 14 D operations in both passes, of 4e14 a
second. So it is 3 x 4 / 3e11 over 14 / 4e14. These are assumed, as in `forecast.communication`.
"""


def held_runs(
    lengths: Sequence[int], *, rank: int, size: int, by_row: bool
) -> Iterator[tuple[int, int, int]]:
    """What a rank of the ring holds: runs of one segment, as (the segment's start, start, stop).

    Args:
        lengths: physical lengths of the row's segments.
        by_row: whether the row is cut in 2 * size chunks, and not each segment.
    """
    ends = [0, *accumulate(lengths)]
    for turn in (rank, 2 * size - 1 - rank):
        for start, end in pairwise(ends):
            origin, cut = (0, ends[-1]) if by_row else (start, end)
            chunk = (cut - origin) // (2 * size)
            first = max(start, origin + turn * chunk)
            stop = min(end, origin + (turn + 1) * chunk)
            if first < stop:
                yield start, first, stop


def work_of_ranks(lengths: Sequence[int], *, size: int, by_row: bool) -> list[tuple[int, int]]:
    """For each rank of the ring: the scores of a head that it computes, and the slots that it
    reads of others. Sliding windows are not counted."""
    work = []
    for rank in range(size):
        cells, held, last = 0, 0, dict[int, int]()
        for first, start, stop in held_runs(lengths, rank=rank, size=size, by_row=by_row):
            cells += (stop - start) * (start + stop + 1 - 2 * first) // 2
            held += stop - start
            last[first] = stop
        work.append((cells, sum(stop - first for first, stop in last.items()) - held))
    return work


def cuts_by_row(lengths: Sequence[int], *, size: int, slot: float) -> bool:
    """Whether the slowest rank ends earlier if the whole row is cut, and not each segment.

    Args:
        slot: the scores of a head that cost as much as to read a slot.
    """
    slowest = [
        max(cells + slot * read for cells, read in work_of_ranks(lengths, size=size, by_row=by_row))
        for by_row in (False, True)
    ]
    return slowest[1] < slowest[0]


@dataclass(frozen=True, slots=True)
class Sight:
    """What the queries of one rank see of the keys that a rank holds.

    Args:
        queries: (n,) int64, the reader's slots that see any.
        keys: (m,) int64, the owner's slots that are seen.
        first, last: (n,) int64, query i sees keys first[i] to last[i] - 1 of the m.
        tiles: for `TiledKernel`, see `_tiles`.
        call: for a kernel; of whole segments, so not with a window.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor
    tiles: tuple[tuple[int, int, int, int, bool], ...]
    call: VarlenCall

    @classmethod
    def of(
        cls, reader: Tensor, owner: Tensor, starts: Tensor, window: int | None, device: torch.device
    ) -> Sight:
        """What a rank sees of another, by the slots that each holds: (T / R,) int64, on the CPU.

        Args:
            starts: (T,) int64, where the segment of each slot starts.
        """
        lowest = starts[reader]
        if window is not None:
            lowest = torch.maximum(lowest, reader + 1 - window)
        first = torch.searchsorted(owner, lowest)
        last = torch.searchsorted(owner, reader, right=True)
        queries = (last > first).nonzero().squeeze(1)
        first, last = first[queries], last[queries]
        edges = torch.zeros(len(owner) + 1, dtype=torch.int64)
        ones = torch.ones_like(first)
        seen = edges.index_add(0, first, ones).index_add(0, last, -ones).cumsum(0)[:-1] > 0
        place = seen.cumsum(0)
        first, last = place[first] - 1, place[last - 1]
        of = starts[reader[queries]]
        ends = ((of[1:] != of[:-1]).nonzero().squeeze(1) + 1).tolist()
        segments = (0, *ends, *([len(of)] if len(of) else []))
        at = torch.tensor(segments[1:], dtype=torch.int64) - 1
        cu_q, cu_k = (
            torch.tensor([0, *each], dtype=torch.int32)
            for each in (segments[1:], last[at].tolist())
        )
        longest_q, longest_k = (max(cu.diff().tolist(), default=0) for cu in (cu_q, cu_k))
        return cls(
            queries=queries.to(device),
            keys=seen.nonzero().squeeze(1).to(device),
            first=first.to(device),
            last=last.to(device),
            tiles=tuple(_tiles(segments, first, last)),
            call=VarlenCall(
                cu_q.to(device), cu_k.to(device), longest_q, longest_k, causal=reader is owner
            ),
        )

    def of_queries(self, *parts: Tensor) -> list[Tensor]:
        """Their rows, of (T / R, ...) each."""
        return [part.index_select(0, self.queries) for part in parts]


def _tiles(
    segments: Sequence[int], first: Tensor, last: Tensor
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Queries of one segment from start to stop, their keys from low to high, and whether some
    query does not see them all."""
    starts = [
        (start, min(stop, start + TILE))
        for origin, stop in pairwise(segments)
        for start in range(origin, stop, TILE)
    ]
    if not starts:
        return
    top, bottom = torch.tensor(starts).T
    bottom = bottom - 1
    edges = torch.stack([first[top], first[bottom], last[top], last[bottom]], dim=1)
    for (start, end), (low, last_low, first_high, high) in zip(starts, edges.tolist(), strict=True):
        yield start, end, low, high, low != last_low or first_high != high


@dataclass(frozen=True, slots=True)
class TiledKernel:
    """Plain attention with its lse, some queries at a time; as `VarlenKernel`, of a `Sight`."""

    def forward(self, qkv: Qkv, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
        """See VarlenKernel."""
        outputs, sums = [], []
        for tile in sight.tiles:
            _, _, value, scores = self._scores(qkv, sight, tile, scale)
            lse = scores.logsumexp(-1)
            outputs.append((scores - lse[..., None]).exp() @ value)
            sums.append(lse)
        return torch.cat(outputs, dim=1).transpose(0, 1), torch.cat(sums, dim=1)

    def backward(
        self, grad: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, sight: Sight, scale: float
    ) -> Qkv:
        """See VarlenKernel."""
        exact = _wide(qkv.query)
        gradients = Qkv(*(torch.zeros_like(part, dtype=exact.dtype) for part in qkv))
        grad, out = grad.to(exact.dtype), out.to(exact.dtype)
        delta = (grad * out).sum(-1).T
        for tile in sight.tiles:
            start, stop, low, high, _ = tile
            query, key, value, scores = self._scores(qkv, sight, tile, scale)
            own = grad[start:stop].transpose(0, 1)
            weights = (scores - lse[:, start:stop, None]).exp()
            change = weights * (own @ value.mT - delta[:, start:stop, None]) * scale
            parts = change @ key, change.mT @ query, weights.mT @ own
            places = ((start, stop), (low, high), (low, high))
            for whole, part, (left, right) in zip(gradients, parts, places, strict=True):
                whole[left:right] += part.transpose(0, 1)
        return gradients

    def _scores(
        self, qkv: Qkv, sight: Sight, tile: tuple[int, int, int, int, bool], scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(H, n, D) queries, (H, m, D) keys and values, and (H, n, m) scores of a tile."""
        start, stop, low, high, masked = tile
        spans = ((start, stop), (low, high), (low, high))
        query, key, value = (
            _wide(part[left:right]).transpose(0, 1)
            for part, (left, right) in zip(qkv, spans, strict=True)
        )
        scores = query @ key.mT * scale
        if masked:
            at = torch.arange(low, high, device=scores.device)
            seen = at >= sight.first[start:stop, None]
            seen &= at < sight.last[start:stop, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        return query, key, value, scores


def _wide(part: Tensor) -> Tensor:
    """In float32, where it is narrower."""
    return part.to(torch.promote_types(part.dtype, torch.float32))


@dataclass(frozen=True)
class RingRow:
    """One row on a ring, and what the layers of a model need of it, each made once.

    Args:
        group: the R ranks of the ring.
        lengths: physical lengths of the row's segments.
        by_row: see `held_runs`.
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    by_row: bool
    device: torch.device
    _made: dict[tuple[int, int, int | None], Sight] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This process's place on the ring."""
        return self.group.rank()

    def sight(self, reader: int, owner: int, window: int | None) -> Sight:
        """What one rank sees of another; one of them is this process."""
        key = (reader, owner, window)
        if key not in self._made:
            cut = (sum(self.lengths),) if self.by_row else self.lengths
            size = self.group.size()
            held = {rank: zigzag_index(cut, rank=rank, size=size) for rank in (reader, owner)}
            lengths = torch.tensor(self.lengths)
            starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            self._made[key] = Sight.of(held[reader], held[owner], starts, window, self.device)
        return self._made[key]

    def start(self, sent: Tensor, to: int, count: int, origin: int) -> _Message:
        """Send to a rank of the ring, and get `count` such slots of another."""
        received = sent.new_empty(count, *sent.shape[1:])
        both = ((dist.isend, sent, to), (dist.irecv, received, origin))
        operations = [
            dist.P2POp(kind, part, group=self.group, group_peer=peer)
            for kind, part, peer in both
            if part.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Message(sent, received, works)

    def keys(self, pairs: Tensor, window: int | None) -> Iterator[tuple[int, int, Sight, Tensor]]:
        """Steps of the ring, the own keys first: whom this rank sent keys to, whom it reads keys
        of, what is seen, and keys with values. The next step's are under way meanwhile."""
        size, rank = self.group.size(), self.rank
        steps = [((rank + step) % size, (rank - step) % size) for step in range(size)]
        arriving = _Message(pairs, pairs, ())
        for (to, origin), after in zip_longest(steps, steps[1:]):
            now = arriving
            if after is not None:
                sent = pairs.index_select(0, self.sight(after[0], rank, window).keys)
                count = len(self.sight(rank, after[1], window).keys)
                arriving = self.start(sent, after[0], count, after[1])
            yield to, origin, self.sight(rank, origin, window), now.arrived()


@dataclass(frozen=True, slots=True)
class _Message:
    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]

    def arrived(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, slots=True)
class _Step:
    """How the steps of a layer are computed."""

    kernel: VarlenKernel | TiledKernel
    repeats: int
    scale: float

    def _whole(self, query: Tensor, pairs: Tensor) -> Qkv:
        key, value = pairs.chunk(2, dim=-1)
        parts = (part.repeat_interleave(self.repeats, dim=1) for part in (key, value))
        return Qkv(query, *parts)

    def forward(self, query: Tensor, pairs: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        given: Any = sight if isinstance(self.kernel, TiledKernel) else sight.call
        out, lse = self.kernel.forward(self._whole(query, pairs), given, self.scale)
        return _wide(out), lse

    def backward(
        self, query: Tensor, pairs: Tensor, sight: Sight, of: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries, and of keys with values, for (grad, out, lse) of the queries."""
        given: Any = sight if isinstance(self.kernel, TiledKernel) else sight.call
        grad, out, lse = of[0], of[1], of[2].T.contiguous()
        qkv = self._whole(query, pairs)
        mine = self.kernel.backward(grad, qkv, out, lse, given, self.scale)
        both = (_wide(part).unflatten(1, (-1, self.repeats)).sum(2) for part in mine[1:])
        return _wide(mine.query), torch.cat(tuple(both), dim=-1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, pairs: Tensor, row: RingRow, step: _Step, window: int | None
    ) -> Tensor:
        for _, origin, sight, keys in row.keys(pairs, window):
            if origin == row.rank:
                out, lse = step.forward(query, keys, sight)
            elif len(sight.queries):
                (mine,) = sight.of_queries(query)
                part = step.forward(mine, keys, sight)
                out, lse = merge_lse((out, lse), part, sight.queries)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, pairs, out, lse.T)
        ctx.row, ctx.step, ctx.window = row, step, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, pairs, out, lse = ctx.saved_tensors
        row, step, window = ctx.row, ctx.step, ctx.window
        of = (grads[0].contiguous(), out, lse)
        back: list[tuple[Tensor, _Message]] = []
        for to, origin, sight, keys in row.keys(pairs, window):
            if origin == row.rank:
                of_query, of_pairs = step.backward(query, keys, sight, of)
                continue
            gradient = keys
            if len(sight.queries):
                mine, *rest = sight.of_queries(query, *of)
                more, gradient = step.backward(mine, keys, sight, rest)
                of_query.index_add_(0, sight.queries, more)
            sent = row.sight(to, row.rank, window).keys
            message = row.start(gradient.to(pairs.dtype), origin, len(sent), to)
            back.append((sent, message))
        for sent, message in back:
            of_pairs.index_add_(0, sent, _wide(message.arrived()))
        return of_query.to(query.dtype), of_pairs.to(pairs.dtype), None, None, None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: PackedSeqParams | None = None,
    *,
    row: RingRow,
    attention: str | None = None,
    scale: float | None = None,
    window: int | None = None,
    masks: BlockMasks | None = None,
) -> Tensor:
    """Causal attention of this rank's slots over the segments of a row. Collective.

    Args:
        query: (T / R, Hq, D), in the order of the row.
        key, value: (T / R, Hkv, D).
        params: the row's boundaries, which `row` has too.
        attention: the implementation whose kernel computes steps; None for `TiledKernel`.
        scale: factor on the scores; 1 / sqrt(D) if None.
        window: sliding window in tokens, the token itself included; None for the whole segment.
        masks: None, or without image blocks, whose rows are not cut on a ring.

    Returns:
        (T / R, Hq, D).
    """
    assert masks is None or not any(masks.of_segment)
    if window is not None and window >= max(row.lengths):
        window = None
    own, kernel = query.shape[-1], None
    fits = window is None and own <= LARGEST_HEAD and query.dtype in HALVES and query.is_cuda
    if fits and attention is not None:
        kernel = kernel_with_lse(attention) or kernel_with_lse("torch_varlen")
    repeats = query.shape[1] // key.shape[1]
    query, key, value, scale = whole_heads(query, key, value, scale)
    step = _Step(kernel or TiledKernel(), repeats, scale)
    pairs = torch.cat([key, value], dim=-1)
    with torch.autocast(query.device.type, enabled=False):
        output: Tensor = _RingAttention.apply(query, pairs, row, step, window)  # type: ignore[no-untyped-call]
    return output[..., :own]
