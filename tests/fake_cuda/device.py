"""A GPU whose numbers lie on the CPU: its tensors are on `cuda:0` for torch, autograd and autocast.

    with fake_gpu() as gpu:       # in a process that has the device guard (guard.py)
        ...                       # device="cuda" is there; a CPU computes each operator
    gpu.waits                     # where the host waited for the device, and for what
    gpu.operators                 # how often each operator ran

Whatever asks for the device sees CUDA, so every branch for CUDA is taken, autocast follows CUDA's
lists, and operators that only CUDA has are in kernels.py. A tensor of the CPU that meets one of the
device raises, as there; dtypes are the CPU kernels' to refuse. What is copied to pinned memory
without a wait is there once the host waits, and other bytes before. What it cannot show: speed,
memory beyond what tensors hold, several streams, and anything that a CUDA kernel does otherwise
than its contract says.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from fake_cuda.kernels import KERNELS
from fake_cuda.streams import Arrivals, Event, Stream
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.nn.attention import bias
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from vlmpack.attention import wide
from vlmpack.backends import fused

CUDA = torch.device("cuda", 0)
HERE = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default: "one number",
    aten.nonzero.default: "how many are not zero",
    aten.masked_select.default: "how many a mask selects",
    aten._unique2.default: "how many differ",
    aten.unique_dim.default: "how many differ",
    aten.unique_consecutive.default: "how many differ",
    aten.bincount.default: "the largest",
    aten.equal.default: "whether all are equal",
}
"""Operators for whose result, or its shape, the host waits."""

INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
WITH_CPU_TENSORS = {"aten::copy_", "aten::_to_copy", *INDEXING}
"""Operators that take tensors of both devices; indices on the CPU are copied."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waited for the device.

    Args:
        what: it waited for.
        place: "folder/file.py:line" of the innermost code that is not torch's, its folder the
            outermost package; or "backward" where autograd called the operator.
    """

    what: str
    place: str


class FakeCudaTensor(Tensor):
    """A tensor on `cuda:0`, made by `FakeCuda` alone.

    Args:
        held: its numbers, on the CPU.
    """

    held: Tensor
    token: object = None

    @staticmethod
    def __new__(cls, held: Tensor) -> FakeCudaTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held
        if _OPEN:
            _OPEN[-1].hold(self)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return active().run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """As torch's own."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        torch._C.TensorBase.data.__set__(self, value)  # shape and strides
        self.held = _held(value)

    # Modules then move their parameters by swapping tensors, not by setting their data.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> FakeCudaTensor:
        return FakeCudaTensor(inner["held"])

    def __repr__(self) -> str:
        return f"FakeCudaTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """As torch's own, which refuses subclasses."""
        active().wait("a list")
        return active().read(self.held).tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused, as for any tensor on a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")


@contextmanager
def _flash_attention() -> Iterator[None]:
    """`scaled_dot_product_attention` without a mask is a flash kernel on CUDA, which keeps no
    scores; torch would take its plain form for a device that has no kernels.

    By name in every module that has it: a mode for torch's functions is closed inside of
    `Tensor.backward`, so layers that are computed again there would take the other form.
    """
    torchs = torch.nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(_sdpa).bind(*args, **kwargs).arguments
        plain = given.get("attn_mask") is None and not given.get("enable_gqa")
        if plain and isinstance(given["query"], FakeCudaTensor):
            return _sdpa(**given)
        out: Tensor = torchs(*args, **kwargs)
        return out

    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(torchs.__name__) is torchs:
                stack.enter_context(patch.object(module, torchs.__name__, attend))
        yield


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    parts = [query, key, value]
    if torch.is_autocast_enabled("cuda"):
        parts = [part.to(torch.get_autocast_dtype("cuda")) for part in parts]
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(*parts, dropout_p, is_causal, scale=scale)[0]


