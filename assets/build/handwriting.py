"""Handwritten digits from scikit-learn, split by source image, augmented for training.

`load_digits` holds 1,797 scans of 8 x 8 cells with 17 grey levels (UCI optdigits, test part).
A source image belongs to one split only, so no test digit is ever seen in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

from assets.build import glyph as glyphs

SPLIT_SIZES = {"val": 60, "test": 240}
AUGMENT = glyphs.WarpStrength(
    rotation_degrees=9.0, shear=0.18, stretch=0.12, elastic_pixels=0.9, thickness=0.1
)


@dataclass(frozen=True, slots=True)
class Handwriting:
    """The scans of one split, by digit."""

    scans: np.ndarray
    """(N, 8, 8) float32 ink coverage of all source images."""
    sources: dict[int, np.ndarray]
    """Digit -> indices into `scans` that this split may use."""
    augment: bool

    def glyph(self, digit: int, rng: np.random.Generator) -> np.ndarray:
        """One written `digit`, trimmed; distorted when this split augments."""
        source = int(rng.choice(self.sources[digit]))
        scan = self.scans[source]
        canvas = glyphs.centre(glyphs.resize(scan, 26, 26))
        if self.augment and rng.random() < 0.9:
            canvas = glyphs.warp(canvas, rng, AUGMENT)
            if rng.random() < 0.5:
                canvas = glyphs.restroke(canvas, rng, AUGMENT.thickness)
        return glyphs.trim(canvas)


def split_sources(seed: int) -> dict[str, np.ndarray]:
    """Split name -> sorted source indices; the splits are disjoint and cover everything."""
    order = np.random.default_rng(seed).permutation(len(load_digits().target))
    splits: dict[str, np.ndarray] = {}
    start = 0
    for name, size in SPLIT_SIZES.items():
        splits[name] = np.sort(order[start : start + size])
        start += size
    splits["train"] = np.sort(order[start:])
    return splits


def load_split(name: str, seed: int) -> Handwriting:
    """The handwriting of one split; only `train` is augmented."""
    data = load_digits()
    indices = split_sources(seed)[name]
    sources = {d: indices[data.target[indices] == d] for d in range(10)}
    scans = (data.images / 16.0).astype(np.float32)
    return Handwriting(scans, sources, augment=name == "train")
