"""Gemma 4: images at their own shape, as many patches as a budget of tokens allows.

    image   -> resized to fill the budget, its shape kept; sides are multiples of 3 patches
    patches -> tower with rotary positions along two axes -> 3 x 3 averaged -> projector: tokens
    text    -> <|image> <|image|> x n <image|>

config.json says which other parts a checkpoint has. There may be per-layer inputs, layers that
reuse the keys and values of an earlier one, experts besides the MLP, wider heads in layers with
full attention, and bent logits. Image tokens may attend to one another in both directions, only in
layers with a sliding window. An audio tower stays unchanged, because no sample reaches it.

An image fills a budget of tokens at its own shape. Let a token average k patches along each side,
of p pixels each. An image of w x h pixels is scaled by sqrt(budget * k^2 p^2 / (w h)), so that it
would have as many tokens as the budget. Both sides are then rounded down to multiples of k p, and a
side of 0 becomes one token.

Each frame of a video is an image of few tokens, after its time.

    00:00 <|image> <|video|> x n <image|> 00:01 <|image> <|video|> x n <image|> ...

The tower sees each frame by itself. All stored frames are used, as by transformers'
Gemma4VideoProcessor with do_sample_frames=False. That class needs torchvision. Here Pillow resizes
frames as it does images, and levels become pixels by the arithmetic of that backend.

Per-layer inputs are looked up by ids, so a decoder that is called with embeddings must get them as
an argument. Otherwise transformers would find the ids again by comparing each embedding with the
whole table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.families import flops
from vlmpack.families.base import Clip, Family, ImageFeatures, ImageLayout, ModulePaths
from vlmpack.families.configs import (
    final_logit_cap,
    refuse_other_values,
    video_section,
    whole_config,
    whole_config_of,
)
from vlmpack.families.coordinates import json_list
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import (
    PixelSettings,
    ProcessorRule,
    family_processor,
    media_of,
)
from vlmpack.families.text_lm import TextLM
from vlmpack.families.tiles import patch_side
from vlmpack.packing import CostModel, Media
from vlmpack.packing.image_owners import select_images
from vlmpack.recipe.data import ImagesSection

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A decoder layer's sizes.

    Args:
        projections: how many projections of keys and values the layer has. 0 reuses an earlier
            layer's, 1 uses the keys as values, 2 has both.
    """

    inner: int
    key: int
    projections: int
    mlp: int


def text_of(config: Config) -> Config:
    """The section of the language model, or the whole of its own config.json."""
    text: Config = config.get("text_config") or config
    return text


def layer_shapes(text: Config) -> list[LayerShape]:
    """Every decoder layer's.

    Raises:
        ModelError: a size is missing.
    """
    heads, layers = flops.size(text, "num_attention_heads"), flops.size(text, "num_hidden_layers")
    others = {int(key): own for key, own in (text.get("per_layer_config") or {}).items()}
    first_shared = layers - (text.get("num_kv_shared_layers") or 0)
    shapes = []
    for layer, kind in enumerate(text["layer_types"]):
        own = {**text, **others.get(layer, {})}
        head = flops.size(own, "head_dim")
        shared = layer >= first_shared
        one = bool(text.get("attention_k_eq_v")) and kind == "full_attention"
        wide = 2 if shared and text.get("use_double_wide_mlp") else 1
        shapes.append(
            LayerShape(
                inner=heads * head,
                key=flops.size(own, "num_key_value_heads") * head,
                projections=0 if shared else 2 - one,
                mlp=wide * flops.size(text, "intermediate_size"),
            )
        )
    return shapes


def largest_head(config: Config) -> int:
    """Channels of the widest head of the decoder; `config` as in `Family.configured`."""
    text = text_of(whole_config(config))
    heads = flops.size(text, "num_attention_heads")
    return max(shape.inner for shape in layer_shapes(text)) // heads


def decoder_cost(config: Config, tower: flops.Tower | None = None) -> CostModel:
    """The decoder's, with or without a vision tower.

    Layers with a sliding window are priced as the others. A layer that reuses keys and values
    attends as any, and saves their projections.

    Raises:
        ModelError: a size is missing from it.
    """
    text = text_of(config)
    width, layers = flops.size(text, "hidden_size"), flops.size(text, "num_hidden_layers")
    shapes = layer_shapes(text)
    weights = sum(
        width * (2 * shape.inner + shape.projections * shape.key + 3 * shape.mlp)
        for shape in shapes
    )
    if text.get("enable_moe_block"):
        experts = flops.size(text, "top_k_experts") * 3 * flops.size(text, "moe_intermediate_size")
        weights += layers * width * (flops.size(text, "num_experts") + experts)
    extra = text.get("hidden_size_per_layer_input") or 0
    weights += layers * 3 * width * extra  # its projection from the embedding, a gate, and back
    cost = flops.cost_model({"text_config": {**text, "num_experts": 0}}, tower)
    return replace(
        cost,
        per_token=flops.STEP * 2.0 * weights,
        per_squared_length=flops.STEP * 2.0 * sum(shape.inner for shape in shapes),
    )


