"""Gemma 4: images at their own shape, as many patches as a budget of tokens allows.

    image   -> resized to fill the budget, its shape kept; sides are multiples of 3 patches
    patches -> tower with rotary positions along two axes -> 3 x 3 averaged -> projector: tokens
    text    -> <|image> <|image|> x n <image|>

What else a checkpoint has, its config.json says part by part: per-layer inputs, layers that reuse
the keys and values of an earlier one, experts beside the MLP, wider heads in layers with full
attention, bent logits, and image tokens that attend to one another in both directions, in layers
with a sliding window alone. An audio tower stays as it is: no sample reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.families import flops
from vlmpack.families.base import Family, ImageFeatures, ModulePaths
from vlmpack.families.configs import final_logit_cap, whole_config, whole_config_of
from vlmpack.families.gemma4_images import (
    END,
    SOFT,
    START,
    Gemma4ImageRule,
    bounded,
    padded_patches,
)
from vlmpack.families.gemma4_text import decoder_cost, largest_head, per_layer_inputs
from vlmpack.families.gemma4_video import VIDEO, Gemma4VideoRule
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import family_processor
from vlmpack.packing import CostModel, Media
from vlmpack.packing.sharing import select_images
from vlmpack.recipe.data import ImagesSection

PATHS = ModulePaths(
    vision="model.vision_tower",
    projectors=("model.embed_vision",),
    language="model.language_model",
    untouched=("model.audio_tower", "model.embed_audio"),
)


@dataclass(frozen=True, kw_only=True)
class Gemma4(ImageFamily):
    """The family; see `vlmpack.families.Family`."""

    modules: ModulePaths = PATHS
    image_token: str = SOFT
    around: tuple[str, ...] = (START, END)
    pixel_knobs: tuple[str, ...] = ("max_pixels",)
    video_token: str = VIDEO

    def configured(self, config: Mapping[str, Any]) -> Family:
        """With the width of its heads, and image blocks where images attend in both directions."""
        whole = whole_config(config)
        blocks = image_blocks(whole)
        modules = replace(self.modules, image_blocks=blocks, blocks_in_windows=blocks)
        return replace(self, modules=modules, largest_head=largest_head(whole))

    def image_rule(self, folder: Path, budget: ImagesSection) -> Gemma4ImageRule:
        """The rule with the sizes of the folder's image processor, or the budget's.

        Raises:
            ValueError: the tower takes other patches than the processor makes.
            CapabilityError: a budget that the processor cannot keep.
        """
        processor = family_processor(folder, "Gemma4ImageProcessor", sized=False)
        config = whole_config_of(folder)
        made = (processor.patch_size, processor.pooling_kernel_size)
        vision = config["vision_config"]
        taken = (vision["patch_size"], vision["pooling_kernel_size"])
        if made != taken:
            raise ValueError(
                f"patch_size and pooling_kernel_size are {made}, but those of the tower are {taken}"
            )
        patch, pool = made
        rule = Gemma4ImageRule(
            folder, patch, pool, processor.max_soft_tokens, blocks=image_blocks(config)
        )
        rule = bounded(rule, budget.max_pixels)
        longest = rule.tokens * pool
        if longest > vision["position_embedding_size"]:
            raise ValueError(
                f"an image may be {longest} patches long, but the tower knows the places of "
                f"{vision['position_embedding_size']} (position_embedding_size)"
            )
        return rule

    def video_rule(self, folder: Path, settings: Mapping[str, Any]) -> Gemma4VideoRule | None:
        """The rule of the folder's video processor.

        Raises:
            OSError, ValueError: it is another one.
        """
        return Gemma4VideoRule.of(folder, settings, self.image_rule(folder, ImagesSection()))

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Patches padded to those of the largest image, and their places; videos apart."""
        seconds = media.seconds or (None,) * media.num_images
        stills = [number for number, step in enumerate(seconds) if step is None]
        found: dict[str, Any] = {}
        if (images := select_images(media, stills)) is not None:
            pixels, places = padded_patches(images)
            found |= {"pixel_values": pixels, "image_position_ids": places}
        others = [number for number, step in enumerate(seconds) if step is not None]
        if (videos := select_images(media, others)) is not None:
            pixels, places = padded_patches(videos)
            frames = torch.tensor([t for t, _, _ in videos.grid_thw], device=pixels.device)
            found |= {"pixel_values_videos": pixels, "video_position_ids": places}
            found["num_frames_per_video"] = frames
        return found

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """From these the class finds its blocks, where it has some: runs of ones."""
        return {"mm_token_type_ids": is_image.int()}

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """Tower and projector by themselves: `get_image_features` counts tokens on the host. The
        tower reads it once itself, where it drops padding."""
        pixels, places = padded_patches(media)
        output = model.model.vision_tower(pixel_values=pixels, pixel_position_ids=places)
        return ImageFeatures(model.model.embed_vision(inputs_embeds=output.last_hidden_state))

    def decoder_arguments(
        self, model: Any, input_ids: Tensor, media_positions: Tensor
    ) -> dict[str, Any]:
        """Per-layer inputs, where it has them."""
        return per_layer_inputs(model.model.language_model, input_ids, media_positions)

    def logit_cap(self, config: Mapping[str, Any]) -> float | None:
        """What the file says."""
        return final_logit_cap(config)

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """The decoder's and the tower's; published files leave sizes out."""
        whole = whole_config(config)
        cost = decoder_cost(whole, self.tower(whole))
        # Patches are averaged by a matrix product of each token with all patches of its image.
        vision = whole["vision_config"]
        averaged = 2.0 * flops.size(vision, "hidden_size") / vision["pooling_kernel_size"] ** 2
        squares = cost.per_squared_patches + flops.STEP * averaged
        return replace(cost, per_squared_patches=squares)

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """A tower whose attention spans a whole image; its MLPs have a gate."""
        vision, size = config["vision_config"], flops.size
        width, layers = size(vision, "hidden_size"), size(vision, "num_hidden_layers")
        heads, groups = size(vision, "num_attention_heads"), size(vision, "num_key_value_heads")
        head = size(vision, "head_dim")
        block = 2 * width * head * (heads + groups) + 3 * width * size(vision, "intermediate_size")
        return flops.Tower(
            width=heads * head,
            weights=layers * block + width * 3 * size(vision, "patch_size") ** 2,
            full_layers=layers,
            merger_weights=width * size(config["text_config"], "hidden_size"),
            patches_per_token=size(vision, "pooling_kernel_size") ** 2,
        )


def image_blocks(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of an image attend to one another in both directions."""
    return bool(config["text_config"]["use_bidirectional_attention"] == "vision")


FAMILY = Gemma4(name="gemma4", model_types=("gemma4",))
