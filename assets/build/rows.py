"""Rows: glyphs side by side on a sheet of paper, with the flaws of a scan.

In: glyphs (ink coverage) and a generator. Out: a Pillow image, grey or RGB, about 28 pixels high,
and where in it each glyph stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

from assets.build import glyph as glyphs


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStyle:
    """Ranges from which the look of one row is drawn; lengths in pixels."""

    glyph_height: tuple[int, int] = (19, 25)
    pitch: tuple[int, int] = (27, 33)
    """Distance between neighbours' centres; about one image token, so that each has its own."""
    jitter: int = 2
    margin: tuple[int, int] = (11, 18)
    """From an outer glyph's centre to the edge of the paper."""
    odd_height_share: float = 0.2
    tall_share: float = 0.06
    """Share of sheets two tokens high, the row somewhere on them."""
    colour_share: float = 0.3
    min_contrast: float = 150.0
    blur_share: float = 0.2
    noise_share: float = 0.15
    noise_levels: float = 7.0


@dataclass(frozen=True, slots=True)
class Row:
    """A drawn row and the horizontal extent (left, right) of each glyph, in pixels."""

    image: Image.Image
    spans: list[tuple[int, int]]


def place(
    row: Sequence[np.ndarray], rng: np.random.Generator, style: RowStyle
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Ink coverage of the whole row (H, W), and the glyphs' extents."""
    height = int(rng.integers(25, 33)) if rng.random() < style.odd_height_share else 28
    if rng.random() < style.tall_share:
        height = int(rng.integers(50, 62))
    tall = int(rng.integers(style.glyph_height[0], style.glyph_height[1] + 1))
    squeeze = rng.uniform(0.85, 1.12)
    pitch = int(rng.integers(style.pitch[0], style.pitch[1] + 1))
    middle = int(rng.integers(15, height - 14)) if height > 40 else height // 2
    centre = int(rng.integers(style.margin[0], style.margin[1] + 1))
    boxes: list[tuple[int, int, np.ndarray]] = []
    for shape in row:
        h = min(height, tall + int(rng.integers(-2, 3)))
        w = min(22, max(3, round(shape.shape[1] * h / shape.shape[0] * squeeze)))
        y = min(height - h, max(0, middle - h // 2 + int(rng.integers(-2, 3))))
        x = max(0, centre - w // 2 + int(rng.integers(-style.jitter, style.jitter + 1)))
        boxes.append((y, x, glyphs.resize(shape, h, w)))
        centre += pitch
    width = centre - pitch + int(rng.integers(style.margin[0], style.margin[1] + 1)) + 2
    width = max(width, max(x + shape.shape[1] for _, x, shape in boxes))
    ink = np.zeros((height, width), dtype=np.float32)
    for y, left, shape in boxes:
        view = ink[y : y + shape.shape[0], left : left + shape.shape[1]]
        np.maximum(view, shape, out=view)
    return ink, [(left, left + shape.shape[1]) for _, left, shape in boxes]


def colours(rng: np.random.Generator, style: RowStyle) -> tuple[np.ndarray, np.ndarray]:
    """Paper and ink, RGB 0..255, with enough contrast to read; equal channels when grey."""
    dark = rng.uniform(0, 235 - style.min_contrast)
    light = rng.uniform(dark + style.min_contrast, 255)
    tint = 20.0 if rng.random() < style.colour_share else 0.0
    pair = [level + rng.uniform(-tint, tint, size=3) for level in (light, dark)]
    paper, ink = (np.clip(colour, 0, 255) for colour in pair)
    return paper, ink


def draw(row: Sequence[np.ndarray], rng: np.random.Generator, style: RowStyle) -> Row:
    """The finished row; its image has mode L when grey, RGB when tinted."""
    coverage, spans = place(row, rng, style)
    if rng.random() < style.blur_share:
        coverage = ndimage.gaussian_filter(coverage, rng.uniform(0.3, 0.9))
    paper, ink = colours(rng, style)
    grey = bool(np.ptp(paper) == 0 and np.ptp(ink) == 0)
    if grey:
        paper, ink = paper[:1], ink[:1]
    pixels = paper + coverage[..., None] * (ink - paper)
    if rng.random() < style.noise_share:
        noise = rng.normal(size=coverage.shape) * rng.uniform(0, style.noise_levels)
        pixels = pixels + noise[..., None]
    image = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return Row(Image.fromarray(image[..., 0] if grey else image), spans)
