"""Deal the packs of one global batch to ranks so that the ranks finish together. No torch.

The cost of a pack is its FLOPs, from lengths alone. With s_i the lengths of a pack's samples, T
their sum, and a_k the patches of its images:

    language = per_token * T + per_squared_length * sum s_i^2 + per_label_token * labels
    vision   = per_patch * sum a_k + per_squared_patches * sum a_k^2

Both are linear in sums over samples, so the cost of a pack is the sum of its samples' costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmpack.errors import PackingError
from vlmpack.packing.limits import MAX_COUNT, Integers, positive, short_value

Floats = npt.NDArray[np.float64]

PAIRS_A_SWAP = 4096
"""Pairs of items that are tried for a swap at most: 0.05 to 0.1 ms."""
MIN_PARTNERS = 4
"""Ranks among which the other item is sought, at least."""
MAX_MISSES = 4
"""Turns without a better pair, where only some are tried, after which swapping ends."""
MANY_RANKS = 512
"""Above so many, items are dealt and swapped for all ranks at once."""
SWAP_ROUNDS, PLACES = 8, 4
"""Then there are so many rounds at most, and so many items of a rank are tried in one."""


def balance(
    costs: npt.ArrayLike, num_ranks: int, *, tolerance: float = 0.01, max_swaps: int = 256
) -> Integers:
    """Deal n items to ranks, equally many to each, so that the largest load is small.

    Each cost of a rank is measured as a share of its mean over ranks. The largest share of any rank
    and cost is made small. Items are dealt from the largest on. Each goes to the rank that has room
    and whose largest share stays smallest. Then items of the worst rank are swapped with others
    while that helps. Of very many pairs only some are tried (PAIRS_A_SWAP), so that the work grows
    linearly with n. More than MANY_RANKS ranks get one item each at a time, the largest load the
    smallest item. Then the worst of them swap with the best in one go. For packs that is as even.
    For items of very unequal costs it is less so, by a tenth in one draw. A pure function of its
    arguments.

    Args:
        costs: (n,) or (n, k), finite and at least 0: k costs of each item, in any units.
        num_ranks: n must be a multiple of it; fill with items of no cost.
        tolerance: swapping ends once no load is more than this share above its mean.
        max_swaps: most swaps, and attempts at one.

    Returns:
        (num_ranks, n / num_ranks) int64: the items of each rank, ascending.

    Raises:
        PackingError: an argument that is not as above.
    """
    table = _checked(costs)
    ranks = positive("num_ranks", num_ranks)
    count = len(table)
    if ranks > MAX_COUNT:
        raise PackingError(f"num_ranks is {short_value(ranks)}, expected at most {MAX_COUNT:,}")
    if count % ranks:
        raise PackingError(
            f"costs has {count} items, not a multiple of num_ranks {ranks}; add "
            f"{-count % ranks} items of no cost"
        )
    if count == 0:
        return np.zeros((ranks, 0), np.int64)
    totals = table.sum(axis=0)
    shares = table * np.divide(ranks, totals, out=np.zeros_like(totals), where=totals > 0)
    if ranks > MANY_RANKS:
        dealt = _deal_blocks(shares, ranks)
        _swap_pairs(shares, dealt, 1 + tolerance, min(SWAP_ROUNDS, max_swaps))
        return np.sort(dealt, axis=1)
    dealt = _deal(shares, ranks)
    if ranks > 1:
        _swap(shares, dealt, 1 + tolerance, max_swaps)
    return np.sort(dealt, axis=1)


def _checked(costs: npt.ArrayLike) -> Floats:
    """The costs as a table, (n, k)."""
    try:
        table: npt.NDArray[Any] = np.asarray(costs)
    except (ValueError, TypeError, OverflowError) as error:
        raise PackingError(f"costs are no numbers of shape (n,) or (n, k): {error}") from error
    if table.ndim not in (1, 2) or table.dtype.kind not in "iuf" or 0 in table.shape[1:]:
        raise PackingError(
            f"costs must be numbers of shape (n,) or (n, k), found {table.dtype} of shape "
            f"{table.shape}"
        )
    table = table.astype(np.float64)
    table = table[:, None] if table.ndim == 1 else table
    bad = ~(np.isfinite(table) & (table >= 0)).all(axis=1)
    if bad.any():
        first = int(bad.argmax())
        raise PackingError(f"costs[{first}] is {table[first].tolist()}, expected finite, >= 0")
    return table


def _deal(shares: Floats, ranks: int) -> Integers:
    """(R, n / R) items, longest first."""
    each = len(shares) // ranks
    dealt = np.zeros((ranks, each), np.int64)
    filled = [0] * ranks
    loads = np.zeros((shares.shape[1], ranks))  # of a rank without room: without end
    for item in np.argsort(-shares.sum(axis=1), kind="stable").tolist():
        after = loads + shares[item][:, None]
        rank = int(after.max(axis=0).argmin())
        dealt[rank, filled[rank]] = item
        filled[rank] += 1
        loads[:, rank] = after[:, rank] if filled[rank] < each else np.inf
    return dealt


def _deal_blocks(shares: Floats, ranks: int) -> Integers:
    """(R, n / R) items, an item of each block of R to each rank."""
    blocks = np.argsort(-shares.sum(axis=1), kind="stable").reshape(-1, ranks)
    dealt = np.zeros(blocks.T.shape, np.int64)
    columns = np.ascontiguousarray(shares.T)
    loads = np.zeros((shares.shape[1], ranks))
    for place, block in enumerate(blocks):
        largest_first = np.argsort(-loads.max(axis=0), kind="stable")
        dealt[largest_first, place] = block[::-1]
        loads += columns[:, dealt[:, place]]
    return dealt


def _swap_pairs(shares: Floats, dealt: Integers, goal: float, rounds: int) -> None:
    """Let each rank above the goal swap an item with one of the least loaded, all in one go, each
    with another one in every round."""
    ranks, each = dealt.shape
    tops: list[float] = []
    columns = np.ascontiguousarray(shares.T)  # a cost at a time: a last axis of k is slow
    for turn in range(rounds):
        turned = np.ascontiguousarray(dealt.T)
        loads = [column[turned].sum(axis=0) for column in columns]
        largest = np.max(loads, axis=0)
        tops.append(float(largest.max()))
        if tops[-1] <= goal or tops[-1] in tops[:-3]:  # three rounds without a smaller one
            return
        order = np.argsort(largest, kind="stable")
        count = min(ranks // 2, int((largest > goal).sum()))
        worst = order[::-1][:count]
        best = np.roll(order[: ranks // 2], turn)[:count]
        places = np.arange(turn * PLACES, turn * PLACES + min(each, PLACES)) % each
        mine, theirs = dealt[worst[:, None], places], dealt[best[:, None], places]
        after = np.full((count, len(places), len(places)), -np.inf)
        for column, load in zip(columns, loads, strict=True):
            gain = column[theirs][:, None] - column[mine][:, :, None]
            np.maximum(after, load[worst][:, None, None] + gain, out=after)
            np.maximum(after, load[best][:, None, None] - gain, out=after)
        after = after.reshape(count, -1)
        chosen = after.argmin(axis=1)
        helps = after[np.arange(count), chosen] < largest[worst] * (1 - 1e-9)
        i, j = (places[place] for place in np.divmod(chosen[helps], len(places)))
        one, other = worst[helps], best[helps]
        dealt[one, i], dealt[other, j] = dealt[other, j], dealt[one, i]


def _swap(shares: Floats, dealt: Integers, goal: float, max_swaps: int) -> None:
    """Swap an item of the worst rank with one of another while the larger of the two falls."""
    loads = np.ascontiguousarray(shares[dealt].sum(axis=1).T)  # (k, R)
    misses = 0
    for turn in range(max_swaps):
        largest = loads.max(axis=0)
        worst = int(largest.argmax())
        if largest[worst] <= goal:
            return
        some = _candidates(shares, dealt, loads, worst, turn, misses)
        after = _after(shares, dealt, loads, worst, some)
        i, r, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, r, j] >= largest[worst] * (1 - 1e-9):
            misses += 1
            if some.is_all or misses == MAX_MISSES:
                return
            continue
        misses = 0
        mine, rank, theirs = some.mine[i], some.ranks[r], some.theirs[r, j]
        change = shares[dealt[rank, theirs]] - shares[dealt[worst, mine]]
        loads[:, worst] += change
        loads[:, rank] -= change
        dealt[worst, mine], dealt[rank, theirs] = dealt[rank, theirs], dealt[worst, mine]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Pairs of items to try.

    Args:
        mine: (A,) places in the worst rank.
        ranks: (P,) other ranks.
        theirs: (P, B) places in each of these.
        is_all: whether there are no other pairs.
    """

    mine: Integers
    ranks: Integers
    theirs: Integers
    is_all: bool


