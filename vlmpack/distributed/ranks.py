"""Who this process is, and the few collectives that the trainer needs. torch only.

Ranks and groups are passed as values; the only global state is that of torch.distributed.

`CollectiveTimeouts` says how long this process waits for the others: long at first, short in later
steps. torch sets a timeout when a group is made. It has one private function to change it later,
for gloo and NCCL alike, which affects only later calls of this process.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpack.distributed.launch_order import set_launch_order
from vlmpack.distributed.meeting import meeting_store
from vlmpack.errors import CapabilityError, VlmpackError

CPU = torch.device("cpu")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others; `Ranks()` is one alone, on CPU.

    A model replica is the TP x CP x PP processes that hold one copy of the model. They train the
    same micro-batches, and the first of them is the replica's lead. The TP x CP processes of its
    first pipeline stage divide the images of a row.

    Args:
        dp_rank: rank among the model replicas.
        replica_rank: rank inside the replica; 0 is its lead.
        stage_size: processes of each of its pipeline stages.
        replica_group: gloo group of this replica's processes; None if it is one process.
        ahead_group: another group of these processes, for a thread beside the training thread.
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device = CPU
    replica_rank: int = 0
    replica_size: int = 1
    stage_size: int = 1
    replica_group: dist.ProcessGroup | None = None
    ahead_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def is_lead(self) -> bool:
        """Whether this process counts its replica's data and writes down what was trained."""
        return self.replica_rank == 0

    @property
    def image_rank(self) -> int | None:
        """This process among those that share the images of a row out; None on later stages."""
        return self.replica_rank if self.replica_rank < self.stage_size else None

    def sum_over_world(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather_rows(self, values: Tensor) -> list[Tensor]:
        """What each rank has, on all of them, in rank order.

        Args:
            values: (n, ...) on the device of the collectives; n may differ between ranks.
        """
        if self.world_size == 1:
            return [values]
        counts = values.new_zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(values)
        lengths = self.sum_over_world(counts).tolist()
        padded = values.new_zeros(max(lengths), *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    @property
    def ahead(self) -> Ranks:
        """The same ranks for a thread beside the training thread, with a group of its own."""
        return replace(self, replica_group=self.ahead_group)

    def gather_in_replica(self, values: Tensor) -> list[Tensor]:
        """What each process of the replica has, on all of them, the lead's first; a few bytes.

        Args:
            values: on CPU, of one shape and type on all.
        """
        if self.replica_group is None:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.replica_size)]
        dist.all_gather(gathered, values, group=self.replica_group)
        return gathered

    def gather_objects_in_replica(self, value: Any) -> list[Any]:
        """As `gather_in_replica`, for any value. For small things, rarely."""
        return _gathered(value, self.replica_size, self.replica_group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small things, rarely."""
        return _gathered(value, self.world_size, None)

    def broadcast_object(self, value: Any) -> Any:
        """The main rank's value on every rank. For small things, rarely."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Run something on the main rank alone; its result, or its exception, on every rank."""
        result: Result
        result, problem = self.broadcast_object(_attempted(work) if self.is_main else None)
        if problem is not None:
            raise problem
        return result

    @contextmanager
    def raised_by_all(self, error: type[VlmpackError]) -> Iterator[None]:
        """Raise an error of any rank in this block on all ranks. Collective."""
        problem: str | None = None
        try:
            yield
        except error as raised:
            problem = str(raised)
        problems = [text for text in self.gather_objects(problem) if text is not None]
        if problems:
            raise error("; ".join(dict.fromkeys(problems)))


def _gathered(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    gathered = [value] * size
    if size > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def _attempted(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def world_size_from_environment() -> int:
    """WORLD_SIZE as torchrun sets it; 1 without a launcher.

    Raises:
        CapabilityError: it is set, but is no positive integer.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise CapabilityError(f"WORLD_SIZE is {text!r}, expected a positive integer")
    return int(text)


def start_process_group(
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    sharded: bool = False,
    timeout_seconds: float | None = None,
) -> Ranks:
    """Join the process group that torchrun describes, or run alone.

    CUDA with NCCL where there is a GPU, otherwise CPU with gloo. Ranks are laid out as Megatron
    lays them out, tensor-parallel ranks next to each other:
    rank = tp + TP * (cp + CP * (dp + DP * pp)).

    Args:
        tensor: TP, processes that share each layer's matrices.
        context: CP, processes that share each row's tokens.
        pipeline: PP, stages.
        sharded: whether parameters are gathered ahead, which then decides the launch order.
        timeout_seconds: the longest wait for the others; None for torch's own.

    Raises:
        CapabilityError: the world size is not a multiple of TP x CP x PP.
        VlmpackError: not all processes came.
    """
    world_size = world_size_from_environment()
    rank = int(os.environ.get("RANK", "0"))
    set_launch_order(in_order=max(tensor, context) > 1 and not sharded, gathers_ahead=sharded)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = CPU
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=None if timeout_seconds is None else timedelta(seconds=timeout_seconds),
            store=meeting_store(rank, world_size, seconds=timeout_seconds),
        )
    inner, replica_size = tensor * context, tensor * context * pipeline
    if world_size % replica_size:
        raise CapabilityError(
            f"{world_size} processes, expected a multiple of tensor {tensor} x context {context} x "
            f"pipeline {pipeline} = {replica_size}"
        )
    dp_size = world_size // replica_size
    members = [
        [i + inner * (dp + dp_size * pp) for pp in range(pipeline) for i in range(inner)]
        for dp in range(dp_size)
    ]
    dp_rank = rank // inner % dp_size
    group = ahead = None
    if replica_size > 1:
        group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
        ahead, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
    return Ranks(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        device=device,
        replica_rank=members[dp_rank].index(rank),
        replica_size=replica_size,
        stage_size=inner,
        replica_group=group,
        ahead_group=ahead,
    )


@contextmanager
def process_group(
    *, tensor: int, context: int, pipeline: int, timeout_seconds: float, sharded: bool = False
) -> Iterator[Ranks]:
    """`start_process_group` at the start of a block, `stop_process_group` at its end."""
    try:
        yield start_process_group(
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            sharded=sharded,
            timeout_seconds=timeout_seconds,
        )
    finally:
        stop_process_group()


_at_stop: list[Callable[[], None]] = []


def at_stop(release: Callable[[], None]) -> None:
    """Call `release` when this process leaves the process group, to free groups in module state.

    A group that outlives the interpreter keeps its threads running, and they may abort the process.
    """
    if release not in _at_stop:
        _at_stop.append(release)


def stop_process_group() -> None:
    groups: list[Any] = []
    if dist.is_initialized():
        groups = [*dist.distributed_c10d._world.pg_map]
        dist.destroy_process_group()
    while _at_stop:
        _at_stop.pop()()
    gc.collect()  # engines are cycles; left to the interpreter's shutdown, they would end too late
    # A group ends its threads with its last owner. Where that was DDP's reducer, in C++, it waited
    # for them with the interpreter's lock, which they take to drop a tensor. Python gives it up.
    groups.clear()


DAY = 86400.0


@dataclass(frozen=True, slots=True)
class CollectiveTimeouts:
    """Seconds.

    Args:
        first: of a launch and its first step, and of all that is not a step.
        later: of every later step.
    """

    first: float
    later: float

    @contextmanager
    def of_callbacks(self) -> Iterator[None]:
        """The timeout while a program's callbacks run; the watchdog still reports."""
        set_timeout(max(self.first, DAY))
        try:
            yield
        finally:
            set_timeout(self.first)

    @contextmanager
    def of_step(self, *, is_first: bool) -> Iterator[None]:
        if not is_first:
            set_timeout(self.later)
        try:
            yield
        finally:
            set_timeout(self.first)


def set_timeout(seconds: float) -> None:
    """Set the timeout of every group that this process is in, if it is in any."""
    timeout = timedelta(seconds=seconds)
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if hasattr(dist, "set_timeout"):  # from torch 2.14 on
            dist.set_timeout(timeout, group)
        else:
            c10d._set_pg_timeout(timeout, group)
