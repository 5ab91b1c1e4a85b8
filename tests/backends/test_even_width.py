"""MLPs whose width is no multiple of 8, against the same formula without zeros."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vlmpack.backends.even_width import even_mlp, is_uneven_mlp
from vlmpack.backends.fused import ACTIVATIONS


def mlp_of(width: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    torch.manual_seed(0)
    sizes = {"gate_proj": (16, width), "up_proj": (16, width), "down_proj": (width, 16)}
    layers = {name: nn.Linear(*each, bias=bias, dtype=dtype) for name, each in sizes.items()}
    return SimpleNamespace(**layers)


def parameters(mlp: SimpleNamespace) -> list[nn.Parameter]:
    return [value for layer in vars(mlp).values() for value in layer.parameters()]


def gradients(mlp: SimpleNamespace, x: torch.Tensor, run) -> list[torch.Tensor]:
    """The output's numbers and the gradients of x and of every weight."""
    x = x.clone().requires_grad_()
    out = run(mlp, x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *parameters(mlp)])]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("width", [20, 13])
def test_zeros_change_no_number_and_no_gradient(width, bias, activation):
    mlp, x = mlp_of(width, bias=bias), torch.randn(3, 7, 16, dtype=torch.float64)
    f = ACTIVATIONS[activation]

    def stock(mlp, x):
        return mlp.down_proj(f(mlp.gate_proj(x)) * mlp.up_proj(x))

    def even(mlp, x):
        return even_mlp(mlp, x, x.dtype, lambda gate, up: f(gate) * up)

    for got, expected in zip(gradients(mlp, x, even), gradients(mlp, x, stock), strict=True):
        assert got.shape == expected.shape and expected.abs().max() > 1e-3
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_what_lies_behind_is_written(monkeypatch):
    """Control: memory that nobody fills is found."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda own, *a, **k: empty(own, *a, **k).fill_(float("nan"))
    )
    mlp, x = mlp_of(20, bias=True), torch.randn(2, 16, dtype=torch.float64)
    silu = ACTIVATIONS["silu"]
    assert torch.isfinite(even_mlp(mlp, x, x.dtype, lambda gate, up: silu(gate) * up)).all()
    monkeypatch.setattr(torch.Tensor, "zero_", lambda own: own)
    assert not torch.isfinite(even_mlp(mlp, x, x.dtype, lambda gate, up: silu(gate) * up)).all()


def test_only_odd_widths_of_plain_layers_on_a_gpu_are_evened():
    x, bf16 = SimpleNamespace(is_cuda=True), torch.bfloat16
    assert is_uneven_mlp(mlp_of(20, bias=True), x, bf16)
    assert not is_uneven_mlp(mlp_of(24, bias=True), x, bf16)
    assert not is_uneven_mlp(mlp_of(20, bias=True), torch.zeros(2, 16), bf16), "a CPU"
    assert not is_uneven_mlp(mlp_of(20, bias=True), x, torch.float32), "rows of 4 bytes a number"
    adapted = mlp_of(20, bias=True)
    adapted.up_proj = nn.Sequential(adapted.up_proj)
    assert not is_uneven_mlp(adapted, x, bf16)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_an_mlp_whose_layers_have_hooks_calls_them(kind, name):
    x, mlp = SimpleNamespace(is_cuda=True), mlp_of(20, bias=True)
    handle = getattr(getattr(mlp, name), f"register_{kind}_hook")(lambda *_: None)
    assert not is_uneven_mlp(mlp, x, torch.bfloat16)
    handle.remove()
    assert is_uneven_mlp(mlp, x, torch.bfloat16)
