"""Models with few of their layers: what repeats in one of `gpu_shapes.SHAPES`, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_shapes import Shape

TEXT, BLOCK, FULL_BLOCK = "text layer", "tower block", "tower block, whole image"


def pattern(shape: Shape) -> list[str]:
    """The kinds of text layers that repeat."""
    kinds = [*shape.text["layer_types"]]
    size = next(n for n in range(1, len(kinds) + 1) if kinds[:n] * (len(kinds) // n) == kinds)
    return kinds[:size]


def kinds_of(shape: Shape) -> dict[str, int]:
    """How many of each kind of layers the whole model has. A hybrid's text layers are counted by
    the pattern that repeats."""
    found = {TEXT: len(shape.text["layer_types"]) // len(pattern(shape))}
    if not shape.vision:
        return found
    full = len(shape.vision.get("fullatt_block_indexes", ()))
    found[BLOCK] = shape.vision["depth"] - full
    return {**found, FULL_BLOCK: full} if full else found


def of_layers(shape: Shape, layers: Mapping[str, int]) -> Shape:
    """The shape with so many of each kind."""
    types = pattern(shape) * layers[TEXT]
    depth = layers.get(BLOCK, 0) + layers.get(FULL_BLOCK, 0)
    vision = {**shape.vision, "depth": depth} if depth else {}
    if FULL_BLOCK in layers:
        vision["fullatt_block_indexes"] = [*range(layers[BLOCK], depth)]
    text = {**shape.text, "num_hidden_layers": len(types), "layer_types": types}
    return replace(shape, text=text, vision=vision)
