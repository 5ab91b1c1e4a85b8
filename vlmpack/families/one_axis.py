"""Plain positions: what families have in common whose decoder counts 0, 1, 2 ..."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmpack.packing import GridTHW


class OneAxis:
    """Part of a family; see `vlmpack.families.Family`."""

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """Nothing beside the ids."""
        return {}

    def positions(
        self, num_tokens: int, media_starts: Sequence[int], media: Sequence[GridTHW]
    ) -> Tensor:
        """(1, s): 0, 1, 2 ... from the start of each sample; image tokens count as text does."""
        return torch.arange(num_tokens)[None]
