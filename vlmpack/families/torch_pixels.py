"""Pixels of image processors that transformers has on torchvision alone.

What they take from torchvision is little: with the arithmetic below, which is that of transformers'
backend there, in the same order on the same types, a family's rule makes the same bits without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vlmpack.families.processor_config import processor_setting
from vlmpack.whole_file import regular_text

FORMER = {"image_mean": "norm_mean", "image_std": "norm_std"}
"""Names that some published files have for keys of today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSettings:
    """What becomes of an image's levels, 0 to 255.

    Args:
        resample: Pillow's number of a filter; 3 is bicubic.
        do_rescale: whether levels are multiplied with `rescale_factor`.
        rescale_factor: 1 / 255 puts them between 0 and 1.
        do_normalize: whether `image_mean` is then taken away, and what is left divided by
            `image_std`, channel by channel.
        image_mean: of (red, green, blue).
        image_std: of the same.
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
        found = {key: section[old] for key, old in FORMER.items() if section.get(old) is not None}
        found |= {field.name: section[field.name] for field in fields(cls) if field.name in section}
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for key, value in found.items():
            kind = kinds[key]
            if kind is tuple and isinstance(value, list) and len(value) == 3:
                found[key] = tuple(map(float, value))
            elif kind is float and isinstance(value, int | float):
                found[key] = float(value)
            elif type(value) is not kind:
                wanted = "a list of three numbers" if kind is tuple else kind.__name__
                raise ValueError(f"{key} is {value!r}, expected {wanted}")
        return cls(**found)

    def normalized(self, levels: Tensor) -> Tensor:
        """(3, H, W) float32 of (3, H, W) levels, uint8 or float32; `rescale_and_normalize` of
        transformers' backend, which folds the factor into mean and deviation."""
        if not self.do_normalize:
            return levels * self.rescale_factor if self.do_rescale else levels.float()
        scale = 1.0 / self.rescale_factor if self.do_rescale else 1.0
        mean, std = (torch.tensor(each) * scale for each in (self.image_mean, self.image_std))
        return levels.float().sub(mean[:, None, None]).div_(std[:, None, None])


def processor_section(folder: Path, kind: str) -> Mapping[str, Any]:
    """What a model folder says of its image processor: the section of processor_config.json, or
    the whole of preprocessor_config.json, in this order, as transformers has it.

    Args:
        folder: model folder.
        kind: name of the class that it must be, or not name any.

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
