"""Tensors that stay in their files until a box of them is asked for.

A deferred tensor has no values. It knows its origin, which is a tensor of a file or an operator of
torch on other tensors. transformers renames, stacks, cuts and casts such tensors on load as it does
any others.

    file: experts.0.up (F, D) bfloat16 --+
    file: experts.1.up (F, D) bfloat16 --+-> float32 -> stack -> a parameter (E, F, D)

A box of the parameter is read only from files that hold some of it. Operators that lay tensors out
(`_HAND_DOWN`) pass a box on to their inputs. Any other operator is run on its whole inputs, and the
box is cut out of the result. That costs memory, but is as exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vlmpack.model_folder.quantised import HeldCodes
from vlmpack.model_folder.safetensors_read import READABLE, StoredTensor, read_into

aten = torch.ops.aten

Box = tuple[slice, ...]
"""A slice with start and stop for each dimension."""

Part = tuple[Tensor, Box, Tensor]
"""A tensor, a box of it, and where its values go."""

_EQUAL_BYTES = 1 << 24
"""How much of each of two tensors is compared at a time."""


@dataclass(frozen=True, slots=True)
class Made:
    """A result of an operator.

    Args:
        place: which of its results; None where it has one.
    """

    func: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    place: int | None


class Deferred(Tensor):
    """A tensor of the CPU without values."""

    origin: StoredTensor | Made
    held: HeldCodes | None = None
    """What a folder has in its place, where that is quantised."""

    @staticmethod
    def __new__(cls: Any, like: Tensor, origin: StoredTensor | Made) -> Deferred:
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, like: Tensor, origin: StoredTensor | Made) -> None:
        self.origin = origin

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is aten.equal.default:
            return _are_equal(*args)
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes into a tensor that was not read yet")
        bare, settings = tree_map_only(Tensor, _without_values, (args, options))
        if "device" in settings:
            settings = {**settings, "device": "meta"}
        result = func(*bare, **settings)
        if isinstance(result, Tensor):
            return Deferred(result, Made(func, args, options, None))
        if isinstance(result, list | tuple) and all(isinstance(x, Tensor) for x in result):
            return [Deferred(x, Made(func, args, options, n)) for n, x in enumerate(result)]
        raise NotImplementedError(f"{func} asks for more than tensors that were not read yet")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype})"


def deferred(stored: StoredTensor) -> Deferred:
    """The tensor of a file.

    Raises:
        NotImplementedError: of a dtype that is not read by boxes.
    """
    if stored.dtype not in READABLE:
        raise NotImplementedError(f"{stored.name} is of dtype {stored.dtype}")
    like = torch.empty(stored.shape, dtype=READABLE[stored.dtype], device="meta")
    return Deferred(like, stored)


def read_box(tensor: Tensor, box: Box, target: Tensor) -> None:
    """Copy the values of a box.

    Args:
        target: on CPU, of the box's shape; any strides, and any dtype, to which is cast.

    Raises:
        OSError, ValueError: as `read_into`.
    """
    if target.numel() == 0:
        return
    if not isinstance(tensor, Deferred):
        target.copy_(tensor[box])
    elif isinstance(tensor.origin, StoredTensor):
        read_into(target, tensor.origin, box)
    elif (parts := _handed_down(tensor, box, target)) is not None:
        for part in parts:
            read_box(*part)
    else:
        target.copy_(_run(tensor.origin)[box])


def held_codes(tensor: Tensor) -> HeldCodes | None:
    """What a folder has of a tensor that is a quantised weight of it, as it is or cast."""
    while isinstance(tensor, Deferred) and tensor.held is None:
        made = tensor.origin
        if isinstance(made, StoredTensor) or _HAND_DOWN.get(made.func) not in (_same, _cast):
            return None
        tensor = made.args[0]
    return tensor.held if isinstance(tensor, Deferred) else None


def read_whole(tensor: Tensor) -> Tensor:
    """All values, on CPU; raises as `read_box`."""
    if not isinstance(tensor, Deferred):
        return tensor
    target, box = torch.empty(tensor.shape, dtype=tensor.dtype), _all_of(tensor)
    if isinstance(tensor.origin, Made) and _handed_down(tensor, box, target) is None:
        return _run(tensor.origin)
    read_box(tensor, box, target)
    return target


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _all_of(tensor: Tensor) -> Box:
    return tuple(slice(0, length) for length in tensor.shape)


def _run(made: Made) -> Tensor:
    """What an operator makes of the whole of what it takes."""
    args, options = tree_map_only(Deferred, read_whole, (made.args, made.options))
    result = made.func(*args, **options)
    output: Tensor = result if made.place is None else result[made.place]
    return output


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """As `torch.equal`, a few rows at a time."""
    if one.shape != other.shape or one.ndim == 0:
        return one.shape == other.shape and torch.equal(read_whole(one), read_whole(other))
    row = max(1, one.numel() // max(1, len(one)) * one.element_size())
    step = max(1, _EQUAL_BYTES // row)
    for start in range(0, len(one), step):
        box = (slice(start, min(start + step, len(one))), *_all_of(one)[1:])
        shape = tuple(cut.stop - cut.start for cut in box)
        parts = [torch.empty(shape, dtype=tensor.dtype) for tensor in (one, other)]
        for tensor, part in zip((one, other), parts, strict=True):
            read_box(tensor, box, part)
        if not torch.equal(*parts):
            return False
    return True


def _handed_down(tensor: Deferred, box: Box, target: Tensor) -> list[Part] | None:
    """What a box is made of; None where the operator has to run."""
    made = tensor.origin
    assert isinstance(made, Made)
    rule = _HAND_DOWN.get(made.func)
    return None if rule is None else rule(tensor, made, box, target)


Rule = Callable[[Deferred, Made, Box, Tensor], list[Part] | None]
_HAND_DOWN: dict[Any, Rule] = {}


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _HAND_DOWN.update(dict.fromkeys(functions, rule))
        return rule

    return register


def _dim(tensor: Tensor, dim: int) -> int:
    return dim % tensor.ndim


@_rule(aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh.default)
def _same(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    return [(made.args[0], box, target)]


@_rule(aten._to_copy.default)
def _cast(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    """Values are rounded once on their way from a file to `target` where that is this cast."""
    source = made.args[0]
    if tensor.dtype in (target.dtype, source.dtype):
        return [(source, box, target)]
    rounded = torch.empty(target.shape, dtype=tensor.dtype)
    read_box(source, box, rounded)
    return [(rounded, _all_of(rounded), target)]


@_rule(aten.stack.default)
def _stack(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    sources, dim = made.args[0], _dim(tensor, _argument(made, 1, "dim", 0))
    cut, inner = box[dim], (*box[:dim], *box[dim + 1 :])
    return [
        (source, inner, target.select(dim, place))
        for place, source in enumerate(sources[cut.start : cut.stop])
    ]


@_rule(aten.cat.default)
def _cat(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    sources, dim = made.args[0], _dim(tensor, _argument(made, 1, "dim", 0))
    if any(source.dtype != tensor.dtype or source.ndim != tensor.ndim for source in sources):
        return None
    return list(_of_neighbours(sources, dim, box, target))


def _of_neighbours(sources: Sequence[Tensor], dim: int, box: Box, target: Tensor) -> Iterator[Part]:
    chosen, origin = box[dim], 0
    for source in sources:
        length = source.shape[dim]
        start, stop = max(chosen.start, origin), min(chosen.stop, origin + length)
        if start < stop:
            inner = (*box[:dim], slice(start - origin, stop - origin), *box[dim + 1 :])
            yield source, inner, target.narrow(dim, start - chosen.start, stop - start)
        origin += length


@_rule(aten.slice.Tensor)
def _slice(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    source, dim = made.args[0], _dim(tensor, _argument(made, 1, "dim", 0))
    chosen = slice(
        _argument(made, 2, "start", None),
        _argument(made, 3, "end", None),
        _argument(made, 4, "step", 1),
    )
    start, _, step = chosen.indices(source.shape[dim])
    return _moved(source, dim, start, box, target) if step == 1 else None


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    source, dim, place = made.args[0], _dim(tensor, _argument(made, 2, "dim", 0)), made.place
    assert place is not None
    sizes = made.args[1]
    start = place * sizes if isinstance(sizes, int) else sum(sizes[:place])
    return _moved(source, dim, start, box, target)


def _moved(source: Tensor, dim: int, start: int, box: Box, target: Tensor) -> list[Part]:
    cut = slice(box[dim].start + start, box[dim].stop + start)
    return [(source, (*box[:dim], cut, *box[dim + 1 :]), target)]


@_rule(aten.select.int, aten.unbind.int)
def _select(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    source = made.args[0]
    if made.place is None:
        dim, place = _dim(source, made.args[1]), made.args[2] % source.shape[made.args[1]]
    else:
        dim, place = _dim(source, _argument(made, 1, "dim", 0)), made.place
    inner = (*box[:dim], slice(place, place + 1), *box[dim:])
    return [(source, inner, target.unsqueeze(dim))]


@_rule(aten.unsqueeze.default)
def _unsqueeze(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    dim = _dim(tensor, made.args[1])
    return [(made.args[0], (*box[:dim], *box[dim + 1 :]), target.squeeze(dim))]


@_rule(aten.squeeze.dim)
def _squeeze(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    source, dim = made.args[0], made.args[1]
    dim = _dim(source, dim)
    if source.ndim == tensor.ndim:  # it is longer than 1, and stays
        return [(source, box, target)]
    return [(source, (*box[:dim], slice(0, 1), *box[dim:]), target.unsqueeze(dim))]


@_rule(aten.transpose.int, aten.t.default)
def _transpose(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    one, other = (_dim(tensor, dim) for dim in made.args[1:] or (0, tensor.ndim - 1))
    turned = list(box)
    turned[one], turned[other] = box[other], box[one]
    return [(made.args[0], tuple(turned), target.transpose(one, other))]


@_rule(aten.permute.default)
def _permute(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    order = [_dim(tensor, dim) for dim in made.args[1]]
    back = [order.index(dim) for dim in range(tensor.ndim)]
    return [(made.args[0], tuple(box[dim] for dim in back), target.permute(back))]


@_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(tensor: Deferred, made: Made, box: Box, target: Tensor) -> list[Part] | None:
    """Rows of another shape are the same rows."""
    source = made.args[0]
    same_rows = source.ndim > 0 and tensor.ndim > 0 and source.shape[0] == tensor.shape[0]
    if not same_rows or box[1:] != _all_of(tensor)[1:] or not target.is_contiguous():
        return None
    rows = target.view(target.shape[0], *source.shape[1:])
    return [(source, (box[0], *_all_of(source)[1:]), rows)]


def _argument(made: Made, place: int, name: str, default: Any) -> Any:
    """An argument of an operator, given by place, by name or not at all."""
    if len(made.args) > place:
        return made.args[place]
    return made.options.get(name, default)
