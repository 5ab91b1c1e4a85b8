"""A right row passes every check; each way to break it fails the check that is about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import single_rank
from typer.testing import CliRunner

from vlmpack.alignment import Alignment
from vlmpack.build.look import open_train
from vlmpack.cli.app import app
from vlmpack.data.loading.loader import MicroBatch, TrainedSample
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator
from vlmpack.packing.batch import IGNORE_INDEX, PackedBatch
from vlmpack.proof.rows import opening
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.opening import ShownRow, Wanted, open_row, view_row
from vlmpack.proof.rows.row import Row, cut_row
from vlmpack.proof.verify import run as verify_run
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.report.inspect.page import render_page

SAMPLES, BOUNDARIES, LABELS, POSITIONS = (
    "samples",
    "boundaries",
    "labels and loss mask",
    "positions",
)
PADDING, IMAGES, BUDGET, CONTEXT = ("padding", "pixels in order", "budget", "CP 2 slices")
ALL = {SAMPLES, LABELS, POSITIONS, BOUNDARIES, PADDING, IMAGES, BUDGET, CONTEXT}


@pytest.fixture
def row(opened_row: Any) -> ShownRow:
    return opened_row[0]


def with_batch(row: ShownRow, **fields: Any) -> ShownRow:
    """The row with other tensors, cut for the ranks again."""
    batch = replace(row.batch, **fields)
    return replace(row, batch=batch, slices=cut_row(batch, row.rules.context))


def failed(row: ShownRow) -> set[str]:
    return {check.name for check in check_row(row) if check.fails}


def changed(tensor: torch.Tensor, place: Any, value: int) -> torch.Tensor:
    copy = tensor.clone()
    assert int(copy[place]) != value
    copy[place] = value
    return copy


def relabelled(row: ShownRow, slot: int, label: int) -> ShownRow:
    """Another label, with mask and list that agree with it."""
    labels = changed(row.batch.labels, (0, slot), label)
    mask = labels != IGNORE_INDEX
    return with_batch(
        row, labels=labels, loss_mask=mask, label_positions=mask.flatten().nonzero().squeeze(1)
    )


def leaking_label(row: ShownRow) -> ShownRow:
    """The last token of a sample learns the next one's first: labels shifted after packing."""
    end = row.batch.lengths[0] - 1
    first_of_next = row.segments[1].start
    return relabelled(row, end, int(row.batch.input_ids[0, first_of_next]))


def label_in_a_gap(row: ShownRow) -> ShownRow:
    segment = next(s for s in row.segments if s.slots > s.length > 0)
    return relabelled(row, segment.start + segment.length, 5)


def wrong_label(row: ShownRow) -> ShownRow:
    slot = int(row.batch.label_positions[0])
    return relabelled(row, slot, int(row.batch.labels[0, slot]) + 1)


def lost_label(row: ShownRow) -> ShownRow:
    """A token that the sample alone learns is not learnt in the row."""
    return relabelled(row, int(row.batch.label_positions[0]), IGNORE_INDEX)


def label_of_the_encoder(row: ShownRow) -> ShownRow:
    """Wrong in the sample alone, too: packed and unpacked would agree."""
    slot = int(row.batch.label_positions[0])
    owner = next(n for n, end in enumerate(row.ends) if slot < end)
    item, broken = row.alone[owner], wrong_label(row)
    at = slot - row.starts[owner]
    labels = changed(item.labels, at, int(broken.batch.labels[0, slot]))
    alone = list(row.alone)
    alone[owner] = replace(item, labels=labels)
    return replace(broken, alone=tuple(alone))


def one_axis(row: ShownRow) -> ShownRow:
    return with_batch(row, position_ids=row.batch.position_ids[:1])


def positions_from_one(row: ShownRow) -> ShownRow:
    """The family's own count begins at 1, in the row as alone."""
    counted = tuple(positions + 1 for positions in row.positions)
    moved = with_batch(row, position_ids=row.batch.position_ids + 1)
    return replace(moved, positions=counted)


