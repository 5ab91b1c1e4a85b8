"""Megatron's process groups for one recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from vlmpack.backends.mcore.cpu import megatron_on_cpu
from vlmpack.distributed import at_stop
from vlmpack.errors import CapabilityError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How one model replica is spread over processes.

    Args:
        tensor: TP.
        pipeline: PP.
        context: CP.
        expert: EP, processes that share the experts of a layer; they come from TP x CP x DP.
        sequence: sequence parallelism inside the TP group.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False

    def __str__(self) -> str:
        sequence = " + SP" if self.sequence else ""
        expert = f", EP {self.expert}" if self.expert > 1 else ""
        return f"TP {self.tensor}{sequence} x CP {self.context} x PP {self.pipeline}{expert}"


_world: dist.ProcessGroup | None = None
"""The default process group that Megatron's groups were built in."""


def start_model_parallel(sizes: ParallelSizes) -> ProcessGroupCollection:
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
        there = ParallelSizes(
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
            context=parallel_state.get_context_parallel_world_size(),
            expert=parallel_state.get_expert_model_parallel_world_size(),
            sequence=sizes.sequence,
        )
        if there != sizes:
            raise CapabilityError(
                f"this process already has Megatron groups for {there}, expected {sizes}; use one "
                f"process per layout"
            )
    else:
        with megatron_on_cpu():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tensor,
                pipeline_model_parallel_size=sizes.pipeline,
                context_parallel_size=sizes.context,
                expert_model_parallel_size=sizes.expert,
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
