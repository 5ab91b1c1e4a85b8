"""Checks of recurrent layers alone: their segments, their outputs and their gradients.

Losses of a row show that something is wrong. These checks show the layer, and whether the fault is
in its convolution, delta rule or scan. Each call is checked for its segments, and its outputs are
compared with those of each sample alone. On the mcore engine each rank checks its own heads and
layers, over the whole row.

Gradients are compared with the stock model's under vlmpack's torch forms in float64, one sample at
a time. transformers' chunked rule takes the decay between two tokens as a difference of float32
sums over a chunk. With strong decays (published models draw A up to 16), gradients of `A_log`,
`dt_bias` and their projection are off by up to 5e-4. The torch forms in float32 are off by 1e-5,
which serves as the noise here. A bound from transformers' float32 would be 30 times as wide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.recurrence import KERNELS, kernel_places, recording
from vlmpack.proof.measure import (
    OUTPUT_BOUND,
    Check,
    GradientError,
    bounded,
    gradient_errors,
    relative_l2,
    worst,
)
from vlmpack.proof.verify.compare import RESETS
from vlmpack.proof.verify.leak import check_gradient_leaks, gradient_leaks_not_looked_for
from vlmpack.proof.verify.packed import PackedRun
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.proof.verify.unpacked import StockModel
from vlmpack.recurrence import (
    Chosen,
    RecurrenceCall,
    RecurrenceChoice,
    RowSegments,
    StepSize,
    recorded_by,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)

TOKEN_DIMS = {
    "convolution": {"x": 2},
    "delta_rule": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "scan": {"x": 1, "dt": 1, "b": 1, "c": 1},
}
"""Along which dimension the tensors of a kind have their tokens, by the names of our arguments."""


def torch_forms(dtype: torch.dtype) -> RecurrenceChoice:
    """The torch forms computing in a dtype; outputs are in the dtype of the first tensor."""
    name, reason = str(dtype).removeprefix("torch."), "for comparison"
    return RecurrenceChoice(
        convolution=Chosen(name, partial(_in_dtype, dtype, segment_convolution), reason),
        delta_rule=Chosen(name, partial(_in_dtype, dtype, segment_delta_rule), reason),
        scan=Chosen(name, partial(_in_dtype, dtype, segment_scan), reason),
    )


def _in_dtype(
    dtype: torch.dtype, function: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    def cast(value: Any) -> Any:
        if isinstance(value, StepSize):
            return replace(value, bias=cast(value.bias))
        return value.to(dtype) if isinstance(value, Tensor) else value

    output = function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
    return output.to(args[0].dtype)


def one_segment(length: int, device: torch.device) -> RowSegments:
    return RowSegments((length,), torch.tensor([0, length], dtype=torch.int32, device=device))


def named_arguments(kernel: str, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """Transformers' arguments of a kernel under the names of ours; options stay as they are."""
    bound = inspect.signature(KERNELS[kernel].ours).bind_partial(None, None, *args, **kwargs)
    arguments = dict(bound.arguments)
    options: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options = arguments.pop(name, {})
    del arguments["choice"], arguments["row"]
    return {**arguments, **options}


def _call_alone(kernel: str, choice: RecurrenceChoice, *args: Any, **kwargs: Any) -> Any:
    known = KERNELS[kernel]
    if known.kind is None:
        return known.ours(choice, one_segment(0, torch.device("cpu")), *args, **kwargs)
    given = named_arguments(kernel, args, kwargs)
    name, dim = next(iter(TOKEN_DIMS[known.kind].items()))
    tokens: Tensor = given[name]
    return known.ours(choice, one_segment(tokens.shape[dim], tokens.device), **given)