def per_layer_inputs(decoder: Any, input_ids: Tensor, media_positions: Tensor) -> dict[str, Any]:
    """What a decoder with per-layer inputs takes of ids; see `Family.decoder_arguments`.

    A placeholder has the inputs of the padding token, as in `Gemma4Model.forward`.
    """
    if not decoder.hidden_size_per_layer_input:
        return {}
    ids = input_ids.flatten().index_fill(0, media_positions, decoder.config.pad_token_id)
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids.view_as(input_ids))}


@dataclass(frozen=True, kw_only=True)
class Gemma4Text(TextLM):
    """The family; see `vlmpack.families.Family`."""

    def configured(self, config: Config) -> Family:
        """With the width of its heads."""
        return replace(self, largest_head=largest_head(config))

    def logit_cap(self, config: Config) -> float | None:
        """What the file says."""
        return final_logit_cap(config)

    def decoder_arguments(
        self, model: Any, input_ids: Tensor, media_positions: Tensor
    ) -> dict[str, Any]:
        """Per-layer inputs, where it has them."""
        decoder = model.get_submodule(self.modules.language)
        return per_layer_inputs(decoder, input_ids, media_positions)

    def cost_model(self, config: Config) -> CostModel:
        """The decoder's; published files leave sizes out."""
        return decoder_cost(whole_config(config))


GEMMA4_TEXT = Gemma4Text(name="gemma4_text", model_types=("gemma4_text",))
"""Gemma 4's language model alone, and what the whole model shares with it.

Per-layer inputs are looked up by ids, so a decoder that is called with embeddings must get them as
an argument.
"""


START, SOFT, END = "<|image>", "<|image|>", "<image|>"

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The budgets that transformers' Gemma 4 image processor takes."""


Rule = TypeVar("Rule", bound="Gemma4ImageRule")


