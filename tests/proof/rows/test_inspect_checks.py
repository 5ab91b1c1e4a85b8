"""A right row passes every check; each way to break it fails the check that is about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmpack.alignment import Alignment
from vlmpack.build.read_only import open_train
from vlmpack.data.loading.loader import MicroBatch, TrainedSample
from vlmpack.packing.batch import IGNORE_INDEX, PackedBatch
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.opening import Wanted, open_row
from vlmpack.proof.rows.row import Row, cut_row
from vlmpack.proof.rows.show import take_apart
from vlmpack.report.inspect.page import render_page

SAMPLES, LABELS, POSITIONS = (
    "every sample whole, once",
    "labels stay in their sample",
    "positions restart at each sample",
)
BOUNDARIES, MASK, PADDING = (
    "boundaries divide as they must",
    "loss mask is the labels",
    "padding learns nothing",
)
IMAGES, BUDGET, CONTEXT = (
    "images fill their places",
    "inside the budget",
    "CP 2 holds each token once",
)
ALL = {SAMPLES, LABELS, POSITIONS, BOUNDARIES, MASK, PADDING, IMAGES, BUDGET, CONTEXT}


@pytest.fixture
def row(opened_row: Any) -> Row:
    return opened_row[0]


def with_batch(row: Row, **fields: Any) -> Row:
    """The row with other tensors, cut for the ranks again."""
    batch = replace(row.batch, **fields)
    return replace(row, batch=batch, slices=cut_row(batch, row.rules.context))


def failed(row: Row) -> set[str]:
    return {check.name for check in check_row(row) if not check.holds}


def changed(tensor: torch.Tensor, place: Any, value: int) -> torch.Tensor:
    copy = tensor.clone()
    assert int(copy[place]) != value
    copy[place] = value
    return copy


def relabelled(row: Row, slot: int, label: int) -> Row:
    """Another label, with mask and list that agree with it."""
    labels = changed(row.batch.labels, (0, slot), label)
    mask = labels != IGNORE_INDEX
    return with_batch(
        row, labels=labels, loss_mask=mask, label_positions=mask.flatten().nonzero().squeeze(1)
    )


def leaking_label(row: Row) -> Row:
    """The last token of a sample learns the next one's first: labels shifted after packing."""
    end = row.batch.lengths[0] - 1
    first_of_next = row.segments[1].start
    return relabelled(row, end, int(row.batch.input_ids[0, first_of_next]))


def label_in_a_gap(row: Row) -> Row:
    segment = next(s for s in row.segments if s.slots > s.length > 0)
    return relabelled(row, segment.start + segment.length, 5)


def wrong_label(row: Row) -> Row:
    slot = int(row.batch.label_positions[0])
    return relabelled(row, slot, int(row.batch.labels[0, slot]) + 1)


def positions_of_the_whole_row(row: Row) -> Row:
    size = row.batch.position_ids.shape
    return with_batch(row, position_ids=torch.arange(size[-1]).expand(size).contiguous())


def one_axis_for_all(row: Row) -> Row:
    """Text positions on every axis: restarts are right, image grids are not."""
    axis = torch.cat([torch.arange(s.slots) for s in row.segments])
    return with_batch(row, position_ids=axis.expand(row.batch.position_ids.shape).contiguous())


def moved_boundary(row: Row) -> Row:
    assert row.batch.cu_seqlens_padded is not None
    place = int(row.batch.cu_seqlens_padded[1])
    return with_batch(row, cu_seqlens_padded=changed(row.batch.cu_seqlens_padded, 1, place + 2))


def wrong_logical(row: Row) -> Row:
    place = int(row.batch.cu_seqlens[1])
    return with_batch(row, cu_seqlens=changed(row.batch.cu_seqlens, 1, place + 1))


def wrong_host_lengths(row: Row) -> Row:
    first, second, *rest = row.batch.segment_lengths
    batch = replace(row.batch, segment_lengths=(first + 4, second - 4, *rest))
    return replace(row, batch=batch)


def mask_apart(row: Row) -> Row:
    slot = int(row.batch.label_positions[0])
    mask = row.batch.loss_mask.clone()
    mask[0, slot] = False
    return replace(row, batch=replace(row.batch, loss_mask=mask))


