"""Seeded lengths: a mix of text and images as packers meet it."""

from __future__ import annotations

import numpy as np


def mixed_lengths(count: int, capacity: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(count,) tokens and (count,) vision patches.

    35% lognormal text (median 250, sigma 0.9), 40% uniform 250 to 1800, 18% lognormal (median 3000,
    sigma 0.5), 7% uniform 3000 to 9000; clipped to the capacity. Three quarters of what is not
    text are vision tokens, of four patches each.
    """
    random = np.random.default_rng(seed)
    kind = random.choice(4, size=count, p=[0.35, 0.40, 0.18, 0.07])
    drawn = np.stack(
        [
            random.lognormal(np.log(250), 0.9, count),
            random.uniform(250, 1800, count),
            random.lognormal(np.log(3000), 0.5, count),
            random.uniform(3000, 9000, count),
        ]
    )[kind, np.arange(count)]
    tokens = np.clip(drawn, 1, capacity).astype(np.int64)
    return tokens, np.where(kind > 0, tokens * 3 // 4 * 4, 0)
