"""Which implementation of each recurrence runs. It is chosen once, at build time, and reported.

`vlmpack verify` records their calls, with the arguments under our names.

The kernels for CUDA are those of causal-conv1d, flash-linear-attention and mamba-ssm, behind the
arguments of the torch forms. Each is imported when it is called, after it was chosen. Triton
kernels are tested by its interpreter on a CPU. None has been run on a GPU by this version's tests
unless docs/gpu.md says so.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError
from vlmpack.kernel_operators import is_plain
from vlmpack.recurrence.convolution import segment_convolution
from vlmpack.recurrence.delta_rule import fixed_delta_rule, segment_delta_rule
from vlmpack.recurrence.rows import RowSegments
from vlmpack.recurrence.scan import PLAIN, StepSize, fixed_scan, segment_scan

RULE_CHUNK = 64
"""Slots of a chunk of flash-linear-attention's rule, where nothing else is asked."""

SCAN_CHUNK = 256
"""Slots of a chunk of mamba-ssm's scan: what its own layers take."""


def conv1d_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: RowSegments,
    *,
    activation: str | None = None,
) -> Tensor:
    """causal-conv1d's kernel; arguments and result as `segment_convolution`.

    The kernel knows boundaries only where channels are the fastest dimension, in strides of 8. A
    row of another layout is copied once. It refuses channels that 8 does not divide, and filters of
    fewer than 2 or more than 4 taps. These take the torch form.
    """
    from causal_conv1d import causal_conv1d_fn

    row.check(x.shape[2])
    if x.shape[1] % 8 or not 2 <= weight.shape[1] <= 4:
        return segment_convolution(x, weight, bias, row, activation=activation)
    if x.stride(1) != 1 or x.stride(2) % 8 or x.stride(0) % 8:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    out: Tensor = causal_conv1d_fn(x, weight, bias, seq_idx=row.seq_idx, activation=activation)
    return out


def fla_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: RowSegments,
    *,
    activation: str | None = None,
) -> Tensor:
    """flash-linear-attention's Triton kernel; arguments and result as `segment_convolution`.

    It counts its chunks on the host, of a size that it chooses, so no graph can record it.
    """
    from fla.modules.convolution import causal_conv1d

    row.check(x.shape[2])
    out, _ = causal_conv1d(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=_own(row),
        cu_seqlens_cpu=row.cu_seqlens_host,  # else it reads them back from the device
    )
    output: Tensor = out.transpose(1, 2)
    return output


def fla_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    row: RowSegments,
    *,
    normalize: bool = False,
) -> Tensor:
    """flash-linear-attention's chunked rule; arguments and result as `segment_delta_rule`.

    Chunk indices have one shape for all rows of a width and are made on the device. So no layer
    reads the host, and a captured graph is valid for other segments.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    row.check(query.shape[1])
    out, _ = chunk_gated_delta_rule(
        query.to(value.dtype),  # under autocast the three may differ
        key.to(value.dtype),
        value,
        g=g,
        beta=beta,
        cu_seqlens=_own(row),
        chunk_indices=row.chunk_indices(RULE_CHUNK),
        use_qk_l2norm_in_kernel=normalize,
    )
    output: Tensor = out.to(query.dtype)
    return output


def mamba_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    row: RowSegments,
    *,
    skip: Tensor | None = None,
    step_size: StepSize = PLAIN,
) -> Tensor:
    """mamba-ssm's Triton scan; arguments and result as `segment_scan`."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    row.check(x.shape[1])
    out: Tensor = mamba_chunk_scan_combined(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=SCAN_CHUNK,
        D=skip,
        seq_idx=row.seq_idx,
        dt_bias=step_size.bias,
        dt_softplus=step_size.softplus,
        dt_limit=step_size.limits,
    )
    return out


def _own(row: RowSegments) -> Tensor:
    """(N + 1,) int64: boundaries in a new tensor of this row.

    flash-linear-attention caches what it derives from a tensor by object identity. Boundaries
    written again and again into one buffer would be taken for the first row's.
    """
    return row.once("fla", lambda: row.cu_seqlens.to(torch.int64))


Kind = Literal["convolution", "delta_rule", "scan"]
"""What a recurrent layer is made of; a field of `RecurrenceChoice`."""

RecurrenceName = Literal["auto", "torch", "kernels"]
"""What can be asked for: `model.recurrence` of a recipe."""

KINDS: tuple[Kind, ...] = ("convolution", "delta_rule", "scan")
"""All kinds, in the order of a report."""


