"""Digits in type: fonts that ship with matplotlib and Pillow, and seven-segment shapes.

Out: a bank of distorted glyphs per digit, for pretraining. No handwriting enters here.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from assets.build import glyph as glyphs

# Fonts without usable digits (symbols, private-use variants, old-style figures) are left out.
FONT_PATTERNS = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf", "cm*10.ttf")
FONTS_LEFT_OUT = ("Display", "cmex10", "cmsy10", "cmmi10")
FONT_SIZE = 40
# Segments: top, upper left, upper right, middle, lower left, lower right, bottom.
SEGMENTS = ("1110111", "0010010", "1011101", "1011011", "0111010")
SEGMENTS += ("1101011", "1101111", "1010010", "1111111", "1111011")
DISTORTION = glyphs.WarpStrength(
    rotation_degrees=8.0, shear=0.25, stretch=0.12, elastic_pixels=0.8, thickness=0.12
)


def font_files() -> list[Path]:
    """Usable fonts, in a fixed order."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = {path for pattern in FONT_PATTERNS for path in folder.glob(pattern)}
    return sorted(p for p in files if not any(part in p.stem for part in FONTS_LEFT_OUT))


def load_fonts() -> list[ImageFont.FreeTypeFont | ImageFont.ImageFont]:
    """All fonts at one size, Pillow's own last."""
    fonts: list[ImageFont.FreeTypeFont | ImageFont.ImageFont] = [
        ImageFont.truetype(str(path), FONT_SIZE) for path in font_files()
    ]
    return [*fonts, ImageFont.load_default(FONT_SIZE)]


def print_digit(digit: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> np.ndarray:
    """One digit in one font, trimmed."""
    image = Image.new("L", (2 * FONT_SIZE, 2 * FONT_SIZE))
    ImageDraw.Draw(image).text((FONT_SIZE // 2, FONT_SIZE // 4), str(digit), fill=255, font=font)
    return glyphs.trim(np.asarray(image, dtype=np.float32) / 255.0)


def segment_digit(digit: int, rng: np.random.Generator) -> np.ndarray:
    """A seven-segment digit with random proportions and stroke width, trimmed."""
    width, height = int(rng.integers(12, 22)), int(rng.integers(26, 34))
    left, top = 8, 4
    right, middle, bottom = left + width, top + height // 2, top + height
    lines = (
        ((left, top), (right, top)),
        ((left, top), (left, middle)),
        ((right, top), (right, middle)),
        ((left, middle), (right, middle)),
        ((left, middle), (left, bottom)),
        ((right, middle), (right, bottom)),
        ((left, bottom), (right, bottom)),
    )
    image = Image.new("L", (40, 44))
    pen = ImageDraw.Draw(image)
    stroke = int(rng.integers(2, 6))
    for on, line in zip(SEGMENTS[digit], lines, strict=True):
        if on == "1":
            pen.line(line, fill=255, width=stroke)
    return glyphs.trim(np.asarray(image, dtype=np.float32) / 255.0)


def distort(shape: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random height, warp, stroke width and resolution; trimmed."""
    height = int(rng.integers(22, 28))
    width = max(2, round(shape.shape[1] * height / shape.shape[0] * rng.uniform(0.8, 1.25)))
    canvas = glyphs.centre(glyphs.resize(shape, height, min(width, 28)))
    canvas = glyphs.warp(canvas, rng, DISTORTION)
    if rng.random() < 0.5:
        canvas = glyphs.restroke(canvas, rng, DISTORTION.thickness)
    if rng.random() < 0.25:
        canvas = glyphs.coarsen(canvas, int(rng.integers(8, 14)))
    return glyphs.trim(canvas)


def glyph_bank(per_digit: int, seed: int) -> list[list[np.ndarray]]:
    """`per_digit` distorted glyphs for each digit 0..9."""
    rng = np.random.default_rng(seed)
    fonts = load_fonts()
    printed = [[print_digit(digit, font) for font in fonts] for digit in range(10)]
    bank: list[list[np.ndarray]] = [[] for _ in range(10)]
    while len(bank[9]) < per_digit:
        for digit in range(10):
            if rng.random() < 0.06:
                shape = segment_digit(digit, rng)
            else:
                shape = printed[digit][int(rng.integers(len(fonts)))]
            glyph = distort(shape, rng)
            # A distortion that ate the digit would be a wrong label.
            bank[digit].append(glyph if glyph.max() > 0.5 else glyphs.trim(shape))
    return bank
