"""LoRA and DoRA for Megatron's linear layers: peft's adapters, of which each rank holds its part.

A Megatron layer may be several of transformers', as queries, keys and values or gate and up are.
Each of them has an adapter of its own, which adds s B A x (2106.09685):

| layer           | A                      | between A and B        | B, DoRA's magnitude |
|-----------------|------------------------|------------------------|---------------------|
| column-parallel | whole on each rank     | copied; SP: gathered   | rows, as the weight |
| row-parallel    | columns, as the weight | summed; SP: and shared | whole on each rank  |

So tensor parallelism exchanges `rank` numbers for each token and adapter, and the same number of
gradients. A matrix that is whole on each rank has the same gradient everywhere, except under
sequence parallelism, where each rank sees its own tokens. Megatron then adds the gradients up, by
the flag that it also sets on norms.

Routed experts are whole on their ranks, and so are their adapters. Their gradients are added up
over the ranks that have the same expert, as those of its weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.boxes import TensorSlice
from vlmpack.backends.hf.adapters import inject_adapters
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces
from vlmpack.errors import CapabilityError
from vlmpack.recipe.trainable import LoraSection

PiecesOf = Callable[[str, int], list[Piece]]
"""The pieces of a Megatron parameter, from its name inside GPTModel and its number of rows."""

WEIGHT = ".weight"
MAGNITUDE = "magnitude_vector"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPart:
    """One of transformers' linear layers inside a Megatron one.

    Args:
        shape: (out, in) of its whole weight.
        held: (first, one past the last) of each run of rows that this rank holds, in order.
        inner: the same for its columns, which are one run.
    """

    name: str
    shape: tuple[int, int]
    held: tuple[tuple[int, int], ...]
    inner: tuple[int, int]
    adapted: bool

    @property
    def rows(self) -> int:
        """Rows that this rank holds."""
        return sum(stop - start for start, stop in self.held)

    @property
    def columns(self) -> int:
        """Columns that this rank holds."""
        return self.inner[1] - self.inner[0]

    def tensor(self, kind: str) -> str:
        """transformers' name of a parameter of its adapter: `A`, `B` or `magnitude_vector`."""
        return f"{self.name}.lora_{kind}.{ADAPTER}{WEIGHT}"


def fused_parts(pieces: Sequence[Piece], targets: Collection[str]) -> tuple[list[FusedPart], int]:
    """The transformers layers that a Megatron weight is made of.

    Args:
        pieces: of the weight. Parts alternate, each with equally many rows every time.

    Returns:
        The parts, and how often they alternate.
    """
    boxes: dict[str, list[TensorSlice]] = {}
    for piece in pieces:
        boxes.setdefault(piece.box.name, []).append(piece.box)
    turns, rest = divmod(sum(1 for _ in groupby(piece.box.name for piece in pieces)), len(boxes))
    assert not rest
    parts = []
    for name, held in boxes.items():
        (first, *_), layer = held, name.removesuffix(WEIGHT)
        out, columns = first.shape
        parts.append(
            FusedPart(
                name=layer,
                shape=(out, columns),
                held=_ranges((box.start[0], box.stop[0]) for box in held),
                inner=(first.start[1], first.stop[1]),
                adapted=layer in targets,
            )
        )
    return parts, turns


