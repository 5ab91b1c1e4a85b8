"""The kernels for CUDA that are written in Triton, run by its interpreter on a CPU, against our
torch forms and the recurrences themselves; `make kernels` installs them.

flash-linear-attention's convolution and gated delta rule, mamba-ssm's scan: forward and backward
over packed rows, through the functions of ours that hand them segments. What nobody writes is NaN
there. Kernels in CUDA C++ (causal-conv1d) are compared by signature.
"""

from __future__ import annotations

import pytest
import torch
from support.interpreted import LIMITS, Case, Interpreter, applied, drawn, why_not_installed
from support.recurrences import (
    LAYOUTS,
    by_segment,
    convolution,
    delta_rule,
    recurrent_sizes,
    segments,
    ssd,
    with_gradients,
    worst,
)

from vlmpack.forecast.activations import Recurrences, rule_bytes
from vlmpack.recurrence import KINDS, segment_convolution, segment_delta_rule, segment_scan

MISSING = why_not_installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

LENGTHS = (5, 59, 70, 0, 6, 0)
"""Boundaries inside a chunk of the row and at its end; empty segments, one of them the last."""
TOTAL = sum(LENGTHS)
BOUND = 1e-5
TORCH_FORMS = {
    "convolution": segment_convolution,
    "delta_rule": segment_delta_rule,
    "scan": segment_scan,
}


@pytest.fixture(scope="module")
def interpreter():
    process = Interpreter()
    yield process
    process.close()


def literal(kind, lengths, leaves):
    """The recurrence over each segment alone, in the layout of the kernel's output."""
    if kind == "convolution":
        x, weight, bias = leaves
        alone = by_segment(lambda x: convolution(x, weight, bias, activate=True), lengths, [x[0].T])
        return alone.T[None]
    if kind == "delta_rule":
        return by_segment(
            lambda *x: delta_rule(*x, normalize=True), lengths, [x[0] for x in leaves]
        )[None]
    tail = (*leaves[4:], LIMITS)
    return by_segment(lambda *x: ssd(*x, *tail), lengths, [x[0] for x in leaves[:4]])[None]


def exact(tensors):
    return [x.double().requires_grad_() for x in tensors]


def references(kind, lengths, tensors):
    """Values and gradients in double: of the torch form, and of the recurrence itself."""
    leaves, others = exact(tensors), exact(tensors)
    ours = applied(TORCH_FORMS[kind], kind, leaves, segments(lengths))
    return with_gradients(ours, leaves), with_gradients(literal(kind, lengths, others), others)


@pytest.mark.cases(slow="scan")
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_each_segment_alone(interpreter, kind):
    tensors = drawn(kind, TOTAL)
    got = interpreter("compute", Case(kind, LENGTHS), tensors, 64)
    for want in references(kind, LENGTHS, tensors):
        assert len(got) == 1 + len(tensors)
        assert worst(got, want) < BOUND
    leaking = interpreter("compute", Case(kind, (TOTAL,)), tensors, 64)
    assert worst(leaking[:1], want[:1]) > 0.01
    assert worst(leaking[1:], want[1:]) > 0.01


@pytest.mark.soak
def test_chunks_behind_the_last_segments_end_change_no_bit(interpreter):
    lengths = (5, 70, 0)
    tensors, case = drawn("delta_rule", sum(lengths)), Case("delta_rule", lengths)
    padded = segments(lengths).chunk_indices(64)
    assert padded.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1]]  # the last two are nobody's
    got = interpreter("of_given_chunks", case, tensors, padded)
    want = interpreter("of_given_chunks", case, tensors, None)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(x.isfinite().all() for x in got)
    padded[2, 1] = 2
    left_out = interpreter("of_given_chunks", case, tensors, padded)
    assert left_out[0][0, :69].isfinite().all()
    assert left_out[0][0, 69:].isnan().all()  # a slot that no chunk has is seen


