"""Refuse tensors with values that are no numbers, except buffers that are infinite by design."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlmpack.errors import ModelError, NonFiniteError
from vlmpack.model_folder.finite import OddValues, odd_tensors, odd_words, read_through


def refuse_odd_weights(folder: Path, odd: OddValues, model: Callable[[], Any]) -> None:
    """Refuse a model folder.

    Args:
        model: makes the transformers model of that folder, with or without storage.

    Raises:
        ModelError: one of them is no such buffer.
    """
    if not odd:
        return
    if found := _without_bounds(model(), odd):
        raise ModelError(
            f"model.path: {folder}: {odd_words(found)}; expected finite ones: take the folder from "
            "where it came from, or from an earlier checkpoint of the run that wrote it"
        )


def refuse_odd_adapters(file: Path) -> None:
    """Refuse a file of adapters.

    Raises:
        ModelError: it has such a tensor.
        OSError: it cannot be read.
    """
    if odd := read_through(file)[1]:
        raise ModelError(f"{file}: {odd_words(odd)}; expected finite ones")


def refuse_odd_state(state: Mapping[str, Tensor], model: Any, hint: str) -> None:
    """Refuse what is about to be written.

    Raises:
        NonFiniteError: one of them holds such values by no design.
    """
    if found := odd_state(state, model):
        raise NonFiniteError(f"nothing is written: {odd_words(found)}; {hint}")


def odd_state(state: Mapping[str, Tensor], model: Any) -> OddValues:
    """Those of a model's tensors that hold such values by no design."""
    return _without_bounds(model, odd_tensors(state.items()))


def _without_bounds(model: Any, odd: OddValues) -> OddValues:
    """A mask holds -inf, and a bound that clamps nothing inf or -inf (`input_max` of Gemma 4):
    one of the two alone, under a name that buffers have and no parameter."""
    buffers, parameters = (
        {name.rpartition(".")[2] for name, _ in named}
        for named in (model.named_buffers(), model.named_parameters())
    )
    bounds = buffers - parameters
    return {
        name: values
        for name, values in odd.items()
        if values not in ({"inf"}, {"-inf"}) or name.rpartition(".")[2] not in bounds
    }