Recurrence = Callable[..., Tensor]
"""A recurrence inside the segments of a row. Its arguments are those of its kind's torch form."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One implementation, and why it is this one."""

    name: str
    function: Recurrence
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceChoice:
    """What runs of each kind of recurrence."""

    convolution: Chosen
    delta_rule: Chosen
    scan: Chosen

    def described(self, kinds: Collection[Kind] = KINDS) -> str:
        """One line for the log: what runs of these kinds, and why."""
        chosen: dict[str, Chosen] = {
            kind.replace("_", " "): getattr(self, kind) for kind in KINDS if kind in kinds
        }
        names = ", ".join(f"{kind}: {each.name}" for kind, each in chosen.items())
        reasons = dict.fromkeys(each.reason for each in chosen.values())
        return f"{names} ({'; '.join(reasons)})"


@dataclass(frozen=True, slots=True)
class _Where:
    """Where a recurrence has to run."""

    device: torch.device
    dtype: torch.dtype
    fixed_shape: bool


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A function of a package that may not be there, or too old: its newest argument that we pass
    is `argument`."""

    name: str
    function: Recurrence
    module: str
    attribute: str
    argument: str
    wanted: str
    low_precision: bool = False
    captures: bool = True
    refuses: Callable[[torch.device], str | None] = lambda device: None
    """Why the package refuses a device that is here, which it says in the first backward pass."""

    def why_unavailable(self, where: _Where) -> str | None:
        device, dtype = where.device, where.dtype
        if where.fixed_shape and not self.captures:
            return f"{self.name} counts chunks on the host, which no captured graph can"
        if device.type != "cuda":
            return f"{self.name} needs a CUDA device, this one is {device.type}"
        if self.low_precision and dtype not in _LOW_PRECISION:
            return f"{self.name} needs bfloat16 or float16, the model computes in {dtype}"
        try:  # for real: a package that is there may be broken, or built for another torch
            function = getattr(importlib.import_module(self.module), self.attribute)
        except (ImportError, AttributeError, OSError) as error:
            place = f"{self.module}.{self.attribute}"
            return f"{place} cannot be imported ({error}); wanted: {self.wanted}"
        if self.argument not in signature(function).parameters:
            return f"{self.module}.{self.attribute} has no {self.argument}; wanted: {self.wanted}"
        return self.refuses(device)


_HOPPER = 9
"""The major compute capability of such GPUs."""

_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""From which version of Triton on, and up to which, its code for the rule's backward pass is wrong
there: flash-linear-attention 0.6 refuses it, unless tilelang is installed to run in its place."""


def _refused_on_hopper(device: torch.device) -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    if find_spec("tilelang") is not None:
        return None
    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        return None
    first, stop = _WRONG_ON_HOPPER
    if not first <= tuple(map(int, re.findall(r"\d+", triton)[:3])) < stop:
        return None
    return (
        f"fla refuses its rule's backward pass on Hopper GPUs with Triton {triton}, which computes "
        f"it wrong. Expected Triton {'.'.join(map(str, stop))} or newer, or tilelang"
    )


_KERNELS: Mapping[Kind, tuple[_Kernel, ...]] = {
    "convolution": (
        _Kernel(
            "causal_conv1d",
            conv1d_convolution,
            "causal_conv1d",
            "causal_conv1d_fn",
            "seq_idx",
            "causal-conv1d 1.4 or newer",
        ),
        _Kernel(
            "fla",
            fla_convolution,
            "fla.modules.convolution",
            "causal_conv1d",
            "cu_seqlens_cpu",
            "flash-linear-attention 0.5.2 or newer",
            captures=False,
        ),
    ),
    "delta_rule": (
        _Kernel(
            "fla",
            fla_delta_rule,
            "fla.ops.gated_delta_rule",
            "chunk_gated_delta_rule",
            "chunk_indices",
            "flash-linear-attention 0.6 or newer",
            low_precision=True,
            refuses=_refused_on_hopper,
        ),
    ),
    "scan": (
        _Kernel(
            "mamba_ssm",
            mamba_scan,
            "mamba_ssm.ops.triton.ssd_combined",
            "mamba_chunk_scan_combined",
            "seq_idx",
            "mamba-ssm 2.2 or newer",
        ),
    ),
}
"""Packages that have a kernel, the best one first."""

