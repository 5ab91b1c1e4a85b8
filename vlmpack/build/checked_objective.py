"""A program's objective, whose faults are told by the name of the part that they are of.

In: what was handed over to `vlmpack.finetune`. Out: an `Objective` that computes the same. Where a
part of it raises, or returns what it must not, that is an ObjectiveError: its forward step with the
loss function of that, its sums of token losses, its counts, and what finds a remark's samples.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from numbers import Real
from operator import index
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlmpack.backends.engine import ForwardStep, LossFunction
from vlmpack.build.objective_rules import (
    leaves_gradients,
    reads_alone,
    refuse_mean,
    refuse_mean_node,
    runs_no_backward,
)
from vlmpack.errors import ObjectiveError, VlmpackError
from vlmpack.handed_over import calling
from vlmpack.packing import Batch
from vlmpack.training.objective import Objective
from vlmpack.training.vlm_step import TokenSums, cross_entropy
from vlmpack.words import raised, what_is

_OF_COLLECTIVES = f"torch{os.sep}distributed{os.sep}"
_CUT_OFF = (
    "that has no gradient; expected one that is computed from what it was given (.detach(), "
    ".item() and torch.no_grad() cut it off)"
)


def checked_objective(given: Objective | TokenSums) -> Objective:
    """What was handed over as an objective; of a function over the losses of label tokens, their
    sums divided by their number."""
    if not isinstance(given, Objective):
        hint = "; a vlmpack.Objective can name further sums, and another divisor"
        sums = _checked_sums(Objective(sums=given), f"objective {_name(given)}", hint)
        return Objective(sums=sums)
    counts = {
        name: _checked_count(count, f"objective.counts[{name!r}]")
        for name, count in given.counts.items()
    }
    remarks = {
        name: replace(remark, which=_checked_which(remark.which, f"objective.remarks[{name!r}]"))
        for name, remark in given.remarks.items()
    }
    checked = replace(given, counts=counts, remarks=remarks)
    if given.forward_step is not None:
        return replace(checked, forward_step=_checked_step(given, given.forward_step))
    if given.sums is cross_entropy:
        return checked
    called = f"objective.sums ({_name(given.sums)})"
    return replace(checked, sums=_checked_sums(given, called, ", as `sum_names` names them"))


def _checked_step(given: Objective, step: ForwardStep) -> ForwardStep:
    """A forward step of the program's own."""
    called = f"objective.forward_step ({_name(step)})"

    def checked(
        data_iterator: Iterator[Batch], model: nn.Module, **scales: Any
    ) -> tuple[Tensor, LossFunction]:
        taken: list[Batch] = []
        with ExitStack() as unchanged, leaves_gradients(called, model):

            def noted() -> Iterator[Batch]:
                for batch in data_iterator:
                    taken.append(batch)
                    unchanged.enter_context(reads_alone(called, batch))
                    yield batch

            found = _asked(called, step, noted(), model, **scales)
        if not (isinstance(found, tuple | list) and len(found) == 2 and callable(found[1])):
            raise ObjectiveError(
                f"{called} returned {_shown(found)}; expected (the model's output, a function of "
                "it)"
            )
        output, loss_function = found
        return output, partial(
            _checked_loss,
            called=called,
            own=loss_function,
            objective=given,
            batches=taken,
        )

    return checked


