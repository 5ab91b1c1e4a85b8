"""What we hand to kernels for CUDA, read back by stand-ins that have the published signatures.

A stand-in computes what the recurrence says from the boundaries that it was given, and checks what
its package asks of layouts and types. Signatures are those of the versions in
`support/kernel_packages.txt`, compared with the packages' own sources where `make kernels` has
installed them; what is written in Triton runs for real in `test_interpreted.py`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType

import pytest
import torch
from support.interpreted import FOLDER, why_not_installed
from support.recurrences import by_segment, convolution, delta_rule, segments, ssd, worst

from vlmpack.recurrence import (
    StepSize,
    segment_convolution,
    segment_delta_rule,
    segment_scan,
)
from vlmpack.recurrence.choose import (
    conv1d_convolution,
    fla_convolution,
    fla_delta_rule,
    mamba_scan,
)

MISSING = why_not_installed()
LENGTHS = (5, 70, 0, 64, 1)
TOTAL = sum(LENGTHS)


def provide(monkeypatch, name, **functions):
    """A module of that name, and its parents."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    for function, stand_in in functions.items():
        setattr(sys.modules[name], function, stand_in)


def lengths_of(seq_idx):
    """Lengths of the runs of equal numbers in (1, T) int32."""
    assert seq_idx.dtype is torch.int32
    assert seq_idx.is_contiguous()
    return tuple(seq_idx[0].unique_consecutive(return_counts=True)[1].tolist())


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """causal_conv1d_interface.py; the checks are those of causal_conv1d.cpp."""
    assert x.stride(1) == 1 and x.stride(2) > 1  # seq_idx is for channel last alone
    assert x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
    assert x.shape[1] % 8 == 0 and 2 <= weight.shape[1] <= 4
    lengths = lengths_of(seq_idx)
    out = by_segment(
        lambda part: convolution(part, weight, bias, activate=activation is not None),
        lengths,
        [x[0].T],
    )
    return out.T[None]


@pytest.mark.parametrize("layout", ["channels last", "a slice", "slots last"])
def test_causal_conv1d_is_told_of_segments_in_a_layout_that_it_takes(monkeypatch, layout):
    provide(monkeypatch, "causal_conv1d", causal_conv1d_fn=causal_conv1d_fn)
    wide = random(TOTAL, 19)
    x = {
        "channels last": wide[:, :16].contiguous().T[None],
        "a slice": wide[:, 1:17].T[None],
        "slots last": wide[:, :16].T.contiguous()[None],
    }[layout]
    weight, bias, row = random(16, 4), random(16), segments(LENGTHS)
    got = conv1d_convolution(x, weight, bias, row, activation="silu")
    want = segment_convolution(x, weight, bias, row, activation="silu")
    assert worst([got], [want]) < 1e-13


@pytest.mark.parametrize(("channels", "taps"), [(6, 4), (8, 1), (8, 5)])
def test_causal_conv1d_is_not_called_for_what_it_refuses(monkeypatch, channels, taps):
    provide(monkeypatch, "causal_conv1d", causal_conv1d_fn=None)
    x, weight, row = random(1, channels, TOTAL), random(channels, taps), segments(LENGTHS)
    got = conv1d_convolution(x, weight, None, row)
    assert torch.equal(got, segment_convolution(x, weight, None, row))


def causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    """fla/modules/causal_conv1d/ops.py; x is (1, T, D)."""
    assert not kwargs
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    lengths = cu_seqlens.diff().tolist()
    out = by_segment(
        lambda part: convolution(part, weight, bias, activate=activation is not None),
        lengths,
        [x[0]],
    )
    return out[None], None


