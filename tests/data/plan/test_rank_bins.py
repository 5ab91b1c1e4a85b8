"""What bins cost where they hold pairs, or share prefixes, against a count token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.rank_bins import Known, bin_costs, bins_by_rank
from vlmpack.packing.batch import Prefix
from vlmpack.packing.prefix_rows import PlannedSample, PlannedSequence

Case = tuple[list[PlannedSample], Int64s, list[tuple[int, ...]]]
"""Samples, the patches of each, and bins of their numbers."""


def row_cost(tokens: Any, squares: Any, patches: Any, *, patch_squares: Any) -> Any:
    return np.stack([tokens, squares, patches, patch_squares], axis=1).astype(np.float64)


def drawn(each: int, *, shares: bool) -> Case:
    """Groups of samples about one image, each of one or two sequences; a bin never splits one."""
    rng = np.random.default_rng(each + shares)
    samples: list[PlannedSample] = []
    patches: list[int] = []
    bins: list[tuple[int, ...]] = []
    for group in range(30):
        image, prompt, cost = (int(rng.integers(3, 20)) for _ in range(3))
        prefixes = (Prefix(image, b"i%d" % group), Prefix(image + prompt, b"p%d" % group))
        first = len(samples)
        for _ in range(int(rng.integers(1, 6))):
            longer = rng.integers(1, 9, each).tolist()
            own = prefixes if shares else ()
            samples.append(tuple(PlannedSequence(image + prompt + n, own) for n in longer))
            patches.append(cost)
        members = tuple(range(first, len(samples)))
        if group % 3:
            bins[-1] += members
        else:
            bins.append(members)
    return samples, np.asarray(patches), [*bins, ()]


def known_of(samples: Sequence[PlannedSample], patches: Int64s, *, shares: bool) -> Known:
    tokens = np.asarray([[sequence.length for sequence in sample] for sample in samples])
    return Known(
        sizes=lambda numbers: (tokens[numbers].sum(axis=1), patches[numbers]),
        sequence_tokens=lambda numbers: tokens[numbers],
        planned=(lambda numbers: [samples[n] for n in numbers.tolist()]) if shares else None,
    )


def counted(samples: Sequence[PlannedSample], patches: Int64s, members: Sequence[int]) -> list[int]:
    """Tokens of a row by what stands before each, so that one that several sequences begin with is
    one; a token behind d others runs over 2 d + 1 in the unit in which n tokens alone run over
    n * n. Images by the first cut of their samples."""
    found: set[tuple[object, ...]] = set()
    images: dict[object, int] = {}
    for number in members:
        for place, sequence in enumerate(samples[number]):
            for token in range(sequence.length):
                owner: object = (number, place)
                for prefix in reversed(sequence.prefixes):
                    owner = prefix.digest if token < prefix.length else owner
                found.add((owner, token))
        first = samples[number][0].prefixes
        images[first[0].digest if first else number] = int(patches[number])
    depth = [token for _, token in found]
    shown = [*images.values()]
    return [len(found), sum(2 * at + 1 for at in depth), sum(shown), sum(n * n for n in shown)]


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("each", [1, 2], ids=["samples", "pairs"])
def test_costs_are_those_of_each_token_of_the_row(each: int, shares: bool) -> None:
    samples, patches, bins = drawn(each, shares=shares)
    known = known_of(samples, patches, shares=shares)
    theirs = [counted(samples, patches, members) for members in bins]
    assert bin_costs(bins, known, row_cost).tolist() == theirs
    alone = replace(known, planned=None)
    assert (bin_costs(bins, alone, row_cost).tolist() == theirs) is not shares
    as_one = replace(alone, sequence_tokens=lambda numbers: known.sizes(numbers)[0][:, None])
    assert (bin_costs(bins, as_one, row_cost).tolist() == theirs) is (each == 1 and not shares)


def test_ranks_are_even_in_what_is_computed() -> None:
    """Four bins of eight samples: two whose samples share all but a token, and two that share
    nothing. Costed as if alone, a rank may get both of the same kind."""
    cut = Prefix(99, b"i")
    samples: list[PlannedSample] = [(PlannedSequence(100, (cut,)),)] * 16
    samples += [(PlannedSequence(100, ()),)] * 16
    bins = [tuple(range(start, start + 8)) for start in (0, 8, 16, 24)]
    known = known_of(samples, np.zeros(32, dtype=np.int64), shares=True)
    found = bins_by_rank(bins, 2, known=known, row_cost=row_cost, balanced=True)
    assert [sorted(row[0] < 16 for row in rank) for rank in found.bins] == [[False, True]] * 2
    assert found.imbalance == 1.0
    dealt = bins_by_rank([bins[0], bins[2], bins[1], bins[3]], 2, known=known, row_cost=row_cost,
                      balanced=False)  # fmt: skip
    assert dealt.imbalance > 1.7
