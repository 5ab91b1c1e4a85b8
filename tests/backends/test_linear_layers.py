"""Linear layers that read one tensor, computed together: against autograd of each layer alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vlmpack.backends import linear_layers
from vlmpack.backends.linear_layers import Operands, group_products, products

WIDTHS = (24, 8, 16)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=dtype).requires_grad_()


def operands(*, bias: bool, dtype: torch.dtype = torch.float64) -> list[Operands]:
    return [
        Operands(
            drawn(out, 12, seed=n, dtype=dtype),
            drawn(out, seed=9 + n, dtype=dtype) if bias else None,
        )
        for n, out in enumerate(WIDTHS)
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unread", [None, 0, 2])
@pytest.mark.parametrize("frozen", [None, 1])
def test_outputs_and_gradients_are_those_of_layers_alone(
    bias: bool, unread: int | None, frozen: int | None
) -> None:
    found = []
    for together in (True, False):
        x, own = drawn(2, 5, 12, seed=20), operands(bias=bias)
        if frozen is not None:
            own[frozen].weight.requires_grad_(False)
        outputs = products(own, x) if together else [linear(x, *one) for one in own]
        read = [y for n, y in enumerate(outputs) if n != unread]
        torch.cat(read, -1).square().sum().backward()
        leaves = [x, *(each for one in own for each in one if each is not None)]
        found.append([*outputs, *(each.grad for each in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) is (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    lost = sum(each is None for each in found[1])
    assert lost == (0 if unread is None else 1 + bias) + (frozen is not None), "guard"


def gradient(own: list[Operands], x: Tensor, *, together: bool) -> Tensor:
    x = x.detach().requires_grad_()
    outputs = products(own, x) if together else [linear(x, *one) for one in own]
    given = [drawn(*y.shape, seed=30 + n, dtype=y.dtype).detach() for n, y in enumerate(outputs)]
    torch.autograd.backward([*outputs], given)
    assert x.grad is not None
    return x.grad


def test_the_gradient_of_x_is_rounded_once() -> None:
    """The control is autograd, which rounds each product and each sum."""
    low = operands(bias=False, dtype=torch.bfloat16)
    x = drawn(64, 12, seed=20, dtype=torch.bfloat16)
    wide = [Operands(one.weight.double(), None) for one in low]
    outputs = [linear(x.detach().double(), *one) for one in wide]
    given = [drawn(*y.shape, seed=30 + n, dtype=torch.bfloat16) for n, y in enumerate(outputs)]
    exact = sum(g.double() @ one.weight for g, one in zip(given, wide, strict=True))
    assert isinstance(exact, Tensor)
    mine, alone = (gradient(low, x, together=each) for each in (True, False))
    same = (mine == exact.to(torch.bfloat16)).double().mean()
    assert same > 0.995 > 0.7 > (alone == exact.to(torch.bfloat16)).double().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, out) for out in (32, 8, 8))
        self.between: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x)
        self.between()
        return torch.cat((q, k, self.v_proj(x)), -1)


def passed(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = drawn(2, 5, 16, seed=1, dtype=torch.float32).detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_a_group_runs_where_its_input_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    own = linear_layers.products

    def counted(each: Any, x: Tensor) -> Any:
        calls.append(len(each))
        return own(each, x)

    monkeypatch.setattr(linear_layers, "products", counted)
    plain, model = Attention(), Attention()
    group_products(model)
    for dtype, expected in ((torch.bfloat16, [3]), (torch.float32, [])):
        calls.clear()
        (y, of_x), (stock, of_stock) = passed(model, dtype), passed(plain, dtype)
        assert calls == expected and torch.equal(y, stock)
        torch.testing.assert_close(of_x, of_stock, rtol=2**-6, atol=2**-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2**-7, atol=1e-3)


def test_a_weight_that_changes_in_between_is_read_anew() -> None:
    plain, model = Attention(), Attention()
    group_products(model)
    for each in (plain, model):

        def change(own: Attention = each) -> None:
            with torch.no_grad():
                own.v_proj.weight.add_(1)

        each.between = change
    assert torch.equal(passed(model, torch.bfloat16)[0], passed(plain, torch.bfloat16)[0])


def test_outputs_may_be_changed_in_place_and_inputs_of_another_dtype_are_left_alone() -> None:
    plain, model = Attention(), Attention()
    group_products(model)
    x = drawn(2, 5, 16, seed=1, dtype=torch.float32)
    found = []
    for own in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = own.q_proj(x.bfloat16()).mul_(2)
            found += [y, own(x.half())]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    own = [
        Operands(drawn(8, 16, seed=2, dtype=torch.float32), drawn(8, seed=3, dtype=torch.float32))
    ]
    (y,) = products(own, x)
    y.mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * own[0].weight.sum(0).expand_as(x))
