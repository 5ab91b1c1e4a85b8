"""What a vision tower would otherwise work out from grids, image by image, while the device waits:
made on the host where the row is made, of all of its images at once.

Two images of 4 x 4 and 2 x 4 patches, 2 x 2 of which are merged into a token, windows of 2 x 2
tokens:

    position_ids   (row, column) of each patch, in the order of the tower
    images         lengths 16, 8                    what attention over a whole image ends at
    windows        lengths 16, 8                    what attention inside attention windows ends at
    window_index   0 1 2 3 | 4 5                    the tokens, window by window

They are no `PackedSeqParams`: those say where the text's samples end, and fit nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSegments:
    """Where the attention of a vision tower ends: after each image, or each attention window.

    Args:
        cu_seqlens: (n + 1,) int32, cumulative lengths in patches.
        lengths: the n lengths, host integers.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TowerSegments:
        """Segments of these lengths, on CPU."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(cu_seqlens=ends, lengths=tuple(lengths))

    @property
    def max_seqlen(self) -> int:
        """The longest of them."""
        return max(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerInputs:
    """What a vision tower is told about the images of a batch, beside their pixels. P patches lie
    in the order of `Media.pixel_values`.

    Args:
        position_ids: (P, 2) int64, row and column of each patch in its image.
        images: where images end; each frame counts as one.
        windows: where attention windows end, in the order of `window_index`; None for a tower
            without.
        window_index: (P / merged,) int64, the tokens in the order of attention windows.
        interp_indices: (P, taps) int64, the rows of a learned table of positions that each patch's
            own is mixed of; None for a tower without such a table.
        interp_weights: (P, taps) float32, what they are mixed by.
    """

    position_ids: Tensor
    images: TowerSegments
    windows: TowerSegments | None = None
    window_index: Tensor | None = None
    interp_indices: Tensor | None = None
    interp_weights: Tensor | None = None


TowerRule = Callable[[Sequence[tuple[int, int, int]]], TowerInputs]
"""Grids of images, (t, h, w) in patches, to what their tower is told."""
