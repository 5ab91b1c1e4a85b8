"""What samples and packs cost in FLOPs, from lengths alone. No torch.

With s_i the lengths of a pack's samples, T their sum, and a_k the patches of its images:

    language = per_token * T + per_squared_length * sum s_i^2 + per_label_token * labels
    vision   = per_patch * sum a_k + per_squared_patches * sum a_k^2

Both are linear in sums over samples, so the cost of a pack is the sum of its samples' costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Column = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """FLOPs of one training step (forward and backward, no recomputation) of a model.

    Args:
        per_token: the decoder's linear layers.
        per_squared_length: causal attention of the decoder.
        per_label_token: the head, which runs on tokens with a label.
        per_patch: the vision tower's linear layers and windowed attention, and the projector.
        per_squared_patches: the tower's attention over whole images.
        image_patches: patches that an image is taken to have where sums of squares are not known.
    """

    per_token: float
    per_squared_length: float
    per_label_token: float = 0.0
    per_patch: float = 0.0
    per_squared_patches: float = 0.0
    image_patches: int = 1024

    def __call__(
        self,
        tokens: Column,
        squares: Column,
        patches: Column,
        *,
        patch_squares: Column | None = None,
        labels: Column | None = None,
    ) -> Floats:
        """(n, 2) FLOPs of the language model and of the vision tower.

        Args:
            tokens: (n,) tokens of each row, image tokens included.
            squares: (n,) sum of the squared lengths of its samples.
            patches: (n,) vision patches.
            patch_squares: (n,) sum of the squared patches of its images, exact; squared patches of
                its *samples* are an upper bound, exact where a sample has one image. None: every
                image is taken to have `image_patches`, an estimate.
            labels: (n,) tokens with a label; None: the head is left out.
        """
        if patch_squares is None:
            patch_squares = patches * self.image_patches
        language = self.per_token * tokens + self.per_squared_length * squares
        if labels is not None:
            language = language + self.per_label_token * labels
        vision = self.per_patch * patches + self.per_squared_patches * patch_squares
        return np.stack([language, vision], axis=1).astype(np.float64)
