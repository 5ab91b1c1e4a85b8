"""Token ids with one placeholder for each run of an image -> the sample as it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vlmpack.families.base import Family, ImageLayout
from vlmpack.packing import IGNORE_INDEX, EncodedSample, Media


class Tokens(NamedTuple):
    """A conversation's tokens.

    Args:
        ids: one placeholder for each run of an image.
        supervised: for each, whether it is a target.
        placeholder_id: of the token that one image feature replaces.
    """

    ids: Sequence[int]
    supervised: Sequence[bool]
    placeholder_id: int


def assemble(
    family: Family,
    key: str,
    tokens: Tokens,
    layouts: Sequence[ImageLayout],
    media: Media | None,
) -> EncodedSample:
    """Expand placeholders, shift labels inside the sample, add positions.

    Args:
        family: counts positions.
        key: the sample's.
        tokens: of its conversation.
        layouts: of its images, in order.
        media: their pixels.
    """
    runs = iter([(run, k == 0) for layout in layouts for k, run in enumerate(layout.runs)])
    expanded: list[int] = []
    targets: list[int] = []
    media_starts: list[int] = []
    media_positions: list[int] = []
    for token, is_target in zip(tokens.ids, tokens.supervised, strict=True):
        if token == tokens.placeholder_id:
            count, is_first = next(runs)
            if is_first:
                media_starts.append(len(expanded))
            media_positions.extend(range(len(expanded), len(expanded) + count))
            expanded.extend([token] * count)
            targets.extend([IGNORE_INDEX] * count)
        else:
            expanded.append(token)
            targets.append(token if is_target else IGNORE_INDEX)
    grids = media.grid_thw if media is not None else ()
    return EncodedSample(
        key=key,
        input_ids=torch.tensor(expanded),
        labels=torch.tensor([*targets[1:], IGNORE_INDEX]),
        position_ids=family.positions(len(expanded), media_starts, grids),
        media=media,
        media_positions=torch.tensor(media_positions, dtype=torch.int64),
    )
