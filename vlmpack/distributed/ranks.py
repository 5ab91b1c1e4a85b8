"""Who this process is, and the few collectives that the trainer needs. torch only.

Ranks and groups are values that are passed in; nothing here is global except what
torch.distributed keeps itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpack.errors import CapabilityError

COLLECTIVE_TIMEOUT_SECONDS = 1800

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others.

    Args:
        rank: global rank.
        world_size: number of processes.
        local_rank: rank on this machine.
        dp_rank: rank among the data-parallel replicas.
        dp_size: number of data-parallel replicas.
        device: where this process computes.
    """

    rank: int
    world_size: int
    local_rank: int
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Element-wise sum over the data-parallel replicas, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values)
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small things, rarely."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """The main rank's value on every rank. For small things, rarely."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Run something on the main rank alone; its result, or its exception, on every rank."""
        result: Result | None = None
        problem: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as error:  # told to all, so that no rank waits for one that is gone
                problem = error
        result, problem = self.broadcast_object((result, problem))  # Any from here on
        if problem is not None:
            raise problem
        return result


def world_size_from_environment() -> int:
    """WORLD_SIZE as torchrun sets it; 1 without a launcher.

    Raises:
        CapabilityError: it is set, but is no positive integer.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise CapabilityError(f"WORLD_SIZE is {text!r}, expected a positive integer")
    return int(text)


def start_process_group() -> Ranks:
    """Join the process group that torchrun describes, or run alone.

    CUDA with NCCL where there is a GPU, otherwise CPU with gloo. All ranks are data-parallel
    replicas: the hf engine knows no other parallelism.
    """
    world_size = world_size_from_environment()
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
        )
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        dp_rank=rank,
        dp_size=world_size,
        device=device,
    )


def stop_process_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
