"""What a call into ATen costs on a GPU: launches, bytes, FLOPs, and the time of an H200 by a model.

    time of a call = max(FLOPs / rate, bytes / bandwidth, launches x floor)
    time of a step = max(sum over its calls, calls x time of the host)

A kernel reads each tensor that it is given once, and writes each that it makes once. A broadcast
tensor is read as far as it lies in memory. Launches of an operator are those of torch's CUDA
kernels. The rates are those of an H200 (data sheet: 989 TFLOP/s dense in bf16, 4.8 TB/s), lowered
to what products and copies reach. One measured run of 26 November 2026 took 1.22 times what they
say, in full and with LoRA alike. A call from Python took 24 us on that machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fake_cuda.meta import Call
from torch import Tensor

PEAK = 989e12
PRODUCT = 660e12
"""FLOP/s of a large bf16 product."""
ODD = 0.62
"""Of that, where the width of either factor is no multiple of 8: its rows begin at odd bytes."""
FLASH = {False: 380e12, True: 300e12}
"""FLOP/s of varlen attention, forward and backward, with heads of 128."""
NARROW_HEADS = 0.8
WIDE_HEADS = 0.4
"""Of that, by our kernel of heads over 256: assumed, from what its tiles read of the L2 cache."""
BANDWIDTH = 4.0e12
FLOOR = 3e-6
HOST = 24e-6

NO_LAUNCH = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_",
        "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "record_stream",
        "_local_scalar_dense",
    )
)  # fmt: skip
GATHERS = frozenset(f"aten::{name}" for name in ("embedding", "index_select", "gather", "index"))
FILLS = frozenset(f"aten::{name}" for name in ("zero_", "fill_", "copy_"))
IN_PLACE_ROWS = frozenset(f"aten::{name}" for name in ("index_add_", "scatter_add_", "index_copy_"))
SEVERAL = {
    "aten::index_copy": 2,
    "aten::embedding_dense_backward": 8,
    "aten::index_put": 4,
    "aten::index_put_": 3,
    "aten::_index_put_impl_": 3,
    "aten::slice_backward": 2,
    "aten::select_backward": 2,
    "aten::index_add": 2,
    "aten::scatter_add": 2,
    "aten::_flash_attention_backward": 3,
    "vlmpack::wide_attention_backward": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 3,
    "aten::cumsum": 2,
}
"""Kernels of operators that are more than one."""
PRODUCTS = {"aten::mm": 2, "aten::addmm": 2, "aten::addmm_": 2, "aten::bmm": 3, "aten::baddbmm": 3}
"""Products of matrices, with the dimensions of what they multiply."""
TENSORS_A_LAUNCH = {"aten::_foreach_": 100, "aten::_fused_adam": 36}
ELEMENTS_A_LAUNCH = 65536 * 320


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call or of many.

    Args:
        launches: kernels.
        calls: into ATen, views included.
        bytes: read and written.
        flops: of products and attention.
        seconds: of the GPU, by the model.
    """

    launches: float = 0
    calls: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def __add__(self, other: Cost) -> Cost:
        return self.plus(other, 1)

    def plus(self, other: Cost, times: float) -> Cost:
        """With another, so many times."""
        return Cost(
            *(
                getattr(self, name) + times * getattr(other, name)
                for name in ("launches", "calls", "bytes", "flops", "seconds")
            )
        )


def in_memory(x: Tensor) -> int:
    """Bytes of a tensor, a broadcast dimension once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count


def cost_of(call: Call) -> Cost:
    """Of a call of the fake GPU."""
    if call.is_view or call.name in NO_LAUNCH:
        return Cost(calls=1)
    launches = _launches(call)
    moved = float(sum(map(in_memory, [*_read(call), *_written(call)])))
    flops = _flops(call)
    seconds = max(flops / _rate(call) if flops else 0.0, moved / BANDWIDTH, FLOOR * launches)
    is_operator = call.launches is None
    return Cost(launches, 1 if is_operator else launches, moved, flops, seconds)


def _launches(call: Call) -> int:
    if call.launches is not None:
        return call.launches
    for name, most in TENSORS_A_LAUNCH.items():
        if call.name.startswith(name):
            many = call.writes
            elements = sum(x.numel() for x in many)
            return max(1, -(-elements // ELEMENTS_A_LAUNCH), -(-len(many) // most))
    if call.name == "vlmpack::rms_norm_backward":  # and a sum, where the weight learns
        return sum(bool(x.numel()) for x in call.writes)
    return SEVERAL.get(call.name, 1)


def _read(call: Call) -> Sequence[Tensor]:
    reads = [*call.reads]
    if call.name in GATHERS:  # as many rows as are written
        return [*reads[1:], *call.writes]
    if call.name in FILLS:
        return reads[1:]
    if call.name in IN_PLACE_ROWS:
        return [*reads[1:], reads[-1]]
    if call.name == "aten::index_copy":
        return [*reads, reads[-1]]
    if call.name == "aten::embedding_dense_backward":
        return [reads[0], reads[0]]
    return reads


def _written(call: Call) -> Sequence[Tensor]:
    if call.name in IN_PLACE_ROWS:
        return [call.reads[-1]]
    if call.name.startswith("aten::_fused_adam"):  # weights and both moments
        return [*call.writes] * 3
    return call.writes


def _factors(call: Call) -> tuple[Tensor, Tensor] | None:
    """The matrices that a product multiplies."""
    ndim = PRODUCTS.get(call.name)
    matrices = [x for x in call.reads if x.ndim == ndim]
    return None if len(matrices) < 2 else (matrices[-2], matrices[-1])


def _flops(call: Call) -> float:
    if call.flops is not None:
        return call.flops
    factors = _factors(call)
    return 0.0 if factors is None else 2.0 * factors[0].numel() * factors[1].shape[-1]


def _rate(call: Call) -> float:
    if "attention" in call.name:
        is_backward = "backward" in call.name
        width = call.reads[1 if is_backward else 0].shape[-1]
        share = WIDE_HEADS if call.name.startswith("vlmpack::wide") else 1.0
        return FLASH[is_backward] * (share if width >= 128 else NARROW_HEADS)
    factors = _factors(call)
    assert factors is not None
    rows, inner, columns = factors[0].shape[-2], factors[0].shape[-1], factors[1].shape[-1]
    rate = PRODUCT
    if inner % 8 or columns % 8:
        rate *= ODD
    narrow = min(rows, inner, columns)
    if narrow < 128:
        rate *= 0.9 * max(narrow, 8) / 128
    return rate
