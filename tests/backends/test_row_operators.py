"""Norms and rotations as operators: on a CPU the formulas, which are the stock modules bit for bit.
`test_row_kernels.py` has the kernels."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.backends.row_operators import FORMS, OPERATORS, NormForm, rms_norm, rotate, rotated
from vlmpack.kernel_operators import launched

LLAMA, GEMMA = NormForm(0.0, True), NormForm(1.0, False)
STOCK = {
    ("qwen2_5_vl", "Qwen2_5_VLRMSNorm"): LLAMA,
    ("qwen3", "Qwen3RMSNorm"): LLAMA,
    ("pixtral", "PixtralRMSNorm"): LLAMA,
    ("qwen3_5", "Qwen3_5RMSNorm"): GEMMA,
    ("gemma3", "Gemma3RMSNorm"): GEMMA,
    ("nemotron_h", "NemotronHRMSNorm"): NormForm(0.0, False),
}


def stock_norm(which):
    module = importlib.import_module(f"transformers.models.{which[0]}.modeling_{which[0]}")
    made = getattr(module, which[1])(80, eps=1e-6)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(3))
    return made


def drawn(*shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=draw).to(dtype).requires_grad_()


class Launched(TorchDispatchMode):
    """The operators that run, with the shapes of their tensors; views are left out."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(each.alias_info is not None for each in func._schema.returns)
        if not views and "empty" not in func._schema.name:
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            self.operators.append((func._schema.name, shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("which", "form"), STOCK.items(), ids=str)
def test_a_stock_norm_has_the_same_bits(which, form):
    """In float32, and of bfloat16 rows beside a float32 weight, as towers have them."""
    norm = stock_norm(which)
    for dtype in (torch.float32, torch.bfloat16):
        x = drawn(2, 7, 80, dtype=dtype)
        mine, theirs = rms_norm(x, norm.weight, 1e-6, form), norm(x)
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
        narrow = rms_norm(x, norm.weight, 1e-6, form, torch.bfloat16)
        assert torch.equal(narrow, theirs.bfloat16())
        grad = drawn(2, 7, 80, dtype=theirs.dtype).detach()
        pairs = [torch.autograd.grad(y, (x, norm.weight), grad) for y in (mine, theirs)]
        bound = 1e-6 if dtype is torch.float32 else 2e-2
        for got, want in zip(*pairs, strict=True):
            assert got.dtype is want.dtype
            assert (got - want).norm() < bound * want.norm()
    other = NormForm(1 - form.offset, rounds_first=False)
    assert not torch.equal(rms_norm(x, norm.weight, 1e-6, other), theirs)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_are_those_of_differences(form):
    """In float64, in which the formulas run as they are."""
    x, weight = (each.detach().double().requires_grad_() for each in (drawn(2, 3, 6), drawn(6)))
    assert torch.autograd.gradcheck(lambda *given: rms_norm(*given, 1e-3, form), (x, weight))


def test_rotations_and_gradients_are_the_formula():
    angle = drawn(1, 5, 4).detach().repeat(1, 1, 2).double()
    cos, sin = angle.cos(), angle.sin()
    q, k = (drawn(1, 5, heads, 12).detach().double().requires_grad_() for heads in (3, 2))
    mine, theirs = rotate((q, k), cos, sin), [rotated(x, cos, sin) for x in (q, k)]
    assert all(map(torch.equal, mine, theirs))
    (alone,) = rotate((q,), cos, sin)
    assert torch.equal(alone, mine[0])
    assert torch.autograd.gradcheck(lambda *given: tuple(rotate(given, cos, sin)), (q, k))
    low, _ = rotate((q, k), cos, sin, torch.bfloat16)
    assert torch.equal(low, mine[0].bfloat16())
    back = torch.autograd.grad(mine[0], q, mine[0].detach())[0]
    assert torch.allclose(back, q), "the gradient of what was turned is turned back"
    assert not torch.allclose(mine[0], q)


def test_a_second_derivative_is_refused_by_name():
    """Their backward passes are operators that have no derivative."""
    x, weight = (each.detach().double().requires_grad_() for each in (drawn(2, 3, 8), drawn(8)))
    q = drawn(1, 5, 3, 8)
    cos = torch.randn(1, 5, 4).repeat(1, 1, 2)
    for leaf, made in ((x, rms_norm(x, weight, 1e-6, LLAMA)), (q, rotate((q,), cos, cos)[0])):
        (grad,) = torch.autograd.grad(made.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


def test_a_row_alone_has_the_gradient_of_a_batch_of_it():
    x, weight = drawn(80), drawn(80)
    grads = [
        torch.autograd.grad(rms_norm(rows, weight, 1e-6, LLAMA).sin().sum(), (x, weight))
        for rows in (x, x[None])
    ]
    assert all(map(torch.equal, *grads))


def test_kernels_run_on_the_device_of_their_tensors_and_never_in_double(monkeypatch):
    """Without Triton: the kernel, the module that has it and the device are stand-ins."""
    entered, given = [], []

    @contextmanager
    def device(where):
        entered.append(where)
        yield
        entered.append(None)

    def launch(*args):
        assert entered == [3], "within the guard"
        given.append(args)
        return "launched"

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(
        "vlmpack.kernel_operators.import_module",
        lambda name: {"vlmpack.backends.kernels": SimpleNamespace(launch=launch)}[name],
    )
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    run = launched(lambda *_: "the formula", "vlmpack.backends.kernels", "launch")
    x = drawn(3)
    assert run(1.0, x, x) == "launched" and given == [(1.0, x, x)]
    assert entered == [3, None]
    assert run(1.0, x, x.double()) == "the formula" and len(given) == 1


def test_each_is_one_operator_either_way():
    """With its real arguments, whether or not the weight learns."""
    for learns in (True, False):
        x, weight = drawn(2, 7, 80), drawn(80).detach().requires_grad_(learns)
        with Launched() as seen:
            out = rms_norm(x, weight, 1e-6, LLAMA, torch.bfloat16)
            out.backward(torch.ones((), dtype=out.dtype).expand_as(out))
        assert [each for each in seen.operators if each[0].startswith("vlmpack")] == [
            ("vlmpack::rms_norm", [(2, 7, 80), (80,)]),
            ("vlmpack::rms_norm_backward", [(2, 7, 80), (2, 7, 80), (80,), (2, 7)]),
        ]
        assert (weight.grad is not None) == learns
    q, k, cos = drawn(1, 5, 3, 8), drawn(1, 5, 1, 8), drawn(1, 5, 8).detach()
    with Launched() as seen:
        torch.autograd.grad(rotate((q, k), cos, cos), (q, k), (q.detach(), k.detach()))
    names = [name for name, _ in seen.operators]
    assert names == ["vlmpack::rotate"] * 2


def test_shapes_are_known_without_numbers_and_there_may_be_no_rows():
    x, weight = drawn(2, 7, 80), drawn(80)
    form = (1e-6, 0.0, True, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(each) for each in (x, weight)]
        kinds = [OPERATORS.rms_norm(*given, *form)]
    kinds.append(OPERATORS.rms_norm(x.to("meta"), weight.to("meta"), *form))
    kinds.append(OPERATORS.rms_norm(x, weight, *form))
    assert len({(y.shape, y.dtype, z.shape, z.dtype) for y, z in kinds}) == 1
    none = rms_norm(x[:, :0], weight, 1e-6, LLAMA)
    assert none.shape == (2, 0, 80)
    assert not torch.autograd.grad(none.sum(), weight)[0].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_sees_an_operator():
    x, weight, graphs = drawn(2, 7, 80), drawn(80), []

    def backend(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def norm(x, weight):
        return 2 * rms_norm(x, weight, 1e-6, LLAMA)

    compiled = torch.compile(norm, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    got, want = compiled(x, weight), norm(x, weight)
    assert torch.equal(got, want)
    pairs = [torch.autograd.grad(y.sin().sum(), (x, weight)) for y in (got, want)]
    assert all(map(torch.equal, *pairs))
    forward = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any(name.startswith("vlmpack.rms_norm") for name in forward)
    torch.compiler.reset()
