"""Rows planned with what their samples share: as large as the rows that are made, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from vlmpack.data.plan.packers import BudgetPacker
from vlmpack.packing import prefix_rows
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, Prefix
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.collate import pack_batch_sequences
from vlmpack.packing.prefix_rows import (
    PlannedSample,
    PlannedSequence,
    items_of,
    planned_tokens,
    shared_rows,
)

Drawn = tuple[list[PlannedSample], list[int], list[int]]
"""Samples, the patches of each, and the group of each."""


def drawn_groups(generator: np.random.Generator, count: int, longest: int = 20) -> Drawn:
    """Groups of questions about one image; some have a second cut behind a common prompt, some
    samples no cut at all."""
    samples: list[PlannedSample] = []
    patches: list[int] = []
    groups: list[int] = []
    while len(samples) < count:
        group = len(groups)
        image = int(generator.integers(3, longest))
        prompt = image + int(generator.integers(1, 6))
        prefixes = (Prefix(image, b"i%d" % group), Prefix(prompt, b"p%d" % group))
        kept = prefixes[: int(generator.integers(0, 3))]
        cost = int(generator.integers(1, 50))
        for _ in range(int(generator.integers(1, 9))):
            own = int(generator.integers(2, 9))
            some = kept[: int(generator.integers(1, 3))]
            samples.append((PlannedSequence(prompt + own, some),))
            patches.append(cost)
            groups.append(group)
    return samples, patches, groups


def encoded(sample: PlannedSample, key: int) -> EncodedSample:
    """A sample of that length whose tokens are told by its prefixes."""
    [sequence] = sample
    ids = torch.full((sequence.length,), 1000 + key)
    for prefix in reversed(sequence.prefixes):
        ids[: prefix.length] = int.from_bytes(prefix.digest, "little")
    if len(sequence.prefixes) == 2:
        first, second = sequence.prefixes
        ids[first.length : second.length] = int.from_bytes(second.digest, "little")
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[-2:-1] = 7
    return EncodedSample(
        key=str(key),
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(sequence.length)[None],
        media_positions=torch.zeros(0, dtype=torch.int64),
        prefixes=sequence.prefixes,
    )


def made(samples: list[PlannedSample], row: list[int], alignment: int) -> int:
    """The slots of a row that is made of samples."""
    return pack_batch_sequences(
        [encoded(samples[place], place) for place in row],
        pad_to_multiple_of=alignment,
        pad_token_id=0,
        share_prefix=True,
    ).num_slots


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize("alignment", [1, 4, 8])
@pytest.mark.parametrize("most", [None, 12, 5])
def test_a_planned_row_is_as_large_as_the_row_that_is_made(
    alignment: int, most: int | None
) -> None:
    generator = np.random.default_rng(alignment)
    saved = 0
    for _ in range(12):
        samples, patches, _ = drawn_groups(generator, 60)
        budget = RowBudget(max_tokens=96, max_patches=120, max_sequences=most, alignment=alignment)
        rows = shared_rows(samples, np.asarray(patches), budget)
        assert sorted(place for row in rows for place in row) == list(range(len(samples)))
        for row in rows:
            size = planned_tokens([samples[place] for place in row], alignment)
            assert size == made(samples, row, alignment) <= 96
            assert most is None or len(row) <= most
            first = [n for n in range(len(row)) if not n or not _follows(samples, row, n)]
            assert sum(patches[row[n]] for n in first) <= 120
        plain = budget.rows(np.asarray([s[0].length for s in samples]), np.asarray(patches))
        saved += len(plain) - len(rows)
    assert saved > 12 or most == 5, "a bound that tight makes as many rows"


def _follows(samples: list[PlannedSample], row: list[int], n: int) -> bool:
    before, here = samples[row[n - 1]][0].prefixes, samples[row[n]][0].prefixes
    return bool(set(before) & set(here))


def test_no_group_that_fits_a_row_is_split_and_one_that_does_not_is_cut() -> None:
    generator = np.random.default_rng(5)
    cut = kept = 0
    for _ in range(20):
        samples, _, groups = drawn_groups(generator, 50)
        samples = [
            (PlannedSequence(one[0].length, (Prefix(2, b"g%d" % group),)),)
            for one, group in zip(samples, groups, strict=True)
        ]
        budget = RowBudget(max_tokens=64)
        rows = shared_rows(samples, np.zeros(len(samples), dtype=np.int64), budget)
        row_of = {place: n for n, row in enumerate(rows) for place in row}
        for group in set(groups):
            members = [place for place, name in enumerate(groups) if name == group]
            fits = planned_tokens([samples[place] for place in members], 1) <= 64
            together = len({row_of[place] for place in members}) == 1
            assert together or not fits, "a group is split although it fits"
            kept += together and len(members) > 1
            cut += not fits
        for row in rows:
            names = [groups[place] for place in row]
            assert len({*names}) == sum(a != b for a, b in pairwise(names)) + 1
    assert cut > 5 and kept > 50


def test_an_item_is_cut_where_it_would_not_fit_a_row() -> None:
    image = Prefix(10, b"i")
    samples: list[PlannedSample] = [(PlannedSequence(14, (image,)),)] * 6
    budget = RowBudget(max_tokens=24, max_patches=7)
    found = [
        (item.places, item.tokens, item.patches) for item in items_of(samples, [7] * 6, budget)
    ]
    assert found == [(range(3), 22, 7), (range(3, 6), 22, 7)]
    few = replace(budget, max_sequences=2)
    assert [len(item.places) for item in items_of(samples, [7] * 6, few)] == [2, 2, 2]


def test_items_are_those_of_growing_one_by_one_in_fewer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []

    def counting(some: Sequence[PlannedSample], alignment: int) -> int:
        counted.append(len(some))
        return planned_tokens(some, alignment)

    monkeypatch.setattr(prefix_rows, "planned_tokens", counting)
    samples, patches, _ = drawn_groups(np.random.default_rng(3), 150)
    budget = RowBudget(max_tokens=48)
    grown, first = [], 0
    for place in range(1, len(samples) + 1):
        shares = place < len(samples) and _follows(samples, [place - 1, place], 1)
        if not shares or planned_tokens(samples[first : place + 1], 1) > 48:
            grown.append(range(first, place))
            first = place
    assert [item.places for item in items_of(samples, patches, budget)] == grown
    assert {len(places) for places in grown} == {1, 2, 3, 4}
    large: list[PlannedSample] = [(PlannedSequence(14, (Prefix(10, b"i"),)),)] * 1000
    counted.clear()
    (item,) = items_of(large, [1] * 1000, RowBudget(max_tokens=4010))
    assert (len(item.places), item.tokens) == (1000, 4010)
    assert len(counted) < 12, "each growth counted all before it"


def test_a_bound_on_samples_alone_is_kept_as_well_as_one_on_patches() -> None:
    """Sixteen questions an image of 40 tokens, 8 to a row: no row has to hold fewer."""
    image = Prefix(40, b"i")
    samples: list[PlannedSample] = [(PlannedSequence(44, (image,)),)] * 16
    samples += [(PlannedSequence(6, ()),)] * 16
    budget = RowBudget(max_tokens=96, max_sequences=8)
    rows = shared_rows(samples, np.zeros(32, dtype=np.int64), budget)
    assert [len(row) for row in rows] == [8] * 4


def test_without_cuts_rows_are_those_of_the_budget() -> None:
    generator = np.random.default_rng(8)
    tokens, patches = generator.integers(1, 60, 200), generator.integers(0, 40, 200)
    samples: list[PlannedSample] = [(PlannedSequence(int(count), ()),) for count in tokens]
    budget = RowBudget(max_tokens=128, max_patches=100, alignment=4)
    assert shared_rows(samples, patches, budget) == budget.rows(tokens, patches)


def test_the_samples_of_a_step_are_the_same_with_and_without_sharing() -> None:
    samples, patches, _ = drawn_groups(np.random.default_rng(2), 90)
    tokens = np.asarray([sample[0].length for sample in samples])

    def packer(*, shares: bool) -> BudgetPacker:
        return BudgetPacker(
            budget=RowBudget(max_tokens=64),
            global_batch_size=16,
            scope="batch",
            sizes=lambda numbers: (tokens[numbers], np.asarray(patches)[numbers]),
            planned=(lambda numbers: [samples[n] for n in numbers.tolist()]) if shares else None,
        )

    order = np.arange(len(samples))
    shared, plain = packer(shares=True)(order), packer(shares=False)(order)
    flat = [[sorted(n for row in step for n in row) for step in found] for found in (shared, plain)]
    assert flat[0] == flat[1]
    assert sum(map(len, shared)) < sum(map(len, plain))


def test_five_questions_an_image_take_half_the_tokens_and_a_fifth_of_the_images() -> None:
    """An image of 64 tokens, 5 questions of 12 to 24 each, rows of 1,024."""
    generator = np.random.default_rng(1)
    samples: list[PlannedSample] = []
    for group in range(60):
        cut = Prefix(64, b"%d" % group)
        samples += [(PlannedSequence(64 + int(generator.integers(12, 25)), (cut,)),)] * 5
    budget = RowBudget(max_tokens=1024, alignment=8)
    rows = shared_rows(samples, np.full(len(samples), 256), budget)
    alone = sum(sample[0].length for sample in samples)
    together = sum(planned_tokens([samples[place] for place in row], 8) for row in rows)
    assert alone / together > 2
    items = list(items_of(samples, [256] * len(samples), budget))
    assert len(samples) / len(items) > 4
