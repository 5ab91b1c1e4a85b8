"""The localisation loss: every image token tells which digit it shows and where in line that is.

Pretraining draws the rows itself, so it knows what stands where. Asking the vision tower for it at
every image token is some twenty times more supervision than the answer alone, and the model starts
to read after hundreds of steps rather than thousands. The heads are thrown away afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

NUM_DIGITS = 10
NUM_PLACES = 8
MAX_IMAGES = 3
NOTHING = NUM_DIGITS
NO_PLACE = NUM_PLACES


@dataclass(frozen=True, slots=True)
class RowMarks:
    """The digits of one image from left to right and their extents in pixels."""

    digits: list[int]
    spans: list[tuple[int, int]]


def token_targets(
    marks: RowMarks, width: int, grid: tuple[int, int], image_index: int
) -> np.ndarray:
    """(3, rows * cols) int64: digit and place of the glyph that covers most of each token; image.

    `width` is the image's before it was resized to whole tokens; all token rows are alike.
    """
    rows, cols = grid
    edges = np.arange(cols + 1) * (width / cols)
    spans = np.array(marks.spans, dtype=np.float64)
    overlap = np.minimum(edges[1:, None], spans[:, 1]) - np.maximum(edges[:-1, None], spans[:, 0])
    best = overlap.argmax(axis=1)
    covered = overlap.max(axis=1) > 1.0
    digits = np.where(covered, np.array(marks.digits)[best], NOTHING)
    places = np.where(covered, best, NO_PLACE)
    images = np.full(cols, image_index)
    return np.tile(np.stack([digits, places, images]), (1, rows)).astype(np.int64)


class LocalisationLoss(nn.Module):
    """Linear heads on the vision tower's output and on an early layer of the language model.

    The tower tells digit and place; the language model, which alone sees the order of the images,
    tells to which of them an image token belongs. The features are read by forward hooks.
    """

    def __init__(self, tower: nn.Module, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.digit_head = nn.Linear(width, NUM_DIGITS + 1)
        self.place_head = nn.Linear(width, NUM_PLACES + 1)
        self.image_head = nn.Linear(width, MAX_IMAGES)
        self.features: dict[str, torch.Tensor] = {}
        self.hooks = [
            tower.register_forward_hook(self.keep_tower),
            layer.register_forward_hook(self.keep_layer),
        ]

    def keep_tower(self, _module: nn.Module, _inputs: object, output: Any) -> None:
        """Remember the tower's image tokens (I, width)."""
        self.features["tower"] = output.pooler_output

    def keep_layer(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        """Remember the language model's tokens (N, T, width)."""
        self.features["layer"] = output

    def forward(self, targets: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        """Sum of the heads' mean cross entropies.

        `targets` (3, I) from `token_targets`; `image_mask` (N, T) is None when the tower ran alone.
        """
        tower = self.features["tower"]
        loss = nn.functional.cross_entropy(self.digit_head(tower), targets[0])
        loss = loss + nn.functional.cross_entropy(self.place_head(tower), targets[1])
        if image_mask is not None:
            tokens = self.image_head(self.features["layer"][image_mask])
            loss = loss + nn.functional.cross_entropy(tokens, targets[2])
        return loss

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        for hook in self.hooks:
            hook.remove()
