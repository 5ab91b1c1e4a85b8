"""transformers' image processor of a model folder: the one on PIL, whatever else there is.

transformers has some image processors only on torchvision (`PixelSettings`). They use little of it.
The arithmetic below is that of transformers' backend, in the same order on the same types, so a
family's rule gives the same bits without torchvision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from vlmpack.errors import VlmpackError
from vlmpack.families.base import ImageLayout
from vlmpack.families.configs import processor_setting
from vlmpack.model_folder.load import load_image_processor
from vlmpack.packing import Media
from vlmpack.whole_file import regular_text


def image_processor(folder: Path, **settings: Any) -> Any:
    """The processor with the folder's settings, or those given in place of them.

    Raises:
        OSError, ValueError: its files are missing, or name no processor of transformers.
        ModelError: they name code of the folder's own.
    """
    section = processor_setting(folder, "image_processor", None)
    if section is None and not (folder / "preprocessor_config.json").is_file():
        raise FileNotFoundError("the file is missing")
    try:
        return load_image_processor(folder, **settings)
    except (VlmpackError, OSError, ValueError):
        raise
    except Exception as error:  # values of another type fail anywhere in a processor's class
        raise ValueError(f"{type(error).__name__}: {error}") from error


def family_processor(folder: Path, *kinds: str, sized: bool = True) -> Any:
    """The processor, if it is one that a family's rule follows.

    Args:
        kinds: allowed names of its class, without the variant (Pil, Fast).

    Raises:
        OSError, ValueError: as `image_processor`; another class, one that leaves images at their
            own size, or one that crops them.
    """
    processor = image_processor(folder)
    name = type(processor).__name__
    if name.removesuffix("Pil").removesuffix("Fast") not in kinds:
        raise ValueError(f"it is a {name}, expected {' or '.join(kinds)}")
    if not processor.do_resize or (sized and processor.size is None):
        size = None if processor.size is None else dict(processor.size)
        what = f"do_resize is {processor.do_resize}" + (f" and size {size}" if sized else "")
        raise ValueError(f"{what}, expected true{' and a size' if sized else ''}")
    if processor.do_center_crop:
        raise ValueError("do_center_crop is true, expected false")
    return processor


@dataclass(frozen=True)
class ProcessorRule:
    """What the image rules share: transformers' processor, with the rule's sizes."""

    pictures_are_whole: ClassVar[bool] = True
    folder: Path

    def settings(self) -> dict[str, Any]:
        """See `vlmpack.families.ImageRule`."""
        return {}

    @cached_property
    def processor(self) -> Any:
        """The folder's processor, with the rule's settings."""
        return image_processor(self.folder, **self.settings())

    @cached_property
    def level_values(self) -> np.ndarray:
        """(3, 256) float32: what the processor's own functions make of each level of a channel."""
        values = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
        processor = self.processor
        if processor.do_rescale:
            values = processor.rescale(values, processor.rescale_factor)
        if processor.do_normalize:
            values = processor.normalize(values, processor.image_mean, processor.image_std)
        return np.ascontiguousarray(values[:, 0], dtype=np.float32)

    def shown(self, pixels: Tensor) -> Image:
        """An image from (3, H, W) pixels as the tower takes them, normalisation undone."""
        mean, std = (
            torch.tensor(each) for each in (self.processor.image_mean, self.processor.image_std)
        )
        levels = pixels.permute(1, 2, 0)
        if self.processor.do_normalize:
            levels = levels * std + mean
        levels = levels / self.processor.rescale_factor
        return fromarray(levels.round().clamp(0, 255).numpy().astype(np.uint8))


def media_of(
    rows: Tensor,
    layouts: Sequence[ImageLayout],
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Media:
    """Images as rows of patches, (P, channels * side * side), with what their layouts say of them.

    `sizes` has each image's (width, height), for families that ask for them.
    """
    return Media(
        pixel_values=rows,
        grid_thw=tuple(layout.grid for layout in layouts),
        num_tokens=tuple(layout.num_tokens for layout in layouts),
        image_sizes=None if sizes is None else tuple(sizes),
    )


def blank(layout: ImageLayout, width: int, size: tuple[int, int] | None = None) -> Media:
    """An image of zeros."""
    rows = torch.zeros(math.prod(layout.grid), width)
    return media_of(rows, [layout], None if size is None else [size])


FORMER = {"image_mean": "norm_mean", "image_std": "norm_std"}
"""Names that some published files have for keys of today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSettings:
    """How an image's levels, 0 to 255, become pixels.

    Args:
        resample: Pillow's number of a filter; 3 is bicubic.
        rescale_factor: 1 / 255 puts them between 0 and 1.
        do_normalize: whether `image_mean` is then subtracted and the result divided by `image_std`.
            Both have a value for red, green and blue.
    """

    resample: int = 3
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    image_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Self:
        """From the keys of an image processor's file; what it leaves out is the default.

        Raises:
            ValueError: a value of another type.
        """
        settings = {
            key: section[old] for key, old in FORMER.items() if section.get(old) is not None
        }
        settings |= {
            field.name: section[field.name] for field in fields(cls) if field.name in section
        }
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for key, value in settings.items():
            kind = kinds[key]
            if kind is tuple and isinstance(value, list) and len(value) == 3:
                settings[key] = tuple(map(float, value))
            elif kind is float and isinstance(value, int | float):
                settings[key] = float(value)
            elif type(value) is not kind:
                expected = "a list of three numbers" if kind is tuple else kind.__name__
                raise ValueError(f"{key} is {value!r}, expected {expected}")
        return cls(**settings)

    def normalized(self, levels: Tensor) -> Tensor:
        """(3, H, W) float32 of (3, H, W) levels, uint8 or float32; `rescale_and_normalize` of
        transformers' backend, which folds the factor into mean and deviation."""
        if not self.do_normalize:
            return levels * self.rescale_factor if self.do_rescale else levels.float()
        scale = 1.0 / self.rescale_factor if self.do_rescale else 1.0
        mean, std = (torch.tensor(each) * scale for each in (self.image_mean, self.image_std))
        return levels.float().sub(mean[:, None, None]).div_(std[:, None, None])


def processor_section(folder: Path, kind: str) -> Mapping[str, Any]:
    """A model folder's settings of its image processor.

    They are a section of processor_config.json, or else the whole of preprocessor_config.json, as
    in transformers.

    Args:
        kind: the class that it must name, unless it names none.

    Raises:
        OSError: neither file is there.
        ValueError: it is no JSON object, or of another class.
    """
    section = processor_setting(folder, "image_processor", None)
    if section is None:
        text = regular_text(folder / "preprocessor_config.json")
        section = json.loads(text)
    if not isinstance(section, Mapping):
        raise ValueError(f"it is a {type(section).__name__}, expected a JSON object")
    named = section.get("image_processor_type")
    if named not in (None, kind):
        raise ValueError(f"it is a {named}, expected {kind}")
    return section
