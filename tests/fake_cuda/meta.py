"""A fake GPU whose tensors have no numbers, so that a model of any size takes megabytes.

    with fake_gpu(MetaCuda(listener)) as gpu:
        ...                       # listener(call) hears of each call into ATen, as it is made

Shapes, dtypes and strides are those of the real step, and memory is not touched. Numbers that the
host reads are ones. A few small tensors of integers, such as the boundaries of a row, keep what
they were copied from, since FLOPs of attention follow from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any
from weakref import finalize

import torch
from fake_cuda import liger, stand_ins
from fake_cuda.device import OPDEFS, FakeCuda, FakeCudaTensor, active
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

aten = torch.ops.aten
SMALL = 100_000
"""Integers that are kept."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call into ATen, or the launch of a kernel that is none of its operators.

    Args:
        name: "aten::mm", "liger::gated".
        reads, writes: tensors.
        launches: kernels that it starts; None where that follows from the name.
        flops: of it; None where they follow from the shapes.
        is_view: whether it only makes another view.
    """

    name: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    launches: int | None = None
    flops: float | None = None
    is_view: bool = False


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Of no numbers."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class _Token:
    """Lives as long as the tensor that has it."""


class MetaCuda(FakeCuda):
    """The device; see the module."""

    def __init__(self, listener: Callable[[Call], None]) -> None:
        super().__init__()
        self.listener = listener
        self.integers: dict[int, list[int]] = {}
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.bytes = 0

    def read(self, held: Tensor) -> Tensor:
        """See `FakeCuda.read`."""
        return torch.ones(held.shape, dtype=held.dtype)

    def hold(self, tensor: FakeCudaTensor) -> None:
        """Count its storage, until the last tensor of it is gone."""
        storage = tensor.held.untyped_storage()
        place = storage._cdata
        if not self.holders[place]:
            self._resize(place, storage.nbytes())
        self.holders[place] += 1
        tensor.token = _Token()  # torch swaps no tensors that have weak references
        finalize(tensor.token, self._let_go, place)

    def _let_go(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place]
            self._resize(place, 0)
            del self.sizes[place]

    def _resize(self, place: int, size: int) -> None:
        self.bytes += size - self.sizes.get(place, 0)
        self.sizes[place] = size

    def resize(self, tensor: Tensor, size: int) -> None:
        """FSDP2 frees and allocates storages of tensors that it keeps."""
        assert isinstance(tensor, FakeCudaTensor)
        self._resize(tensor.held.untyped_storage()._cdata, size)

    def launch(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], n: int) -> None:
        """A kernel that is no operator of torch."""
        self.listener(Call(name, reads, writes, launches=n, flops=0.0))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator."""
        name = func._schema.name
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_device = any(isinstance(x, FakeCudaTensor) for x in tensors)
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if func is aten.is_pinned.default:
            return False
        if func is aten._pin_memory.default:
            return args[0].clone()
        if not on_device and target != "cuda":
            return func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
        if name in OPDEFS:
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        self._watch(func, args, kwargs, tensors, target)
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if target == "cpu" or (func is aten.copy_.default and args[0].device.type == "cpu"):
            return self._to_host(func, args, kwargs)
        held = {id(x.held): x for x in tensors if isinstance(x, FakeCudaTensor)}
        plain, options = tree_map(_without_numbers, (args, kwargs))
        options.pop("pin_memory", None)
        if target is not None:
            options["device"] = "meta"
        special, flops = SPECIAL.get(name), None
        if special is not None:
            out, flops = special(self, *plain, **options)
        elif name.startswith(("aten::_foreach_", "aten::_fused_adam")):
            out = _of_many(name, plain)
        else:
            out = func(*plain, **options)
        out = tree_map_only(
            Tensor, lambda x: held[id(x)] if id(x) in held else FakeCudaTensor(x), out
        )
        self._tell(func, args, tensors, out, flops)
        return out

    def _to_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        into, source = (None, args[0]) if len(args) == 1 else args[:2]
        self.listener(Call("copy to the host", [source], []))
        if into is not None and func is aten.copy_.default:
            return into.fill_(1) if into.numel() < SMALL else into  # untouched memory costs nothing
        return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _tell(
        self, func: Any, args: Any, tensors: list[Tensor], out: Any, flops: float | None
    ) -> None:
        name = func._schema.name
        made = [x for x in tree_flatten(out)[0] if isinstance(x, FakeCudaTensor)]
        if func is aten._to_copy.default and not isinstance(args[0], FakeCudaTensor):
            source = args[0]
            if source.device.type == "meta":  # a parameter without numbers, which moves
                return
            if not source.dtype.is_floating_point and source.numel() < SMALL:
                self.integers[made[0].held.untyped_storage()._cdata] = source.flatten().tolist()
            self.listener(Call("copy to the device", [source], made))
            return
        alias = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in alias)
        if name.startswith(("aten::_foreach_", "aten::_fused_adam")) and not made:
            made = [x for x in args[0] if isinstance(x, Tensor)]
        elif not func._schema.returns:  # it writes over what it is given
            pairs = zip(func._schema.arguments, args, strict=False)
            made = [x for each, x in pairs if each.alias_info and each.alias_info.is_write]
        self.listener(Call(name, tensors, made, flops=flops, is_view=is_view))

    def pairs(self, cu: Tensor, slots: int, *, causal: bool, window: int | None = None) -> float:
        """(query, key) pairs of segments, by their boundaries. `window` is how many keys a token
        sees before itself at most; None or -1 for all."""
        ends = self.integers.get(cu.untyped_storage()._cdata, [0, slots])
        lengths = [b - a for a, b in pairwise(ends)]
        beyond = [0 if window in (None, -1) else max(0, n - window) for n in lengths]
        seen = sum(n**2 - more**2 for n, more in zip(lengths, beyond, strict=True))
        return seen / (2 if causal else 1)


