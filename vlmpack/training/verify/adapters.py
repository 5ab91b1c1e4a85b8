"""Gradients of adapters: the stock model has none, so the engine itself, run on
rows of one sample each, is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmpack.backends.policy import is_adapter
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.training.verify.compare import Compared
from vlmpack.training.verify.figures import Check
from vlmpack.training.verify.gradients import GradientError, check_gradients, gradient_errors
from vlmpack.training.verify.packed import PackedRun
from vlmpack.training.verify.row import Row, make_row


def _adapter_names(run: PackedRun) -> list[str]:
    """Trained parameters that the stock model does not have."""
    model: Any = run.model
    if model is None:
        return []
    return [n for n, p in model.named_parameters() if p.requires_grad and is_adapter(n)]


def adapter_gradients(
    run: PackedRun,
    collator: PackCollator | PadCollator,
    rows: Sequence[Row],
    count: Tensor,
) -> dict[str, Tensor]:
    """Gradients of adapters from rows of one sample each: the stock model has no adapters."""
    names = _adapter_names(run)
    if not names:
        return {}
    alone = [
        make_row(collator, [sample], [number])
        for row in rows
        for sample, number in zip(row.samples, row.numbers, strict=True)
    ]
    run.engine.zero_gradients()
    run.run(alone, backward=True)
    run.engine.finish_gradients(count, None)
    return held_gradients(run, dict.fromkeys(names, torch.empty(0)))


def held_gradients(run: PackedRun, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on CPU of the gradients of some parameters; zeros where there is none."""
    if not names:
        return {}
    model: Any = run.model
    found = {}
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.detach().to("cpu", torch.float32, copy=True)
    return found


def check_adapters(
    compared: Compared,
    singles: dict[str, Tensor],
    packed: dict[str, Tensor],
) -> list[Check]:
    """The gradients of the rows against those of the samples alone; no check without adapters."""
    if not singles:
        return []
    errors = gradient_errors(singles, packed.items())
    none = {name: GradientError(0.0, error.scale) for name, error in errors.items()}
    parts = dict.fromkeys(singles, "adapters")
    found = check_gradients(compared, errors, none, parts)
    return [replace(check, noise=None) for check in found]  # it was not measured
