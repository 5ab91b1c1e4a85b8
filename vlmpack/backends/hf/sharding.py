"""FSDP2: decoder layers and vision blocks are sharded one by one, the rest with the root.

And which part of each parameter a rank holds, for checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.hf.model import PackedLM
from vlmpack.distributed import Ranks


def _repeated_blocks(part: nn.Module) -> list[nn.Module]:
    """The members of the part's longest ModuleList: its layers or blocks."""
    lists = [list(module) for module in part.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def shard_model(
    vlm: PackedLM, ranks: Ranks, *, compute_dtype: torch.dtype, replicate: int = 1
) -> None:
    """Shard parameters, gradients and moments over ranks, in place.

    Args:
        vlm: in float32, on CPU or on its device; the shards end up on the device.
        ranks: all of them become one mesh.
        compute_dtype: parameters are gathered in it; gradients are reduced in float32.
        replicate: groups of neighbouring ranks that hold a whole model each (HSDP).
    """
    each = ranks.world_size // replicate
    if replicate == 1:
        mesh = init_device_mesh(ranks.device.type, (each,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(ranks.device.type, (replicate, each), mesh_dim_names=names)
    # Inputs are in the compute dtype already, but for rotary cos and sin, which stay float32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in vlm.parts:
        for block in _repeated_blocks(part):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(vlm, mesh=mesh, mp_policy=policy)


def copy_of(value: Tensor, ranks: Ranks) -> tuple[int, int]:
    """How many ranks hold the same of a tensor as this one, and which of them this one is."""
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