def positions_of_the_whole_row(row: ShownRow) -> ShownRow:
    size = row.batch.position_ids.shape
    return with_batch(row, position_ids=torch.arange(size[-1]).expand(size).contiguous())


def one_axis_for_all(row: ShownRow) -> ShownRow:
    """Text positions on every axis: restarts are right, image grids are not."""
    axis = torch.cat([torch.arange(s.slots) for s in row.segments])
    return with_batch(row, position_ids=axis.expand(row.batch.position_ids.shape).contiguous())


def moved_boundary(row: ShownRow) -> ShownRow:
    assert row.batch.cu_seqlens_padded is not None
    place = int(row.batch.cu_seqlens_padded[1])
    return with_batch(row, cu_seqlens_padded=changed(row.batch.cu_seqlens_padded, 1, place + 2))


def wrong_logical(row: ShownRow) -> ShownRow:
    place = int(row.batch.cu_seqlens[1])
    return with_batch(row, cu_seqlens=changed(row.batch.cu_seqlens, 1, place + 1))


def one_segment(row: ShownRow) -> ShownRow:
    """The boundaries of one sample as long as the row."""
    whole = torch.tensor([0, row.num_slots], dtype=torch.int32)
    batch = replace(
        row.batch, cu_seqlens=whole, cu_seqlens_padded=None, segment_lengths=(row.num_slots,)
    )
    return replace(row, batch=batch)


def moved_by_the_alignment(row: ShownRow) -> ShownRow:
    """Boundaries, lengths and slices agree with one another; the tokens lie elsewhere."""
    assert row.batch.cu_seqlens_padded is not None
    place = int(row.batch.cu_seqlens_padded[1])
    first, second, *rest = row.batch.segment_lengths
    return with_batch(
        row,
        cu_seqlens_padded=changed(row.batch.cu_seqlens_padded, 1, place + 4),
        segment_lengths=(first + 4, second - 4, *rest),
    )


def boundaries_that_turn_back(row: ShownRow) -> ShownRow:
    batch, back = row.batch, torch.tensor([row.num_slots - 4, row.num_slots], dtype=torch.int32)
    assert batch.cu_seqlens_padded is not None
    longer = replace(
        batch,
        cu_seqlens=torch.cat([batch.cu_seqlens, back]),
        cu_seqlens_padded=torch.cat([batch.cu_seqlens_padded, back]),
        segment_lengths=(*batch.segment_lengths, -4, 4),
    )
    return replace(row, batch=longer)


def short_host_lengths(row: ShownRow) -> ShownRow:
    return replace(row, batch=replace(row.batch, segment_lengths=row.batch.segment_lengths[:-1]))


def wrong_multiple(row: ShownRow) -> ShownRow:
    """A row that sequence parallelism cannot share out."""
    multiples = replace(row.rules.multiples, row=row.num_slots - 4)
    return replace(row, rules=replace(row.rules, multiples=multiples, budget=None))


def wrong_lengths(row: ShownRow) -> ShownRow:
    first, *rest = row.batch.lengths
    return with_batch(row, lengths=(first - 1, *rest))


class ShortBound(PackedBatch):
    """A row that promises shorter segments than it has."""

    @property
    def max_seqlen(self) -> int:
        """One too few."""
        return max(self.segment_lengths) - 1


def short_bound(row: ShownRow) -> ShownRow:
    values = {field.name: getattr(row.batch, field.name) for field in fields(row.batch)}
    return replace(row, batch=ShortBound(**values))


def wrong_host_lengths(row: ShownRow) -> ShownRow:
    first, second, *rest = row.batch.segment_lengths
    batch = replace(row.batch, segment_lengths=(first + 4, second - 4, *rest))
    return replace(row, batch=batch)


def mask_apart(row: ShownRow) -> ShownRow:
    slot = int(row.batch.label_positions[0])
    mask = row.batch.loss_mask.clone()
    mask[0, slot] = False
    return replace(row, batch=replace(row.batch, loss_mask=mask))


