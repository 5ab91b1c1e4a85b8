"""Recurrences on CUDA: kernels and torch forms against the torch form on CPU in double.

Of the kernels an H200 has run fla's convolution (2026-11-26); the others are written from their
documented signatures.
"""

from __future__ import annotations

import pytest
import torch
from support.recurrences import worst

from vlmpack.recurrence import (
    RowSegments,
    StepSize,
    choose_recurrence,
    fixed_delta_rule,
    fixed_scan,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
LENGTHS = (5, 70, 1, 64, 200, 0, 44)
"""With a segment that only fills boundaries up; 384 slots."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference, relative to the largest entry: of float32, and of bfloat16's 8 bits."""


def row_on(device, lengths=LENGTHS):
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return RowSegments(tuple(lengths), cu_seqlens.to(device))


def drawn(kind):
    """Inputs in double: the first of them have a slot in dimension 1 (2 for a convolution)."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    total = sum(LENGTHS)
    match kind:
        case "convolution":
            return [normal(total, 64).T[None], normal(64, 4), normal(64)]
        case "delta_rule":
            q, k, v = (normal(1, total, heads, 64) for heads in (2, 2, 4))
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
            return [q, k, v, -normal(1, total, 4).abs(), normal(1, total, 4).sigmoid()]
        case _:
            x, dt = normal(1, total, 4, 32), normal(1, total, 4)
            return [x, dt, -normal(4).abs(), *(normal(1, total, 2, 32) for _ in range(2))]


def result(function, kind, inputs, row):
    """Values and gradients in double on CPU."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = {"step_size": StepSize(softplus=True)} if kind == "scan" else {}
    out = function(*leaves, row, **options)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=out.device)
    grads = torch.autograd.grad((out.double().flatten() * weights).sum(), leaves)
    return [x.detach().double().cpu() for x in (out, *grads)]


def compared(function, kind, dtype, row=None):
    """The largest difference of a function on CUDA from the torch form on CPU."""
    plain = {
        "convolution": segment_convolution,
        "delta_rule": segment_delta_rule,
        "scan": segment_scan,
    }[kind]
    inputs = [x.to(dtype) for x in drawn(kind)]
    want = result(plain, kind, [x.double() for x in inputs], row_on("cpu"))
    on_cuda = [x.to(DEVICE) for x in inputs]
    row = row_on(DEVICE) if row is None else row
    return worst(result(function, kind, on_cuda, row), want)


@pytest.mark.parametrize("kind", ["convolution", "delta_rule", "scan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_equals_the_torch_form(kind, dtype):
    chosen = getattr(choose_recurrence("auto", device=DEVICE, dtype=dtype), kind)
    if chosen.name == "segments":
        pytest.skip(chosen.reason)
    assert compared(chosen.function, kind, dtype) < BOUNDS[dtype]
    told = row_on(DEVICE, (sum(LENGTHS),))
    assert compared(chosen.function, kind, dtype, told) > 10 * BOUNDS[dtype]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (segment_convolution, "convolution"),
        (segment_delta_rule, "delta_rule"),
        (fixed_delta_rule, "delta_rule"),
        (segment_scan, "scan"),
        (fixed_scan, "scan"),
    ],
)
def test_the_torch_forms_compute_there_what_they_compute_here(function, kind):
    assert not torch.backends.cuda.matmul.allow_tf32  # as torch has it
    assert compared(function, kind, torch.float32) < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("function", "kind"), [(fixed_delta_rule, "delta_rule"), (fixed_scan, "scan")]
)
def test_a_captured_graph_serves_rows_of_other_segments(function, kind):
    inputs = [x.float().to(DEVICE).requires_grad_() for x in drawn(kind)]
    buffer = row_on(DEVICE).cu_seqlens

    def step():
        out = function(*inputs, RowSegments(LENGTHS, buffer))
        # Detached: nodes of autograd that live on would have streams wait for one another.
        return out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((384, 0, 0, 0, 0, 0, 0), (1, 150, 9, 24, 100, 50, 50)):
        buffer.copy_(row_on(DEVICE, lengths).cu_seqlens)
        graph.replay()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