def _checked_loss(
    output: Tensor,
    *,
    called: str,
    own: LossFunction,
    objective: Objective,
    batches: list[Batch],
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """What a loss function makes of the model's output."""
    name, names = f"the loss function of {called}", objective.sum_names
    with reads_alone(name, batches), runs_no_backward(name, output):
        found: Any = _asked(name, own, output)
    is_right = (
        isinstance(found, tuple | list)
        and len(found) == 3
        and _is_sum(found[0])
        and (found[2] == {} or _are_sums(found[2], names))
    )
    if not is_right:
        raise ObjectiveError(
            f"{name} returned {_shown(found)}; expected (a 0-d tensor to differentiate, a number "
            f"of tokens, {_expected(names)}) as the objective's `sum_names` names them, or {{}} "
            "where another rank reports the same"
        )
    whole, number, report = found
    if isinstance(output, Tensor) and output.requires_grad and not whole.requires_grad:
        raise ObjectiveError(f"{name} returned a tensor {_CUT_OFF}")
    if objective.is_divided_by_counts:
        refuse_mean_node(name, whole)
    return whole, number, report


def _checked_sums(objective: Objective, called: str, hint: str) -> TokenSums:
    """An objective's function over losses.

    Args:
        objective: the program's.
        called: what a message calls the function.
        hint: ends a message, behind what was expected.
    """
    given, names = objective.sums, objective.sum_names
    is_first = objective.is_divided_by_counts

    def sums(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        nonlocal is_first
        with reads_alone(called, batch), runs_no_backward(called, losses):
            found: Any = _asked(called, given, losses, batch)
        if not _are_sums(found, names):
            said = f"{called} returned {_shown(found)}; expected {_expected(names)}{hint}"
            raise ObjectiveError(said)
        if losses.requires_grad and not found["loss_sum"].requires_grad:
            raise ObjectiveError(f"{called} returned a 'loss_sum' {_CUT_OFF}")
        if is_first and losses.requires_grad:
            is_first = not refuse_mean(called, given, losses, batch, found["loss_sum"])
        return cast(Mapping[str, Tensor], found)

    return sums


def _checked_count(given: Callable[[Batch], int], called: str) -> Callable[[Batch], int]:
    def count(batch: Batch) -> int:
        with reads_alone(called, batch):
            found: Any = _asked(called, given, batch)
        if _is_sum(found):
            found = found.item()
        if not isinstance(found, Real):
            raise ObjectiveError(f"{called} returned {_shown(found)}; expected a number")
        return cast(int, found)

    return count


def _checked_which(
    given: Callable[[Batch], Sequence[int]], called: str
) -> Callable[[Batch], Sequence[int]]:
    def which(batch: Batch) -> Sequence[int]:
        with reads_alone(f"{called}.which", batch):
            found: Any = _asked(f"{called}.which", given, batch)
        places = _places(found)
        if places is None or not all(0 <= place < len(batch.keys) for place in places):
            raise ObjectiveError(
                f"{called}.which returned {repr(found)[:100]}; expected places of samples in the "
                f"micro-batch, which has {len(batch.keys)}"
            )
        return places

    return which


def _places(found: object) -> list[int] | None:
    try:
        return [index(place) for place in found] if isinstance(found, Iterable) else None
    except TypeError:
        return None


def _asked(called: str, part: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """What a part of an objective returns. What it raises is told by its name; memory that ran out,
    a process that is gone and what vlmpack says itself are no faults of the program."""

    def fault(error: BaseException) -> Exception:
        if isinstance(error, VlmpackError | torch.OutOfMemoryError) or _is_collectives(error):
            return cast(Exception, error)
        return ObjectiveError(f"{called} {raised(error)}")

    with calling(called, fault):
        return part(*arguments, **more)


def _is_collectives(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    is_in_torch = any(_OF_COLLECTIVES in frame.filename for frame in frames)
    return isinstance(error, RuntimeError) and is_in_torch


def _are_sums(found: object, names: Sequence[str]) -> bool:
    return (
        isinstance(found, Mapping)
        and found.keys() == set(names)
        and all(_is_sum(value) for value in found.values())
    )


def _is_sum(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _expected(names: Sequence[str]) -> str:
    return f"{{{', '.join(f'{name!r}: a 0-d tensor' for name in names)}}}"


def _shown(found: object) -> str:
    """What was returned, for a message."""
    if isinstance(found, Tensor):
        return f"a {found.dim()}-d tensor"
    if isinstance(found, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(value)}' for name, value in found.items())}}}"
    if isinstance(found, tuple):
        return f"({', '.join(map(_shown, found))})"
    return what_is(found)


def _name(part: object) -> str:
    if isinstance(part, partial):
        return _name(part.func)
    return str(getattr(part, "__name__", type(part).__name__))