class FakeCuda(TorchDispatchMode):
    """The device; `fake_gpu` opens it. `waits` has where the host waited for it, in order, and
    `operators` how often each ran there, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.operators = Counter[str]()
        self.arrivals = Arrivals()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def wait(self, what: str) -> None:
        """The host waits now."""
        self.waits.append(Wait(what, _place(sys._getframe(1))))

    def read(self, held: Tensor) -> Tensor:
        """A tensor's numbers, for the host."""
        return held

    def hold(self, tensor: FakeCudaTensor) -> None:
        """Hear of a tensor that is made."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator."""
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_device = any(isinstance(x, FakeCudaTensor) for x in tensors)
        named = kwargs.get("device")
        target = None if named is None else torch.device(named).type
        if func is aten.is_pinned.default:  # locked pages have nothing that could be told apart
            return False
        if func is aten._pin_memory.default:
            return self.arrivals.lock(args[0].clone())
        if kwargs.get("pin_memory") and target != "cuda":
            rest = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            return self.arrivals.lock(func(*args, **rest))
        if not on_device and target != "cuda":
            return func(*args, **kwargs)
        self.operators[func._schema.name] += 1
        if func._schema.name in OPDEFS:  # made of others in Python
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        self._watch(func, args, kwargs, tensors, target)
        if func is aten.copy_.default and self._comes_later(*args):
            return self.arrivals.start(args[0], _held(args[1]))
        from_host = func is aten.copy_.default and not isinstance(args[1], FakeCudaTensor)
        if from_host and self.arrivals.is_locked(args[1]):
            self.arrivals.arrive(self.arrivals.begun)  # one stream, in order
        kernel = KERNELS.get(func)
        if kernel is None:
            _require_one_device(func, tensors, on_device)
        held = {id(x.held): x for x in tensors if isinstance(x, FakeCudaTensor)}
        plain, options = tree_map(_held, (args, kwargs))
        if target is not None:
            options = {**options, "device": "cpu"}
        out = (kernel or func)(*plain, **{k: v for k, v in options.items() if k != "pin_memory"})
        _require_same_shapes(func, held)
        if target == "cpu" or (func is aten.copy_.default and args[0].device.type == "cpu"):
            return args[0] if func is aten.copy_.default else out
        return tree_map_only(
            Tensor, lambda x: held[id(x)] if id(x) in held else FakeCudaTensor(x), out
        )

    def _watch(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        target: str | None,
    ) -> None:
        """Note whether the host waits for this operator."""
        if func in READS:
            self.wait(READS[func])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.wait("how often in all")
        elif func is aten._to_copy.default and target is not None:
            source = "cuda" if isinstance(args[0], FakeCudaTensor) else "cpu"
            self._copied(source, target, bool(kwargs.get("non_blocking")))
        elif func is aten.copy_.default and not self._comes_later(*args):
            self._copied(args[1].device.type, args[0].device.type, any(args[2:]))
        elif func._schema.name in INDEXING:
            self._indexed(func, args)

    def _comes_later(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
        """Whether it is a copy to locked pages that the host does not wait for."""
        from_device = isinstance(source, FakeCudaTensor) and not isinstance(target, FakeCudaTensor)
        return non_blocking and from_device and self.arrivals.is_locked(target)

    def _copied(self, source: str, target: str, non_blocking: bool) -> None:
        if source == "cuda" and target == "cpu":
            self.wait("a copy to the host")
        elif source == "cpu" and target == "cuda" and not non_blocking:
            self.wait("a copy to the device")

    def _indexed(self, func: Any, args: Any) -> None:
        given = [index for index in args[1] if index is not None]
        masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
        fills = len(args) > 2 and args[2].numel() == 1 and len(masks) == len(given)
        if masks and not fills:  # else it is masked_fill
            self.wait("how many a mask selects")
        if any(index.device.type == "cpu" and index.ndim for index in given):
            self.wait("a copy to the device")


GpuT = TypeVar("GpuT", bound=FakeCuda)
_OPEN: list[FakeCuda] = []


@contextmanager
def fake_gpu(gpu: GpuT | None = None) -> Iterator[GpuT]:
    """`cuda:0`, while it is open; one at a time."""
    assert not _OPEN, "one fake device at a time"
    gpu = cast("GpuT", FakeCuda()) if gpu is None else gpu
    lifted = torch._C._only_lift_cpu_tensors()
    with _cuda_by_name(gpu), _flash_attention(), gpu:
        _OPEN.append(gpu)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is seen then
        try:
            yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            _OPEN.clear()


def is_open() -> bool:
    """Whether there is a fake device now."""
    return bool(_OPEN)


def active() -> FakeCuda:
    if not _OPEN:
        raise RuntimeError("a tensor of a fake device that is closed")
    return _OPEN[-1]


def _held(value: Any) -> Any:
    return value.held if isinstance(value, FakeCudaTensor) else value


def _require_one_device(func: Any, tensors: list[Tensor], on_device: bool) -> None:
    if not on_device or func._schema.name in WITH_CPU_TENSORS:
        return
    strangers = [x for x in tensors if not isinstance(x, FakeCudaTensor) and x.ndim > 0]
    if strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got "
            + ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        )


