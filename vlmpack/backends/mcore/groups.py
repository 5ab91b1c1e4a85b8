"""Megatron's process groups for one recipe, and megatron-core on a CPU with gloo.

The CPU is for tests and small runs, and active only without CUDA. Megatron asks for CUDA by name in
a few places, such as `device="cuda"`, `torch.cuda.current_device()`, `tensor.type() ==
"torch.cuda.FloatTensor"`, CUDA generators and streams. Inside `megatron_on_cpu()` these answer with
the CPU. Outside of it, and wherever there is a GPU, nothing is changed. Functions that Megatron
compiles run uncompiled.

Limits: gloo collectives, float32, Megatron's local layer specs, no CUDA graphs, no fused kernels,
dropout 0 (all ranks share one generator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.overrides import TorchFunctionMode

from vlmpack.distributed import at_stop
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ParallelismSection

CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Maps what names CUDA in calls of torch functions to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _nothing() -> Callable[..., None]:
    """A function of its own each time: torch.compile wants one place for each that it knows."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's copy to the host, which leaves CPU tensors alone even where it wants numpy."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _NoStream:
    """A stream, or an event of one, on a device that runs everything in order."""

    def wait_stream(self, stream: object) -> None:
        return None

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        return None


_NO_STREAM = _NoStream()

_depth = 0


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron's code run on the CPU inside this context, if there is no CUDA; contexts may
    nest.
    """
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing()),
        (torch.cuda, "Stream", lambda: _NO_STREAM),
        (torch.cuda, "current_stream", lambda: _NO_STREAM),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "manual_seed", _nothing()),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (
            megatron_random,
            "_set_cuda_rng_state",
            _set_rng_state,
        ),
    )
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(_CudaMeansCpu())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


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
                expert_tensor_parallel_size=1,  # each expert is whole on one rank
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
