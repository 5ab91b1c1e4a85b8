"""A recorded stretch gives what its inputs hold now, and keeps what Python decided then."""

from __future__ import annotations

import pytest
import torch

from vlmpack.backends.recording import TapeRecording, recorder_on
from vlmpack.errors import CapabilityError


@pytest.fixture
def parts():
    weight = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    return torch.randn(4, 3, dtype=torch.float64, requires_grad=True), weight


def _refill(x):
    with torch.no_grad():
        x.copy_(torch.randn_like(x))


def _eager(stretch, wrt, gradient):
    output = stretch()
    return output.detach(), torch.autograd.grad(output, wrt, gradient)


def test_a_replay_reads_inputs_and_weights_where_they_lie(parts):
    x, weight = parts

    def stretch():
        return torch.tanh(x @ weight).square()

    recording = TapeRecording(stretch, parts)
    for _ in range(3):
        _refill(x)
        with torch.no_grad():
            weight.mul_(0.9)  # an optimizer step
        gradient = torch.randn(4, 3, dtype=torch.float64)
        output, wanted = _eager(stretch, parts, gradient)
        assert torch.equal(recording.forward(), output)
        found = recording.backward(gradient)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_forward_runs_nothing_of_the_backward_pass(parts):
    x, weight = parts
    recording = TapeRecording(lambda: torch.tanh(x @ weight), parts)
    names = [str(step.operator) for step in recording.steps]
    assert names.index("aten.tanh_backward.default") >= recording._split
    assert names.index("aten.tanh.default") < recording._split


def test_what_python_decided_is_kept(parts):
    """The control: a number that a row decides stays the first row's."""
    x, weight = parts
    longest = [2]
    recording = TapeRecording(lambda: (x @ weight) * longest[0], parts)
    longest[0] = 5
    _refill(x)
    torch.testing.assert_close(recording.forward(), (x @ weight).detach() * 2)


def test_a_number_read_from_a_tensor_cannot_be_recorded(parts):
    x, weight = parts
    with pytest.raises(CapabilityError, match="a number that the host reads"):
        TapeRecording(lambda: x @ weight * (x @ weight).sum().item(), parts)
    with pytest.raises(CapabilityError, match=r"index.* a shape that follows"):
        TapeRecording(lambda: (x @ weight)[x.sum(1) > 0], parts)
    TapeRecording(lambda: (x @ weight)[x.argmax(0)], parts)  # has the shape of its numbers


def test_values_are_dropped_behind_their_last_use(parts):
    x, weight = parts
    recording = TapeRecording(lambda: torch.tanh(torch.exp(x @ weight)).square(), parts)
    recording.forward()
    assert 0 < len(recording._values) < recording._split
    recording.backward(torch.ones(4, 3, dtype=torch.float64))
    assert not recording._values


def test_a_cpu_has_no_cuda_graph():
    assert recorder_on(torch.device("cpu")) is TapeRecording