def _require_same_shapes(func: Any, held: dict[int, FakeCudaTensor]) -> None:
    """A tensor cannot change its shape in place here: torch keeps it, too."""
    for tensor in held.values():
        if tensor.held.shape != tensor.shape:
            raise NotImplementedError(f"{func} changes a tensor's shape in place")


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((HERE, TORCH, "<")):
            _, _, package = file.rpartition("site-packages/")
            name = (
                package if package != file else str(Path(file).relative_to(Path(HERE).parents[1]))
            )
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


def _set_data(parameter: torch.nn.Parameter, value: Tensor) -> None:
    """A parameter of the CPU that gets data on the device is one of the device, as a whole."""
    if not isinstance(value, FakeCudaTensor):
        torch._C.TensorBase.data.__set__(parameter, value)
        return
    moved = torch.nn.Parameter(value, parameter.requires_grad)
    vars(moved).update(vars(parameter))
    torch.utils.swap_tensors(parameter, moved)


def _unwatched(kind: type[Tensor], *_: Any, **__: Any) -> Tensor:
    """A mask without numbers: torch makes no subclass of its own of a tensor that is watched."""
    with _disable_current_modes():
        return Tensor.__new__(kind)


def _class_that_makes(make: Callable[[], Any]) -> type:
    """Modules that are imported meanwhile name these classes in annotations, which a function is
    not fit for."""

    class Made:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return make()

    return Made


@contextmanager
def _cuda_by_name(gpu: FakeCuda) -> Iterator[None]:
    """What is asked of a device by name, answered for the fake one."""
    properties = SimpleNamespace(
        name="fake",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        shared_memory_per_block_optin=227 << 10,
    )
    state = torch.zeros(16, dtype=torch.uint8)
    stream = Stream(gpu)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda _=None: (80 << 30, 80 << 30),
        "get_rng_state": lambda device=None: state.clone(),
        "set_rng_state": lambda *_, **__: None,
        "manual_seed": lambda _: None,
        "default_generators": (SimpleNamespace(set_state=lambda _: None, get_state=state.clone),),
        "synchronize": lambda _=None: stream.synchronize(),
        "Stream": _class_that_makes(lambda: stream),
        "Event": _class_that_makes(lambda: Event(gpu)),
        "current_stream": lambda _=None: stream,
        "default_stream": lambda _=None: stream,
        "stream": lambda _: nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as changed:
        for name, answer in answers.items():
            changed.enter_context(patch.object(torch.cuda, name, answer))
        for name in ("get_rng_state", "set_rng_state"):  # the module's own, which others import
            changed.enter_context(patch.object(torch.cuda.random, name, answers[name]))
        data = property(lambda tensor: torch._C.TensorBase.data.__get__(tensor), _set_data)
        changed.enter_context(patch.object(torch.nn.Parameter, "data", data, create=True))
        changed.enter_context(patch.object(bias.CausalBias, "__new__", _unwatched))
        changed.enter_context(patch.object(bias, "can_use_flash_attention", lambda *_: True))
        # torch's builds for CUDA bring Triton; here our operators are their formulas.
        changed.enter_context(patch.object(fused, "why_no_kernels", lambda _: None))
        changed.enter_context(patch.object(wide, "find_spec", lambda _: True))
        # torch runs its fused and foreach kernels for these types alone.
        known = [*_foreach_utils._foreach_supported_types, FakeCudaTensor]
        changed.enter_context(patch.object(_foreach_utils, "_foreach_supported_types", known))
        yield