def stale_label_positions(row: Row) -> Row:
    return with_batch(row, label_positions=row.batch.label_positions[1:])


def wrong_fill(row: Row) -> Row:
    segment = next(s for s in row.segments if s.slots > s.length > 0)
    slot = segment.start + segment.length
    return with_batch(row, input_ids=changed(row.batch.input_ids, (0, slot), 3))


def lost_placeholder(row: Row) -> Row:
    slot = int(row.batch.media_positions[1])
    return with_batch(row, input_ids=changed(row.batch.input_ids, (0, slot), 3))


def shifted_media(row: Row) -> Row:
    return with_batch(row, media_positions=row.batch.media_positions + 1)


def lost_patches(row: Row) -> Row:
    media = row.batch.media
    assert media is not None
    return with_batch(row, media=replace(media, pixel_values=media.pixel_values[:-4]))


def another_order(row: Row) -> Row:
    keys = row.batch.keys
    return with_batch(row, keys=(keys[1], keys[0], *keys[2:]))


def sample_twice(row: Row) -> Row:
    return replace(row, planned=(*row.planned, row.planned[0]))


def over_budget(row: Row) -> Row:
    assert row.rules.budget is not None
    budget = replace(row.rules.budget, max_tokens=row.num_slots - 8)
    return replace(row, rules=replace(row.rules, budget=budget))


def over_samples(row: Row) -> Row:
    assert row.rules.budget is not None
    budget = replace(row.rules.budget, max_sequences=len(row.alone) - 1)
    return replace(row, rules=replace(row.rules, budget=budget))


def slices(row: Row, indices: list[torch.Tensor]) -> Row:
    assert not isinstance(row.slices, str)
    labels = row.batch.labels.flatten()
    parts = []
    for part, index in zip(row.slices, indices, strict=True):
        places = (labels[index] != IGNORE_INDEX).nonzero().squeeze(1)
        targets = labels[index][places]
        parts.append(replace(part, row_index=index, label_positions=places, targets=targets))
    return replace(row, slices=tuple(parts))


def zigzag_over_the_row(row: Row) -> Row:
    """Chunks of the whole row instead of each segment's: all tokens are held, wrongly."""
    quarters = torch.arange(row.num_slots).chunk(4)
    return slices(
        row, [torch.cat([quarters[0], quarters[3]]), torch.cat([quarters[1], quarters[2]])]
    )


def token_on_two_ranks(row: Row) -> Row:
    assert not isinstance(row.slices, str)
    first, second = (part.row_index.clone() for part in row.slices)
    second[0] = first[0]
    return slices(row, [first, second])


def lost_target(row: Row) -> Row:
    assert not isinstance(row.slices, str)
    first, *rest = row.slices
    short = replace(first, label_positions=first.label_positions[1:], targets=first.targets[1:])
    return replace(row, slices=(short, *rest))


BREAKS: list[tuple[Callable[[Row], Row], set[str]]] = [
    (leaking_label, {LABELS}),
    (label_in_a_gap, {LABELS, PADDING}),
    (wrong_label, {LABELS}),
    (positions_of_the_whole_row, {POSITIONS}),
    (one_axis_for_all, {POSITIONS}),
    (wrong_logical, {BOUNDARIES}),
    (wrong_host_lengths, {BOUNDARIES}),
    (mask_apart, {MASK}),
    (stale_label_positions, {MASK}),
    (wrong_fill, {PADDING}),
    (shifted_media, {IMAGES}),
    (lost_patches, {IMAGES}),
    (lost_placeholder, {SAMPLES, IMAGES}),
    (another_order, {SAMPLES}),
    (sample_twice, {SAMPLES}),
    (over_budget, {BUDGET}),
    (over_samples, {BUDGET}),
    (zigzag_over_the_row, {CONTEXT}),
    (token_on_two_ranks, {CONTEXT}),
    (lost_target, {CONTEXT}),
]


def test_a_right_row_passes_every_check(row: Row) -> None:
    checks = check_row(row)
    assert {check.name for check in checks} == ALL and all(check.holds for check in checks)
    assert len(row.alone) >= 3 and row.batch.cu_seqlens_padded is not None


