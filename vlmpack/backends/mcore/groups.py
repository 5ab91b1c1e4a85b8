"""Megatron's process groups for one recipe."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from vlmpack.backends.mcore.cpu import megatron_on_cpu
from vlmpack.distributed import at_stop
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ParallelismSection


def in_words(split: ParallelismSection) -> str:
    """How one model replica is spread over processes."""
    sequence = " + SP" if split.sequence else ""
    expert = f", EP {split.expert}" if split.expert > 1 else ""
    return f"TP {split.tensor}{sequence} x CP {split.context} x PP {split.pipeline}{expert}"


_world: dist.ProcessGroup | None = None
"""The default process group that Megatron's groups were built in."""


def start_model_parallel(split: ParallelismSection) -> ProcessGroupCollection:
    """Build Megatron's groups over the default process group, which is made here if need be.

    Raises:
        CapabilityError: groups of other sizes exist already in this process.
    """
    global _world
    if not dist.is_initialized():  # a single process: Megatron wants a group all the same
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if _world is not dist.group.WORLD:  # an earlier run of this process left its groups behind
        stop_model_parallel()
        _world = dist.group.WORLD
    if parallel_state.model_parallel_is_initialized():
        sizes = {
            "tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "context": parallel_state.get_context_parallel_world_size(),
            "expert": parallel_state.get_expert_model_parallel_world_size(),
        }
        there = split.model_copy(update=sizes)
        if there != split:
            raise CapabilityError(
                f"this process already has Megatron groups for {in_words(there)}, expected "
                f"{in_words(split)}; use one process per layout"
            )
    else:
        with megatron_on_cpu():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=split.tensor,
                pipeline_model_parallel_size=split.pipeline,
                context_parallel_size=split.context,
                expert_model_parallel_size=split.expert,
                expert_tensor_parallel_size=1,  # experts are shared out whole
                create_gloo_process_groups=False,
                order="tp-cp-ep-dp-pp",
            )
    at_stop(stop_model_parallel)
    return ProcessGroupCollection.use_mpu_process_groups()


def stop_model_parallel() -> None:
    """Drop Megatron's groups, and with them their threads.

    megatron-core 0.16.1's own `destroy_model_parallel` forgets one group.
    """
    global _world
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    _world = None