def _without_numbers(value: Any) -> Any:
    if isinstance(value, FakeCudaTensor):
        return value.held
    if isinstance(value, Tensor) and value.device.type != "meta":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _of_many(name: str, plain: Any) -> Any:
    """What an operator of lists returns; nothing where it writes in place."""
    if name.endswith("_"):
        return None
    if "norm" in name:
        return [empty((), x.dtype) for x in plain[0]]
    return [torch.empty_like(x) for x in plain[0]]


def _is_causal(given: bool, options: dict[str, Any]) -> bool:
    return given or options.get("window_size_right") == 0


def _flash(gpu: MetaCuda, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    cu, causal = rest[0], _is_causal(rest[5], options)
    slots, heads, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = empty((heads, slots), torch.float32)
    state = (empty((2,), torch.uint64), empty((0,), q.dtype), empty((0,), q.dtype))
    pairs = gpu.pairs(cu, slots, causal=causal, window=options.get("window_size_left"))
    return (out, lse, *state), 4.0 * pairs * heads * width


def _flash_backward(
    gpu: MetaCuda, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> Any:
    cu, causal = rest[2], _is_causal(rest[7], options)
    slots, heads, width = q.shape
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    pairs = gpu.pairs(cu, slots, causal=causal, window=options.get("window_size_left"))
    return grads, 10.0 * pairs * heads * width


def _wide(gpu: MetaCuda, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Any:
    slots, heads, width = q.shape
    made = (empty(q.shape, q.dtype), empty((heads, slots), torch.float32))
    return made, 4.0 * gpu.pairs(cu, slots, causal=True) * heads * width


def _wide_backward(gpu: MetaCuda, grad: Tensor, *rest: Any) -> Any:
    """Each of its two kernels makes the scores, and the slope of the weights, anew."""
    q, k, v, _, _, cu, _ = rest
    slots, heads, width = q.shape
    flops = 14.0 * gpu.pairs(cu, slots, causal=True) * heads * width
    return tuple(empty(x.shape, x.dtype) for x in (q, k, v)), flops


def _dense(gpu: MetaCuda, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    causal = rest[1] if len(rest) > 1 else options.get("is_causal", False)
    rows, heads, slots, width = q.shape
    flops = 4.0 * rows * heads * slots * k.shape[2] * width / (2 if causal else 1)
    return (torch.empty_like(q), empty((rows, heads, slots), torch.float32)), flops


def _dense_backward(
    gpu: MetaCuda, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> Any:
    causal = rest[3] if len(rest) > 3 else options.get("is_causal", False)
    rows, heads, slots, width = q.shape
    flops = 10.0 * rows * heads * slots * k.shape[2] * width / (2 if causal else 1)
    return tuple(torch.empty_like(x) for x in (q, k, v)), flops


SPECIAL: dict[str, Callable[..., tuple[Any, float]]] = {
    "aten::_flash_attention_forward": _flash,
    "aten::_flash_attention_backward": _flash_backward,
    "vlmpack::wide_attention": _wide,
    "vlmpack::wide_attention_backward": _wide_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _dense,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _dense_backward,
}
"""(result, FLOPs) of operators that meta tensors have no kernel for."""


class _Counted(torch.autograd.Function):
    """A kernel of a package: one launch forward, some backward, with the bytes of its arguments."""

    @staticmethod
    def forward(ctx: Any, name: str, launches: int, likes: Any, *tensors: Any) -> Any:
        given = [x.contiguous() for x in tensors]
        ctx.save_for_backward(*given)
        ctx.name, ctx.launches, gpu = name, launches, active_gpu()
        outs = [_like(given[place]) for place in likes]
        gpu.launch(name, given, outs, 1)
        return outs[0] if len(outs) == 1 else tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        found = [_like(x) for x in given]
        written = [x for x, is_wanted in zip(found, wanted, strict=True) if is_wanted]
        own = [grad.contiguous() for grad in grads]
        active_gpu().launch(f"{ctx.name}_backward", [*given, *own], written, ctx.launches)
        pairs = zip(found, wanted, strict=True)
        return None, None, None, *(x if is_wanted else None for x, is_wanted in pairs)


def _like(x: Tensor) -> Tensor:
    return FakeCudaTensor(empty(x.shape, x.dtype))


def active_gpu() -> MetaCuda:
    """The device that is open."""
    gpu = active()
    assert isinstance(gpu, MetaCuda)
    return gpu


def counted(name: str, *tensors: Tensor, like: Sequence[int] = (0,), backward: int = 1) -> Any:
    """A kernel's output without numbers, told to the device.

    Args:
        like: of which of the tensors the outputs have the shape and dtype.
        backward: launches of its backward pass.
    """
    return _Counted.apply(name, backward, tuple(like), *tensors)


class _Gated(liger.LigerSiLUMulFunction):
    @staticmethod
    def apply(gate: Tensor, up: Tensor, *_: Any) -> Tensor:
        return counted("liger::gated", gate, up)


@wraps(stand_ins.causal_conv1d_fn)
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    return counted("causal_conv1d", x, weight, *([] if bias is None else [bias]))


@wraps(stand_ins.chunk_gated_delta_rule)
def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
    return counted("gated_delta_rule", q, k, v, g, beta, like=(2,)), None


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": _Gated},
    "liger_kernel.ops.geglu": {"LigerGELUMulFunction": _Gated},
    "causal_conv1d": {"causal_conv1d_fn": _convolution},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _delta_rule},
}
"""What is installed there, in place of `stand_ins.MODULES`."""
