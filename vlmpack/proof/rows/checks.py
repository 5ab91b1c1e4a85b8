"""What must hold of a row, recomputed from its tensors without the collator's code.

The reference is each sample encoded alone, and plain loops over Python integers. A check that fails
says where it failed first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from vlmpack.proof.rows.findings import NO_LOSS, Broken, many
from vlmpack.proof.rows.row import Row
from vlmpack.proof.rows.slices_check import check_slices


@dataclass(frozen=True, slots=True)
class Check:
    """One property of a row.

    Args:
        name: what is checked.
        holds: whether it does.
        detail: the figures that show it; what was found first where it does not hold.
    """

    name: str
    holds: bool
    detail: str


def check_row(row: Row) -> list[Check]:
    """All checks that apply to a row.

    Args:
        row: packed, or padded rows.
    """
    checks: list[tuple[str, Callable[[Row], str]]] = [
        ("every sample whole, once", _samples),
        ("labels stay in their sample", _labels),
        ("positions restart at each sample", _positions),
        ("boundaries divide as they must", _boundaries),
        ("loss mask is the labels", _loss_mask),
        ("padding learns nothing", _padding),
    ]
    if row.batch.media is not None or any(item.media is not None for item in row.alone):
        checks.append(("images fill their places", _images))
    if row.rules.budget is not None:
        checks.append(("inside the budget", _budget))
    if row.rules.context > 1:
        checks.append((f"CP {row.rules.context} holds each token once", check_slices))
    return [_run(row, name, check) for name, check in checks]


def _run(row: Row, name: str, check: Callable[[Row], str]) -> Check:
    try:
        return Check(name, True, check(row))
    except Broken as found:
        return Check(name, False, str(found))


def _starts(row: Row) -> list[tuple[str, int, int]]:
    """(key, first slot, length when encoded alone) of each sample that should be in the row."""
    starts = row.boundaries
    if len(starts) <= len(row.alone):
        raise Broken(f"{len(row.alone)} samples, but {len(starts)} boundaries")
    return [
        (item.key, start, len(item.input_ids))
        for item, start in zip(row.alone, starts, strict=False)
    ]


def _owners(row: Row) -> list[int]:
    """For each slot, the sample that it belongs to, or -1."""
    owner = [-1] * row.num_slots
    for number, (key, start, length) in enumerate(_starts(row)):
        for slot in range(start, start + length):
            if not 0 <= slot < len(owner) or owner[slot] != -1:
                raise Broken(f"{key} at slots {start} to {start + length - 1} is not alone there")
            owner[slot] = number
    return owner


def _samples(row: Row) -> str:
    holes = [hole.key for hole in row.shown.holes]
    keys = list(row.batch.keys)
    if sorted([*keys, *holes]) != sorted(row.planned):
        raise Broken(f"planned are {_some(row.planned)}; the row holds {_some(keys)}")
    if holes and not keys:
        raise Broken(f"none of the {many(len(holes), 'planned sample')} could be used")
    ids = row.batch.input_ids.flatten().tolist()
    for place, ((key, start, length), alone) in enumerate(
        zip(_starts(row), row.alone, strict=True)
    ):
        if keys[place] != key:
            raise Broken(f"segment {place} is named {keys[place]}, but comes from {key}")
        if ids[start : start + length] != alone.input_ids.tolist():
            raise Broken(f"{key}: its slots do not hold the tokens it has alone")
    missing = f"; {len(holes)} left out as bad" if holes else ""
    return f"{many(len(keys), 'sample')} with the tokens of each alone{missing}"


def _labels(row: Row) -> str:
    ids = row.batch.input_ids.flatten().tolist()
    labels = row.batch.labels.flatten().tolist()
    owner = [*_owners(row), -1]
    count = 0
    for slot, label in enumerate(labels):
        if label == NO_LOSS:
            continue
        count += 1
        if owner[slot] == -1:
            raise Broken(f"slot {slot} has the label {label}, but belongs to no sample")
        key = row.alone[owner[slot]].key
        if owner[slot + 1] != owner[slot]:
            raise Broken(f"slot {slot}, the last of {key}, learns a token that is not its own")
        if ids[slot + 1] != label:
            raise Broken(f"slot {slot} of {key} learns {label}; its next token is {ids[slot + 1]}")
    for (key, start, length), alone in zip(_starts(row), row.alone, strict=True):
        if labels[start : start + length] != alone.labels.tolist():
            raise Broken(f"{key}: its labels are not those it has alone")
    return f"{many(count, 'label')}, each the next token of its own sample"


def _positions(row: Row) -> str:
    axes = row.batch.position_ids.flatten(1).tolist()
    for (key, start, length), positions in zip(_starts(row), row.positions, strict=True):
        wanted = positions.tolist()
        if len(wanted) != len(axes):
            raise Broken(f"{len(axes)} axes; {key} alone has {len(wanted)}")
        for axis, (found, own) in enumerate(zip(axes, wanted, strict=True)):
            part = found[start : start + length]
            if part[:1] != [0]:
                raise Broken(f"{key} begins at position {part[:1]} on axis {axis}, not at 0")
            if part != own:
                slot = next(i for i, pair in enumerate(zip(part, own, strict=False)) if _ne(pair))
                raise Broken(
                    f"slot {start + slot} of {key}: position {part[slot]} on axis {axis}, alone it "
                    f"has {own[slot]}"
                )
    count = "1 axis" if len(axes) == 1 else f"{len(axes)} axes"
    return f"{count}, from 0 in each sample, as its family counts them alone"


def _ne(pair: tuple[int, int]) -> bool:
    return pair[0] != pair[1]


def _boundaries(row: Row) -> str:
    physical, logical = row.boundaries, row.batch.cu_seqlens.tolist()
    multiple, total = row.rules.multiples.sequence, row.rules.multiples.row
    if physical[0] != 0 or physical[-1] != row.num_slots:
        raise Broken(f"they run from {physical[0]} to {physical[-1]}, the row has {row.num_slots}")
    for place, (start, end) in enumerate(pairwise(physical)):
        if end < start:
            raise Broken(f"segment {place} ends at {end}, before its start {start}")
        if end % multiple:
            raise Broken(f"boundary {end} is no multiple of {multiple}{_why(row)}")
    if row.num_slots % total:
        raise Broken(f"the row has {row.num_slots} slots, no multiple of {total}")
    if not row.is_padded:
        _logical(row, logical)
    lengths = [end - start for start, end in pairwise(physical)]
    if list(row.batch.segment_lengths) != lengths[: len(row.batch.segment_lengths)]:
        raise Broken("segment_lengths are not the differences of the boundaries")
    if any(lengths[len(row.batch.segment_lengths) :]):
        raise Broken("segment_lengths stop before the row does")
    return f"{len(physical)} of them, all multiples of {multiple}{_why(row)}, 0 to {physical[-1]:,}"


def _why(row: Row) -> str:
    return f" (2 x CP {row.rules.context})" if row.rules.context > 1 else ""


def _logical(row: Row, logical: list[int]) -> None:
    for (key, _, length), begin, end in zip(_starts(row), logical, logical[1:], strict=False):
        if end - begin != length:
            raise Broken(f"cu_seqlens gives {key} {end - begin} tokens, it has {length}")
    gaps = [
        (key, end - start - length)
        for (key, start, length), end in zip(_starts(row), row.boundaries[1:], strict=False)
    ]
    for key, gap in gaps:
        if not 0 <= gap < row.rules.multiples.sequence:
            raise Broken(f"{key} is followed by {gap} slots of alignment")
    repeats = row.batch.cu_seqlens_padded is not None and logical == row.boundaries
    if repeats and not row.batch.fixed_shape:  # rows of one shape have it all or none
        raise Broken("cu_seqlens_padded repeats cu_seqlens: kernels take a slower path for it")


def _loss_mask(row: Row) -> str:
    mask = row.batch.loss_mask.flatten().tolist()
    labels = row.batch.labels.flatten().tolist()
    for slot, (learns, label) in enumerate(zip(mask, labels, strict=True)):
        if bool(learns) != (label != NO_LOSS):
            raise Broken(f"slot {slot}: loss_mask is {learns}, the label {label}")
    listed = row.batch.label_positions.tolist()
    if listed != [slot for slot, learns in enumerate(mask) if learns]:
        raise Broken("label_positions are not the slots of loss_mask")
    return f"loss_mask == (labels != {NO_LOSS}) in all {len(mask):,} slots"


def _padding(row: Row) -> str:
    ids, labels = row.batch.input_ids.flatten().tolist(), row.batch.labels.flatten().tolist()
    free = [slot for slot, number in enumerate(_owners(row)) if number == -1]
    for slot in free:
        if ids[slot] != row.rules.pad_token_id or labels[slot] != NO_LOSS:
            raise Broken(f"slot {slot} of no sample: token {ids[slot]}, label {labels[slot]}")
    return f"{len(free):,} of {row.num_slots:,} slots, all of them the fill token without loss"


def _images(row: Row) -> str:
    ids = row.batch.input_ids.flatten().tolist()
    found = [slot for slot, token in enumerate(ids) if token == row.rules.placeholder_id]
    media = row.batch.media
    features = sum(media.num_tokens) if media is not None else 0
    if len(found) != features:
        raise Broken(f"{len(found)} placeholders, but the images give {features} features")
    if row.batch.media_positions.tolist() != found:
        raise Broken("media_positions are not the slots of the placeholders")
    owner = _owners(row)
    counts = [0] * len(row.alone)
    for slot in found:
        if owner[slot] == -1:
            raise Broken(f"slot {slot} is a placeholder of no sample")
        counts[owner[slot]] += 1
    for item, count in zip(row.alone, counts, strict=True):
        own = sum(item.media.num_tokens) if item.media is not None else 0
        if own != count:
            raise Broken(f"{item.key} has {count} placeholders, its images give {own} features")
    grids = media.grid_thw if media is not None else ()
    patches = sum(t * h * w for t, h, w in grids)
    rows = int(media.pixel_values.shape[0]) if media is not None else 0
    if patches != rows:
        raise Broken(f"pixel_values has {rows} patches, the grids {patches}")
    return f"{many(features, 'placeholder')} and as many features of {many(len(grids), 'image')}"


def _budget(row: Row) -> str:
    budget = row.rules.budget
    assert budget is not None
    patches = 0 if row.batch.media is None else int(row.batch.media.pixel_values.shape[0])
    # The tail may round a full row up to a multiple of its own.
    most = -(-budget.max_tokens // row.rules.multiples.row) * row.rules.multiples.row
    bounds = (
        ("tokens", row.num_slots, most),
        ("vision patches", patches, budget.max_patches),
        ("samples", len(row.alone), budget.max_sequences),
    )
    for name, found, bound in bounds:
        if bound is not None and found > bound:
            raise Broken(f"{found:,} {name}, allowed are {bound:,}")
    return ", ".join(f"{found:,} of {bound:,} {name}" for name, found, bound in bounds if bound)


def _some(keys: tuple[str, ...] | list[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