def mask_and_list_apart(row: ShownRow) -> ShownRow:
    """They agree with one another, and not with the labels."""
    mask = row.batch.loss_mask.clone()
    mask[0, int(row.batch.label_positions[0])] = False
    listed = row.batch.label_positions[1:]
    return replace(row, batch=replace(row.batch, loss_mask=mask, label_positions=listed))


def stale_label_positions(row: ShownRow) -> ShownRow:
    return with_batch(row, label_positions=row.batch.label_positions[1:])


def wrong_fill(row: ShownRow) -> ShownRow:
    segment = next(s for s in row.segments if s.slots > s.length > 0)
    slot = segment.start + segment.length
    return with_batch(row, input_ids=changed(row.batch.input_ids, (0, slot), 3))


def lost_placeholder(row: ShownRow) -> ShownRow:
    slot = int(row.batch.media_positions[1])
    return with_batch(row, input_ids=changed(row.batch.input_ids, (0, slot), 3))


def shifted_media(row: ShownRow) -> ShownRow:
    return with_batch(row, media_positions=row.batch.media_positions + 1)


def lost_patches(row: ShownRow) -> ShownRow:
    media = row.batch.media
    assert media is not None
    return with_batch(row, media=replace(media, pixel_values=media.pixel_values[:-4]))


def with_media(row: ShownRow, **fields: Any) -> ShownRow:
    media = row.batch.media
    assert media is not None
    return with_batch(row, media=replace(media, **fields))


def swapped_images(row: ShownRow) -> ShownRow:
    """The last image's patches come first: as many, in another order."""
    assert row.batch.media is not None
    t, h, w = row.batch.media.grid_thw[0]
    return with_media(row, pixel_values=row.batch.media.pixel_values.roll(t * h * w, 0))


def one_pixel(row: ShownRow) -> ShownRow:
    assert row.batch.media is not None
    pixels = row.batch.media.pixel_values.clone()
    pixels[-1, -1] += 1e-3
    return with_media(row, pixel_values=pixels)


def wrong_grid(row: ShownRow) -> ShownRow:
    """Height and width changed places: as many patches and tokens."""
    assert row.batch.media is not None
    grids = row.batch.media.grid_thw
    place = next(n for n, (_, h, w) in enumerate(grids) if h != w)
    turned = (grids[place][0], grids[place][2], grids[place][1])
    return with_media(row, grid_thw=(*grids[:place], turned, *grids[place + 1 :]))


def lost_images(row: ShownRow) -> ShownRow:
    return with_batch(row, media=None)


def wrong_token(row: ShownRow) -> ShownRow:
    """One that is no label and stands for no image."""
    return with_batch(row, input_ids=changed(row.batch.input_ids, (0, 0), 3))


def short_row(row: ShownRow) -> ShownRow:
    """The slots of the last sample and the tail are not there."""
    cut = row.starts[-1]
    batch = row.batch
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    return replace(
        row, batch=replace(batch, **{name: getattr(batch, name)[..., :cut] for name in names})
    )


def another_order(row: ShownRow) -> ShownRow:
    keys = row.batch.keys
    return with_batch(row, keys=(keys[1], keys[0], *keys[2:]))


def sample_twice(row: ShownRow) -> ShownRow:
    return replace(row, planned=(*row.planned, row.planned[0]))


def over_budget(row: ShownRow) -> ShownRow:
    assert row.rules.budget is not None
    budget = replace(row.rules.budget, max_tokens=row.num_slots - 8)
    return replace(row, rules=replace(row.rules, budget=budget))


def over_samples(row: ShownRow) -> ShownRow:
    assert row.rules.budget is not None
    budget = replace(row.rules.budget, max_sequences=len(row.alone) - 1)
    return replace(row, rules=replace(row.rules, budget=budget))


def slices(row: ShownRow, indices: list[torch.Tensor]) -> ShownRow:
    assert not isinstance(row.slices, str)
    labels = row.batch.labels.flatten()
    parts = []
    for part, index in zip(row.slices, indices, strict=True):
        places = (labels[index] != IGNORE_INDEX).nonzero().squeeze(1)
        targets = labels[index][places]
        parts.append(replace(part, row_index=index, label_positions=places, targets=targets))
    return replace(row, slices=tuple(parts))


