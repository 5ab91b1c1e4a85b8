"""What a rank holds of parameters and moments: boxes for checkpoints, and whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlmpack.backends.boxes import SCALES, Kind, ReadSlice, TensorSlice, whole
from vlmpack.backends.hf.optimizer import begin_moments, moments_of
from vlmpack.backends.hf.sharding import copy_of, local_slice
from vlmpack.distributed import Ranks
from vlmpack.packing.sharing import spread_by_size

Named = Sequence[tuple[str, nn.Parameter]]


def owned_slices(
    parameters: Named, optimizer: torch.optim.Optimizer, ranks: Ranks, *, moments: bool
) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
    """Shards of this rank, of those that several copies hold its part, and its part of the
    parameters that every rank holds."""
    places = {name: copy_of(parameter, ranks) for name, parameter in parameters}
    owners: dict[str, int] = {}
    for copies in {copies for copies, _ in places.values()}:
        alike = {name: p.numel() for name, p in parameters if places[name][0] == copies}
        owners |= spread_by_size(alike, copies)
    for name, parameter in parameters:
        box = local_slice(name, parameter)
        if 0 in box.lengths or owners[name] != places[name][1]:
            continue
        yield "model", box, local_part(parameter)
        if moments:
            for kind, value in moments_of(optimizer, parameter).items():
                yield kind, _box_of(kind, box, value), local_part(value)


def load_slices(
    parameters: Named, optimizer: torch.optim.Optimizer, read: ReadSlice, *, optimizer_steps: int
) -> None:
    """Copy each box into what this rank holds of the parameter and its moments."""
    optimizer.state.clear()
    for name, parameter in parameters:
        box = local_slice(name, parameter)
        _fill(parameter, read("model", box))
        if optimizer_steps == 0:
            continue
        for kind, value in begin_moments(optimizer, parameter, steps=optimizer_steps).items():
            _fill(value, read(kind, _box_of(kind, box, value)))


def _box_of(kind: Kind, box: TensorSlice, value: Tensor) -> TensorSlice:
    """The box of a moment, which is its parameter's; scales are few, and whole."""
    return whole(box.name, tuple(value.shape)) if kind in SCALES else box


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a tensor; a view."""
    data = value.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _fill(value: Tensor, box: Tensor | None) -> None:
    """Copy a box into what this rank holds of a tensor; without one it stays as it is."""
    if box is not None:
        local_part(value).copy_(box)


def whole_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, before they are sharded; of 4-bit ones as they were."""
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None)
        yield name, tuple(parameter.shape if packed is None else packed.shape)


def whole_state(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Every tensor of a model, whole, on CPU, 4-bit weights unpacked. Collective for shards.

    Args:
        model: transformers', with adapters of peft or without.
        keep: whether this rank keeps them; the others get an empty dict.
    """
    from vlmpack.backends.hf.quantize import unpacked_weights

    state: dict[str, Tensor] = {}
    unpacked = unpacked_weights(model)
    for name, value in model.state_dict().items():
        layer = name.partition(".base_layer.weight")[0] + ".base_layer.weight"
        if layer in unpacked and name != layer:
            continue  # how the packed weight is scaled
        if name in unpacked:
            value = unpacked[name]()
        # Collective for shards: every rank takes part, one keeps it.
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            # A frozen matrix may lie in bfloat16; what is merged into it is float32.
            wide = torch.float32 if whole.dtype is torch.bfloat16 else whole.dtype
            state[name] = whole.detach().to("cpu", wide, copy=True)
    return state