FORMS: Mapping[Kind, Recurrence] = {
    "convolution": segment_convolution,
    "delta_rule": segment_delta_rule,
    "scan": segment_scan,
}
"""The torch form of each kind, whose arguments all others have too."""

FIXED_FORMS: Mapping[Kind, Recurrence] = {
    "convolution": segment_convolution,
    "delta_rule": fixed_delta_rule,
    "scan": fixed_scan,
}
"""Those of rows that a graph captures."""

_AS_ASKED = "as the recipe asks"


def packaged_kinds(dtype: torch.dtype) -> tuple[Kind, ...]:
    """Kinds that an installed package has a kernel for, on a CUDA device that need not be here.

    Packages are looked up, not imported, to forecast what `choose_recurrence` will find.
    """
    return tuple(
        kind
        for kind, ours in _KERNELS.items()
        if any(
            find_spec(kernel.module.partition(".")[0]) is not None
            and not (kernel.low_precision and dtype not in _LOW_PRECISION)
            for kernel in ours
        )
    )


def choose_recurrence(
    requested: RecurrenceName = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype,
    fixed_shape: bool = False,
    kinds: Collection[Kind] = KINDS,
) -> RecurrenceChoice:
    """Choose the implementations once, at build time.

    Args:
        requested: `auto` takes a package's kernel where one can run, and a torch form elsewhere.
            `torch` takes the torch forms, `kernels` only a package's kernels.
        fixed_shape: whether a graph will capture the rows, so that nothing may depend on segments.
        kinds: what the model has; other kinds never run.

    Raises:
        CapabilityError: `kernels`, and one of these kinds has none that can run here, which the
            message names; or anything but `auto` for a model without such layers.
    """
    if requested != "auto" and not kinds:
        raise CapabilityError(
            f"model.recurrence: {requested}, but no layer of the model carries state from token to "
            f"token; leave it out"
        )
    where = _Where(device, dtype, fixed_shape)
    name, forms = ("fixed", FIXED_FORMS) if fixed_shape else ("segments", FORMS)
    chosen: dict[str, Chosen] = {
        kind: _first(_KERNELS[kind], Chosen(name, forms[kind], ""), where, requested)
        for kind in KINDS
    }
    missing = {
        kind.replace("_", " "): chosen[kind].reason
        for kind in KINDS
        if chosen[kind].name == name and kind in kinds
    }
    if requested == "kernels" and missing:
        raise CapabilityError(
            f"model.recurrence: kernels has none for the {', the '.join(missing)}: "
            f"{'; '.join(dict.fromkeys(missing.values()))}; use auto or torch"
        )
    return RecurrenceChoice(**chosen)


def on_this_path(choice: RecurrenceChoice) -> RecurrenceChoice:
    """The choice, or the torch forms on the plain path."""
    if not is_plain():
        return choice
    return choose_recurrence("torch", device=torch.device("cpu"), dtype=torch.float32)


def _first(
    kernels: Sequence[_Kernel], torch_form: Chosen, where: _Where, requested: RecurrenceName
) -> Chosen:
    """The first kernel that can run, or the torch form, which always can."""
    if requested == "torch":
        return replace(torch_form, reason=_AS_ASKED)
    refused: list[str] = []
    for kernel in kernels:
        why = kernel.why_unavailable(where)
        if why is None:
            first = "first choice" if requested == "auto" else _AS_ASKED
            return Chosen(kernel.name, kernel.function, "; ".join(refused) or first)
        refused.append(why)
    return replace(torch_form, reason="; ".join(refused))


@dataclass(frozen=True, slots=True)
class RecurrenceCall:
    """A call of a recurrence in a packed row: segments, other arguments by name, and output."""

    kind: Kind
    row: RowSegments
    given: Mapping[str, Any]
    output: Tensor


Listener = Callable[[RecurrenceCall], None]
"""What is called behind every recurrence of a packed row."""


def recorded_by(listener: Listener, choice: RecurrenceChoice) -> RecurrenceChoice:
    """A choice that runs the same, and gives every call to the listener."""

    def recording(kind: Kind, chosen: Chosen) -> Chosen:
        arguments = signature(FORMS[kind])

        def function(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = chosen.function(*args, **kwargs)
            given = dict(arguments.bind(*args, **kwargs).arguments)
            listener(RecurrenceCall(kind, given.pop("row"), given, output))
            return output

        return replace(chosen, function=function)

    kinds: dict[str, Any] = {kind: recording(kind, getattr(choice, kind)) for kind in KINDS}
    return replace(choice, **kinds)
