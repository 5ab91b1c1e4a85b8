"""Pixtral's tower on the images of a whole batch in one call, without a mask.

The tower lays the patches of all images in one row. transformers keeps the images apart with a mask
of P x P patches, filled in for every call (5 GB in bfloat16 for 50,000 patches), and pads images to
the largest before that. Here patches come as rows and attention is told where images end: memory
grows with P, and nothing is computed between images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmpack.families.tower_attention import ROWS, use_tower_attention
from vlmpack.packing import GridTHW, Media
from vlmpack.packing.vision import TowerInputs, TowerSegments


@dataclass(frozen=True, slots=True)
class PixtralTowerRule:
    """Grids -> what the tower is told."""

    def __call__(self, grid_thw: Sequence[GridTHW]) -> TowerInputs:
        """What the tower is told of some images; at least one."""
        places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grid_thw]
        return TowerInputs(
            position_ids=torch.cat(places),
            images=TowerSegments.of([t * h * w for t, h, w in grid_thw]),
        )


def tower_output(tower: Any, media: Media, inputs: TowerInputs) -> Tensor:
    """(P, W) the last layer's output for the patches of all images; as the tower's forward, which
    takes padded images and a mask.

    Args:
        tower: transformers' module.
        media: pixels in its dtype and on its device.
        inputs: of the same images, on its device.
    """
    use_tower_attention(tower, ROWS)
    rows, side = media.pixel_values, tower.patch_size
    embeds = tower.patch_conv(rows.view(rows.shape[0], -1, side, side)).flatten(1)[None]
    embeds = tower.ln_pre(embeds)
    hidden: Tensor = tower.transformer(
        embeds,
        attention_mask=None,
        position_embeddings=tower.patch_positional_embedding(embeds, inputs.position_ids),
        tower_inputs=inputs,
    ).last_hidden_state
    return hidden[0]
