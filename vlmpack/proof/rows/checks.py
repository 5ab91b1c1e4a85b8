"""What must hold of a row, recomputed from its tensors without the collator's code.

The row is compared with each sample encoded alone, by plain loops over Python integers. A failed
check names the first place. Every command that judges rows uses these checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from vlmpack.packing import PackedBatch
from vlmpack.proof.measure import Check
from vlmpack.proof.rows.row import (
    BOUNDARIES,
    COLLATOR,
    NO_LOSS,
    Broken,
    Counts,
    Row,
    RowRules,
    check_prefixes,
    free_slots,
    owners_of,
    without_prefixes,
)
from vlmpack.words import counted, some_of


def check_row(row: Row) -> list[Check]:
    """All checks that apply to a row, packed or padded."""
    return check_rows([row])


def check_rows(rows: Sequence[Row]) -> list[Check]:
    """All checks that apply to some rows of the same rules; each is of all rows."""
    rules, size = rows[0].rules, rows[0].rules.context
    checks: list[tuple[str, Callable[[Row], Counts], Callable[..., str]]] = [
        ("samples", _samples, _say_samples),
        ("boundaries", _boundaries, lambda *counts: _say_boundaries(rules, *counts)),
        ("labels and loss mask", _labels, lambda count: _LABELS.format(counted(count, "label"))),
        ("positions", _positions, lambda _: _say_positions(rows[0])),
        ("padding", _padding, _say_padding),
    ]
    if any(row.batch.media is not None or _has_images(row) for row in rows):
        checks.append(("pixels in order", _images, _say_images))
    if any(isinstance(row.batch, PackedBatch) and row.batch.prefix_tree for row in rows):
        checks.append(("shared prefixes", check_prefixes, _say_prefixes))
    if rules.budget is not None:
        checks.append(("budget", _budget, lambda *counts: _say_budget(rules, *counts)))
    if size > 1:
        said = "{:,} slots on each of {} ranks, zigzag in every segment"
        checks.append((f"CP {size} slices", check_slices, lambda n: said.format(n, size)))
    return [_run(rows, *check) for check in checks]


def _run(
    rows: Sequence[Row], name: str, check: Callable[[Row], Counts], say: Callable[..., str]
) -> Check:
    try:
        as_it_is = check in (_boundaries, _padding, _images, _budget, check_prefixes)
        counts = [check(row if as_it_is else without_prefixes(row)) for row in rows]
    except Broken as found:
        return Check(name=name, status="fail", detail=str(found), look_at=found.look_at)
    detail = say(*map(sum, zip(*counts, strict=True)))
    return Check(name=name, status="pass", detail=detail)


def _say_prefixes(count: int, tokens: int) -> str:
    return (
        f"{counted(count, 'segment')} of several samples, {tokens:,} tokens not "
        "repeated; labels in branches alone"
    )


def _samples(row: Row) -> Counts:
    keys = list(row.batch.keys)
    if sorted([*keys, *row.left_out]) != sorted(row.planned):
        raise Broken(f"planned are {some_of(row.planned)}; the row holds {some_of(keys)}", COLLATOR)
    if row.left_out and not keys:
        raise Broken(f"none of the {counted(len(row.left_out), 'planned sample')} could be used")
    ids = row.batch.input_ids.flatten().tolist()
    if len(row.alone) != len(keys) * row.sequences:
        raise Broken(f"{len(keys)} samples are named, {len(row.alone)} sequences are there")
    for place, (item, start) in enumerate(zip(row.alone, row.starts, strict=True)):
        name = keys[place // row.sequences]
        if name != item.key:
            raise Broken(f"sequence {place} is named {name}, but is of {item.key}", COLLATOR)
        if ids[start : start + item.length] != item.input_ids.tolist():
            raise Broken(
                f"{item.key}: slots {start} to {start + item.length - 1} do not hold the tokens "
                "it has alone",
                COLLATOR,
            )
    return len(keys), len(row.left_out), len(row.alone) if row.sequences > 1 else 0


def _say_samples(count: int, left_out: int, sequences: int) -> str:
    missing = f"; {left_out} left out as bad" if left_out else ""
    if sequences:
        return f"{counted(count, 'pair')} with the tokens of each answer alone{missing}"
    return f"{counted(count, 'sample')} with the tokens of each alone{missing}"


def _labels(row: Row) -> Counts:
    batch = row.batch
    ids, labels = batch.input_ids.flatten().tolist(), batch.labels.flatten().tolist()
    alone = [item.labels.tolist() for item in row.alone]
    owners, starts, count = owners_of(row), row.starts, 0
    for slot, label in enumerate(labels):
        owner = owners[slot]
        if owner == -1:
            if label != NO_LOSS:
                raise Broken(f"slot {slot} of no sample learns {label}", COLLATOR)
            continue
        item = row.alone[owner]
        own = alone[owner][slot - starts[owner]]
        if label != NO_LOSS:
            look_at = "the encoder" if label == own else "labels, shifted inside each sample alone"
            if owners[slot + 1] != owner:
                raise Broken(
                    f"slot {slot}, the last of {item.key}, learns a token that is not its own",
                    look_at,
                )
            if ids[slot + 1] != label:
                raise Broken(
                    f"slot {slot} of {item.key} learns {label}; its next token is {ids[slot + 1]}",
                    look_at,
                )
            count += 1
        if label != own:
            raise Broken(
                f"slot {slot} of {item.key} has the label {label}, alone it has {own}", COLLATOR
            )
    mask = batch.loss_mask.flatten().tolist()
    for slot, (learns, label) in enumerate(zip(mask, labels, strict=True)):
        if bool(learns) != (label != NO_LOSS):
            raise Broken(f"slot {slot}: loss_mask is {learns}, the label {label}", COLLATOR)
    if batch.label_positions.tolist() != [slot for slot, learns in enumerate(mask) if learns]:
        raise Broken("label_positions are not the slots of loss_mask", COLLATOR)
    return (count,)


_LABELS = "{}, each the next token of its own sample; loss_mask is where they are"


def _positions(row: Row) -> Counts:
    look_at = f"positions, counted for each sample alone as by {row.counted_by}"
    axes = row.batch.position_ids.flatten(1).tolist()
    for item, start, positions in zip(row.alone, row.starts, row.positions, strict=True):
        if len(positions) != len(axes):
            raise Broken(f"{len(axes)} axes; {item.key} alone has {len(positions)}", look_at)
        for axis, (row_has, own) in enumerate(zip(axes, positions.tolist(), strict=True)):
            found = row_has[start : start + item.length]
            if found[:1] != [0]:
                first = next(iter(found), None)
                raise Broken(f"{item.key} begins at {first} on axis {axis}, not at 0", look_at)
            for slot, (has, wants) in enumerate(zip(found, own, strict=False), start=start):
                if has != wants:
                    raise Broken(
                        f"slot {slot} of {item.key}: {has} on axis {axis}, alone it has {wants}",
                        look_at,
                    )
    return (len(axes),)


def _say_positions(row: Row) -> str:
    axes = row.batch.position_ids.flatten(1).shape[0]
    return f"{counted(axes, 'axis', 'axes')} from 0 in each sample, equal to {row.counted_by}"


def _boundaries(row: Row) -> Counts:
    """The number of boundaries and the slots between them, in the row and without sharing."""
    apart = without_prefixes(row)
    _check_boundaries(apart)
    return len(row.boundaries), row.num_slots, len(apart.boundaries), apart.num_slots


def _check_boundaries(row: Row) -> None:
    physical, rules = row.boundaries, row.rules
    multiple = rules.multiples.sequence
    if physical[0] != 0 or physical[-1] != row.num_slots:
        raise Broken(
            f"they run from {physical[0]} to {physical[-1]}, the row has {row.num_slots} slots",
            BOUNDARIES,
        )
    for place, (start, end) in enumerate(pairwise(physical)):
        if end < start:
            raise Broken(f"segment {place} ends at {end}, before its start {start}", BOUNDARIES)
        if end % multiple:
            raise Broken(f"boundary {end} is no multiple of {multiple}{_why(rules)}", BOUNDARIES)
    if row.num_slots % rules.multiples.row:
        raise Broken(
            f"the row has {row.num_slots} slots, no multiple of {rules.multiples.row}", BOUNDARIES
        )
    for place, (item, start, end) in enumerate(zip(row.alone, row.starts, row.ends, strict=True)):
        if physical[place : place + 2] != [start, end]:
            raise Broken(
                f"segment {place}, {item.key}, lies in {physical[place : place + 2]}, its length "
                f"puts it at {[start, end]}",
                BOUNDARIES,
            )
    _lengths(row, physical)


def _lengths(row: Row, physical: list[int]) -> None:
    """The lengths of samples and of segments, in each form that states them."""
    params = row.flat.packed_seq_params()
    logical = params.cu_seqlens_q.tolist()
    lengths = [item.length for item in row.alone]
    if list(row.batch.lengths) != lengths:
        raise Broken(f"the row says lengths {row.batch.lengths}, the samples have {lengths}")
    if not row.is_padded:
        for item, start, end in zip(row.alone, logical, logical[1:], strict=False):
            if end - start != item.length:
                raise Broken(
                    f"cu_seqlens gives {item.key} {end - start} tokens, it has {item.length}",
                    BOUNDARIES,
                )
        if logical[: len(lengths) + 1] != [0, *accumulate(lengths)]:
            raise Broken(f"cu_seqlens begins at {logical[0]}, not at 0", BOUNDARIES)
        repeats = params.cu_seqlens_q_padded is not None and logical == physical
        if repeats and not row.flat.fixed_shape:  # rows of one shape have it all or none
            raise Broken("cu_seqlens_padded repeats cu_seqlens: kernels take a slower path for it")
    slots = [end - start for start, end in pairwise(physical)]
    stated = list(params.segment_lengths)
    if stated != slots[: len(stated)]:
        raise Broken("segment_lengths are not the differences of the boundaries", BOUNDARIES)
    if any(slots[len(stated) :]):
        raise Broken("segment_lengths stop before the row does", BOUNDARIES)
    if params.max_seqlen_q < max(slots):
        raise Broken(f"max_seqlen is {params.max_seqlen_q}, a segment has {max(slots)} slots")


def _why(rules: RowRules) -> str:
    return f" (2 x CP {rules.context})" if rules.context > 1 else ""


def _say_boundaries(rules: RowRules, *counts: int) -> str:
    multiple = rules.multiples.sequence
    also = f", all multiples of {multiple}{_why(rules)}" if multiple > 1 else ""

    def amount(count: int, slots: int) -> str:
        return f"{count} of them over {slots:,} slots"

    return f"{amount(*counts[:2])}, as the samples' lengths say{also}{_unshared(amount, counts)}"


def _unshared(amount: Callable[..., str], counts: Counts) -> str:
    """What a row would have if it shared nothing, where it does."""
    half = len(counts) // 2
    apart = counts[half:]
    return f"; with nothing shared {amount(*apart)}" if apart != counts[:half] else ""


def _padding(row: Row) -> Counts:
    """Padding slots and all slots, of the row and without sharing."""
    ids, labels = row.batch.input_ids.flatten().tolist(), row.batch.labels.flatten().tolist()
    free, apart = free_slots(row), without_prefixes(row)
    for slot in free:
        if ids[slot] != row.rules.pad_token_id or labels[slot] != NO_LOSS:
            raise Broken(
                f"slot {slot} of no sample: token {ids[slot]}, label {labels[slot]}", COLLATOR
            )
    return len(free), row.num_slots, len(free_slots(apart)), apart.num_slots


def _say_padding(*counts: int) -> str:
    def amount(free: int, slots: int) -> str:
        return f"{free:,} of {slots:,} slots"

    said = f"{amount(*counts[:2])}, all of them the fill token without loss"
    return said + _unshared(amount, counts)


def _has_images(row: Row) -> bool:
    return any(item.media is not None for item in row.alone)


def _images(row: Row) -> Counts:
    """Images and placeholders, of the row and without sharing."""
    apart, media = check_images(without_prefixes(row)), row.batch.media
    images = media.num_images if media is not None else 0
    return images, int(row.batch.media_positions.shape[0]), *apart


def _say_images(*counts: int) -> str:
    def amount(images: int, features: int) -> str:
        return f"{counted(images, 'image')} in {counted(features, 'placeholder')}"

    images, features = counts[:2]
    said = f"{counted(images, 'image')}, bit by bit, in {counted(features, 'placeholder')}"
    return said + _unshared(amount, counts)


def _budget(row: Row) -> Counts:
    media = row.batch.media
    patches = int(media.pixel_values.shape[0]) if media else 0
    counts = (row.num_slots, patches, len(row.alone) // row.sequences)
    for (name, bound), count in zip(_bounds(row.rules), counts, strict=True):
        if bound is not None and count > bound:
            raise Broken(f"{count:,} {name}, allowed are {bound:,}", "the planner")
    return counts


def _bounds(rules: RowRules) -> tuple[tuple[str, int | None], ...]:
    budget = rules.budget
    assert budget is not None
    # The tail may round a full row up to a multiple of its own.
    most = -(-budget.max_tokens // rules.multiples.row) * rules.multiples.row
    return (
        ("tokens", most),
        ("vision patches", budget.max_patches),
        ("samples", budget.max_sequences),
    )


def _say_budget(rules: RowRules, *counts: int) -> str:
    bounds = zip(_bounds(rules), counts, strict=True)
    return ", ".join(f"{count:,} of {bound:,} {name}" for (name, bound), count in bounds if bound)


def check_images(row: Row) -> Counts:
    """Check that each sample's images fill its places, and are its own, in order and bit by bit.

    Raises:
        Broken: what does not hold.
    """
    media, ids = row.batch.media, row.batch.input_ids.flatten().tolist()
    slots = [slot for slot, token in enumerate(ids) if token in row.rules.placeholder_ids]
    own = sum(media.num_tokens) if media is not None else 0
    features = own * row.sequences  # each sequence of a pair shows all of its images
    if len(slots) != features:
        raise Broken(
            f"{len(slots)} placeholders, but the images give {features} features", COLLATOR
        )
    if row.batch.media_positions.tolist() != slots:
        raise Broken("media_positions are not the slots of the placeholders", COLLATOR)
    owners = owners_of(row)
    counts = Counter(owners[slot] for slot in slots)
    if counts[-1]:
        slot = next(slot for slot in slots if owners[slot] == -1)
        raise Broken(f"slot {slot} is a placeholder of no sample", COLLATOR)
    for number, item in enumerate(row.alone):
        own = sum(item.media.num_tokens) if item.media is not None else 0
        if own != counts[number]:
            raise Broken(
                f"{item.key} has {counts[number]} placeholders, its images give {own} features",
                COLLATOR,
            )
    _sources(row)
    return _pixels(row), features


def _sources(row: Row) -> None:
    """Both sequences of a pair get the features of its own images, in order."""
    sources = row.batch.media_sources
    expected: list[int] = []
    first = 0
    for item in row.alone[:: row.sequences]:
        count = sum(item.media.num_tokens) if item.media is not None else 0
        expected += [*range(first, first + count)] * row.sequences
        first += count
    numbers = [*range(first)] if sources is None else sources.tolist()
    if numbers != expected:
        place = next(
            (
                at
                for at, pair in enumerate(zip(numbers, expected, strict=False))
                if len({*pair}) > 1
            ),
            min(len(numbers), len(expected)),
        )
        raise Broken(f"placeholder {place} does not get the feature of its own image", COLLATOR)


def _pixels(row: Row) -> int:
    """The row's images are those of its samples, in their order and bit by bit; how many."""
    media = row.batch.media
    if media is None:
        return 0
    order = "the order in which the collator concatenates images"
    rows = int(media.pixel_values.shape[0])
    if rows != (patches := sum(t * h * w for t, h, w in media.grid_thw)):
        raise Broken(f"pixel_values has {rows} patches, the grids {patches}", order)
    patch = image = 0
    for item in row.alone[:: row.sequences]:
        if (own := item.media) is None:
            continue
        stop, after = patch + int(own.pixel_values.shape[0]), image + own.num_images
        if (
            not torch.equal(media.pixel_values[patch:stop], own.pixel_values)
            or media.grid_thw[image:after] != own.grid_thw
            or media.num_tokens[image:after] != own.num_tokens
        ):
            raise Broken(
                f"{item.key}: the row's patches {patch} to {stop - 1} are not its own", order
            )
        patch, image = stop, after
    if (patch, image) != (rows, media.num_images):
        raise Broken(f"the row has {rows} patches, its samples have {patch}", order)
    return image


