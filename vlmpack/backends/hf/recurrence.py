"""Replace the kernels that transformers' recurrent layers call by our recurrences.

Every modeling module of transformers decorates its own copy of a few functions with a kernel's
name, and its layers call them by their global names. One replacement for each kernel name is put
into each such module that a model comes from:

    layer -> causal_conv1d_fn(x, weight, bias, **kwargs)
                 row_segments in kwargs    -> our convolution, segment by segment
                 none, in a packed row     -> an error
                 none, elsewhere           -> what was there before

So an unpacked model of the same class is not changed. `row_segments` is an argument of the model's
forward, and transformers hands it down to its layers, through gradient checkpoints too. A family
that does not hand it on is found in the first forward pass.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from vlmpack.attention.eager import eager
from vlmpack.backends.hf.context import HeadExchange
from vlmpack.errors import CapabilityError
from vlmpack.recurrence import (
    KINDS,
    Kind,
    Listener,
    RecurrenceChoice,
    RowSegments,
    StepSize,
    on_this_path,
    recorded_by,
)

DECORATOR = "use_kernel_func_from_hub_with_fallback"
"""What transformers decorates its copies with; the first argument is the kernel's name."""

ROW_ARGUMENT = "row_segments"
"""What the forward of a model takes a row's `RowSegments` as."""

_PACKED_ROW: ContextVar[bool] = ContextVar("packed_row", default=False)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def packed_row() -> AbstractContextManager[None]:
    """A context in which every recurrence must get the segments of its row.

    It wraps the forward pass. Recomputation in a backward pass lies outside of it, and has the
    arguments of the forward pass.
    """
    return _set(_PACKED_ROW, True)


def decorated_kernels(source: str) -> dict[str, str]:
    """Function name -> kernel name, for what the source of a modeling module decorates.

    Functions that are named as a kernel without being decorated count too. One is LFM3's
    convolution, for which the kernel's filters are too short.
    """
    kernels: dict[str, str] = {}
    if not any(name in source for name in (DECORATOR, *KERNELS)):
        return kernels
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            match mark:
                case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(kernel)), *_]):
                    if name == DECORATOR:
                        kernels[node.name] = kernel
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in KERNELS:
            kernels.setdefault(node.name, node.name)
    return kernels


