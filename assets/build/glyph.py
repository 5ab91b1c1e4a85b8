"""Glyphs (one digit as ink coverage, float32 in 0..1) and the distortions applied to them.

A glyph is an array (H, W). Every function takes and returns one; randomness comes from a numpy
generator that the caller seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import ndimage

CANVAS = 32
INK_THRESHOLD = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class WarpStrength:
    """Upper bounds of the random distortion of a glyph."""

    rotation_degrees: float = 8.0
    shear: float = 0.2
    stretch: float = 0.12
    elastic_pixels: float = 1.2
    thickness: float = 0.12


def resize(glyph: np.ndarray, height: int, width: int, method: int = Image.BICUBIC) -> np.ndarray:
    """`glyph` at (height, width), clipped to 0..1."""
    image = Image.fromarray(glyph).resize((width, height), method)
    return np.clip(np.asarray(image, dtype=np.float32), 0.0, 1.0)


def trim(glyph: np.ndarray) -> np.ndarray:
    """Cut the empty border off."""
    ink = glyph > INK_THRESHOLD
    rows, cols = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    if rows.size == 0:
        return glyph
    return glyph[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


def centre(glyph: np.ndarray, size: int = CANVAS) -> np.ndarray:
    """Put `glyph` in the middle of a square canvas, shrunk first if it does not fit."""
    height, width = glyph.shape
    scale = min(1.0, size / height, size / width)
    if scale < 1.0:
        glyph = resize(glyph, max(1, round(height * scale)), max(1, round(width * scale)))
        height, width = glyph.shape
    canvas = np.zeros((size, size), dtype=np.float32)
    top, left = (size - height) // 2, (size - width) // 2
    canvas[top : top + height, left : left + width] = glyph
    return canvas


def warp(glyph: np.ndarray, rng: np.random.Generator, strength: WarpStrength) -> np.ndarray:
    """Random rotation, shear, stretch and elastic bending of a square canvas, in one sampling."""
    size = glyph.shape[0]
    angle = np.deg2rad(rng.uniform(-1, 1) * strength.rotation_degrees)
    shear = rng.uniform(-1, 1) * strength.shear
    stretch = np.exp(rng.uniform(-1, 1, size=2) * strength.stretch)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = rotation @ np.array([[1.0, 0.0], [shear, 1.0]]) @ np.diag(stretch)
    grid = np.stack(np.mgrid[0:size, 0:size]).astype(np.float32) - (size - 1) / 2
    source = np.einsum("ij,jhw->ihw", matrix, grid) + (size - 1) / 2
    if strength.elastic_pixels > 0:
        # A 4 x 4 field of random vectors, interpolated: smooth bends at the scale of a stroke.
        field = (
            rng.normal(size=(2, 4, 4)).astype(np.float32) * strength.elastic_pixels * rng.random()
        )
        source += np.stack([resize_field(component, size) for component in field])
    return ndimage.map_coordinates(glyph, source, order=1, mode="constant").astype(np.float32)


def resize_field(field: np.ndarray, size: int) -> np.ndarray:
    """A small displacement field at (size, size), not clipped."""
    return np.asarray(Image.fromarray(field).resize((size, size), Image.BICUBIC))


def restroke(glyph: np.ndarray, rng: np.random.Generator, thickness: float) -> np.ndarray:
    """Thicken or thin the strokes: blur, then a soft threshold at a random level."""
    soft = ndimage.gaussian_filter(glyph, rng.uniform(0.6, 1.4))
    level = 0.42 + rng.uniform(-1, 1) * thickness
    sharpness = rng.uniform(5, 14)
    curve = 1.0 / (1.0 + np.exp(-sharpness * (np.stack([soft, 0 * soft, 0 * soft + 1]) - level)))
    # Rescaled so that bare paper stays bare: a raised floor would draw a box around the glyph.
    return ((curve[0] - curve[1]) / (curve[2] - curve[1])).astype(np.float32)


def coarsen(glyph: np.ndarray, cells: int) -> np.ndarray:
    """Average a square canvas into `cells` x `cells` and scale back up: a low-resolution scan."""
    small = resize(glyph, cells, cells, Image.BOX)
    return resize(small, glyph.shape[0], glyph.shape[1])
