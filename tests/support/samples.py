"""Made-up encoded samples for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlmpack.packing import IGNORE_INDEX, EncodedSample, Media


def text_sample(
    key: str, ids: Sequence[int], *, axes: int = 1, num_targets: int = 1
) -> EncodedSample:
    """Text whose last `num_targets` tokens are targets."""
    tokens = torch.tensor(ids)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    if len(ids) > 1:
        first = max(0, len(ids) - 1 - num_targets)
        labels[first:-1] = tokens[first + 1 :]
    return EncodedSample(
        key=key,
        input_ids=tokens,
        labels=labels,
        position_ids=torch.arange(len(ids)).expand(axes, -1),
        media_positions=torch.empty(0, dtype=torch.int64),
    )


def image_sample(key: str, *, num_text: int = 3, grid=(1, 4, 4), axes: int = 3) -> EncodedSample:
    """One image, then text; one placeholder for four patches of width 6."""
    patches = grid[0] * grid[1] * grid[2]
    count = patches // 4
    sample = text_sample(key, [9] * count + list(range(20, 20 + num_text)), axes=axes)
    return EncodedSample(
        key=key,
        input_ids=sample.input_ids,
        labels=sample.labels,
        position_ids=sample.position_ids,
        media=Media(
            pixel_values=torch.full((patches, 6), float(len(key))),
            grid_thw=(grid,),
            num_tokens=(count,),
        ),
        media_positions=torch.arange(count),
    )
