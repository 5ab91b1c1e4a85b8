"""CUDA_DEVICE_MAX_CONNECTIONS: how many queues CUDA puts a process's kernels into.

Kernels of one queue start in launch order. Kernels of different queues start in any order. CUDA
reads the variable once, when a process first uses it. Two layouts need a value:

    tensor or context parallelism, up to Hopper    1: a collective is launched right before the
                                                   matmul that it overlaps. In another queue it may
                                                   start late, when the matmul has taken all
                                                   multiprocessors
    fully sharded parameters                       not 1: gathers of the next layer run in their own
                                                   stream beside this layer's kernels, and would
                                                   wait for them in one queue

Megatron's launcher asserts both. From Blackwell on a stream's priority replaces the first. The
variable changes only speed, so an unset one is set, and a wrong one causes a warning.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

logger = logging.getLogger("vlmpack")

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""The first major compute capability for which tensor and context parallelism have no wish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """What to do about the variable in this process.

    Args:
        set_to: what to set it to; None to leave it.
        warning: what stands against the layout's wish, and what to set; None for nothing.
    """

    set_to: str | None = None
    warning: str | None = None


def launch_order(
    environment: Mapping[str, str],
    *,
    in_order: bool = False,
    gathers_ahead: bool = False,
    generation: int | None,
    in_use: bool = False,
) -> LaunchOrder:
    """What to do about the variable for a layout.

    Args:
        in_order: whether a layer's collectives overlap its own matmuls (TP or CP).
        gathers_ahead: whether parameters are gathered while another layer computes; no layout here
            has both.
        generation: major compute capability of the GPU; None if unknown, which changes nothing.
        in_use: whether CUDA has read the variable.
    """
    found = environment.get(VARIABLE)
    if generation is None:
        return LaunchOrder()
    if gathers_ahead and found == "1":
        return LaunchOrder(
            warning=f"{VARIABLE} is 1: parallelism.sharding: fsdp gathers parameters beside the "
            "kernels of the layer before, and in one queue behind them. Unset it, or set it to 8"
        )
    if not in_order or generation >= BLACKWELL or found == "1":
        return LaunchOrder()
    if found is None and not in_use:
        return LaunchOrder(set_to="1")
    is_now = "is not set, and CUDA has started in this process" if found is None else f"is {found}"
    return LaunchOrder(
        warning=f"{VARIABLE} {is_now}: with parallelism.tensor or parallelism.context above 1, "
        "GPUs up to Hopper may start a collective late, behind the matmul that it overlaps. Set "
        "it to 1 before this process starts"
        + ("" if found is None else ", or unset it: it is set then")
    )


def set_launch_order(*, in_order: bool = False, gathers_ahead: bool = False) -> None:
    """Set the variable before this process first uses CUDA; see `launch_order`."""
    order = launch_order(
        os.environ,
        in_order=in_order,
        gathers_ahead=gathers_ahead,
        generation=gpu_generation() if in_order or gathers_ahead else None,
        in_use=torch.cuda.is_initialized(),
    )
    if order.set_to is not None:
        os.environ[VARIABLE] = order.set_to
    if order.warning is not None:
        logger.warning("%s", order.warning)


def gpu_generation() -> int | None:
    """Major compute capability of this machine's first GPU; None without a GPU.

    The driver's library is asked, because CUDA must not be initialised here.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(
        0, ctypes.byref(device)
    ) or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlShutdown()
    return None if failed else major.value
