"""Refuse tensors with values that are no numbers, except buffers that are infinite by design."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmpack.errors import ModelError, NonFiniteError
from vlmpack.model_folder.finite import (
    NonFiniteValues,
    non_finite_tensors,
    non_finite_words,
    read_through,
)


def refuse_non_finite_weights(
    folder: Path, non_finite: NonFiniteValues, model: Callable[[], Any]
) -> None:
    """Refuse a model folder with tensors that are not finite, but for buffers infinite by design.

    Args:
        non_finite: the folder's tensors with values that are no numbers.
        model: makes the transformers model of that folder, with or without storage.

    Raises:
        ModelError: a tensor is not finite, and is no buffer that is infinite by design.
    """
    if not non_finite:
        return
    if damaged := _without_bounds(model(), non_finite):
        raise ModelError(
            f"model.path: {folder}: {non_finite_words(damaged)}. Expected finite ones: take the "
            "folder from where it came from, or from an earlier checkpoint of the run that wrote it"
        )


def refuse_non_finite_adapters(file: Path) -> None:
    """Refuse a file of adapters that holds values that are no numbers.

    Raises:
        ModelError: a tensor of the file is not finite.
        OSError: the file cannot be read.
    """
    if non_finite := read_through(file)[1]:
        raise ModelError(f"{file}: {non_finite_words(non_finite)}; expected finite ones")


def refuse_non_finite_state(state: Mapping[str, Tensor], model: Any, hint: str) -> None:
    """Refuse to write tensors that are not finite, but for buffers infinite by design.

    Raises:
        NonFiniteError: a tensor is not finite, and is no buffer that is infinite by design.
    """
    if damaged := non_finite_state(state, model):
        raise NonFiniteError(f"nothing is written: {non_finite_words(damaged)}; {hint}")


def non_finite_state(state: Mapping[str, Tensor], model: Any) -> NonFiniteValues:
    """A model's tensors that are not finite, but for buffers that are infinite by design."""
    return _without_bounds(model, non_finite_tensors(state.items()))


def _without_bounds(model: Any, non_finite: NonFiniteValues) -> NonFiniteValues:
    """The tensors but for masks, which hold -inf, and bounds that clamp nothing, which hold inf or
    -inf (`input_max` of Gemma 4). Each holds one of the two alone, under a name that buffers have
    and no parameter."""
    buffers, parameters = (
        {name.rpartition(".")[2] for name, _ in named}
        for named in (model.named_buffers(), model.named_parameters())
    )
    bounds = buffers - parameters
    return {
        name: values
        for name, values in non_finite.items()
        if values not in ({"inf"}, {"-inf"}) or name.rpartition(".")[2] not in bounds
    }
