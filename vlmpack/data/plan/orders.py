"""Seeded orders of samples, and those in which the samples of one image stand together.

Randomness is Philox's raw bit stream, keyed by blake2b of what it is for; permutations are a stable
argsort of it. So a plan does not depend on how numpy shuffles.

With `data.group_by: image` the samples of one image stand together:

    samples    a0 b0 a1 c0 b1 a2        groups by image: a, b, c
    shuffled   c0 a2 a0 a1 b0 b1        whole groups permuted, each in an order of its own

With `data.learn: each_answer` those of a group stay in turn, so that each answer's sample goes on
from the one before.

A group is shuffled as a unit, so the place of a group says nothing about its size. What is cut
behind the order (a shuffle window, a global batch, a micro-batch) cuts a group where its border
falls. A sample without images is a group of its own, and no group spans two sources.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vlmpack.data.index.table import Int64s

PLAN_RULE = "plan-1"
"""Changes whenever the same inputs would give another plan."""


def seeded_order(count: int, *labels: object) -> Int64s:
    """(count,) a permutation of 0 .. count - 1 that depends on the labels alone."""
    text = "|".join([PLAN_RULE, *(str(label) for label in labels)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    raw = np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)
    return np.argsort(raw, kind="stable")


def grouped_order(
    numbers: Int64s, groups: Int64s, *labels: object, in_turn: bool = False
) -> Int64s:
    """(n,) a permutation of places, in which the samples of each group stand together.

    Where a sample comes several times (more than one pass over its source), each time belongs to
    a unit of its own: copies of a sample are not brought together.

    Args:
        numbers: (n,) the samples.
        groups: (n,) theirs.
        labels: what the order depends on beside these.
        in_turn: whether the samples of a group stand in the order of their numbers.
    """
    found, group = np.unique(groups, return_inverse=True)
    unit_keys = _times_before(numbers) * found.shape[0] + group
    units, unit = np.unique(unit_keys, return_inverse=True)
    place_of_unit = seeded_order(units.shape[0], "groups", *labels)
    inside = numbers if in_turn else seeded_order(numbers.shape[0], "in groups", *labels)
    return np.lexsort((inside, place_of_unit[unit])).astype(np.int64)


def in_groups(groups: Int64s) -> Int64s:
    """(n,) a permutation of places that brings groups together where their first sample stands, and
    moves nothing else.

    Args:
        groups: (n,) of the samples, in their order.
    """
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
