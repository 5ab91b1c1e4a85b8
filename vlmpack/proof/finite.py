"""A model that computes no numbers is told by the tensor or the module that has the first of them.

NaN is equal to nothing, so a comparison with it would blame packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.finite import odd_state
from vlmpack.errors import NonFiniteError
from vlmpack.model_folder.finite import odd_tensors, odd_words


def require_finite_model(name: str, model: nn.Module) -> None:
    """Refuse weights and buffers that are no numbers, but for buffers that are infinite by design.

    Args:
        name: what it is called in the message.

    Raises:
        NonFiniteError: with the tensors' names.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    if odd := odd_state(dict(named), model):
        raise NonFiniteError(f"{name}: {odd_words(odd)}; expected finite ones")


def require_finite_losses(
    name: str, model: nn.Module, values: Iterable[Tensor], forward: Callable[[], Any]
) -> None:
    """Refuse losses or logits that are no numbers, by the first module that computes some.

    Args:
        name: whose they are.
        values: losses and logits.
        forward: computes them again.

    Raises:
        NonFiniteError: with the module's path.
    """
    if not _odd(values):
        return
    with _first_odd(model) as found, torch.no_grad():
        forward()
    where = found[0] if found else "the cross entropy of finite logits"
    raise NonFiniteError(
        f"{name}: the model's own losses are no numbers, so there is nothing to compare with. "
        f"The first such values: {where}; expected a model that computes finite ones in this dtype"
    )


def require_finite_gradients(name: str, gradients: Mapping[str, Tensor]) -> None:
    """Refuse gradients that are no numbers where losses are some.

    Raises:
        NonFiniteError: with the parameters' names.
    """
    if odd := odd_tensors(gradients.items()):
        raise NonFiniteError(
            f"{name}: the model's own losses are finite and its gradients are not, so there is "
            f"nothing to compare with: {odd_words(odd)}"
        )


@contextmanager
def _first_odd(model: nn.Module) -> Iterator[list[str]]:
    """What holds the first values that are no numbers: the input of a module, where they are made
    between two, or its output."""
    found: list[str] = []

    def look(kind: str, path: str, module: nn.Module, *values: Any) -> None:
        if found:
            return
        if seen := _odd(_tensors(values if kind == "input" else values[-1])):
            found.append(f"the {kind} of {path or type(model).__name__} ({', '.join(seen)})")

    handles = []
    for path, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(partial(look, "input", path), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(partial(look, "output", path)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _odd(values: Iterable[Tensor]) -> list[str]:
    """Which there are; nothing for -inf alone, which is a mask's."""
    odd = odd_tensors((str(number), value) for number, value in enumerate(values))
    seen = sorted(set().union(*odd.values()))
    return [] if seen == ["-inf"] else seen


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of what a module takes or returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value))
