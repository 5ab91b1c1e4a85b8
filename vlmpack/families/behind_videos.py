"""Text behind a video, in models whose videos have time in their positions.

Qwen2-VL (2409.12191, 2.1) goes on behind an image or a video from the largest position of all axes
plus one. transformers did so up to 5.2 at least. By 5.8 `get_rope_index` goes on as behind a single
frame, so text stands inside the time of a longer video; but its `generate` puts the first new
token behind all axes.

    time        4  8 12 16 |
    height      4  5  4  5 |        a video of 4 patches along time, 4 positions apart
    transformers 5         |  6  7  8
    here, and the paper    | 17 18 19
"""

from __future__ import annotations

import torch
from torch import Tensor


def behind_videos(positions: Tensor, kinds: Tensor) -> Tensor:
    """(A, B, S) positions of transformers' class, what follows a video moved behind all its axes.

    Args:
        positions: (A, B, S) of `get_rope_index`.
        kinds: (B, S) `mm_token_type_ids`: 0 on text, 1 on images, 2 on videos.
    """
    moved = positions.clone()
    for row, of_row in enumerate(kinds):
        is_video = torch.nn.functional.pad(of_row == 2, (1, 1))
        edges = (is_video[1:] != is_video[:-1]).nonzero()[:, 0].tolist()
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop < len(of_row):
                wanted = moved[:, row, first:stop].max() + 1
                moved[:, row, stop:] += wanted - moved[:, row, stop].min()
    return moved
