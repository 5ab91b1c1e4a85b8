"""A program's objective, checked while it runs: an error names the part that is at fault.

`checked_objective` turns what was passed to `vlmpack.finetune` into an `Objective`. It checks the
forward step, the loss function, the sums, the counts, and the selection of a remark's samples. An
ObjectiveError is raised if a part raises, returns a wrong value, or does one of these:

    .backward()        its gradients would be added to those of the step
    batch.labels[:] =  the batch would change for later readers
    losses.mean()      sums are divided once, by the whole batch, so this divides twice

Only the last check reads from the device. It computes the first micro-batch of a launch a second
time, as a row with its samples twice.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from numbers import Real
from operator import index
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlmpack.backends.engine import ForwardStep, LossFunction
from vlmpack.errors import ObjectiveError, VlmpackError
from vlmpack.handed_over import calling
from vlmpack.packing import Batch, PackedBatch, PaddedBatch
from vlmpack.training.objective import Objective, TokenSums, cross_entropy
from vlmpack.words import raised, what_is

MEAN_CLOSENESS = 1e-3
"""A mean over a row, and one over the same row twice, differ by rounding alone."""


_OF_COLLECTIVES = f"torch{os.sep}distributed{os.sep}"


_CUT_OFF = (
    "that has no gradient; expected one that is computed from what it was given (.detach(), "
    ".item() and torch.no_grad() cut it off)"
)


def checked_objective(given: Objective | TokenSums) -> Objective:
    """An Objective from what was given; a function over losses is averaged over label tokens."""
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

            result = _asked(called, step, noted(), model, **scales)
        if not (isinstance(result, tuple | list) and len(result) == 2 and callable(result[1])):
            raise ObjectiveError(
                f"{called} returned {_shown(result)}; expected (the model's output, a function of "
                "it)"
            )
        output, loss_function = result
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
    name, names = f"the loss function of {called}", objective.sum_names
    with reads_alone(name, batches), runs_no_backward(name, output):
        result: Any = _asked(name, own, output)
    is_right = (
        isinstance(result, tuple | list)
        and len(result) == 3
        and _is_sum(result[0])
        and (result[2] == {} or _are_sums(result[2], names))
    )
    if not is_right:
        raise ObjectiveError(
            f"{name} returned {_shown(result)}. Expected (a 0-d tensor to differentiate, a number "
            f"of tokens, {_expected(names)}) as the objective's `sum_names` names them, or {{}} "
            "where another rank reports the same"
        )
    whole, number, report = result
    if isinstance(output, Tensor) and output.requires_grad and not whole.requires_grad:
        raise ObjectiveError(f"{name} returned a tensor {_CUT_OFF}")
    if objective.is_divided_by_counts:
        refuse_mean_node(name, whole)
    return whole, number, report


def _checked_sums(objective: Objective, called: str, hint: str) -> TokenSums:
    """An objective's function over losses."""
    given, names = objective.sums, objective.sum_names
    is_first = objective.is_divided_by_counts

    def sums(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        nonlocal is_first
        with reads_alone(called, batch), runs_no_backward(called, losses):
            result: Any = _asked(called, given, losses, batch)
        if not _are_sums(result, names):
            said = f"{called} returned {_shown(result)}; expected {_expected(names)}{hint}"
            raise ObjectiveError(said)
        if losses.requires_grad and not result["loss_sum"].requires_grad:
            raise ObjectiveError(f"{called} returned a 'loss_sum' {_CUT_OFF}")
        if is_first and losses.requires_grad:
            is_first = not refuse_mean(called, given, losses, batch, result["loss_sum"])
        return cast(Mapping[str, Tensor], result)

    return sums


def _checked_count(given: Callable[[Batch], int], called: str) -> Callable[[Batch], int]:
    def count(batch: Batch) -> int:
        with reads_alone(called, batch):
            result: Any = _asked(called, given, batch)
        if _is_sum(result):
            result = result.item()
        if not isinstance(result, Real):
            raise ObjectiveError(f"{called} returned {_shown(result)}; expected a number")
        return cast(int, result)

    return count


def _checked_which(
    given: Callable[[Batch], Sequence[int]], called: str
) -> Callable[[Batch], Sequence[int]]:
    def which(batch: Batch) -> Sequence[int]:
        with reads_alone(f"{called}.which", batch):
            result: Any = _asked(f"{called}.which", given, batch)
        places = _places(result)
        if places is None or not all(0 <= place < len(batch.keys) for place in places):
            raise ObjectiveError(
                f"{called}.which returned {repr(result)[:100]}; expected places of samples in the "
                f"micro-batch, which has {len(batch.keys)}"
            )
        return places

    return which


def _places(result: object) -> list[int] | None:
    try:
        return [index(place) for place in result] if isinstance(result, Iterable) else None
    except TypeError:
        return None


def _asked(called: str, part: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """What a part of an objective returns; an error in it names the part.

    Lack of memory, lost processes and vlmpack's own errors are passed on as they are.
    """

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


def _are_sums(result: object, names: Sequence[str]) -> bool:
    return (
        isinstance(result, Mapping)
        and result.keys() == set(names)
        and all(_is_sum(value) for value in result.values())
    )


def _is_sum(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _expected(names: Sequence[str]) -> str:
    return f"{{{', '.join(f'{name!r}: a 0-d tensor' for name in names)}}}"


def _shown(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a {result.dim()}-d tensor"
    if isinstance(result, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(value)}' for name, value in result.items())}}}"
    if isinstance(result, tuple):
        return f"({', '.join(map(_shown, result))})"
    return what_is(result)


def _name(part: object) -> str:
    if isinstance(part, partial):
        return _name(part.func)
    return str(getattr(part, "__name__", type(part).__name__))


@contextmanager
def reads_alone(called: str, batch: object) -> Iterator[None]:
    """A block that changes no tensor of a batch in place.

    Raises:
        ObjectiveError: it has changed some.
    """
    before = [(name, tensor, tensor._version) for name, tensor in _tensors(batch, "batch")]
    yield
    changed = [name for name, tensor, version in before if tensor._version != version]
    if changed:
        raise ObjectiveError(
            f"{called} changed {', '.join(changed[:4])} in place; expected that it reads the batch "
            "alone: change a clone"
        )


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield name, value
    elif is_dataclass(value):
        for entry in fields(value):
            yield from _tensors(getattr(value, entry.name, None), f"{name}.{entry.name}")
    elif isinstance(value, list):
        for one in value:
            yield from _tensors(one, name)


@contextmanager
def runs_no_backward(called: str, output: object) -> Iterator[None]:
    """A block that runs no backward pass through what the model gave.

    Raises:
        ObjectiveError: it does, where it does.
    """
    node = output.grad_fn if isinstance(output, Tensor) else None

    def refuse(_gradients: Sequence[Tensor]) -> None:
        raise _backward(called)

    handle = None if node is None else node.register_prehook(refuse)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def leaves_gradients(called: str, model: nn.Module) -> Iterator[None]:
    """A block that runs no backward pass through what the model gives in it.

    Gradients themselves do not tell: DDP moves them to other tensors in a forward pass.

    Raises:
        ObjectiveError: it does, where it does.
    """
    with ExitStack() as watched:

        def watch(_module: nn.Module, _inputs: object, output: object) -> None:
            watched.enter_context(runs_no_backward(called, output))

        watched.callback(model.register_forward_hook(watch).remove)
        yield


def _backward(called: str) -> ObjectiveError:
    return ObjectiveError(
        f"{called} ran a backward pass through the model (.backward()); expected that it returns "
        "the sum: vlmpack differentiates it, once"
    )


def refuse_mean(
    called: str,
    sums: Callable[[Tensor, Batch], Mapping[str, Tensor]],
    losses: Tensor,
    batch: Batch,
    loss_sum: Tensor,
) -> bool:
    """Compute the same row twice as long: a sum doubles, a mean stays.

    The objective gets a copy of the row, and no random number of the step is drawn. An error over
    such a row is ignored.

    Args:
        losses: (L,) of the label tokens.
        loss_sum: that of them, 0-d.

    Raises:
        ObjectiveError: it is a mean.
    """
    row = twice(batch)
    if row is None or not losses.numel():
        return False
    devices = [losses.device] if losses.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            made = copy.copy(sums)(losses.detach().repeat(2), row)["loss_sum"]
            once, doubled = torch.stack([loss_sum.detach(), made]).double().tolist()
        except Exception:
            return True
    if once and abs(doubled - once) <= MEAN_CLOSENESS * abs(once):
        raise _mean(called)
    return True


def refuse_mean_node(called: str, whole: Tensor) -> None:
    """The same for a loss function, from its last operation, since it cannot be called twice.

    Raises:
        ObjectiveError: that is a mean.
    """
    if whole.grad_fn is not None and whole.grad_fn.name().startswith("MeanBackward"):
        raise _mean(called)


def _mean(called: str) -> ObjectiveError:
    return ObjectiveError(
        f"{called} returned a mean as 'loss_sum'. Expected the sum over the micro-batch. It is "
        "divided once, by the `divisor` of the whole global batch (num_label_tokens unless a "
        "vlmpack.Objective names another)"
    )


def twice(batch: Batch) -> Batch | None:
    """The batch with each sample twice, without images; None if its parts know their neighbours."""
    packed = isinstance(batch, PackedBatch)
    if isinstance(batch, PackedBatch):
        if batch.context or batch.prefix_tree or batch.media_part:
            return None
    elif not isinstance(batch, PaddedBatch):
        return None

    def again(name: str, of: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        tensor = getattr(batch, name)
        if tensor is None:
            return None
        along = tensor.dim() - 1 if packed else max(0, tensor.dim() - 2)  # slots, or rows
        return torch.cat([tensor, of(tensor)], dim=along)

    def ends(cumulative: Tensor | None) -> Any:
        if cumulative is None:
            return None
        return torch.cat([cumulative, cumulative[1:] + cumulative[-1]])

    names = ["input_ids", "labels", "loss_mask", "position_ids", "sources"]
    more: dict[str, Any] = {}
    if isinstance(batch, PackedBatch):
        names.append("padding_mask")
        more = {
            "cu_seqlens": ends(batch.cu_seqlens),
            "cu_seqlens_padded": ends(batch.cu_seqlens_padded),
            "segment_lengths": batch.segment_lengths * 2,
        }
    slots = batch.num_slots
    return replace(
        batch,
        **{name: again(name) for name in names} | more,
        label_positions=again("label_positions", lambda places: places + slots),
        media=None,
        media_positions=batch.media_positions[:0],
        media_sources=None,
        keys=batch.keys * 2,
        lengths=batch.lengths * 2,
        image_blocks=(),
    )
