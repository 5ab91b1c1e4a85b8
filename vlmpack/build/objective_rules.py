"""What an objective of the program's own may not do, beside what it returns.

    .backward()        would add its gradients to those of the step
    batch.labels[:] =  would change the batch for all that reads it later
    losses.mean()      would be divided a second time: sums are divided once, by the whole batch

All three are seen without a read on the host, but the last one: the first micro-batch of a launch
is asked about a second time, as a row that has its samples twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.errors import ObjectiveError
from vlmpack.packing import Batch, PackedBatch, PaddedBatch

MEAN_CLOSENESS = 1e-3
"""A mean over a row, and one over the same row twice, differ by rounding alone."""


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
    """A block that adds nothing to the gradients of a model's parameters.

    Raises:
        ObjectiveError: it has.
    """
    before = [_gradients(parameter) for parameter in model.parameters()]
    yield
    if before != [_gradients(parameter) for parameter in model.parameters()]:
        raise _backward(called)


def _gradients(parameter: nn.Parameter) -> list[tuple[int, int] | None]:
    held = (parameter.grad, getattr(parameter, "main_grad", None))
    return [(id(one), one._version) if isinstance(one, Tensor) else None for one in held]


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
    found: Tensor,
) -> bool:
    """Ask about the same row once more, twice as long: a sum doubles, a mean stays.

    A copy is asked, and no random number is drawn for the step's own; what fails over such a row is
    no fault.

    Args:
        called: in messages.
        sums: of the program.
        losses: (L,) of the label tokens.
        batch: theirs.
        found: the 0-d `loss_sum` of them.

    Returns:
        Whether it has been asked.

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
            once, doubled = torch.stack([found.detach(), made]).double().tolist()
        except Exception:
            return True
    if once and abs(doubled - once) <= MEAN_CLOSENESS * abs(once):
        raise _mean(called)
    return True


def refuse_mean_node(called: str, whole: Tensor) -> None:
    """The same of a loss function, which cannot be asked twice: its last operation is seen.

    Raises:
        ObjectiveError: that is a mean.
    """
    if whole.grad_fn is not None and whole.grad_fn.name().startswith("MeanBackward"):
        raise _mean(called)


def _mean(called: str) -> ObjectiveError:
    return ObjectiveError(
        f"{called} returned a mean as 'loss_sum'; expected the sum over the micro-batch: "
        "it is divided once, by the `divisor` of the whole global batch (num_label_tokens unless a "
        "vlmpack.Objective names another)"
    )


def twice(batch: Batch) -> Batch | None:
    """A batch that has each sample two times, without images; None of one whose parts know their
    neighbours, and of what is none."""
    packed = isinstance(batch, PackedBatch)
    if isinstance(batch, PackedBatch):
        if batch.context or batch.forks or batch.media_share:
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
