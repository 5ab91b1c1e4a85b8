"""Seeded orders of samples, and how many each source gives to each window.

Randomness is Philox's raw bit stream, keyed by blake2b of its purpose. Permutations are a stable
argsort of it, so a plan does not depend on how numpy shuffles.

With `data.group_by: image` the samples of one image stand together:

    samples    a0 b0 a1 c0 b1 a2        groups by image: a, b, c
    shuffled   c0 a2 a0 a1 b0 b1        whole groups permuted, each in an order of its own

With `data.learn: each_answer` the samples of a group keep their order, so that each continues the
one before. A shuffle window, a global batch or a micro-batch cuts a group where its border falls. A
sample without images is a group of its own, and no group spans two sources.

An epoch's draws per source are whole numbers (largest remainder of weight x epoch), spread evenly
over the epoch. After any window, source d has given its part of the samples so far, off by less
than one. Window counts are `floor(window * rate)` plus a few left-over places. Those go by earliest
deadline, which is the schedule that keeps every source within one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.table import Int64s


def draws_per_source(
    weights: Sequence[float], epoch_size: int, tokens_per_draw: Sequence[Fraction] | None = None
) -> tuple[int, ...]:
    """Samples that each source gives to one epoch: its share, off by less than one.

    Args:
        weights: positive, of any scale; shares of the epoch's samples.
        epoch_size: samples in the epoch; the draws sum to it.
        tokens_per_draw: the mean of each source, above 0: then weights are shares of the epoch's
            tokens, so a source with weight w and mean m is drawn in proportion to w / m.
    """
    # repr: 0.1 means one tenth here, not the binary fraction nearest to it.
    exact = [Fraction(repr(weight)) for weight in weights]
    if tokens_per_draw is not None:
        exact = [share / mean for share, mean in zip(exact, tokens_per_draw, strict=True)]
    total = sum(exact)
    shares = [weight / total * epoch_size for weight in exact]
    draws = [int(share) for share in shares]
    order = sorted(range(len(draws)), key=lambda d: (draws[d] - shares[d], d))
    for d in order[: epoch_size - sum(draws)]:
        draws[d] += 1
    return tuple(draws)


def window_starts(draws: Sequence[int], window: int) -> npt.NDArray[np.int64]:
    """What each source has given before each window of an epoch.

    Args:
        draws: per source, for the epoch.

    Returns:
        (W + 1, D) int64, for W windows and D sources: row w is the count before window w, the last
            row is `draws`. Rows sum to `min(w * window, epoch)`.
    """
    epoch = sum(draws)
    num_windows = -(-epoch // window) if epoch else 0
    starts = np.zeros((num_windows + 1, len(draws)), dtype=np.int64)
    if not num_windows:
        return starts
    whole = [window * count // epoch for count in draws]
    rests = [window * count % epoch for count in draws]
    slots = window - sum(whole)
    given = [0] * len(draws)
    slot = 0
    for w in range(1, num_windows):
        for _ in range(slots):
            given[_earliest(rests, given, slot, epoch * slots)] += 1
            slot += 1
        starts[w] = [w * count + extra for count, extra in zip(whole, given, strict=True)]
    starts[num_windows] = list(draws)
    return starts


def _earliest(rests: Sequence[int], given: Sequence[int], slot: int, scale: int) -> int:
    """The source that gets a left-over slot: due to have started, and with the nearest deadline.

    Source d is owed `rests[d] / scale` places per slot. Its next place may be taken from slot
    `given / rate` on and must be taken before `(given + 1) / rate`.
    """
    best, best_deadline = -1, Fraction(0)
    for d, rest in enumerate(rests):
        if rest == 0 or given[d] * scale >= (slot + 1) * rest:
            continue
        deadline = Fraction((given[d] + 1) * scale, rest)
        # Deadlines count whole slots: rounding up makes ties, which the order of sources settles.
        rounded = Fraction(-(-deadline.numerator // deadline.denominator))
        if best < 0 or rounded < best_deadline:
            best, best_deadline = d, rounded
    assert best >= 0, "the left-over rates sum to one place per slot"
    return best


PLAN_RULE = "plan-1"
"""Changes whenever the same inputs would give a different plan."""


def seeded_order(count: int, *labels: object) -> Int64s:
    """(count,) a permutation of 0 .. count - 1 that depends on the labels alone."""
    text = "|".join([PLAN_RULE, *(str(label) for label in labels)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    raw = np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)
    return np.argsort(raw, kind="stable")


def grouped_order(
    numbers: Int64s, groups: Int64s, *labels: object, in_turn: bool = False
) -> Int64s:
    """(n,) a permutation of places that keeps the samples of each group together.

    A sample that comes several times belongs to another unit each time, so its copies are not
    brought together.

    Args:
        labels: what else the order depends on.
        in_turn: whether the samples of a group stand in the order of their numbers.
    """
    found, group = np.unique(groups, return_inverse=True)
    unit_keys = _times_before(numbers) * found.shape[0] + group
    units, unit = np.unique(unit_keys, return_inverse=True)
    place_of_unit = seeded_order(units.shape[0], "groups", *labels)
    inside = numbers if in_turn else seeded_order(numbers.shape[0], "in groups", *labels)
    return np.lexsort((inside, place_of_unit[unit])).astype(np.int64)


def in_groups(groups: Int64s) -> Int64s:
    """(n,) a permutation that moves each group to the place of its first sample, and nothing
    else."""
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(first[place], kind="stable").astype(np.int64)


def _times_before(numbers: Int64s) -> Int64s:
    """(n,) how often each number came before."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if ordered.size else order
    counts = np.diff(np.r_[begins, ordered.size])
    times = np.empty_like(numbers)
    times[order] = np.arange(ordered.size) - np.repeat(begins, counts)
    return times
