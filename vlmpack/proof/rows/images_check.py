"""What must hold of the images of a row."""

from __future__ import annotations

from collections import Counter

import torch

from vlmpack.proof.rows.row import COLLATOR, Broken, Counts, Row, owners_of


def check_images(row: Row) -> Counts:
    """Each sample's images fill its places; they are its own, in order and bit by bit.

    Raises:
        Broken: what does not hold.
    """
    media, ids = row.batch.media, row.batch.input_ids.flatten().tolist()
    found = [slot for slot, token in enumerate(ids) if token in row.rules.placeholder_ids]
    own = sum(media.num_tokens) if media is not None else 0
    features = own * row.sequences  # each sequence of a pair shows all of its images
    if len(found) != features:
        raise Broken(
            f"{len(found)} placeholders, but the images give {features} features", COLLATOR
        )
    if row.batch.media_positions.tolist() != found:
        raise Broken("media_positions are not the slots of the placeholders", COLLATOR)
    owners = owners_of(row)
    counts = Counter(owners[slot] for slot in found)
    if counts[-1]:
        slot = next(slot for slot in found if owners[slot] == -1)
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
    wanted: list[int] = []
    first = 0
    for item in row.alone[:: row.sequences]:
        count = sum(item.media.num_tokens) if item.media is not None else 0
        wanted += [*range(first, first + count)] * row.sequences
        first += count
    found = [*range(first)] if sources is None else sources.tolist()
    if found != wanted:
        place = next(
            (at for at, pair in enumerate(zip(found, wanted, strict=False)) if len({*pair}) > 1),
            min(len(found), len(wanted)),
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