@pytest.mark.parametrize("kind", ["convolution", "delta_rule"])
def test_boundaries_of_the_row_before_are_not_remembered(interpreter, kind):
    lengths, other = (1, 70), (70, 1)  # in other numbers of chunks
    tensors = drawn(kind, sum(lengths))
    got = interpreter("two_rows_of_one_buffer", Case(kind, lengths), tensors, other)
    want = applied(TORCH_FORMS[kind], kind, exact(tensors), segments(lengths))
    assert worst([got.double()], [want.detach()]) < BOUND


def test_these_are_chosen_for_a_model_on_cuda(interpreter):
    chosen = interpreter("chosen")
    assert {kind: name for kind, (name, _) in chosen.items()} == {
        "convolution": "fla",
        "delta_rule": "fla",
        "scan": "mamba_ssm",
    }
    assert "causal_conv1d.causal_conv1d_fn cannot be imported" in chosen["convolution"][1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "dtype"), [("delta_rule", torch.bfloat16), ("scan", torch.float32)]
)
def test_what_they_keep_for_the_backward_pass(interpreter, kind, dtype):
    """As `vlmpack plan` counts it; beside it a few numbers a head, which layers count."""
    found = []
    for total in (64, 128):
        tensors = [x.to(dtype) if x.ndim > 1 else x for x in drawn(kind, total, (32, 16))]
        found.append(interpreter("kept", Case(kind, (total,)), tensors))
    expected = rule_bytes(
        recurrent_sizes(kind, 1, 2, 32, 16), dtype.itemsize, Recurrences(64, (kind,))
    )
    if kind == "delta_rule":  # its output is what comes behind it that keeps it
        expected -= 2 * 16 * dtype.itemsize
    assert expected <= (found[1] - found[0]) / 64 < expected + 48 * 2


@pytest.mark.soak
@pytest.mark.parametrize("widths", [(16, 16), (80, 40)], ids=str)
@pytest.mark.parametrize("lengths", [*LAYOUTS.values(), (300, 212, 1, 87)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_other_layouts_and_widths(interpreter, kind, lengths, widths):
    if kind == "scan":
        scans_in_other_layouts(interpreter, lengths, widths)
        return
    tensors = drawn(kind, sum(lengths), widths)
    got = interpreter("compute", Case(kind, lengths), tensors, 64)
    for want in references(kind, lengths, tensors):
        assert worst(got, want) < BOUND


def scans_in_other_layouts(interpreter, lengths, widths):
    """In chunks of 64, and of 256 as on CUDA where decays are a tenth: mamba-ssm takes a decay
    between two slots as a difference of sums over their chunk. Sums over 256 slots of the decays
    that are drawn reach hundreds, and 5e-5 of what follows is lost. The gradient of A is a sum of
    such differences, at mild decays too: there the bound is what the kernel loses over one segment.
    """
    for chunk, strength in ((64, 1.0), (256, 0.1)):
        tensors = drawn("scan", sum(lengths), widths)
        tensors[DECAY] *= strength
        bound = BOUND if chunk == 64 else max(BOUND, 4 * own_noise(interpreter, tensors, chunk))
        got = interpreter("compute", Case("scan", lengths), tensors, chunk)
        for want in references("scan", lengths, tensors):
            decay = 1 + DECAY  # behind the output
            rest = [[*x[:decay], *x[decay + 1 :]] for x in (got, want)]
            assert worst(*rest) < BOUND
            assert worst(got[decay : decay + 1], want[decay : decay + 1]) < bound


DECAY = 4
"""Where A stands among the tensors of a scan."""


def own_noise(interpreter, tensors, chunk):
    """How far the gradient of A is from the recurrence's where a row has no boundaries."""
    row = (tensors[0].shape[1],)
    got = interpreter("compute", Case("scan", row), tensors, chunk)[1 + DECAY :][:1]
    return max(worst(got, want[1 + DECAY :][:1]) for want in references("scan", row, tensors))
