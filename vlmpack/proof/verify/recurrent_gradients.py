"""Gradients of recurrent layers as the stock model has them with its recurrences in float64.

The packed run's float32 is held against these; what vlmpack's torch forms in float32 differ from
them by, one sample at a time, is the noise. A bound that followed from stock's float32 would be
30 times as wide where decays are strong, for rounding that is not the packed run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlmpack.proof.measure import GradientError, gradient_errors
from vlmpack.proof.verify.recurrences_alone import recurrences_alone
from vlmpack.proof.verify.reference import Reference

RECURRENT_PARTS = ("recurrent layers", "recurrent scalars")
"""The parts, as `part_of` names them, whose gradients are held against float64."""


def in_double(
    reference: Reference, stock: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, GradientError], dict[str, GradientError]]:
    """Run the stock model twice more, with vlmpack's torch forms in float64 and in float32.

    Args:
        reference: whose model is in float32.
        stock: its own gradients.
        names: parameters of recurrent layers.

    Returns:
        Their gradients with the recurrences in float64, and the errors against these of the torch
        forms in float32, and of stock's own.
    """

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        with recurrences_alone(reference.model, dtype):
            gradients = reference.run().gradients
        return {name: gradients[name] for name in names}

    better = run(torch.float64)
    noise = gradient_errors(better, run(torch.float32).items())
    return better, noise, gradient_errors(better, ((name, stock[name]) for name in names))