def _candidates(
    shares: Floats, dealt: Integers, loads: Floats, worst: int, turn: int, misses: int
) -> _Candidates:
    """All pairs where they are few, else a selection.

    The selection has the least loaded ranks, or after a miss the next ones. Of each rank it has
    items spread evenly in the order of what the worst rank has most of, different ones every turn.

    Args:
        shares: (n, k) of the items.
        dealt: (R, m) items.
        loads: (k, R).
    """
    ranks, each = dealt.shape
    count = min(ranks - 1, max(MIN_PARTNERS, PAIRS_A_SWAP // each**2))
    side = min(each, isqrt(PAIRS_A_SWAP // count))
    order = np.argsort(loads.max(axis=0), kind="stable")
    places = np.arange(count) + misses * count
    partners = np.sort(order[order != worst].take(places, mode="wrap"))
    if side == each:
        every = np.arange(each)
        theirs = np.broadcast_to(every, (count, each))
        return _Candidates(every, partners, theirs, count == ranks - 1)
    most = shares[:, int(loads[:, worst].argmax())]
    picked = (np.arange(side) * each + turn * each // MAX_MISSES % each) // side
    mine = np.argsort(most[dealt[worst]], kind="stable")[picked]
    theirs = np.argsort(most[dealt[partners]], axis=1, kind="stable")[:, picked]
    return _Candidates(mine, partners, theirs, False)


def _after(shares: Floats, dealt: Integers, loads: Floats, worst: int, some: _Candidates) -> Floats:
    """(A, P, B) the largest share of the two ranks once each pair were swapped."""
    mine = shares[dealt[worst, some.mine]].T  # (k, A)
    theirs = np.moveaxis(shares[dealt[some.ranks[:, None], some.theirs]], -1, 0)  # (k, P, B)
    shape = some.theirs.shape
    after = np.full((mine.shape[1], *shape), -np.inf)
    for have, other, load in zip(mine, theirs, loads, strict=True):
        gain = other - have[:, None, None]
        np.maximum(after, load[worst] + gain, out=after)
        # Whole, not broadcast: rows of a few numbers are slow.
        np.maximum(after, np.repeat(load[some.ranks], shape[1]).reshape(shape) - gain, out=after)
    return after


Column = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """FLOPs of one training step (forward and backward, no recomputation) of a model.

    Args:
        per_squared_length: causal attention of the decoder.
        per_squared_patches: the tower's attention over whole images.
        image_patches: assumed patches of an image where sums of squares are not known.
    """

    per_token: float
    per_squared_length: float
    per_label_token: float = 0.0
    per_patch: float = 0.0
    per_squared_patches: float = 0.0
    image_patches: int = 1024

    def __call__(
        self,
        tokens: Column,
        squares: Column,
        patches: Column,
        *,
        patch_squares: Column | None = None,
        labels: Column | None = None,
    ) -> Floats:
        """(n, 2) FLOPs of the language model and of the vision tower.

        Args:
            tokens: (n,) tokens of each row, image tokens included.
            squares: (n,) sum of the squared lengths of its samples.
            patches: (n,) vision patches.
            patch_squares: (n,) sum of the squared patches of its images, exact. Squared patches of
                its *samples* are an upper bound, exact if a sample has one image. None is an
                estimate, which takes every image to have `image_patches`.
            labels: (n,) tokens with a label. None leaves the head out.
        """
        if patch_squares is None:
            patch_squares = patches * self.image_patches
        language = self.per_token * tokens + self.per_squared_length * squares
        if labels is not None:
            language = language + self.per_label_token * labels
        vision = self.per_patch * patches + self.per_squared_patches * patch_squares
        return np.stack([language, vision], axis=1).astype(np.float64)