@pytest.mark.parametrize(("broken", "expected"), BREAKS, ids=lambda v: getattr(v, "__name__", ""))
def test_each_break_shows_its_cross(
    row: Row, broken: Callable[[Row], Row], expected: set[str]
) -> None:
    """And no other: a cross says where to look."""
    assert failed(broken(row)) == expected


def test_rows_of_one_shape_may_repeat_their_boundaries(inspect_recipe: Path) -> None:
    """A row without a gap has physical boundaries where all rows have the same tensors."""
    train, _ = open_train(inspect_recipe)
    wanted = next(n for n, tokens in enumerate(train.fitted.table.num_tokens) if tokens % 4 == 0)
    alone = ["packing.max_sequences=1", "packing.pad_to_max_length=true"]
    key = Wanted(key=train.ref(wanted).key)
    fixed, _, _ = open_row(inspect_recipe, key, overrides=alone, context=2)
    assert fixed.batch.cu_seqlens_padded is not None and len(fixed.alone) == 1
    assert torch.equal(fixed.batch.cu_seqlens_padded, fixed.batch.cu_seqlens)
    assert failed(fixed) == set()
    assert failed(with_batch(fixed, fixed_shape=False)) == {BOUNDARIES}


def test_a_leak_into_the_next_sample_is_called_one(row: Row) -> None:
    found = next(check for check in check_row(leaking_label(row)) if not check.holds)
    key, last = row.alone[0].key, row.batch.lengths[0] - 1
    assert found.detail == f"slot {last}, the last of {key}, learns a token that is not its own"


def test_a_moved_boundary_shows(row: Row) -> None:
    """Everything behind it is misplaced, too, and still nothing raises."""
    assert {BOUNDARIES, SAMPLES, CONTEXT} <= failed(moved_boundary(row))


@pytest.mark.parametrize(
    "broken", [lost_patches, lost_placeholder, shifted_media, moved_boundary, wrong_host_lengths]
)
def test_a_broken_batch_can_still_be_shown(opened_row: Any, broken: Callable[[Row], Row]) -> None:
    """What is wrong with a row must be seen, not hidden by an error on the way to the page."""
    row, found, encoder = opened_row
    batch = broken(row).batch
    names = [TrainedSample(ref.number, ref.key, ref.shard) for ref in found.samples]
    loaded = MicroBatch(
        batch=batch,
        samples=tuple(names),
        skipped=(),
        num_images=0,
        read_seconds=0.0,
        encode_seconds=0.0,
    )
    shown = take_apart(loaded, [None] * len(names), encoder, "it")
    drawn = replace(row, shown=shown, batch=batch, slices=cut_row(batch, 2))
    checks = check_row(drawn)
    assert not all(check.holds for check in checks)
    assert "&#10007;" in render_page(drawn, checks, encoder, "r")


def test_every_check_has_a_control() -> None:
    assert set().union(*(expected for _, expected in BREAKS)) == ALL


def test_a_row_that_cannot_be_cut_says_so(row: Row) -> None:
    rules = replace(row.rules, context=8, multiples=Alignment(16, 16))
    whole = replace(row, rules=rules, slices=cut_row(row.batch, 8))
    assert isinstance(whole.slices, str)
    found = {check.name: check for check in check_row(whole) if not check.holds}
    assert "2 * CP = 16" in found["CP 8 holds each token once"].detail
    assert whole.ranks() is None


def test_repeated_last_boundaries_are_no_fault(row: Row) -> None:
    """`pad_cu_seqlens`: zero-length segments behind the last one."""
    batch: PackedBatch = row.batch
    assert batch.cu_seqlens_padded is not None

    def longer(places: torch.Tensor) -> torch.Tensor:
        return torch.cat([places, places[-1:].expand(3)])

    fixed = with_batch(
        row,
        cu_seqlens=longer(batch.cu_seqlens),
        cu_seqlens_padded=longer(batch.cu_seqlens_padded),
        segment_lengths=(*batch.segment_lengths, 0, 0, 0),
    )
    assert failed(fixed) == set() and len(fixed.segments) == len(row.segments)
