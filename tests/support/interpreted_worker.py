"""Run by `support.interpreted`: kernels of other packages, interpreted on a CPU by Triton.

    TRITON_INTERPRET=1 python -m support.interpreted_worker FOLDER PACKAGES

FOLDER is on the module search path and holds Triton and the packages; PACKAGES says which to
import. Pickled requests come in on
stdin, (name of a function of this module, its arguments), and pickled answers leave on stdout:
(True, result) or (False, traceback).

Kernels and their packages think that they are on a GPU; what they ask of one is answered here.
Memory that they do not initialise is filled with NaN, so that a slot which nobody writes is seen.
"""

from __future__ import annotations

import builtins
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from support.interpreted import Case, applied
from support.kept import kept_bytes
from support.recurrences import segments, with_gradients
from torch import Tensor
from triton.runtime import driver, interpreter

from vlmpack.attention import wide
from vlmpack.backends import fused, row_operators
from vlmpack.backends.row_operators import NormForm
from vlmpack.recurrence import KINDS, choose, choose_recurrence


class _Driver:
    """What fla, mamba-ssm and Triton's autotuner ask of a device."""

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch=0, warp_size=1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *_, **__: [0.0, 0.0, 0.0]  # all configurations are as fast: take the first

    def get_empty_cache_for_benchmark(self) -> Tensor:
        return torch.empty(1)

    def clear_cache(self, *_: Any) -> None:
        pass


class _Counter(int):
    """A loop's counter: a plain int for the interpreter, where kernels convert a tensor's type."""

    def to(self, _: Any) -> _Counter:
        return self


def _counted(*bounds: Any) -> Iterator[_Counter]:
    return map(_Counter, builtins.range(*bounds))


def _float32(argument: Any) -> Any:
    """A Python float that a kernel is called with is a scalar of float32 there, and has `.to`."""
    if not isinstance(argument, float):
        return _converted(argument)
    handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
    return tl.tensor(handle, tl.float32)


_converted = interpreter._implicit_cvt


def _rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
    """The bits of numbers in another type. A GPU rounds float32 to bfloat16, to even where it is
    half way; the interpreter cuts it off."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _cut_off(numbers, source, target, mode)
    whole = torch.from_numpy(numpy.ascontiguousarray(numbers))
    return whole.bfloat16().view(torch.uint16).numpy()


_cut_off = interpreter._convert_float


def _product(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Of two tiles. The interpreter has bfloat16 as its bits, and would multiply those."""
    return _multiplied(builder, *map(_as_numbers, (a, b)), *rest)


def _as_numbers(tile: Any) -> Any:
    if tile.dtype.scalar != tl.bfloat16:
        return tile
    bits = torch.from_numpy(numpy.ascontiguousarray(tile.data)).view(torch.bfloat16)
    return interpreter.TensorHandle(bits.float().numpy(), tl.float32)


