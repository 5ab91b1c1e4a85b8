"""Nemotron Omni, its vision half: Nemotron-H with a RADIO tower for images of any shape.

    image   -> patches, class and register tokens in front of them -> tower, attention inside images
    patches -> 2 x 2 put beside one another -> projector: tokens
    text    -> <img> <image> x n </img>

No sample reaches the tower for sounds, its projector, and what embeds video: they stay as they are.
So does the norm behind the tower that the class adds where the language model has layers of
multi-token prediction: no published file holds it, so servers have it without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ModulePaths
from vlmpack.families.configs import whole_config, whole_config_of
from vlmpack.families.hybrid_flops import nemotron_h_decoder
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.nemotron_omni_images import (
    END,
    IMAGE,
    MERGE,
    START,
    OmniImageRule,
    OmniProcessor,
    bounded,
)
from vlmpack.packing import CostModel, GridTHW, Media
from vlmpack.recipe.data import ImagesSection

PATHS = ModulePaths(
    vision="vision_model",
    projectors=("multi_modal_projector",),
    language="language_model.model",
    head="language_model.lm_head",
    untouched=(
        "audio_tower",
        "embed_audio",
        "vision_model.embeddings.video_patch_projection",
        "vision_final_layernorm",
    ),
)


@dataclass(frozen=True, kw_only=True)
class NemotronOmni(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    modules: ModulePaths = PATHS
    image_token: str = IMAGE
    around: tuple[str, ...] = (START, END)
    pixel_knobs: tuple[str, ...] = ("min_pixels", "max_pixels")

    def image_rule(self, folder: Path, budget: ImagesSection) -> OmniImageRule:
        """The rule with the sizes of the folder's image processor, or the budget's.

        Raises:
            ValueError: another processor than this family's, or other patches than the tower's.
            CapabilityError: a budget that the processor cannot keep.
        """
        processor = OmniProcessor.of_folder(folder)
        config = whole_config_of(folder)
        made = (processor.patch_size, processor.downsample_ratio)
        taken = (config["vision_config"]["patch_size"], config["downsample_ratio"])
        if made != taken:
            raise ValueError(
                f"patch_size and downsample_ratio are {made}, but those of the model are {taken}"
            )
        rule = OmniImageRule(
            folder,
            patch=processor.patch_size,
            least=processor.min_num_patches,
            most=processor.max_num_patches,
            context=processor.max_model_len,
        )
        return bounded(rule, budget)

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Patches as they are, and their grids."""
        grids = _grids(media).to(media.pixel_values.device, non_blocking=True)
        return {"pixel_values": media.pixel_values, "image_grid_hw": grids}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The tower's parts and the projector: `get_image_features` reads the grids back on the
        host, for every layer again. Here they are on the host from the start."""
        tower, grids = model.get_submodule(PATHS.vision), _grids(media)
        prefix = tower.config.num_summary_tokens
        lengths = grids.prod(-1) + prefix
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        hidden = tower.encoder(
            tower.embeddings(media.pixel_values, grids),
            cu_seqlens=ends if len(lengths) > 1 else None,  # one image is a plain sequence
        ).last_hidden_state[0]
        order = merge_order(media.grid_thw, prefix).to(hidden.device, non_blocking=True)
        picked = hidden.index_select(0, order)
        if model.vision_final_layernorm is not None:
            picked = model.vision_final_layernorm(picked)
        merged = picked.view(-1, MERGE**2 * picked.shape[-1])
        return ImageFeatures(model.get_submodule(PATHS.projectors[0])(merged))

    def tower_modules(self) -> tuple[str, ...]:
        """The tower, the norm behind it where there is one, and the projector."""
        return ("vision_model", *PATHS.projectors, "vision_final_layernorm")

    def tower_features(self, tower: Any, media: Media) -> ImageFeatures:
        """By the parts of the model that it asks for."""
        return self.image_features(tower, media)

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of four kinds of layers, and the tower's."""
        whole = whole_config(config)
        decoder = nemotron_h_decoder(whole["text_config"])
        return flops.cost_model(whole, self.tower(whole), decoder)

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention spans a whole image. Its class and register tokens, ten beside a
        thousand patches, are left out."""
        vision, size = config["vision_config"], flops.size
        width, layers = size(vision, "hidden_size"), size(vision, "num_hidden_layers")
        inner, matrices = int(width * vision["mlp_ratio"]), 2
        if vision["use_swiglu_ffn"]:
            inner, matrices = (inner * 2 // 3 + 7) // 8 * 8, 3
        projector = size(config, "projector_hidden_size")
        out = size(config["text_config"], "hidden_size")
        return flops.Tower(
            width=width,
            weights=layers * (4 * width**2 + matrices * width * inner)
            + width * 3 * size(vision, "patch_size") ** 2,
            full_layers=layers,
            merger_weights=MERGE**2 * width * projector + projector * out,
            patches_per_token=MERGE**2,
        )


def _grids(media: Media) -> Tensor:
    """(I, 2) int64 rows and columns of patches, on the host."""
    return torch.tensor([grid[1:] for grid in media.grid_thw])


def merge_order(grids: tuple[GridTHW, ...], prefix: int) -> Tensor:
    """Where the patches of each token lie among the tower's outputs, token by token.

        image 1: prefix, rows x columns patches; image 2: prefix, ...

    Args:
        grids: of the images.
        prefix: outputs of the tower in front of each image's patches.

    Returns:
        (P,) int64: four for each token, row by row inside it, as the class's `pixel_shuffle` puts
        them beside one another.
    """
    found, start = [], 0
    for _, rows, columns in grids:
        start += prefix
        places = torch.arange(start, start + rows * columns)
        blocks = places.view(rows // MERGE, MERGE, columns // MERGE, MERGE)
        found.append(blocks.transpose(1, 2).flatten())
        start += rows * columns
    return torch.cat(found)


FAMILY = NemotronOmni(name="nemotron_omni", model_types=("nemotron_h_omni",))
