"""What an optimizer step trains, and what that means for batch size and learning rate.

Adam-type optimizers keep their dynamics when the learning rate grows with the square root of the
batch (Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2205.10287);
a rule for small changes and noisy gradients, so it is shown as a hint, never applied.
"""

from __future__ import annotations

from math import sqrt

from vlmpack.forecast.figures import SAME_BATCH, BatchFigures, ModeFigures
from vlmpack.recipe import Recipe


def batch_figures(
    recipe: Recipe,
    own: ModeFigures,
    unpacked: ModeFigures,
    *,
    samples_per_row: float,
    copies: int,
) -> BatchFigures:
    """The recipe's global batch beside the unpacked run's.

    Args:
        own, unpacked: the recipe's mode, and mode `none`.
        samples_per_row: of planned rows.
        copies: of the model; a global batch in rows is a multiple of it.
    """
    size = recipe.training.global_batch_size
    keeping = None  # scope `batch` keeps the samples of a step by itself, as pairs always are
    if not (recipe.packing.varies_in_rows or recipe.objective.learns_pairs):
        keeping = max(1, round(size / max(1.0, samples_per_row) / copies)) * copies
    growth = own.mean_batch_samples / max(1e-9, unpacked.mean_batch_samples)
    scaled = None if abs(growth - 1) < SAME_BATCH else recipe.optim.lr * sqrt(growth)
    return BatchFigures(
        global_batch_size=size,
        counts_rows=own.counts_rows,
        samples=own.mean_batch_samples,
        tokens=own.mean_batch_tokens,
        unpacked_samples=unpacked.mean_batch_samples,
        unpacked_tokens=unpacked.mean_batch_tokens,
        samples_per_row=samples_per_row,
        keeping_size=keeping,
        learning_rate=recipe.optim.lr,
        scaled_learning_rate=scaled,
    )