def modeling_modules(model: nn.Module) -> list[ModuleType]:
    """The modules of transformers that the classes of a model's layers come from, by name."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def kernel_places(model: nn.Module) -> list[tuple[ModuleType, str, str]]:
    """Module, function and kernel name, wherever the modules that a model comes from decorate."""
    return [
        (module, function, kernel)
        for module in modeling_modules(model)
        for function, kernel in decorated_kernels(inspect.getsource(module)).items()
    ]


def recurrent_modules(module: nn.Module) -> list[str]:
    """Names of the submodules that carry a state from token to token.

    They are recognised by what they hold, not by the model's name. Mamba and GatedDeltaNet have the
    logarithm of a decay, and like short convolutions a convolution along the sequence.
    """
    return [
        name
        for name, part in module.named_modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children())
        or "A_log" in dict(part.named_parameters(recurse=False))
    ]


Ours = Callable[..., Any]
"""A recurrence as transformers calls it, behind the choice and the row."""


def _convolution(
    choice: RecurrenceChoice,
    row: RowSegments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    return choice.convolution.function(x, weight, bias, row, activation=activation)


def _delta_rule(
    choice: RecurrenceChoice,
    row: RowSegments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    _no_state(options, "initial_state", "output_final_state")
    normalize = bool(options.get("use_qk_l2norm_in_kernel"))
    rule = choice.delta_rule.function
    return rule(query, key, value, g, beta, row, normalize=normalize), None


def _scan(
    choice: RecurrenceChoice,
    row: RowSegments,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    **options: Any,
) -> Tensor:
    _no_state(options, "initial_states", "return_final_states")
    if options.get("z") is not None:  # stock's torch form does not apply it, the kernel does
        raise CapabilityError("a gate inside Mamba-2's scan is not supported in packed rows")
    step_size = StepSize(
        bias=options.get("dt_bias"),
        softplus=bool(options.get("dt_softplus")),
        limits=options.get("dt_limit", (0.0, float("inf"))),
    )
    skip = options.get("D")
    return choice.scan.function(x, dt, a, b, c, row, skip=skip, step_size=step_size)


def _shared_by(exchange: HeadExchange, choice: RecurrenceChoice) -> RecurrenceChoice:
    """A choice that runs whole rows for this rank's channels and heads, where ranks share rows.

    Each rank uses its part of the weights of channels and heads. So their gradients are those of
    one process once the ranks' are added up.
    """
    own = exchange.own

    def convolution(
        x: Tensor, weight: Tensor, bias: Tensor | None, row: RowSegments, **options: Any
    ) -> Tensor:
        (whole,) = exchange.whole_row([x[0].T])
        bias = None if bias is None else own(bias)
        output = choice.convolution.function(whole.T[None], own(weight), bias, row, **options)
        return exchange.to_slots(output[0].T).T[None]

    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        row: RowSegments,
        **options: Any,
    ) -> Tensor:
        value, beta, query, key = exchange.whole_row([value[0], beta[0]], [query[0], key[0]])
        (g,) = exchange.whole_row([g[0]])  # alone: in float32, also where the others are not
        given = (part[None] for part in (query, key, value, g, beta))
        return exchange.to_slots(choice.delta_rule.function(*given, row, **options)[0])[None]

    def scan(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        row: RowSegments,
        *,
        skip: Tensor | None,
        step_size: StepSize,
    ) -> Tensor:
        x, dt, b, c = exchange.whole_row([x[0], dt[0]], [b[0], c[0]])
        if step_size.bias is not None:
            step_size = replace(step_size, bias=own(step_size.bias))
        skip = None if skip is None else own(skip)
        given = (x[None], dt[None], own(a), b[None], c[None])
        output = choice.scan.function(*given, row, skip=skip, step_size=step_size)
        return exchange.to_slots(output[0])[None]

    return replace(
        choice,
        convolution=replace(choice.convolution, function=convolution),
        delta_rule=replace(choice.delta_rule, function=delta_rule),
        scan=replace(choice.scan, function=scan),
    )


def _switched_off(choice: RecurrenceChoice, row: RowSegments, *args: Any, **_: Any) -> None:
    """Stands for a fused path. Its layer gets None, and then calls the kernels above one by one."""
    del choice, row, args


def _no_state(options: Mapping[str, Any], given: str, option: str) -> None:
    if options.get(given) is not None or options.get(option):
        raise CapabilityError("a packed row has no cache: its segments start from nothing")


def _refused(why: str) -> Ours:
    def refuse(choice: RecurrenceChoice, row: RowSegments, *args: Any, **_: Any) -> None:
        del choice, row, args
        raise CapabilityError(f"packed rows cannot run here: {why}")

    return refuse


_ONE_TOKEN = "a step of one token goes on from a cache, and a packed row has none"


@dataclass(frozen=True, slots=True)
class KernelName:
    """What runs in a packed row in place of a kernel that transformers names.

    Args:
        ours: called with the choice, the row, and transformers' arguments.
        kind: what of the choice runs, or None.
    """

    ours: Ours
    kind: Kind | None = None


KERNELS: Mapping[str, KernelName] = {
    "causal_conv1d_fn": KernelName(_convolution, "convolution"),
    "chunk_gated_delta_rule": KernelName(_delta_rule, "delta_rule"),
    "mamba_chunk_scan_combined": KernelName(_scan, "scan"),
    "mamba_split_conv1d_scan_combined": KernelName(_switched_off),
    "mamba_inner_fn": KernelName(_switched_off),
    "selective_scan_fn": KernelName(
        _refused("the scan of the first Mamba (selective_scan) has no form that resets at segments")
    ),
    "chunk_kda": KernelName(
        _refused("Kimi's delta attention (KDA) has no form that resets at segments")
    ),
    "causal_conv1d_update": KernelName(_refused(_ONE_TOKEN)),
    "selective_state_update": KernelName(_refused(_ONE_TOKEN)),
    "fused_recurrent_gated_delta_rule": KernelName(_refused(_ONE_TOKEN)),
    "fused_recurrent_kda": KernelName(_refused(_ONE_TOKEN)),
}
"""Every kernel name of transformers that we know."""


def recurrence_kinds(model: nn.Module) -> tuple[Kind, ...]:
    """The parts of a choice that a model's layers may call. Empty if no layer carries state."""
    names = {kernel for _, _, kernel in kernel_places(model) if kernel in KERNELS}
    kinds = {KERNELS[name].kind for name in names}
    return tuple(kind for kind in KINDS if kind in kinds)