def check_slices(row: Row) -> Counts:
    """Check that each slot is on the one rank that zigzag gives it, and each label on its slot's
    rank.

    Raises:
        Broken: what does not hold.
    """
    if isinstance(row.slices, str):
        raise Broken(row.slices, BOUNDARIES)
    held: dict[int, int] = {}
    for part in row.slices:
        for slot in part.row_index.tolist():
            if slot in held:
                raise Broken(f"slot {slot} is on ranks {held[slot]} and {part.rank}")
            held[slot] = part.rank
    for slot, rank in _zigzag(row):
        if slot not in held:
            raise Broken(f"slot {slot} is on no rank")
        if held[slot] != rank:
            raise Broken(f"slot {slot} is on rank {held[slot]}, zigzag puts it on {rank}")
    if len(held) != row.num_slots:
        raise Broken(f"the ranks hold {len(held)} slots, the row has {row.num_slots}")
    labels = row.batch.labels.flatten().tolist()
    learnt = 0
    for part in row.slices:
        own = part.row_index.tolist()
        slots = [own[place] for place in part.label_positions.tolist()]
        if [labels[slot] for slot in slots] != part.targets.tolist():
            raise Broken(f"rank {part.rank}: its targets are not the labels of its slots")
        learnt += len(slots)
    if learnt != sum(label != NO_LOSS for label in labels):
        raise Broken(f"the ranks learn {learnt} labels, the row has {row.batch.num_label_tokens}")
    return (row.num_slots // row.rules.context,)


def _zigzag(row: Row) -> Iterator[tuple[int, int]]:
    """(slot, rank): chunk c of the 2*CP of a segment is rank min(c, 2*CP - 1 - c)'s."""
    chunks = 2 * row.rules.context
    behind = row.boundaries[len(row.alone) + 1 :]  # of segments that hold no sample
    for start, end in pairwise((0, *row.ends, *behind)):
        length = end - start
        for offset in range(length):
            chunk = offset * chunks // length
            yield start + offset, min(chunk, chunks - 1 - chunk)
