"""What the Qwen-VL families share: the resize rule, 2 x 2 spatial merge, MRoPE positions.

Boundaries, positions and windows of the tower come with the batch, so it reads nothing on the host.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families import flops
from vlmpack.families.base import ImageFeatures, ImageLayout, ModulePaths
from vlmpack.families.configs import whole_config, whole_config_of
from vlmpack.families.coordinates import CoordinateRule, json_list
from vlmpack.families.flops import qwen3_5_decoder
from vlmpack.families.image_family import ImageFamily
from vlmpack.families.image_processor import ProcessorRule, blank, family_processor, media_of
from vlmpack.families.qwen_video import (
    VIDEO_TOKEN,
    WRAPPED,
    FrameBoundRule,
    QwenVideoRule,
    VolumeBoundRule,
    behind_videos,
    video_rule,
)
from vlmpack.families.tower_attention import FLASH_ROWS, inputs_of, use_tower_attention
from vlmpack.packing import CostModel, GridTHW, Media
from vlmpack.packing.batch import TowerInputs, TowerSegments
from vlmpack.recipe.data import ImagesSection


class PatchProduct(nn.Conv3d):
    """A Conv3d that is a matrix product on CUDA, where its input is as large as its kernel.

    The towers get each patch as a row of numbers and pass it to a Conv3d whose kernel is the whole
    patch. Several versions of cuDNN choose kernels for that which are 4 to 50,000 times as slow in
    bfloat16 (pytorch#166122, pytorch#174051, transformers#45750). Parameters and their names stay.

    The convolution stays on a CPU, where a run is compared with stock in float32. It rounds float32
    worse than the product does, so with trained weights the two differ by 2e-6.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(P, C, T, Y, X) patches -> (P, out, 1, 1, 1)."""
        whole = input.shape[2:] == self.kernel_size and not any(self.padding)
        return self.product(input) if whole and input.is_cuda else super().forward(input)

    def product(self, input: Tensor) -> Tensor:
        """What a convolution of inputs as large as the kernel comes to."""
        product = nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def use_patch_products(embedding: nn.Module) -> None:
    """For good: the Conv3d of a module that embeds patches becomes a matrix product."""
    for module in embedding.modules():
        # Not of a subclass: somebody else's forward would be lost.
        if type(module) is nn.Conv3d and module.groups == 1:
            module.__class__ = PatchProduct


@dataclass(frozen=True, slots=True)
class QwenTowerRule:
    """Grids -> inputs of the tower, by transformers' own functions, on CPU.

    Args:
        window_size: side of an attention window in pixels; None for a tower without.
        table_side: rows and columns of the learned position table; None for a tower without.
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
        """The tower's inputs for some images; at least one."""
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
    """What the tower's forward returns for the images of a batch."""
    use_tower_attention(tower, FLASH_ROWS)
    use_patch_products(tower.patch_embed)
    arguments: dict[str, Any] = {
        "position_ids": inputs.position_ids,
        "cu_seqlens": inputs.images.cu_seqlens,
        "max_seqlen": inputs.images.max_seqlen,
    }
    if inputs.windows is not None:
        arguments["window_index"] = inputs.window_index
        arguments["cu_window_seqlens"] = inputs.windows.cu_seqlens
        arguments["max_window_seqlen"] = inputs.windows.max_seqlen
    if inputs.interp_indices is not None:
        arguments["interp_indices"] = inputs.interp_indices
        arguments["interp_weights"] = inputs.interp_weights
    # No grids: a version that still derived anything from them would stop here.
    return tower(media.pixel_values, grid_thw=None, tower_inputs=inputs, **arguments)


MAX_ASPECT_RATIO = 200
"""Qwen's image processor refuses images that are longer than this many times their width."""

IMAGE_TOKEN = "<|image_pad|>"

IMAGE_NAMES = ("pixel_values", "image_grid_thw")
VIDEO_NAMES = ("pixel_values_videos", "video_grid_thw")
"""What the classes call patches and their grids."""

VISUAL = ModulePaths(
    vision="model.visual",
    projectors=("model.visual.merger",),
    language="model.language_model",
)

MERGE_SIZE = 2
"""Patches along each side of a token; all published Qwen-VL models have 2."""


@dataclass(frozen=True)
class QwenImageRule(ProcessorRule):
    """Qwen-VL's resize rule: multiples of patch * merge, an area between two bounds."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """One run of placeholders."""
        return self._layout(self.grid(width, height))

    def _layout(self, grid: GridTHW) -> ImageLayout:
        """One token for merge_size x merge_size patches."""
        num_tokens = math.prod(grid) // self.merge_size**2
        return ImageLayout(grid=grid, text=IMAGE_TOKEN, runs=(num_tokens,))

    def grid(self, width: int, height: int) -> GridTHW:
        """Patches of a still image; the rule of `smart_resize` in transformers' Qwen2-VL files."""
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(
                f"an image of {width} x {height} pixels is more than {MAX_ASPECT_RATIO} times "
                f"longer than wide. This family's processor refuses it"
            )
        factor = self.patch_size * self.merge_size
        new_height = round(height / factor) * factor
        new_width = round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return (1, new_height // self.patch_size, new_width // self.patch_size)

    def shown_size(self, width: int, height: int) -> tuple[int, int]:
        """See `vlmpack.families.base.ShowsWhole`."""
        _, high, wide = self.grid(width, height)
        return wide * self.patch_size, high * self.patch_size

    def preprocess(self, images: Sequence[Image]) -> Media:
        """What transformers' image processor on PIL makes of RGB images, bit for bit."""
        side, processor = self.patch_size, self.processor
        grids = [self.grid(*image.size) for image in images]
        ends = list(accumulate(map(math.prod, grids), initial=0))
        rows = np.empty((ends[-1], 3, processor.temporal_patch_size, side**2), np.float32)
        for image, (_, high, wide), (start, end) in zip(images, grids, pairwise(ends), strict=True):
            resized = image.resize((wide * side, high * side), resample=processor.resample)
            self._write_patches(np.asarray(resized), rows[start:end])
        layouts = [self._layout(grid) for grid in grids]
        return media_of(torch.from_numpy(rows).flatten(1), layouts)

    def _write_patches(self, levels: np.ndarray, rows: np.ndarray) -> None:
        """(H, W, 3) levels as (P, 3, frames, side * side) patches, merged ones side by side.

        The processor makes several float copies of an image on the way. Here a level is looked up
        once, behind the moves, which then cost a quarter of the bytes.
        """
        side, merge = self.patch_size, self.merge_size
        high, wide = (size // (merge * side) for size in levels.shape[:2])
        blocks = levels.reshape(high, merge, side, wide, merge, side, 3)
        patches = wide * merge**2
        for block, into in zip(blocks, np.split(rows, high), strict=True):  # each fits a cache
            for channel, values in enumerate(self.level_values):
                moved = block[..., channel].transpose(2, 0, 3, 1, 4).reshape(patches, 1, side**2)
                into[:, channel] = np.take(values, moved, mode="clip")  # once for each frame

    def smallest(self) -> Media:
        """One token's worth of zeros."""
        side = self.merge_size
        channels = 3 * self.processor.temporal_patch_size * self.patch_size**2
        return blank(self._layout((1, side, side)), channels)

    def settings(self) -> dict[str, Any]:
        """The bounds under all the names that files of this line have had: `min_pixels` and
        `max_pixels`, where a folder has them, win over `size`."""
        return {
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
        }

    def pictures(self, media: Media) -> list[Image]:
        """Patches put back in their places; a patch holds its still image twice, along time."""
        side, merge = self.patch_size, self.merge_size
        counts = [t * h * w for t, h, w in media.grid_thw]
        images = []
        for patches, (_, h, w) in zip(
            media.pixel_values.split(counts), media.grid_thw, strict=True
        ):
            # (row, column, row in it, column in it, channel, time, y, x)
            blocks = patches[: h * w].reshape(
                h // merge, w // merge, merge, merge, 3, -1, side, side
            )[:, :, :, :, :, 0]
            pixels = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h * side, w * side)
            images.append(self.shown(pixels))
        return images


@dataclass(frozen=True, kw_only=True)
class QwenVL(ImageFamily):
    """A family of the line; see `vlmpack.families.Family`.

    Args:
        tokens_per_second: positions of a second of video; None where videos have no time in their
            positions.
    """

    modules: ModulePaths = VISUAL
    num_position_axes: int = 3
    image_token: str = IMAGE_TOKEN
    pixel_knobs: tuple[str, ...] = ("min_pixels", "max_pixels")
    video_token: str = VIDEO_TOKEN
    video_kind: type[QwenVideoRule] = FrameBoundRule
    tokens_per_second: float | None = None
    gated_tower: bool = False

    def video_rule(self, folder: Path, settings: Mapping[str, Any]) -> QwenVideoRule:
        """The rule of the folder's video processor, or of its image processor's file where videos
        have none: there transformers looks too."""
        return video_rule(self.video_kind, folder, settings)

    def image_rule(self, folder: Path, budget: ImagesSection) -> QwenImageRule:
        """The rule with the sizes that the folder's image processor was saved with, or the
        budget's.

        Raises:
            ValueError: another processor than this family's, or without bounds.
        """
        processor = family_processor(folder, "Qwen2VLImageProcessor")
        low, high = (processor.size.get(name) for name in ("shortest_edge", "longest_edge"))
        if not low or not high:
            raise ValueError(
                f"size is {dict(processor.size)}, expected a shortest_edge and a longest_edge, "
                f"which bound the area of an image (or min_pixels and max_pixels)"
            )
        if processor.merge_size != MERGE_SIZE:
            raise ValueError(f"merge_size is {processor.merge_size}, expected {MERGE_SIZE}")
        rule = QwenImageRule(
            folder=folder,
            patch_size=processor.patch_size,
            merge_size=processor.merge_size,
            min_pixels=low,
            max_pixels=high,
        )
        return _bounded(rule, budget)

    def image_arguments(self, media: Media) -> dict[str, Any]:
        """Patches as they are, and their grids; those of videos apart."""
        seconds = media.seconds or (None,) * media.num_images
        rows = media.pixel_values.split(media.patches_here)
        device = media.pixel_values.device
        arguments: dict[str, Any] = {}
        for names, is_video in ((IMAGE_NAMES, False), (VIDEO_NAMES, True)):
            own = [n for n, step in enumerate(seconds) if (step is not None) == is_video]
            if own:
                every = len(own) == media.num_images
                grids = torch.tensor([media.grid_thw[n] for n in own])
                pixels = media.pixel_values if every else torch.cat([rows[n] for n in own])
                arguments |= dict(
                    zip(names, (pixels, grids.to(device, non_blocking=True)), strict=True)
                )
        if self.tokens_per_second is not None and media.seconds is not None:
            arguments["second_per_grid_ts"] = torch.tensor([s for s in seconds if s is not None])
        return arguments

    def token_arguments(self, is_image: Tensor) -> dict[str, Tensor]:
        """What `get_rope_index` reads."""
        return {"mm_token_type_ids": is_image.int()}

    def class_arguments(
        self, model: Any, arguments: dict[str, Any], *, generates: bool = False
    ) -> dict[str, Any]:
        """With positions where there is a video: those of the class, but text behind its time."""
        if self.frames_apart or "video_grid_thw" not in arguments:
            return arguments
        takes = inspect.signature(model.model.get_rope_index).parameters
        given = {name: value for name, value in arguments.items() if name in takes}
        positions, _ = model.model.get_rope_index(**given)
        return {
            **arguments,
            "position_ids": behind_videos(positions, arguments["mm_token_type_ids"]),
        }

    def image_features(self, model: Any, media: Media) -> ImageFeatures:
        """The tower itself: `get_image_features` reads the grids back on the host."""
        assert self.modules.vision is not None
        return self.tower_features(model.get_submodule(self.modules.vision), media)

    def tower_rule(self, vision: Mapping[str, Any]) -> QwenTowerRule:
        """Positions, boundaries and attention windows; by transformers' own functions."""
        return QwenTowerRule.of(vision)

    def tower_rule_of(self, folder: Path) -> QwenTowerRule:
        """From the folder's config.json."""
        return self.tower_rule(whole_config_of(folder)["vision_config"])

    def tower_features(self, tower: Any, media: Media) -> ImageFeatures:
        """With what the batch tells of its images, so that nothing is read on the host."""
        output = tower_output(tower, media, inputs_of(self.tower_rule, tower, media))
        deep = tuple(output.deepstack_features) if self.modules.deep_features else ()
        return ImageFeatures(output.pooler_output, deep)

    def positions(
        self,
        num_tokens: int,
        media_starts: Sequence[int],
        media: Sequence[GridTHW],
        seconds: Sequence[float | None] = (),
    ) -> Tensor:
        """MRoPE (Qwen2-VL, 2409.12191, 2.1): text advances all three axes by one, and an image
        spans its merged grid.

        Text after an image continues from the largest coordinate used plus one.
        """
        pieces: list[Tensor] = []
        cursor = position = 0
        steps = seconds or (None,) * len(media)
        for start, (t, h, w), step in zip(media_starts, media, steps, strict=True):
            pieces.append(torch.arange(position, position + start - cursor).expand(3, -1))
            position += start - cursor
            rows, columns = h // MERGE_SIZE, w // MERGE_SIZE
            times = self._times(t, step)
            axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
            pieces.append(torch.stack([axis.flatten() for axis in axes]) + position)
            cursor = start + t * rows * columns
            position += max(int(times[-1]) + 1, rows, columns)
        pieces.append(torch.arange(position, position + num_tokens - cursor).expand(3, -1))
        return torch.cat(pieces, dim=1)

    def _times(self, count: int, seconds: float | None) -> Tensor:
        """(t,) int64 coordinates of patches along time, in the float32 that transformers has."""
        if seconds is None or self.tokens_per_second is None:
            return torch.arange(count)
        return (torch.arange(count) * (torch.tensor(seconds) * self.tokens_per_second)).long()

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """From what config.json says: the published files of this line name all sizes."""
        return flops.cost_model(config, self.tower(config))

    def tower(self, config: Mapping[str, Any]) -> flops.Tower:
        """The vision tower of a Qwen-VL model.

        Qwen2-VL has `embed_dim` and `mlp_ratio` for the tower and `hidden_size` for its output. The
        later ones have `hidden_size`, `intermediate_size` and `out_hidden_size`.
        """
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            raise ModelError(f"config.json: vision_config is {vision!r}, expected an object")
        size = flops.size
        if "embed_dim" in vision:
            width, out = size(vision, "embed_dim"), size(vision, "hidden_size")
            inner = width * size(vision, "mlp_ratio")
        else:
            width, out = size(vision, "hidden_size"), size(vision, "out_hidden_size")
            inner = size(vision, "intermediate_size")
        depth, side = size(vision, "depth"), size(vision, "patch_size")
        block = 4 * width**2 + (3 if self.gated_tower else 2) * width * inner
        pixels = 3 * vision.get("temporal_patch_size", 2) * side**2
        merged = width * MERGE_SIZE**2
        full = len(vision["fullatt_block_indexes"]) if "fullatt_block_indexes" in vision else depth
        mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
        return flops.Tower(
            width=width,
            weights=depth * block + width * pixels,
            full_layers=full,
            window_layers=depth - full,
            window_patches=(size(vision, "window_size") // side) ** 2 if full < depth else 0,
            merger_weights=mergers * (merged**2 + merged * out),
            patches_per_token=MERGE_SIZE**2,
        )


def _bounded(rule: QwenImageRule, budget: ImagesSection) -> QwenImageRule:
    """The rule with the bounds that are set.

    Raises:
        CapabilityError: less than a token's patch, or a bound beyond the processor's other one.
    """
    least = (rule.patch_size * rule.merge_size) ** 2
    if budget.max_pixels is not None and budget.max_pixels < least:
        raise CapabilityError(
            f"images.max_pixels: {budget.max_pixels} is less than the patch of one token, "
            f"{rule.patch_size * rule.merge_size} x {rule.patch_size * rule.merge_size} = {least} "
            f"pixels; use {least} or more"
        )
    low = rule.min_pixels if budget.min_pixels is None else budget.min_pixels
    high = rule.max_pixels if budget.max_pixels is None else budget.max_pixels
    if low > high and budget.min_pixels is None:
        raise CapabilityError(
            f"images.max_pixels: {high} is less than the {low} pixels that this model's processor "
            f"enlarges small images to. Set images.min_pixels too, to {high} or less"
        )
    if low > high:
        raise CapabilityError(
            f"images.min_pixels: {low} is more than the {high} pixels that this model's processor "
            f"shrinks large images to. Set images.max_pixels too, to {low} or more"
        )
    return replace(rule, min_pixels=low, max_pixels=high)


QWEN2_VL = QwenVL(
    name="qwen2_vl",
    model_types=("qwen2_vl",),
    coordinates=CoordinateRule(
        label="<|object_ref_start|>{label}<|object_ref_end|>",
        box="<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>",
        entry="{label}{shape}",
        bare="{shape}",
        source="QwenLM/Qwen3-VL qwen-vl-finetune/tools/process_bbox.ipynb, issue 105",
    ),
)
"""Qwen2-VL: unwindowed vision tower, 2 x 2 spatial merge, MRoPE in the language model."""


TOKENS_PER_SECOND = 4
"""What transformers' config class has where config.json says nothing."""


class Qwen2_5VL(QwenVL):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def configured(self, config: Mapping[str, Any]) -> Qwen2_5VL:
        """With the positions of a second of video."""
        vision = config.get("vision_config")
        rate = vision.get("tokens_per_second") if isinstance(vision, Mapping) else None
        return replace(self, tokens_per_second=TOKENS_PER_SECOND if rate is None else rate)


QWEN2_5_VL = Qwen2_5VL(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    gated_tower=True,
    coordinates=json_list(
        space="shown", source="QwenLM/Qwen3-VL qwen-vl-finetune/tools/process_bbox.ipynb"
    ),
)
"""Qwen2.5-VL: windowed vision tower, 2 x 2 spatial merge, MRoPE with a video's times."""


QWEN3_VL = QwenVL(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    coordinates=json_list(source="QwenLM/Qwen3-VL issues 1486, 1633, 1987; 2d_grounding.ipynb"),
    video_kind=VolumeBoundRule,
    video_wrapped=WRAPPED,
    frames_apart=True,
    modules=ModulePaths(
        vision="model.visual",
        projectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
        language="model.language_model",
        deep_features=True,
    ),
)
"""Qwen3-VL and its mixture of experts: DeepStack, interleaved MRoPE, norms on queries and keys.

DeepStack (2406.04334) uses features of some of the tower's inner blocks, each through its own
merger. The decoder adds them to the hidden states of its first layers at the placeholders.

In a mixture of experts, a token's experts and their weights follow from its own hidden state alone,
so packing changes nothing. Both engines can add a load-balancing loss, off by default.
"""


class Qwen3_5(QwenVL):  # noqa: N801 - as it is called
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of two kinds of layers, and the tower."""
        whole = whole_config(config)
        decoder = qwen3_5_decoder(whole["text_config"])
        return flops.cost_model(whole, self.tower(whole), decoder)


QWEN3_5 = Qwen3_5(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    coordinates=json_list(
        source="QwenLM/Qwen3.8-Flash-Next issue 4 (space); ms-swift (form)", second_hand=True
    ),
    video_kind=VolumeBoundRule,
    video_wrapped=WRAPPED,
    frames_apart=True,
)
"""Qwen3.5, dense and mixture of experts, with its tower; Qwen3.6 and 3.8 are the same architecture.

Three of four layers of the decoder are GatedDeltaNet: a short convolution and a delta rule, whose
state runs from token to token (`vlmpack/recurrence`). The others are full attention, with a gate on
its output and rotary positions on a quarter of each head. The tower is that of Qwen3-VL without
DeepStack; positions are MRoPE, its axes interleaved.
"""