def uncalled_layers(model: nn.Module) -> set[str]:
    """Names of the linear layers whose weights Mamba-2's fused path reads without calling the
    layer.

    That path runs for padded rows on CUDA, where an adapter of such a layer would have no effect.
    """
    fused = {
        module.__name__
        for module, _, kernel in kernel_places(model)
        if kernel in KERNELS and KERNELS[kernel].ours is _switched_off
    }
    return {
        f"{name}.out_proj"
        for name in recurrent_modules(model)
        if type(model.get_submodule(name)).__module__ in fused
    }


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


def recording(listener: Listener) -> AbstractContextManager[None]:
    """A context in which `listener` gets every call of a recurrence in a packed row, in order."""
    return _set(_LISTENER, listener)


class _Replacement:
    """What stands in a modeling module.

    Args:
        before: what stood there; of another replacement, what that one stands for.
    """

    def __init__(self, name: str, choice: RecurrenceChoice, before: Callable[..., Any]) -> None:
        self.name, self.choice = name, choice
        self.before: Callable[..., Any] = before
        if isinstance(before, _Replacement):
            self.before = before.before

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        row = kwargs.pop(ROW_ARGUMENT, None)
        if row is not None:
            listener, choice = _LISTENER.get(), on_this_path(self.choice)
            if listener is not None:
                choice = recorded_by(listener, choice)
            if (exchange := kwargs.get("head_exchange")) is not None:
                choice = _shared_by(exchange, choice)
            return KERNELS[self.name].ours(choice, row, *args, **kwargs)
        if _PACKED_ROW.get():
            raise CapabilityError(
                f"{self.name} was called in a packed row without {ROW_ARGUMENT}: the layer that "
                f"calls it does not hand its arguments on, and state would run from sample to "
                f"sample"
            )
        return self.before(*args, **kwargs)


def replace_kernels(model: nn.Module, choice: RecurrenceChoice) -> dict[str, str]:
    """Replace every kernel in the modeling modules that a model comes from.

    Returns:
        What was chosen of the kinds that the model has, for the log; empty for none.

    Raises:
        CapabilityError: transformers decorates a kernel name that is not known here, so that
            nobody can say whether it carries state.
    """
    places = kernel_places(model)
    for module, function, kernel in places:
        if kernel not in KERNELS:
            raise CapabilityError(
                f"{module.__name__} calls a kernel that this version does not know, {kernel} "
                f"({function}); known are {', '.join(sorted(KERNELS))}"
            )
    for module, function, kernel in places:
        setattr(module, function, _Replacement(kernel, choice, getattr(module, function)))
    kinds = [kind for _, _, kernel in places if (kind := KERNELS[kernel].kind) is not None]
    return {"recurrence": choice.described(kinds)} if kinds else {}


def stateful_modules(decoder: nn.Module) -> tuple[ModuleType, ...]:
    """The modeling modules that a decoder's layers with a state come from; none without such."""
    kinds = [type(decoder.get_submodule(name)) for name in recurrent_modules(decoder)]
    return tuple(sys.modules[name] for name in sorted({kind.__module__ for kind in kinds}))


def require_replaced(stateful: Iterable[ModuleType]) -> None:
    """Raise unless every modeling module has a replacement that knows where samples end.

    Raises:
        CapabilityError: one of them has none.
    """
    for module in stateful:
        if not any(isinstance(value, _Replacement) for value in vars(module).values()):
            raise CapabilityError(
                f"layers of {module.__name__} carry state from token to token, and no kernel of "
                f"theirs was replaced by one that knows where samples end. The engine and "
                f"vlmpack.packed_model replace those that transformers decorates"
            )
