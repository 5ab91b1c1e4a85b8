"""A recorded stretch gives what its inputs hold now, and keeps what Python decided then."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vlmpack.backends.decoder_graph import TapeRecording, recorder_on
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


def test_a_replay_under_autocast_casts_what_was_cast():
    x, weight = torch.randn(4, 3, requires_grad=True), torch.nn.Parameter(torch.randn(3, 3))

    def stretch():
        with torch.autocast("cpu", enabled=False):
            wide = x @ weight
        return wide @ weight

    wide = TapeRecording(stretch, (x, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = TapeRecording(stretch, (x, weight))
        gradient = torch.randn(4, 3)
        for recording, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recording is narrow):
                output, wanted = _eager(stretch, (x, weight), gradient.to(dtype))
            assert output.dtype is dtype
            assert torch.equal(recording.forward(), output)
            found = recording.backward(gradient.to(dtype))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class _Scattered(torch.autograd.Function):
    """What a rank gets of the sum over ranks; asked for ahead of time, forward and backward."""

    @staticmethod
    def forward(ctx, values):
        mine = torch.empty_like(values)
        dist.reduce_scatter_tensor(mine, values.contiguous(), async_op=True).wait()
        return mine

    @staticmethod
    def backward(ctx, gradient):
        return _Scattered.forward(ctx, gradient)


@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")
def test_a_collective_is_done_when_its_operator_is(parts):
    """gloo copies the result in `wait`, from memory of that one call."""
    x, weight = parts
    alone = not dist.is_initialized()  # an engine of another test has a group of one process too
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recording = TapeRecording(lambda: _Scattered.apply(x @ weight), parts)
        names = [str(step.operator) for step in recording.steps]
        assert sum(name.startswith("c10d.") for name in names) == 2
        _refill(x)
        output, wanted = _eager(lambda: x @ weight, parts, gradient := torch.randn_like(x))
        assert torch.equal(recording.forward(), output)
        found = recording.backward(gradient)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    finally:
        if alone:
            dist.destroy_process_group()


def test_what_torch_compiles_is_recorded_as_it_is_written(parts):
    """Else torch refuses to run it where operators are written down."""
    x, weight = parts
    compiled = torch.compile(lambda x, w: torch.tanh(x @ w), fullgraph=True, backend="eager")
    compiled(x, weight)
    recording = TapeRecording(lambda: compiled(x, weight), parts)
    _refill(x)
    assert torch.equal(recording.forward(), torch.tanh(x @ weight).detach())
    assert "aten.tanh_backward.default" in [str(step.operator) for step in recording.steps]


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