def test_flash_linear_attentions_convolution_is_told_of_segments(monkeypatch):
    provide(monkeypatch, "fla.modules.convolution", causal_conv1d=causal_conv1d)
    x, weight, bias, row = random(1, 6, TOTAL), random(6, 4), random(6), segments(LENGTHS)
    got = fla_convolution(x, weight, bias, row, activation="silu")
    want = segment_convolution(x, weight, bias, row, activation="silu")
    assert worst([got], [want]) < 1e-13


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    """fla/ops/gated_delta_rule/chunk.py; it computes the chunks that the indices name, alone."""
    assert not kwargs
    assert q.dtype == k.dtype == v.dtype
    lengths = cu_seqlens.diff().tolist()
    wanted = [(n, c) for n, length in enumerate(lengths) for c in range(-(-length // 64))]
    given = [tuple(pair) for pair in chunk_indices.tolist()]
    assert given[: len(wanted)] == wanted
    assert all(chunk * 64 >= lengths[n] for n, chunk in given[len(wanted) :])
    assert len(given) == -(-v.shape[1] // 64) + len(lengths)

    def rule(*parts):
        return delta_rule(*parts, normalize=use_qk_l2norm_in_kernel)

    parts = [x[0].double() for x in (q, k, v, g, beta)]
    return by_segment(rule, lengths, parts)[None].to(v.dtype), None


@pytest.mark.parametrize("normalize", [False, True])
def test_flash_linear_attentions_rule_is_told_of_segments_and_chunks(monkeypatch, normalize):
    provide(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)
    q, k = (random(1, TOTAL, 2, 6, seed=n) / 6 for n in (0, 1))
    v, g, beta = random(1, TOTAL, 4, 5), -random(1, TOTAL, 4).abs(), random(1, TOTAL, 4).sigmoid()
    row = segments(LENGTHS)
    got = fla_delta_rule(q, k, v, g, beta, row, normalize=normalize)
    want = segment_delta_rule(q, k, v, g, beta, row, normalize=normalize)
    assert worst([got], [want]) < 1e-12
    # Under autocast queries may come in float32 beside values in bfloat16.
    low = fla_delta_rule(q.float(), k.bfloat16(), v.bfloat16(), g, beta, row)
    assert low.dtype is torch.float32


def test_chunk_indices_have_one_shape_for_rows_of_one_width():
    shapes = {segments(each).chunk_indices(64).shape for each in (LENGTHS, (140, 0, 0, 0, 0))}
    assert shapes == {(3 + 5, 2)}


def test_boundaries_go_to_flash_linear_attention_in_a_tensor_of_the_rows_own(monkeypatch):
    seen = []

    def remember(*args, cu_seqlens, **kwargs):
        seen.append(cu_seqlens)
        return args[2], None

    provide(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=remember)
    buffer = segments(LENGTHS).cu_seqlens
    tensors = [torch.ones(1, TOTAL, 1, 1)] * 3 + [torch.ones(1, TOTAL, 1)] * 2
    for _ in range(2):
        row = type(segments((1,)))(LENGTHS, buffer)  # two rows that share a buffer, as in a graph
        for _ in range(2):
            fla_delta_rule(*tensors, row)
    assert seen[0] is seen[1] and seen[2] is seen[3] and seen[0] is not seen[2]


def mamba_chunk_scan_combined(
    x,
    dt,
    A,  # noqa: N803
    B,  # noqa: N803
    C,  # noqa: N803
    chunk_size,
    D=None,  # noqa: N803
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    """mamba_ssm/ops/triton/ssd_combined.py."""
    assert dt_softplus and chunk_size == 256
    tail = (A, D, dt_bias, dt_limit)
    parts = [each[0] for each in (x, dt, B, C)]
    return by_segment(lambda *part: ssd(*part, *tail), lengths_of(seq_idx), parts)[None]


def test_mamba_ssm_is_told_of_segments(monkeypatch):
    name = "mamba_ssm.ops.triton.ssd_combined"
    provide(monkeypatch, name, mamba_chunk_scan_combined=mamba_chunk_scan_combined)
    x, dt = random(1, TOTAL, 4, 5), random(1, TOTAL, 4)
    b, c = (random(1, TOTAL, 2, 6, seed=n) for n in (1, 2))
    a, skip, row = -random(4).abs(), random(4), segments(LENGTHS)
    step_size = StepSize(bias=random(4, seed=3), softplus=True, limits=(0.1, 2.0))
    got = mamba_scan(x, dt, a, b, c, row, skip=skip, step_size=step_size)
    want = segment_scan(x, dt, a, b, c, row, skip=skip, step_size=step_size)
    assert worst([got], [want]) < 1e-12


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("stand_in", "file"),
    [
        (causal_conv1d_fn, "causal_conv1d/causal_conv1d_interface.py"),
        (causal_conv1d, "fla/modules/causal_conv1d/ops.py"),
        (chunk_gated_delta_rule, "fla/ops/gated_delta_rule/chunk.py"),
        (mamba_chunk_scan_combined, "mamba_ssm/ops/triton/ssd_combined.py"),
    ],
)
def test_stand_ins_have_the_signatures_that_are_published(stand_in, file):
    def signature(source):
        (found,) = (
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and node.name == stand_in.__name__
        )
        arguments = found.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        assert not arguments.kwonlyargs and not arguments.vararg
        return names, [ast.unparse(value) for value in arguments.defaults], bool(arguments.kwarg)

    assert signature(inspect.getsource(stand_in)) == signature((FOLDER / file).read_text())