def zigzag_over_the_row(row: ShownRow) -> ShownRow:
    """Chunks of the whole row instead of each segment's: all tokens are held, wrongly."""
    quarters = torch.arange(row.num_slots).chunk(4)
    return slices(
        row, [torch.cat([quarters[0], quarters[3]]), torch.cat([quarters[1], quarters[2]])]
    )


def token_on_two_ranks(row: ShownRow) -> ShownRow:
    assert not isinstance(row.slices, str)
    first, second = (part.row_index.clone() for part in row.slices)
    second[0] = first[0]
    return slices(row, [first, second])


def lost_target(row: ShownRow) -> ShownRow:
    assert not isinstance(row.slices, str)
    first, *rest = row.slices
    short = replace(first, label_positions=first.label_positions[1:], targets=first.targets[1:])
    return replace(row, slices=(short, *rest))


BREAKS: list[tuple[Callable[[ShownRow], ShownRow], set[str]]] = [
    (leaking_label, {LABELS}),
    (label_in_a_gap, {LABELS, PADDING}),
    (wrong_label, {LABELS}),
    (lost_label, {LABELS}),
    (label_of_the_encoder, {LABELS}),
    (positions_of_the_whole_row, {POSITIONS}),
    (one_axis_for_all, {POSITIONS}),
    (one_axis, {POSITIONS}),
    (positions_from_one, {POSITIONS}),
    (moved_boundary, {BOUNDARIES}),
    (one_segment, {BOUNDARIES}),
    (wrong_logical, {BOUNDARIES}),
    (wrong_lengths, {BOUNDARIES}),
    (moved_by_the_alignment, {BOUNDARIES, CONTEXT}),
    (boundaries_that_turn_back, {BOUNDARIES, CONTEXT}),
    (short_host_lengths, {BOUNDARIES}),
    (wrong_multiple, {BOUNDARIES}),
    (short_bound, {BOUNDARIES}),
    (wrong_host_lengths, {BOUNDARIES}),
    (mask_apart, {LABELS}),
    (mask_and_list_apart, {LABELS}),
    (stale_label_positions, {LABELS}),
    (wrong_fill, {PADDING}),
    (shifted_media, {IMAGES}),
    (lost_patches, {IMAGES}),
    (swapped_images, {IMAGES}),
    (one_pixel, {IMAGES}),
    (wrong_grid, {IMAGES}),
    (lost_images, {IMAGES}),
    (lost_placeholder, {SAMPLES, IMAGES}),
    (another_order, {SAMPLES}),
    (wrong_token, {SAMPLES}),
    (short_row, {SAMPLES, BOUNDARIES, LABELS, PADDING, POSITIONS, IMAGES, CONTEXT}),
    (sample_twice, {SAMPLES}),
    (over_budget, {BUDGET}),
    (over_samples, {BUDGET}),
    (zigzag_over_the_row, {CONTEXT}),
    (token_on_two_ranks, {CONTEXT}),
    (lost_target, {CONTEXT}),
]


def test_a_right_row_passes_every_check(row: ShownRow) -> None:
    checks = check_row(row)
    assert {check.name for check in checks} == ALL and not any(check.fails for check in checks)
    assert len(row.alone) >= 3 and row.batch.cu_seqlens_padded is not None