@contextmanager
def recurrences_alone(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which a stock model computes its recurrences by the torch forms.

    Args:
        model: of transformers, given batches of one sample without padding.
    """
    choice = torch_forms(dtype)
    before = []
    for module, function, kernel in kernel_places(model):
        before.append((module, function, getattr(module, function)))
        setattr(module, function, partial(_call_alone, kernel, choice))
    try:
        yield
    finally:
        for module, function, was in before:
            setattr(module, function, was)


SEGMENTS = "segments of recurrent layers"
ALONE = "recurrences at their own inputs"


@dataclass(slots=True)
class _Calls:
    """Results of a row's recurrence calls; `wrong` ones had other segments than their row."""

    calls: int = 0
    by_layer: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    largest: float = 0.0
    first: str = ""

    @classmethod
    def of_all(cls, ranks: Sequence[_Calls]) -> _Calls:
        return cls(
            calls=sum(each.calls for each in ranks),
            by_layer={
                layer: sum(each.by_layer[layer] for each in ranks) for layer in ranks[0].by_layer
            },
            wrong=[said for each in ranks for said in each.wrong],
            largest=worst([each.largest for each in ranks]),
            first=next((each.first for each in ranks if each.first), ""),
        )


def check_stateful(
    run: PackedRun, rows: Sequence[VerifiedRow], layers: Sequence[str], *, exact: bool
) -> list[Check]:
    """Checks of recurrent layers alone; gradients remain. Collective.

    Padded rows have no boundaries inside.

    Args:
        exact: whether the bound of float32 applies.
    """
    packed = [row for row in rows if not row.is_padded]
    if not packed:
        return []
    checks = check_recurrent(run, packed, layers, exact=exact)
    if run.model is None:
        return [*checks, gradient_leaks_not_looked_for()]
    shared = [row for row in packed if len(row.alone) > 1]
    return [*checks, check_gradient_leaks(run, shared if exact else shared[:1])]


def check_recurrent(
    run: PackedRun, rows: Sequence[VerifiedRow], layers: Sequence[str], *, exact: bool
) -> list[Check]:
    """Run packed rows forward, and look at every call of a recurrence. Collective."""
    mine = _Calls(by_layer=dict.fromkeys(layers, 0))
    for row in rows:
        with ExitStack() as stack:
            _listen(run, layers, partial(_look_at, row=row, calls=mine), stack)
            run.run([row], backward=False)
    calls = _Calls.of_all(run.ranks.gather_objects(mine))
    return [_segments(calls), _alone(calls, exact=exact)]


def _listen(
    run: PackedRun,
    layers: Sequence[str],
    look: Callable[[RecurrenceCall, str], None],
    stack: ExitStack,
) -> None:
    """Call `look` with every call of a recurrence and its layer's path, until the stack ends.

    Layers of transformers ask for recurrences by global names, Megatron's have their own choice.
    """
    if run.model is None:
        paths = {_layer_number(path): path for path in layers}
        for part in run.engine.module.modules():
            held: dict[str, Any] = vars(part)
            choice = held.get("choice")
            if isinstance(choice, RecurrenceChoice):
                stack.callback(held.__setitem__, "choice", choice)
                layer = paths[held["layer_number"] - 1]
                held["choice"] = recorded_by(partial(_named, look, layer), choice)
        return
    now = [""]

    def enter(layer: str, _module: nn.Module, _args: Any) -> None:
        now[0] = layer

    for layer in layers:
        module = run.model.get_submodule(layer)
        stack.enter_context(module.register_forward_pre_hook(partial(enter, layer)))
    stack.enter_context(recording(lambda call: look(call, now[0])))


def _named(look: Callable[[RecurrenceCall, str], None], layer: str, call: RecurrenceCall) -> None:
    look(call, layer)


def _layer_number(path: str) -> int:
    """The place of a decoder's layer, counted from 0: the first number in its path."""
    return next(int(part) for part in path.split(".") if part.isdigit())


def _look_at(call: RecurrenceCall, layer: str, *, row: VerifiedRow, calls: _Calls) -> None:
    calls.calls += 1
    calls.by_layer[layer] = calls.by_layer.get(layer, 0) + 1
    place = f"{call.kind.replace('_', ' ')} of {layer}"
    ends = {0, *row.ends, row.num_slots}
    given = {0, *accumulate(call.row.lengths)}
    on_device = set(call.row.cu_seqlens.tolist())
    if given != ends or on_device != ends:
        other = given if given != ends else on_device
        at = min(other ^ ends)
        which = "a boundary at slot" if at in other else "no boundary at slot"
        calls.wrong.append(f"the {place} was told {which} {at}")
    errors = _errors(call, row)
    calls.largest = worst([calls.largest, *errors.values()])
    beyond = [key for key, error in errors.items() if not error <= OUTPUT_BOUND]
    if beyond and not calls.first:
        calls.first = f"first differs: {place}, in {len(beyond)} segments, e.g. {beyond[0]}"


@torch.no_grad()
def _errors(call: RecurrenceCall, row: VerifiedRow) -> dict[str, float]:
    """Relative L2 errors of each sample and of the tail against the torch form in float64."""
    dims, given, whole = TOKEN_DIMS[call.kind], call.given, call.output
    form = getattr(torch_forms(torch.float64), call.kind).function
    name, dim = next(iter(dims.items()))
    if given[name].shape[dim] != row.num_slots:
        return {"the whole row": float("inf")}
    errors = {}
    for key, start, end in row.spans:
        if start == end:
            continue
        cut = {
            other: value.narrow(dims[other], start, end - start) if other in dims else value
            for other, value in given.items()
        }
        alone = form(cut.pop(name), **cut, row=one_segment(end - start, whole.device))
        ours = whole.narrow(dim, start, end - start)
        errors[key] = relative_l2(ours.float().cpu(), alone.float().cpu())
    return errors


def _segments(seen: _Calls) -> Check:
    silent = [layer for layer, calls in seen.by_layer.items() if not calls]
    if seen.wrong or silent:
        said = seen.wrong or [
            f"{layer} asked no recurrence that knows of segments" for layer in silent
        ]
        more = f", and {len(said) - 1} more" if len(said) > 1 else ""
        return Check(
            name=SEGMENTS,
            status="fail",
            detail=said[0] + more,
            look_at="what hands the row's segments down to its layers",
        )
    layers = len(seen.by_layer)
    detail = f"those of the row in {seen.calls} calls of {layers} layers"
    return Check(name=SEGMENTS, status="pass", detail=detail)


def _alone(calls: _Calls, *, exact: bool) -> Check:
    detail = f"{calls.calls} calls, each segment against itself alone in float64"
    bound = OUTPUT_BOUND if exact else None
    first = calls.first if exact else ""
    return bounded(ALONE, calls.largest, bound, detail=first or detail, look_at=RESETS)


RECURRENT_PARTS = ("recurrent layers", "recurrent scalars")
"""The parts, as `part_of` names them, whose gradients are held against float64."""


def in_double(
    stock: StockModel, gradients: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, GradientError], dict[str, GradientError]]:
    """Run the stock model twice more, with vlmpack's torch forms in float64 and in float32.

    Args:
        stock: in float32.
        gradients: its own.
        names: parameters of recurrent layers.

    Returns:
        Their gradients with the recurrences in float64, and the errors against these of the torch
        forms in float32, and of stock's own.
    """

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        with recurrences_alone(stock.model, dtype):
            gradients = stock.run().gradients
        return {name: gradients[name] for name in names}

    better = run(torch.float64)
    noise = gradient_errors(better, run(torch.float32).items())
    return better, noise, gradient_errors(better, ((name, gradients[name]) for name in names))
