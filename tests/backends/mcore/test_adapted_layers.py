"""Adapters of a Megatron layer that is several of transformers' in turns: each column is that of
its own part, and all of them are added by one product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import relative_l2
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.backends.mcore import adapters
from vlmpack.backends.mcore.adapters import FusedPart, LinearAdapter
from vlmpack.recipe.trainable import LoraSection

GROUP: Any = SimpleNamespace(size=lambda: 1)
TURNS, COLUMNS, RANK = 2, 12, 3
ROWS = {"q": 8, "k": 4, "v": 6}


def made(adapted: str, *, dora: bool, bias: bool) -> tuple[LinearAdapter, Any]:
    """The adapters of some parts, and their layer, in double."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    rows = sum(ROWS.values())
    linear = SimpleNamespace(
        weight=drawn(rows, COLUMNS),
        bias=drawn(rows) if bias else None,
        config=SimpleNamespace(sequence_parallel=False),
    )
    parts = [
        FusedPart(
            name=name,
            shape=(count, COLUMNS),
            held=((0, count),),
            inner=(0, COLUMNS),
            adapted=name in adapted,
        )
        for name, count in ROWS.items()
    ]
    lora = LoraSection(rank=RANK, alpha=5.0, dora=dora)
    adapter = LinearAdapter(linear, parts, TURNS, lora, GROUP).double()
    for parameter in adapter.parameters():
        parameter.data = drawn(*parameter.shape)
    return adapter, linear


def expected(adapter: LinearAdapter, x: Tensor, linear: Any) -> Tensor:
    """Column by column, by the definition."""
    place = dict.fromkeys(ROWS, 0)  # rows of each part so far
    adapted = [part.name for part in adapter.adapted]
    rows = {name: sum(ROWS[n] for n in adapted[:i]) for i, name in enumerate(adapted)}
    columns = []
    order = [n for _ in range(TURNS) for n, count in ROWS.items() for _ in range(count // TURNS)]
    for column, name in enumerate(order):
        weight = linear.weight[column]
        if name in adapted:
            number = adapted.index(name)
            row = rows[name] + place[name]
            a = adapter.a[number * RANK : (number + 1) * RANK]
            weight = weight + adapter.scaling * adapter.b[row] @ a
            if adapter.magnitude is not None:
                weight = weight * adapter.magnitude[row] / weight.detach().norm()
        place[name] += 1
        value = x @ weight
        columns.append(value if linear.bias is None else value + linear.bias[column])
    return torch.stack(columns, dim=-1)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "copy_to_tensor_model_parallel_region", lambda low, group: low)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("adapted", ["qkv", "k", "qv"])
def test_each_column_is_that_of_its_part(adapted: str, dora: bool, bias: bool) -> None:
    # Lengths of rows are float32.
    errors = errors_of(*made(adapted, dora=dora, bias=bias))
    assert max(errors) < (1e-6 if dora else 1e-12)


def errors_of(adapter: LinearAdapter, linear: Any) -> list[float]:
    """Relative L2 to the definition: of the output, of the gradients of its input and of each
    parameter."""
    x = torch.randn(5, 1, COLUMNS, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 1, sum(ROWS.values()), dtype=torch.float64)
    found = []
    for run in (
        lambda: adapter(x, torch.nn.functional.linear(x, linear.weight, linear.bias), linear),
        lambda: expected(adapter, x, linear),
    ):
        output = run()
        wanted = (output * weights).sum()
        found.append([output.detach(), *torch.autograd.grad(wanted, [x, *adapter.parameters()])])
    assert all(theirs.any() for theirs in found[1])
    return [relative_l2(ours, theirs) for ours, theirs in zip(*found, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("adapted", ["k", "qv"])
def test_parts_without_an_adapter_keep_their_bits(adapted: str, dora: bool, bias: bool) -> None:
    adapter, linear = made(adapted, dora=dora, bias=bias)
    adapter.bfloat16()
    weight = linear.weight = linear.weight.bfloat16()
    linear.bias = linear.bias.bfloat16() if bias else None
    if adapter.magnitude is not None:
        adapter.magnitude.data = adapter.magnitude.data.float()
    x = torch.randn(500, 1, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = torch.nn.functional.linear(x, weight, linear.bias)
    ours, base = adapter._parted(adapter(x, plain, linear)), adapter._parted(plain)
    for part, own, before in zip(adapter.parts, ours, base, strict=True):
        assert torch.equal(own, before) is not part.adapted


def test_parts_that_take_no_turns_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, linear = made("qkv", dora=False, bias=False)
    monkeypatch.setattr(adapter, "_fused", lambda values: torch.cat(values, dim=-1))
    assert min(errors_of(adapter, linear)) > 0.1


class Wide(TorchDispatchMode):
    """Names of operators that read or write as many numbers as the layer's output has."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None for r in func._schema.returns)
        if not views and isinstance(out, Tensor) and out.numel() >= self.numel:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return out


def test_one_product_adds_all_adapters() -> None:
    adapter, linear = made("qkv", dora=False, bias=False)
    x = torch.randn(100, 1, COLUMNS, dtype=torch.float64)
    output = torch.nn.functional.linear(x, linear.weight)
    with Wide(output.numel()) as wide:
        adapter(x, output, linear)
    assert wide.names == ["addmm"]
