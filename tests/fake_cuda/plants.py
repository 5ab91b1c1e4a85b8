"""Faults of code for a GPU, planted to see that a step on the fake one finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from vlmpack.backends.hf import attention, engine, model
from vlmpack.packing import media, move_batch
from vlmpack.training import objective


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """It looks at a number of its first tensor."""

    def read(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        assert bool(torch.isfinite(first).all())
        return function(first, *args, **options)

    return read


def _look(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    given[0].sum().item()


def _tower_that_reads(make: Callable[..., Any]) -> Callable[..., Any]:
    """Its last layer looks at a number."""

    def made(*args: Any) -> Any:
        packed = make(*args)
        layers = [part for part in packed.vision.modules() if isinstance(part, nn.Linear)]
        layers[-1].register_forward_pre_hook(_look)
        return packed

    return made


def _left_behind(batch: Any, device: torch.device) -> Any:
    """Positions stay on the CPU."""
    return replace(move_batch(batch, device), position_ids=batch.position_ids)


def _waiting(batch: Any, device: torch.device) -> Any:
    """The host waits for each copy."""
    return media._map_tensors(batch, lambda tensor: tensor.to(device))


def _indexed(
    attend: Callable[..., Any],
    choice: Any,
    module: nn.Module,
    query: torch.Tensor,
    *others: Any,
    **options: Any,
) -> Any:
    """Attention of a row that is taken out of its batch by an index."""
    return attend(choice, module, query[0][None], *others, **options)


PLANTS: dict[str, Callable[[], Any]] = {
    "a read in the loss": lambda: patch.object(
        model, "linear_cross_entropy", _reading(model.linear_cross_entropy)
    ),
    "a read in the tower": lambda: patch.object(
        engine, "packed_model", _tower_that_reads(engine.packed_model)
    ),
    "a copy of the batch that waits": lambda: patch.object(objective, "move_batch", _waiting),
    "positions on the CPU": lambda: patch.object(objective, "move_batch", _left_behind),
    "a row by its index": lambda: patch.object(
        attention, "_attend", partial(_indexed, attention._attend)
    ),
    "no autocast": lambda: patch.object(engine.HFEngine, "_autocast", lambda _: nullcontext()),
}
"""Each is open while an engine is built and takes a step."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The fault of that name, or none."""
    with PLANTS[name]() if name is not None else nullcontext():
        yield
