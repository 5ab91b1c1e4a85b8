"""FSDP2: decoder layers and vision blocks are sharded one by one, the rest with the root.

A checkpoint sees a rank's part of each parameter and moment as a box. Parameters that are still in
their files are sharded without values, and each rank reads its own shards one by one. So its host
holds at most one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlmpack.backends.boxes import SCALES, Kind, ReadSlice, TensorSlice, whole
from vlmpack.backends.hf.deferred import Deferred, read_box
from vlmpack.backends.hf.frozen import packed_layers
from vlmpack.backends.hf.model import PackedLM
from vlmpack.backends.hf.optimizer import moments_of, start_moments
from vlmpack.distributed import Ranks
from vlmpack.errors import as_model_error
from vlmpack.packing.image_owners import spread_by_size


def _repeated_blocks(part: nn.Module) -> list[nn.Module]:
    """The members of the part's longest ModuleList: its layers or blocks."""
    lists = [list(module) for module in part.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def shard_model(
    vlm: PackedLM, ranks: Ranks, *, compute_dtype: torch.dtype, replicate: int = 1
) -> None:
    """Shard parameters, gradients and moments over ranks, in place.

    Args:
        vlm: in float32, on CPU or on its device, or from `open_model`. The shards end up on the
            device.
        compute_dtype: parameters are gathered in it; gradients are reduced in float32.
        replicate: groups of neighbouring ranks that hold a whole model each (HSDP).

    Raises:
        ModelError: a weight file can no longer be read.
    """
    deferred = _set_aside(vlm)
    each = ranks.world_size // replicate
    if replicate == 1:
        mesh = init_device_mesh(ranks.device.type, (each,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(ranks.device.type, (replicate, each), mesh_dim_names=names)
    # Inputs are in the compute dtype already, except rotary cos and sin, which stay float32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in vlm.parts:
        for block in _repeated_blocks(part):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(vlm, mesh=mesh, mp_policy=policy)
    _fill(vlm, deferred, ranks.device)


def _set_aside(vlm: nn.Module) -> dict[str, Deferred]:
    """Parameters that were not read, by name; in their places are ones on the meta device, tied as
    they were."""
    deferred: dict[str, Deferred] = {}
    places: dict[int, nn.Parameter] = {}
    for path, module in vlm.named_modules():
        for name, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not isinstance(value, Deferred):
                continue
            deferred[f"{path}.{name}" if path else name] = value
            if id(value) not in places:
                empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
                places[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad)
            setattr(module, name, places[id(value)])
    return deferred


def _fill(vlm: nn.Module, deferred: Mapping[str, Deferred], device: torch.device) -> None:
    """Read the values of this rank's boxes into parameters on the meta device."""
    found: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, parameter in vlm.named_parameters(remove_duplicate=False):
        if parameter.device.type != "meta":
            continue
        if id(parameter) not in found:
            found[id(parameter)] = _read_shard(name, parameter, deferred[name], device)
        state[name] = found[id(parameter)]
    if state:
        vlm.load_state_dict(state, strict=False, assign=True)


def _read_shard(
    name: str, parameter: nn.Parameter, value: Deferred, device: torch.device
) -> nn.Parameter:
    box = local_slice(name, parameter)
    shard = torch.empty(box.lengths, dtype=parameter.dtype)
    with as_model_error(f"model.path: {name} cannot be read", OSError, ValueError):
        read_box(value, box.index, shard)
    assert isinstance(parameter, DTensor)
    filled = DTensor.from_local(
        shard.to(device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(filled, requires_grad=parameter.requires_grad)


def copy_of(value: Tensor, ranks: Ranks) -> tuple[int, int]:
    """How many ranks hold the same part of a tensor as this rank, and its number among them."""
    if not isinstance(value, DTensor):
        return ranks.world_size, ranks.rank
    mesh = value.device_mesh
    if mesh.ndim == 1:
        return 1, 0
    return mesh.size(0), mesh.get_local_rank(0)


def local_slice(name: str, value: Tensor) -> TensorSlice:
    """The box of a tensor that this rank holds: rows of a DTensor, all of any other tensor."""
    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return whole(name, shape)
    lengths, start = compute_local_shape_and_global_offset(
        shape, value.device_mesh, value.placements
    )
    stop = tuple(a + n for a, n in zip(start, lengths, strict=True))
    return TensorSlice(name=name, shape=shape, start=tuple(start), stop=stop)


Named = Sequence[tuple[str, nn.Parameter]]


def owned_slices(
    parameters: Named, optimizer: torch.optim.Optimizer, ranks: Ranks, *, moments: bool
) -> Iterator[tuple[Kind, TensorSlice, Tensor]]:
    """The boxes that this rank writes.

    They are its shards, or its part of them if several copies hold them, and its part of the
    parameters that every rank holds.
    """
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
        _fill_boxes(parameter, read("model", box))
        if optimizer_steps == 0:
            continue
        for kind, value in start_moments(optimizer, parameter, steps=optimizer_steps).items():
            _fill_boxes(value, read(kind, _box_of(kind, box, value)))


def _box_of(kind: Kind, box: TensorSlice, value: Tensor) -> TensorSlice:
    """The box of a moment, which is its parameter's; scales are few, and whole."""
    return whole(box.name, tuple(value.shape)) if kind in SCALES else box


def local_part(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, as a view."""
    data = value.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _fill_boxes(value: Tensor, box: Tensor | None) -> None:
    """Copy a box into what this rank holds of a tensor; without one it stays as it is."""
    if box is not None:
        local_part(value).copy_(box)


def whole_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, before they are sharded; of packed ones as they were."""
    packed = packed_layers(model)
    for name, parameter in model.named_parameters():
        yield name, packed[name].shape if name in packed else tuple(parameter.shape)


def whole_state(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Every tensor of a model, whole, on CPU, packed weights unpacked. Collective for shards.

    Args:
        keep: whether this rank keeps them; the others get an empty dict.
    """
    state: dict[str, Tensor] = {}
    packed = packed_layers(model)
    for name, value in model.state_dict().items():
        # Collective for shards: every rank takes part, one keeps it.
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            if name in packed:
                whole = packed[name].unpacked(whole).float()
            # A frozen matrix may lie in bfloat16; what is merged into it is float32.
            wide = torch.float32 if whole.dtype is torch.bfloat16 else whole.dtype
            state[name] = whole.detach().to("cpu", wide, copy=True)
    return state
