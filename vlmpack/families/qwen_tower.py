"""The vision tower of the Qwen-VL line on the images of a whole batch: boundaries, positions and
windows come with the batch, so that it reads nothing on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmpack.families.patch_embedding import use_patch_products
from vlmpack.families.tower_attention import FLASH_ROWS, use_tower_attention
from vlmpack.packing import GridTHW, Media
from vlmpack.packing.vision import TowerInputs, TowerSegments


@dataclass(frozen=True, slots=True)
class QwenTowerRule:
    """Grids -> what the tower is told; by transformers' own functions, on CPU.

    Args:
        merge_size: patches along each side of a token.
        patch_size: side of a patch in pixels.
        window_size: side of an attention window in pixels; None for a tower without.
        table_side: rows and columns of the learned table of positions; None for a tower without.
    """

    merge_size: int
    patch_size: int
    window_size: int | None
    table_side: int | None

    @classmethod
    def of(cls, vision: Mapping[str, Any]) -> QwenTowerRule:
        """The rule of a tower, from its whole config."""
        table = vision.get("num_position_embeddings")
        return cls(
            merge_size=vision["spatial_merge_size"],
            patch_size=vision["patch_size"],
            window_size=vision.get("window_size"),
            table_side=None if table is None else int(table**0.5),
        )

    def __call__(self, grid_thw: Sequence[GridTHW]) -> TowerInputs:
        """What the tower is told of some images; at least one."""
        from transformers import vision_utils

        grids = torch.tensor(grid_thw)
        window_index = windows = indices = weights = None
        if self.window_size is not None:
            window_index, ends = vision_utils.get_vision_window_index(
                grids, self.merge_size, self.window_size, self.patch_size
            )
            windows = TowerSegments.of(ends.diff().tolist())
        if self.table_side is not None:
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grids, self.table_side, align_corners=True, spatial_merge_size=self.merge_size
            )
        return TowerInputs(
            position_ids=vision_utils.get_vision_position_ids(grids, self.merge_size),
            images=TowerSegments.of([h * w for t, h, w in grid_thw for _ in range(t)]),
            windows=windows,
            window_index=window_index,
            interp_indices=indices,
            interp_weights=weights,
        )


def tower_output(tower: Any, media: Media, inputs: TowerInputs) -> Any:
    """What the tower's forward returns for the images of a batch.

    Args:
        tower: transformers' module.
        media: pixels in its dtype and on its device.
        inputs: of the same images, on its device.
    """
    use_tower_attention(tower, FLASH_ROWS)
    use_patch_products(tower.patch_embed)
    told: dict[str, Any] = {
        "position_ids": inputs.position_ids,
        "cu_seqlens": inputs.images.cu_seqlens,
        "max_seqlen": inputs.images.max_seqlen,
    }
    if inputs.windows is not None:
        told["window_index"] = inputs.window_index
        told["cu_window_seqlens"] = inputs.windows.cu_seqlens
        told["max_window_seqlen"] = inputs.windows.max_seqlen
    if inputs.interp_indices is not None:
        told["interp_indices"] = inputs.interp_indices
        told["interp_weights"] = inputs.interp_weights
    # No grids: a version that still derived anything from them would stop here.
    return tower(media.pixel_values, grid_thw=None, tower_inputs=inputs, **told)