def _ranges(rows: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that follow each other as one."""
    ranges: list[tuple[int, int]] = []
    for start, stop in rows:
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


class LinearAdapter(nn.Module):
    """The adapters of one Megatron linear layer: a child of it, whose hook changes its output."""

    def __init__(
        self,
        linear: Any,
        parts: Sequence[FusedPart],
        turns: int,
        lora: LoraSection,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.parts, self.turns, self.group = list(parts), turns, group
        self.by_row = isinstance(linear, RowParallelLinear)
        self.sequence = linear.config.sequence_parallel
        self.adapted = [part for part in parts if part.adapted]
        self.rows = [part.rows for part in self.adapted]
        self.rank, self.scaling = _shared_shape([part.name for part in self.adapted], lora)
        rows, columns = sum(self.rows), self.adapted[0].columns
        make = torch.empty
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.a = nn.Parameter(make(len(self.adapted) * self.rank, columns, **like))
        self.b = nn.Parameter(make(rows, self.rank, **like))
        # In bfloat16 a magnitude over its initial norm would not be 1.
        self.magnitude = (
            nn.Parameter(make(rows, device=linear.weight.device)) if lora.dora else None
        )
        for name, parameter in self.named_parameters():
            summed = self.sequence and self._is_whole_here(name)
            setattr(parameter, "sequence_parallel", summed)  # noqa: B010

    def _is_whole_here(self, parameter: str) -> bool:
        """Whether each tensor-parallel rank has all of A, B or the magnitude."""
        return self.by_row == (parameter != "a")

    def pieces(self) -> dict[str, list[Piece]]:
        """Which boxes of peft's tensors the parameters are, by their names here."""
        boxes: dict[str, list[TensorSlice]] = {"a": [], "b": [], "magnitude": []}
        for part in self.adapted:
            out, columns = part.shape
            boxes["a"].append(split(part.tensor("A"), (self.rank, columns), 1, *part.inner))
            for rows in part.held:
                boxes["b"].append(split(part.tensor("B"), (out, self.rank), 0, *rows))
                boxes["magnitude"].append(split(part.tensor(MAGNITUDE), (out,), 0, *rows))
        return {
            name: stack_pieces(boxes[name], replicated=self._is_whole_here(name))
            for name, _ in self.named_parameters()
        }

    def forward(self, x: Tensor, output: Tensor, linear: Any) -> Tensor:
        """The layer's output with its adapters.

        Args:
            x: (T', 1, in') the layer's input, with sequence parallelism this rank's tokens of it
                where the layer is column-parallel.
            output: (T'', 1, out') the layer's own output.
        """
        low = self._crossed(F.linear(x, self.a))
        bias = self._bias_of_adapted(linear)
        plain = output if bias is None else output - bias
        tokens = plain.flatten(0, -2), low.flatten(0, -2)
        adapted = torch.addmm(*tokens, self._spread(), alpha=self.scaling).view_as(output)
        if self.magnitude is None:
            return adapted
        scales = iter((self.magnitude / self._norms(linear.weight)).split(self.rows))
        factors = self._fused(
            [
                next(scales) if part.adapted else self.magnitude.new_ones(part.rows)
                for part in self.parts
            ]
        )
        adapted = (factors * adapted).to(output.dtype)
        return adapted if bias is None else adapted + bias

    def _bias_of_adapted(self, linear: Any) -> Tensor | None:
        """(out',) the bias, which DoRA's factors do not multiply, and zeros for parts without an
        adapter: rounded, (y - b) + b is not y."""
        bias = getattr(linear, "bias", None)
        if self.magnitude is None or bias is None:
            return None
        of_parts = zip(self.parts, self._parted(bias), strict=True)
        return self._fused([b if part.adapted else torch.zeros_like(b) for part, b in of_parts])

    def _spread(self) -> Tensor:
        """(adapters * rank, out') B^T of each part at its columns of the layer, zeros elsewhere, so
        that one product adds all of them."""
        each, start, end = iter(self.b.split(self.rows)), 0, len(self.a)
        blocks = []
        for part in self.parts:
            if part.adapted:
                blocks.append(F.pad(next(each).t(), (0, 0, start, end - start - self.rank)))
                start += self.rank
            else:
                blocks.append(self.b.new_zeros(end, part.rows))
        return self._fused(blocks)

    def _crossed(self, low: Tensor) -> Tensor:
        """A x over the tensor-parallel ranks, as B needs it."""
        if self.by_row and self.sequence:
            crossed: Tensor = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        elif self.by_row:
            crossed = reduce_from_tensor_model_parallel_region(low, group=self.group)
        elif self.sequence:
            crossed = gather_from_sequence_parallel_region(low, group=self.group)
        else:
            crossed = copy_to_tensor_model_parallel_region(low, group=self.group)
        return crossed

    def _parted(self, value: Tensor) -> list[Tensor]:
        """(..., out') in the layer's order, by part."""
        widths = [part.rows // self.turns for part in self.parts]
        return [one.flatten(-2) for one in value.unflatten(-1, (self.turns, -1)).split(widths, -1)]

    def _fused(self, values: Sequence[Tensor]) -> Tensor:
        """What `_parted` takes apart."""
        if len(values) == 1:
            return values[0]
        turned = [value.unflatten(-1, (self.turns, -1)) for value in values]
        return torch.cat(turned, dim=-1).flatten(-2)

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Lengths of the rows of W + s B A, of the parts with adapters; no gradient passes them
        (2402.09353, section 4.3)."""
        pairs = zip(self.a.split(self.rank), self.b.split(self.rows), strict=True)
        squares = []
        for part, held in zip(self.parts, self._parted(weight.t()), strict=True):
            if part.adapted:
                a, b = next(pairs)
                merged = held.float() + self.scaling * (b.float() @ a.float()).t()
                squares.append(merged.square().sum(0))
        total = torch.cat(squares)
        if self.by_row and self.group.size() > 1:  # each rank has some of the columns
            dist.all_reduce(total, group=self.group)
        return total.sqrt()


def _shared_shape(layers: Sequence[str], lora: LoraSection) -> tuple[int, float]:
    """Rank and scale of the adapters of layers that are one of Megatron's."""
    found = {(lora.rank_of(layer), lora.scaling_of(layer)) for layer in layers}
    if len(found) > 1:
        each = ", ".join(f"{name.rpartition('.')[2]} {lora.rank_of(name)}" for name in layers)
        raise CapabilityError(
            f"trainable.lora: Megatron has {layers[0]} and {len(layers) - 1} more in one layer, "
            f"whose adapters have one rank and scale; found ranks {each}. Use model.backend: hf"
        )
    return found.pop()


class ExpertAdapter(nn.Module):
    """The adapter of one layer of a routed expert, which is whole on its ranks: a child of it.

    B is the other way round, (rank, out), since its columns are not neighbours in peft's tensor.

    Args:
        box: of the expert's weight, in a tensor (E, out, in).
        wrapper: the name of peft's wrapper of that tensor.
    """

    def __init__(self, linear: Any, box: TensorSlice, wrapper: str, lora: LoraSection) -> None:
        super().__init__()
        self.box, self.wrapper = box, wrapper
        self.rank, self.scaling = lora.rank_of(box.name), lora.scaling_of(box.name)
        _, rows, columns = box.shape
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.a = nn.Parameter(torch.empty(self.rank, columns, **like))
        self.b = nn.Parameter(torch.empty(self.rank, rows, **like))

    def pieces(self) -> dict[str, list[Piece]]:
        """As `LinearAdapter.pieces`."""
        (experts, rows, columns), number, rank = self.box.shape, self.box.start[0], self.rank
        a, b = (f"{self.wrapper}.lora_{kind}.{ADAPTER}{WEIGHT}" for kind in "AB")
        own = number * rank, (number + 1) * rank
        each = [
            split(b, (rows, rank * experts), 1, at, at + 1)
            for at in range(number, rank * experts, experts)
        ]
        return {
            "a": stack_pieces([split(a, (experts * rank, columns), 0, *own)]),
            "b": [
                Piece(box=column, start=row, stop=row + 1, replicated=False)
                for row, column in enumerate(each)
            ],
        }

    def forward(self, x: Tensor, output: Tensor, linear: Any) -> Tensor:
        """The layer's (T, out) output with its adapter, for its (T, in) input."""
        return torch.addmm(output, F.linear(x, self.a), self.b, alpha=self.scaling)


def add_to_language(
    gpt: nn.Module,
    pieces_of: PiecesOf,
    targets: Collection[str],
    lora: LoraSection,
    group: Any,
    wrappers: Mapping[str, str],
) -> None:
    """Add adapters to the linear layers of a stage's language model.

    Args:
        targets: transformers' names of the layers, others among them.
        wrappers: names of peft's wrappers of tensors of experts, by those of the tensors.
    """
    for name, linear in list(gpt.named_modules()):
        is_linear = isinstance(linear, (ColumnParallelLinear, RowParallelLinear))
        if not is_linear or ".layers." not in name:
            continue
        if ".experts." in name:
            (box,) = (piece.box for piece in pieces_of(name + WEIGHT, linear.weight.shape[0]))
            if box.name in wrappers:
                linear.adapter = ExpertAdapter(linear, box, wrappers[box.name], lora)
                linear.register_forward_hook(_adapted)
            continue
        parts, turns = fused_parts(pieces_of(name + WEIGHT, linear.weight.shape[0]), targets)
        if any(part.adapted for part in parts):
            linear.adapter = LinearAdapter(linear, parts, turns, lora, group)
            linear.register_forward_hook(_adapted)


def add_to_tower(
    tower: nn.Module, prefix: str, targets: Collection[str], lora: LoraSection
) -> None:
    """Add peft's layers to a vision tower, which is transformers' own."""
    inside = {name for name, _ in tower.named_modules()}
    own = [name.removeprefix(prefix) for name in targets if name.startswith(prefix)]
    mine = [name for name in own if name in inside]
    if not mine:
        return
    inject_adapters(tower, mine, lora, prefix=prefix)
    for name, parameter in tower.named_parameters():
        if name.partition(".lora_")[2].startswith(MAGNITUDE):
            parameter.data = parameter.data.float()


def _adapted(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
    value, bias = output
    return linear.adapter(inputs[0], value, linear), bias
