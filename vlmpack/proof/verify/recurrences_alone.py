"""The stock model with vlmpack's torch forms in the place of its recurrences, one sample at a time.

In float64 they are what gradients of recurrent layers are held against: transformers' own chunked
rule takes the decay between two tokens as a difference of float32 sums over a chunk. Where decays
are strong (published models draw A up to 16), its gradients of what makes the decays (`A_log`,
`dt_bias` and the projection before them) are off by up to 5e-4, while the torch forms in float32
are off by 1e-5. In float32 the torch forms are the noise of that comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.recurrence import KERNELS, kernel_places
from vlmpack.recurrence import (
    Chosen,
    RecurrenceChoice,
    RowSegments,
    StepSize,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)

TOKEN_DIMS = {
    "convolution": {"x": 2},
    "delta_rule": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "scan": {"x": 1, "dt": 1, "b": 1, "c": 1},
}
"""Along which dimension the tensors of a kind have their tokens, by the names of our arguments."""


def torch_forms(dtype: torch.dtype) -> RecurrenceChoice:
    """The torch forms computing in a dtype; outputs are in the dtype of the first tensor."""
    name, reason = str(dtype).removeprefix("torch."), "for comparison"
    return RecurrenceChoice(
        convolution=Chosen(name, partial(_in_dtype, dtype, segment_convolution), reason),
        delta_rule=Chosen(name, partial(_in_dtype, dtype, segment_delta_rule), reason),
        scan=Chosen(name, partial(_in_dtype, dtype, segment_scan), reason),
    )


def _in_dtype(
    dtype: torch.dtype, function: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    def cast(value: Any) -> Any:
        if isinstance(value, StepSize):
            return replace(value, bias=cast(value.bias))
        return value.to(dtype) if isinstance(value, Tensor) else value

    found = function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
    return found.to(args[0].dtype)


def one_segment(length: int, device: torch.device) -> RowSegments:
    """A row of one sample alone."""
    return RowSegments((length,), torch.tensor([0, length], dtype=torch.int32, device=device))


def named_arguments(kernel: str, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """Transformers' arguments of a kernel under the names of ours; options stay as they are."""
    bound = inspect.signature(KERNELS[kernel].ours).bind_partial(None, None, *args, **kwargs)
    found = dict(bound.arguments)
    options: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options = found.pop(name, {})
    del found["choice"], found["row"]
    return {**found, **options}


def _alone(kernel: str, choice: RecurrenceChoice, *args: Any, **kwargs: Any) -> Any:
    known = KERNELS[kernel]
    if known.kind is None:
        return known.ours(choice, one_segment(0, torch.device("cpu")), *args, **kwargs)
    given = named_arguments(kernel, args, kwargs)
    name, dim = next(iter(TOKEN_DIMS[known.kind].items()))
    tokens: Tensor = given[name]
    return known.ours(choice, one_segment(tokens.shape[dim], tokens.device), **given)


@contextmanager
def recurrences_alone(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A stretch in which a stock model computes its recurrences by the torch forms.

    Args:
        model: of transformers, given batches of one sample without padding.
        dtype: that they compute in.
    """
    choice = torch_forms(dtype)
    before = []
    for module, function, kernel in kernel_places(model):
        before.append((module, function, getattr(module, function)))
        setattr(module, function, partial(_alone, kernel, choice))
    try:
        yield
    finally:
        for module, function, was in before:
            setattr(module, function, was)