@pytest.mark.parametrize(("broken", "expected"), BREAKS, ids=lambda v: getattr(v, "__name__", ""))
def test_each_break_shows_its_cross(
    row: ShownRow, broken: Callable[[ShownRow], ShownRow], expected: set[str]
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


def test_a_leak_into_the_next_sample_is_called_one(row: ShownRow) -> None:
    found = next(check for check in check_row(leaking_label(row)) if check.fails)
    key, last = row.alone[0].key, row.batch.lengths[0] - 1
    assert found.detail == f"slot {last}, the last of {key}, learns a token that is not its own"


@pytest.mark.parametrize(
    "broken", [lost_patches, lost_placeholder, shifted_media, moved_boundary, wrong_host_lengths]
)
def test_a_broken_batch_can_still_be_shown(
    opened_row: Any, broken: Callable[[ShownRow], ShownRow]
) -> None:
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
    shown = view_row(loaded, [None] * len(names), encoder, "it")
    drawn = replace(row, shown=shown, batch=batch, slices=cut_row(batch, 2))
    checks = check_row(drawn)
    assert any(check.fails for check in checks)
    assert "&#10007;" in render_page(drawn, checks, encoder, "r")


def said_by_verify(
    row: ShownRow, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> set[tuple[str, str]]:
    """What `vlmpack verify` says of the row before its engine runs."""
    own = {item.name: getattr(row, item.name) for item in fields(Row)}
    verified = VerifiedRow(**own, samples=row.alone, numbers=tuple(range(len(row.alone))))
    monkeypatch.setattr(
        verify_run, "build_verified_engine", lambda *_: SimpleNamespace(description={})
    )
    monkeypatch.setattr(verify_run, "verify_rows", lambda *_, **__: [])
    reference: Any = SimpleNamespace(positions=row.positions, positions_of=row.counted_by)
    spec: Any = SimpleNamespace(
        encoder=encoder, ranks=single_rank(), policy=SimpleNamespace(optim=None)
    )
    collator = PackCollator(pad_token_id=0, num_position_axes=3)
    checks, _ = verify_run.verify_layout(spec, collator, [verified], reference)
    return {(check.name, check.sentence) for check in checks if check.fails}


def crosses(output: str) -> set[tuple[str, str]]:
    lines = [line[2:] for line in output.splitlines() if line.startswith("\u2717 ")]
    return {(line.partition(": ")[0], line.partition(": ")[2]) for line in lines}


@pytest.mark.cases(
    quick=("leaking_label", "positions_of_the_whole_row", "wrong_lengths"),
    slow=("moved_boundary", "one_axis", "lost_label"),
)
@pytest.mark.parametrize("broken", [broken for broken, _ in BREAKS], ids=lambda v: v.__name__)
def test_every_command_says_the_same_of_a_fault(
    opened_row: Any,
    broken: Callable[[ShownRow], ShownRow],
    inspect_recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    row, found, encoder = opened_row
    wrong = broken(row)
    shared = {(check.name, check.sentence) for check in check_row(wrong) if check.fails}
    assert shared and said_by_verify(wrong, encoder, monkeypatch) == shared
    monkeypatch.setattr(opening, "open_row", lambda *_, **__: (wrong, found, encoder))
    monkeypatch.setattr(opening, "load_row", lambda *_: wrong)
    asked = ["inspect", inspect_recipe, "--row", 0, "-o", tmp_path]
    inspected = CliRunner().invoke(app, [*map(str, asked)])
    assert inspected.exit_code == 1 and crosses(inspected.output) == shared
    asked = ["data", "show", inspect_recipe, "--batch", 0, "--row", 0]
    assert crosses(CliRunner().invoke(app, [*map(str, asked)]).output) == shared
    page = unescape((tmp_path / f"{found.stem}.html").read_text())
    assert all(f"<b>{name}</b><span>{said}</span>" in page for name, said in shared)


def test_every_check_has_a_control() -> None:
    assert set().union(*(expected for _, expected in BREAKS)) == ALL


def test_a_row_that_cannot_be_cut_says_so(row: ShownRow) -> None:
    rules = replace(row.rules, context=8, multiples=Alignment(16, 16))
    whole = replace(row, rules=rules, slices=cut_row(row.batch, 8))
    assert isinstance(whole.slices, str)
    found = {check.name: check for check in check_row(whole) if check.fails}
    assert "2 * CP = 16" in found["CP 8 slices"].detail
    assert whole.ranks() is None


def test_repeated_last_boundaries_are_no_fault(row: ShownRow) -> None:
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