@dataclass(frozen=True)
class Gemma4ImageRule(ProcessorRule):
    """Resize to fill a budget of tokens.

    Args:
        pool: patches along each side of a token.
    """

    patch: int
    pool: int
    tokens: int
    blocks: bool = False

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders between two tokens; `get_aspect_ratio_preserving_size` of
        transformers' Gemma 4 files."""
        return self._layout(*self._tokens(width, height))

    def _tokens(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        side = self.pool * self.patch
        scale = math.sqrt(self.tokens * side**2 / (height * width))
        rows, columns = (math.floor(scale * edge / side) for edge in (height, width))
        if not rows and not columns:
            raise ValueError(
                f"an image of {width} x {height} pixels has no token left in a budget of "
                f"{self.tokens}. This family's processor refuses it"
            )
        if not rows:
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            rows, columns = min(height // width, self.tokens), 1
        if rows * columns > self.tokens:
            raise ValueError(
                f"an image of {width} x {height} pixels would have {rows} x {columns} tokens, more "
                f"than the budget of {self.tokens}. This family's processor refuses it"
            )
        return rows, columns

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout(
            grid=(1, rows * self.pool, columns * self.pool),
            text=f"{START}{SOFT}{END}",
            runs=(rows * columns,),
        )

    def preprocess(self, images: Sequence[Image]) -> Media:
        """transformers' own image processor (the PIL one where torchvision is missing), its padding
        to the budget taken away again."""
        features = self.processor(images=list(images), return_tensors="pt")
        layouts = [self.layout(*image.size) for image in images]
        rows = [
            patches[: math.prod(layout.grid)]
            for patches, layout in zip(features["pixel_values"], layouts, strict=True)
        ]
        return self._media(torch.cat(rows), layouts)

    def smallest(self) -> Media:
        """One token's worth of zeros."""
        layout = self._layout(1, 1)
        return self._media(torch.zeros(self.pool**2, 3 * self.patch**2), [layout])

    def _media(self, rows: Tensor, layouts: Sequence[ImageLayout]) -> Media:
        media = media_of(rows, layouts)
        if not self.blocks:
            return media
        return replace(media, blocks=tuple(layout.runs for layout in layouts))

    def settings(self) -> dict[str, Any]:
        """The budget."""
        return {"max_soft_tokens": self.tokens}

    def pictures(self, media: Media) -> list[Image]:
        """Patches put back in their places; a patch holds its pixels with the channels last."""
        side = patch_side(media.pixel_values)
        counts = [t * h * w for t, h, w in media.grid_thw]
        return [
            self.shown(
                patches.reshape(h, w, side, side, 3).permute(4, 0, 2, 1, 3).reshape(3, h * side, -1)
            )
            for patches, (_, h, w) in zip(
                media.pixel_values.split(counts), media.grid_thw, strict=True
            )
        ]


def bounded(rule: Rule, max_pixels: int | None) -> Rule:
    """The rule with the largest budget within an area.

    Args:
        max_pixels: most pixels of a resized image; None leaves the rule as it is.

    Raises:
        CapabilityError: less than the smallest budget.
    """
    if max_pixels is None:
        return rule
    area = (rule.pool * rule.patch) ** 2
    fitting = [tokens for tokens in SOFT_TOKENS if tokens * area <= max_pixels]
    if not fitting:
        raise CapabilityError(
            f"images.max_pixels: {max_pixels} is less than {SOFT_TOKENS[0]} tokens of {area} "
            f"pixels, the smallest budget of this family's processor; use "
            f"{SOFT_TOKENS[0] * area} or more"
        )
    return replace(rule, tokens=fitting[-1])


def padded_patches(media: Media) -> tuple[Tensor, Tensor]:
    """All images of a batch, and frames of videos, as the tower takes them, each padded to the
    largest.

    Returns:
        (I, P, 3 * side * side) patches, zeros behind an image's own; (I, P, 2) int64 (x, y) of each
        in patches, -1 there. P is that of the largest image, where transformers' processor has that
        of the budget.
    """
    grids = [(h, w) for t, h, w in media.grid_thw for _ in range(t)]
    counts = [h * w for h, w in grids]
    device = media.pixel_values.device
    rows = media.pixel_values.split(counts)
    pixels = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    places = torch.full((len(counts), max(counts), 2), -1)
    for place, (h, w), count in zip(places, grids, counts, strict=True):
        place[:count] = places_of(h, w)
    return pixels, places.to(device, non_blocking=True)


def places_of(rows: int, columns: int) -> Tensor:
    """(rows * columns, 2) int64 (x, y) of the patches of an image."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)


VIDEO = "<|video|>"
"""What the chat template writes for a video, and what a feature of one replaces."""

_DEFAULTS: Mapping[str, Any] = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VideoRule:
    """Each frame fills a budget of tokens at its own shape, as an image does."""

    frame: Gemma4ImageRule
    pixels: PixelSettings

    @classmethod
    def of(
        cls, folder: Path, settings: Mapping[str, Any], images: Gemma4ImageRule
    ) -> Gemma4VideoRule:
        """The rule of a model folder.

        Raises:
            OSError, ValueError: the video processor is another one, or makes other patches.
        """
        said = video_section(folder, "Gemma4VideoProcessor", _DEFAULTS, settings)
        made = {"patch_size": images.patch, "pooling_kernel_size": images.pool}
        refuse_other_values(said, {"do_resize": True, **made})
        tokens = said["max_soft_tokens"]
        if tokens not in SOFT_TOKENS:
            raise ValueError(
                f"the video processor's max_soft_tokens is {tokens!r}, expected one of "
                f"{', '.join(map(str, SOFT_TOKENS))}"
            )
        return cls(frame=replace(images, tokens=tokens), pixels=PixelSettings.of(said))

    def layout(self, width: int, height: int, clip: Clip) -> ImageLayout:
        """See `vlmpack.families.VideoRule`."""
        one, count = self.frame.layout(width, height), len(clip.times)
        clock = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in clip.times]
        return ImageLayout(
            grid=(count, *one.grid[1:]),
            text=" ".join(f"{at} {START}{VIDEO}{END}" for at in clock),
            runs=one.runs * count,
            seconds=0.0,  # its times are text, no position
        )

    def preprocess(self, frames: Sequence[Image], clip: Clip) -> Media:
        """See `vlmpack.families.VideoRule`."""
        wide, high = frames[0].size
        layout, side = self.layout(wide, high, clip), self.frame.patch
        count, rows, columns = layout.grid
        size, filter_ = (columns * side, rows * side), Resampling(self.pixels.resample)
        shown = [one if one.size == size else one.resize(size, filter_) for one in frames]
        levels = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown]
        pixels = torch.stack([self.pixels.normalized(one) for one in levels])
        blocks = pixels.reshape(count, 3, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1)
        media = media_of(blocks.reshape(count * rows * columns, -1), [layout])
        return replace(media, blocks=(layout.runs,)) if self.frame.blocks else media


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
        arguments: dict[str, Any] = {}
        if (images := select_images(media, stills)) is not None:
            pixels, places = padded_patches(images)
            arguments |= {"pixel_values": pixels, "image_position_ids": places}
        others = [number for number, step in enumerate(seconds) if step is not None]
        if (videos := select_images(media, others)) is not None:
            pixels, places = padded_patches(videos)
            frames = torch.tensor([t for t, _, _ in videos.grid_thw], device=pixels.device)
            arguments |= {"pixel_values_videos": pixels, "video_position_ids": places}
            arguments["num_frames_per_video"] = frames
        return arguments

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


FAMILY = Gemma4(
    name="gemma4",
    model_types=("gemma4",),
    coordinates=json_list(
        box="[{y1}, {x1}, {y2}, {x2}]",
        point="[{y}, {x}]",
        keys={"box": "box_2d", "point": "point_2d"},
        source="huggingface/blog gemma4.md, Burhan-Q/gemma4",
        second_hand=True,
    ),
)
