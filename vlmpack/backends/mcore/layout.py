"""Which boxes of which whole tensors a rank holds, reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vlmpack.backends.boxes import MOMENTS, Kind, ReadSlice, TensorSlice, whole
from vlmpack.backends.hf.frozen import BASE
from vlmpack.backends.mcore.adapters import ExpertAdapter, LinearAdapter, PiecesOf
from vlmpack.backends.mcore.model import MegatronVLM, tower_prefix
from vlmpack.backends.mcore.optimizer import MegatronAdamW
from vlmpack.backends.mcore.weights.base import Piece, flat_boxes, stack_pieces
from vlmpack.backends.mcore.weights.language import language_map
from vlmpack.errors import ModelError
from vlmpack.families.base import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """One parameter of this stage.

    Args:
        owned: whether this TP rank and stage write it; ranks with copies divide the writing.
        copies: the ranks that hold the same; for an expert they are different ones.
    """

    parameter: nn.Parameter
    pieces: list[Piece]
    owned: bool
    copies: dist.ProcessGroup


def language_pieces(model: MegatronVLM, family: Family) -> PiecesOf:
    """The function from a parameter of a stage's language model to the boxes of transformers'
    tensors that it is made of."""
    language = language_map(
        family.modules,
        dims=model.dims,
        sizes=model.sizes,
        tp_rank=model.groups.tp.rank(),
        ep_rank=model.groups.ep.rank(),
    )
    layers = model.gpt.decoder.layers
    first = layers[0].layer_number - 1 if layers else 0
    return partial(language.pieces, first_layer=first)


def local_parameters(
    model: MegatronVLM, family: Family, shapes: dict[str, tuple[int, ...]]
) -> list[LocalParameter]:
    """The stage's parameters with their pieces, marked for Megatron.

    The marks say which parameters differ between TP ranks, and which are experts, whose gradients
    are summed over their own ranks.

    Raises:
        ModelError: a piece that does not fit the transformers model.
    """
    pieces_of = language_pieces(model, family)
    adapters = {
        f"{name}.{own}": pieces
        for name, module in model.named_modules()
        if isinstance(module, LinearAdapter | ExpertAdapter)
        for own, pieces in module.pieces().items()
    }
    local: list[LocalParameter] = []
    for name, parameter in model.named_parameters():
        if name.startswith("vision."):
            theirs = tower_prefix(family) + name.removeprefix("vision.")
            theirs = theirs.replace(BASE, ".")  # of a layer with an adapter of peft
            pieces = stack_pieces([whole(theirs, tuple(parameter.shape))], replicated=True)
        elif name in adapters:
            pieces = adapters[name]
        else:
            pieces = pieces_of(name.removeprefix("gpt."), parameter.shape[0])
        for piece in pieces:
            if shapes.get(piece.box.name) != piece.box.shape:
                raise ModelError(
                    f"{name}: the mcore engine expects {piece.box.name} of shape "
                    f"{piece.box.shape}, the transformers model has {shapes.get(piece.box.name)}"
                )
        replicated = all(piece.replicated for piece in pieces)
        # Megatron's norm counts parameters without this mark on one TP rank alone.
        parameter.tensor_model_parallel = not replicated
        expert = ".local_experts." in name
        if expert:  # 0.16.1 marks them with EP > 1 alone, and then misses the sum over TP ranks
            parameter.allreduce = False
        copy = (
            name == "gpt.output_layer.weight" and model.dims.tied
        )  # the first stage has the original
        local.append(
            LocalParameter(
                parameter=parameter,
                pieces=pieces,
                owned=not copy and (model.groups.tp.rank() == 0 or not replicated),
                copies=model.groups.expt_dp if expert else model.groups.dp_cp,
            )
        )
    return local


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Reads and writes one rank's boxes."""

    parameters: list[LocalParameter]
    optimizer: MegatronAdamW

    def owned(self, *, moments: bool) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
        """The boxes of trained parameters that this rank writes. One rank writes each element of a
        whole tensor."""
        for local in self.parameters:
            if not local.owned or not local.parameter.requires_grad:
                continue
            for kind, values, offset in self._tensors(local, moments=moments):
                start, stop = self._part(local, values.numel(), offset)
                for piece in local.pieces:
                    for part in flat_boxes(piece, start, stop):
                        view = values[part.start - offset : part.stop - offset]
                        yield kind, part.box, view.view(part.box.lengths)

    def held(self, *, moments: bool) -> Iterator[tuple[str, Tensor]]:
        """All that this rank holds, by the boxes of transformers' tensors that each is made of."""
        for local in self.parameters:
            words = ", ".join(piece.box.words for piece in local.pieces)
            yield words, local.parameter
            for kind, values, start in self._tensors(local, moments=moments):
                if kind == "model" and values.dtype is local.parameter.dtype:
                    continue  # the main weight is the parameter itself, or a view of it
                is_whole = values.numel() == local.parameter.numel()
                part = "" if is_whole else f", from element {start} to {start + values.numel()}"
                yield f"{kind} of {words}{part}", values

    def load(self, read: ReadSlice, *, optimizer_steps: int) -> None:
        """Fill parameters, main weights and moments. What `read` lacks stays unchanged.

        A checkpoint has no frozen weights, and an adapter folder has little besides adapters.
        """
        with torch.no_grad():
            for local in self.parameters:
                for piece in local.pieces:
                    value = read("model", piece.box)
                    if value is None:
                        continue
                    rows = local.parameter[piece.start : piece.stop]
                    rows.copy_(value.view_as(rows))
                self._load_main(local, read, optimizer_steps)

    def _load_main(self, local: LocalParameter, read: ReadSlice, optimizer_steps: int) -> None:
        held = self.optimizer.main_parameter(local.parameter)
        if held is None:
            return
        inner, main, _ = held
        if optimizer_steps:
            _prepare_moments(inner, main, optimizer_steps)
        for kind, values, offset in self._tensors(local, moments=optimizer_steps > 0):
            if kind == "model" and main.dtype is local.parameter.dtype:
                continue  # the main weight is the parameter itself, or a view of it
            for piece in local.pieces:
                for part in flat_boxes(piece, offset, offset + values.numel()):
                    value = read(kind, part.box)
                    if value is None:
                        continue
                    values[part.start - offset : part.stop - offset].copy_(value.flatten())

    def _tensors(
        self, local: LocalParameter, *, moments: bool
    ) -> Iterator[tuple[Kind, Tensor, int]]:
        """(kind, flat values that this rank holds, index of the first one in the parameter)."""
        held = self.optimizer.main_parameter(local.parameter)
        if held is None:
            return
        inner, main, offset = held
        yield "model", main.detach().view(-1), offset
        if moments:
            for kind in MOMENTS:
                if kind in inner.state[main]:  # a checkpoint without them is refused as it is saved
                    yield kind, inner.state[main][kind].view(-1), offset

    def _part(self, local: LocalParameter, held: int, offset: int) -> tuple[int, int]:
        """The flat range that this rank writes of what it holds."""
        if self.optimizer.distributed:  # what it holds nobody else does
            return offset, offset + held
        elements, rank, size = local.parameter.numel(), local.copies.rank(), local.copies.size()
        return elements * rank // size, elements * (rank + 1) // size


def _prepare_moments(optimizer: Any, main: Tensor, steps: int) -> None:
    """Room for the moments of a main weight, and the number of steps that they have seen.

    torch's AdamW counts steps by parameter. Transformer Engine's and Apex's, which Megatron uses
    where they are installed, count by group.
    """
    state = optimizer.state[main]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(main)
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.tensor(float(steps))
    else:
        for group in optimizer.param_groups:
            group["step"] = steps