_multiplied = interpreter.InterpreterBuilder.create_dot


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(allocate)
    def filled(*args: Any, **options: Any) -> Tensor:
        made = allocate(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return filled


def prepare(folder: Path, packages: str) -> None:
    """Stand in for a GPU, and import the packages."""
    driver.set_active(_Driver())
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[misc,assignment]
    torch.cuda.get_device_properties = (  # type: ignore[assignment]
        lambda _: SimpleNamespace(multi_processor_count=1)
    )
    interpreter._implicit_cvt = _float32
    interpreter._convert_float = _rounded
    interpreter.InterpreterBuilder.create_dot = _product
    # Their own __init__ import the CUDA extension, which nobody built, and kernels of all kinds.
    for name in ("mamba_ssm", "liger_kernel", "liger_kernel.ops"):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
    for name in PACKAGES[packages]:
        import_module(name)
    for name, function in {"rsqrt": _rsqrt, "tanh": _tanh}.items():  # libdevice's are not there
        for module in PACKAGES["fused"]:
            if hasattr(sys.modules.get(module), name):
                setattr(sys.modules[module], name, function)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = _counted  # type: ignore[attr-defined]
    torch.empty = _filled(torch.empty)
    torch.empty_like = _filled(torch.empty_like)
    torch.Tensor.new_empty = _filled(torch.Tensor.new_empty)  # type: ignore[method-assign]


PACKAGES = {
    "recurrences": (
        "fla.modules.convolution",
        "fla.ops.gated_delta_rule",
        "mamba_ssm.ops.triton.ssd_combined",
    ),
    "fused": (
        "liger_kernel.ops.swiglu",
        "liger_kernel.ops.geglu",
        "vlmpack.backends.label_kernels",
        "vlmpack.backends.row_kernels",
    ),
    "wide": ("vlmpack.attention.wide_kernels",),
}
KERNELS: dict[str, Callable[..., Tensor]] = {
    "convolution": choose.fla_convolution,
    "delta_rule": choose.fla_delta_rule,
    "scan": choose.mamba_scan,
}


def compute(case: Case, tensors: list[Tensor], scan_chunk: int) -> list[Tensor]:
    """Output and gradients of a kernel of ours for this row."""
    choose.SCAN_CHUNK = scan_chunk
    leaves = [x.requires_grad_() for x in tensors]
    row = segments(case.lengths)
    return with_gradients(applied(KERNELS[case.kind], case.kind, leaves, row), leaves)


def kept(case: Case, tensors: list[Tensor]) -> int:
    """Bytes that a kernel of ours keeps for its backward pass, beside its inputs."""
    leaves = [x.requires_grad_() for x in tensors]
    row = segments(case.lengths)
    return kept_bytes(lambda: applied(KERNELS[case.kind], case.kind, leaves, row), leaves)


def two_rows_of_one_buffer(case: Case, tensors: list[Tensor], other: tuple[int, ...]) -> Tensor:
    """The kernel's output for this row after one of `other` lengths whose boundaries lay there."""
    buffer, function = segments(other).cu_seqlens, KERNELS[case.kind]
    for lengths in (other, case.lengths):
        buffer.copy_(segments(lengths).cu_seqlens)
        row = type(segments((1,)))(lengths, buffer)
        with torch.no_grad():
            out = applied(function, case.kind, tensors, row)
    return out


def of_given_chunks(case: Case, tensors: list[Tensor], chunks: Tensor | None) -> list[Tensor]:
    """The rule's output and gradients with these chunk indices; None: those that fla makes."""
    leaves = [x.requires_grad_() for x in tensors]
    row = segments(case.lengths)
    row.once(("chunk_indices", choose.RULE_CHUNK), lambda: chunks)
    return with_gradients(applied(choose.fla_delta_rule, case.kind, leaves, row), leaves)


def use_kernels() -> None:
    """Our operators are Triton's kernels, as on CUDA."""
    kernels = import_module("vlmpack.backends.row_kernels")
    row_operators.OPERATORS = SimpleNamespace(
        rms_norm=kernels.launch_norm,
        rms_norm_backward=kernels.launch_norm_backward,
        rotate=kernels.launch_rotation,
    )


def row_norm(
    form: NormForm, tensors: list[Tensor], eps: float, dtype: torch.dtype | None, grad: Tensor
) -> list[Tensor]:
    """Output and gradients of our norm; `grad` is in the dtype of the output."""
    use_kernels()
    leaves = [x.requires_grad_() for x in tensors]
    out = row_operators.rms_norm(*leaves, eps, form, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def label_rows(
    logits: Tensor, targets: Tensor, grads: Tensor, cap: float, temperatures: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """What the kernels make of logits, and the gradients that they write over them."""
    kernels = import_module("vlmpack.backends.label_kernels")
    made = kernels.launch_losses(logits, targets, cap, temperatures)
    kernels.launch_gradients(logits, targets, *made[1:], grads, cap, temperatures)
    return [*made], logits


def row_rotation(
    tensors: list[Tensor],
    grads: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype | None,
) -> tuple[list[Tensor], bool]:
    """Outputs and gradients of our rotation, and whether what it was handed is as it was."""
    use_kernels()
    leaves = [x.requires_grad_() for x in tensors]
    before = [x.detach().clone() for x in (*leaves, *grads)]
    out = row_operators.rotate(leaves, cos, sin, dtype)
    found = torch.autograd.grad(out, leaves, grads)
    is_kept = all(map(torch.equal, before, (x.detach() for x in (*leaves, *grads))))
    return [*(x.detach() for x in out), *found], is_kept


def far_heads(apart: int) -> list[float]:
    """The first number of each of three heads, turned by nothing, that lie so many elements apart
    in a file of which only those pages are there."""
    with NamedTemporaryFile() as file:
        file.truncate(2 * (3 * apart))
        whole = torch.from_file(file.name, shared=True, size=3 * apart, dtype=torch.bfloat16)
        q = whole.as_strided((1, 1, 3, 16), (16, 16, apart, 1))
        q.copy_(torch.arange(3)[:, None].expand(3, 16))
        cos = torch.ones(1, 1, 16)
        kernels = import_module("vlmpack.backends.row_kernels")
        given = (q[:, :, :0], cos, 0 * cos, 1.0, q.dtype, q.dtype)
        turned: list[float] = kernels.launch_rotation(q, *given)[0][0, 0, :, 0].tolist()
    return turned


def wide_heads(
    tensors: list[Tensor], cu_seqlens: Tensor, scale: float | None, grad: Tensor
) -> tuple[list[Tensor], bool]:
    """Output and gradients of our attention, and whether what it was handed is as it was."""
    kernels = import_module("vlmpack.attention.wide_kernels")
    wide.OPERATORS = SimpleNamespace(
        wide_attention=kernels.launch_attention,
        wide_attention_backward=kernels.launch_attention_backward,
    )
    leaves = [x.requires_grad_() for x in tensors]
    before = [x.detach().clone() for x in (*leaves, grad)]
    out = wide.wide_attention(*leaves, cu_seqlens, scale=scale)
    found = torch.autograd.grad(out, leaves, grad)
    is_kept = all(map(torch.equal, before, (x.detach() for x in (*leaves, grad))))
    return [out.detach(), *found], is_kept


def fused_gated(activation: fused.Activation, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients of liger's gated activation, of what layers before it made."""
    leaves = [x.requires_grad_() for x in tensors]
    made = [1.0 * x for x in leaves]  # its backward pass writes over them
    return with_gradients(fused.liger_gated()(*made, activation), leaves)


def why_no_kernels() -> tuple[str | None, str | None]:
    """What `auto` finds on CUDA: of Triton's, and of liger's."""
    return fused.why_no_kernels(torch.device("cuda", 0)), fused.why_no_liger()


def chosen() -> dict[str, tuple[str, str]]:
    """What is chosen for a model in bfloat16 on CUDA: name and reason."""
    choice = choose_recurrence(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    return {kind: (getattr(choice, kind).name, getattr(choice, kind).reason) for kind in KINDS}


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a package prints is no answer
    prepare(Path(sys.argv[1]), sys.argv[2])
    while True:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = True, globals()[name](*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
