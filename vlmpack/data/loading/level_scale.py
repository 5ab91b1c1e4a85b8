"""The scale by which a model's pixels travel as uint8 levels (`data.pixels: levels`)."""

from __future__ import annotations

import numpy as np
from PIL.Image import Image, fromarray, new

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing.levels import LevelScale

SIDE = 64
"""Width and height in pixels of the images that a processor is tried with."""


def level_scale(encoder: Encoder) -> LevelScale:
    """How pixels of the model's images lie between black and white.

    Raises:
        CapabilityError: they are no levels, so that `data.pixels: levels` has nothing to send.
    """
    rule = encoder.image_rule
    sides = (SIDE, SIDE)
    try:
        ends = [rule.preprocess([new("RGB", sides, colour)]) for colour in ("black", "white")]
        scale = LevelScale(*(media.pixel_values for media in ends))
        if scale.levels_of(rule.preprocess([_noise()]).pixel_values) is None:
            raise ValueError("an image resized by it has values between two levels")
    except ValueError as error:
        raise CapabilityError(
            f"data.pixels is levels, but those of {encoder.family.name} in {encoder.folder} cannot "
            f"be sent so: {error}; set data.pixels to float32"
        ) from error
    return scale


def _noise() -> Image:
    """An image of all levels that every processor has to resize."""
    levels = np.random.default_rng(0).integers(0, 256, (SIDE + 9, SIDE * 2 + 5, 3), dtype=np.uint8)
    return fromarray(levels)
