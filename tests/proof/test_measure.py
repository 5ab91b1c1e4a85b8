"""The library that verify, judge and the sweep measure by: bounds, errors, one change, leaks, TF32.

TF32 is off while something is proven, whichever of torch's ways turned it on, and on afterwards.
What it changes is seen on a GPU alone: tests/gpu/test_judge_on_gpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign import packing
from support.judged import Case

from vlmpack.proof.judge import judge
from vlmpack.proof.measure import (
    Leaks,
    Trial,
    bounded,
    error_together,
    full_float32,
    gradient_errors,
    loss_error,
    ordinary_ids,
    other_pixels,
    other_tokens,
    relative_l2,
    with_noise,
    worst,
)
from vlmpack.proof.verify.packed import as_it_was

CUDA = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
CPU = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn)
OPERATIONS = (*CUDA, *CPU)
READINGS: tuple[Callable[[], Any], ...] = (
    lambda: [operation.fp32_precision for operation in OPERATIONS],
    lambda: torch.backends.cuda.matmul.allow_tf32,
    lambda: torch.backends.cudnn.allow_tf32,
    torch.get_float32_matmul_precision,
)


def generic() -> None:
    torch.backends.fp32_precision = "tf32"


def of_matmuls() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def of_convolutions() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"


def of_cudnn() -> None:
    torch.backends.cudnn.fp32_precision = "tf32"


def older() -> None:
    torch.set_float32_matmul_precision("high")


def halved() -> None:
    torch.set_float32_matmul_precision("medium")


def flagged() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def not_at_all() -> None:
    pass


@pytest.fixture
def settings() -> Iterator[None]:
    before = readings()
    yield
    torch.set_float32_matmul_precision("highest")
    for library in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        library.fp32_precision = "none"
    for operation, precision in zip(OPERATIONS, before[0], strict=True):
        operation.fp32_precision = precision
    assert readings() == before


def readings() -> list[Any]:
    found: list[Any] = []
    for reading in READINGS:
        try:
            found.append(reading())
        except RuntimeError as error:  # set by the one way, read by the other
            assert "mix" in str(error), error
            found.append("refused")
    return found


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    "turn_on",
    [generic, of_matmuls, of_convolutions, of_cudnn, older, halved, flagged, not_at_all],
)
@pytest.mark.parametrize("raises", [False, True])
def test_tf32_is_off_inside_and_as_it_was_afterwards(
    turn_on: Callable[[], None], raises: bool
) -> None:
    turn_on()
    before = readings()
    assert "tf32" in before[0], "there is something to turn off"
    with pytest.raises(ZeroDivisionError) if raises else full_float32(), full_float32():
        inside = readings()
        assert inside[0] == ["ieee"] * len(OPERATIONS)
        assert "refused" not in inside or "refused" in before
        _ = 1 / (not raises)
    assert readings() == before


@pytest.mark.usefixtures("settings")
def test_the_judge_and_verify_compute_without_it(tmp_path: Path) -> None:
    older()
    case = Case("llama", tmp_path / "llama")
    collate, seen = packing(case.model()), []

    def watched(samples: Sequence[Any]) -> Any:
        seen.append(readings())
        return collate(samples)

    assert judge(case.model(), watched, case.samples).passed
    with as_it_was():
        seen.append(readings())
    assert len(seen) > len(case.samples)
    assert all(each[0] == ["ieee"] * len(OPERATIONS) for each in seen)


# Figures


@pytest.mark.parametrize(
    ("noise", "bound"),
    [(0.0, 1e-6), (4e-7, 1e-6), (3e-6, 6e-6), (1.0, 1e-4), (math.inf, 1e-6), (math.nan, 1e-6)],
)
def test_a_bound_follows_the_unpacked_noise_within_limits(noise, bound):
    assert with_noise(1e-6, noise) == pytest.approx(bound)


@pytest.mark.parametrize("measured", [math.nan, math.inf, 2e-5])
def test_what_is_not_below_its_bound_fails(measured):
    assert bounded("x", measured, 1e-5).fails
    assert bounded("x", measured, None).fails == (not math.isfinite(measured))
    assert not bounded("x", 1e-5, 1e-5).fails


def test_nan_is_the_worst_of_all():
    assert math.isnan(worst([1.0, math.nan, math.inf]))
    assert worst([]) == 0.0
    assert relative_l2(torch.ones(2), torch.ones(3)) == math.inf
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert loss_error(torch.ones(2), torch.ones(3)) == math.inf


def test_a_change_is_of_ordinary_tokens_alone_and_shows_in_each():
    """In a sample of one repeated token too, which another order of its tokens would not change."""
    ids = [torch.tensor([7, 1, 7, 7]), torch.tensor([9, 1, 4], dtype=torch.int32)]
    ordinary = ordinary_ids(ids, special=[1])
    assert ordinary.tolist() == [4, 7, 9]
    assert other_tokens(ids[0], ordinary).tolist() == [9, 1, 9, 9]
    changed = other_tokens(ids[1], ordinary)
    assert changed.tolist() == [4, 1, 7] and changed.dtype == torch.int32
    assert ids[0].tolist() == [7, 1, 7, 7]  # the sample itself stays
    assert other_tokens(ids[0], ordinary_ids(ids, [1, 4, 7, 9])).tolist() == ids[0].tolist()
    pixels = torch.arange(6.0).view(3, 2)
    assert not (other_pixels(pixels) == pixels).any()


@pytest.mark.parametrize(
    ("moved", "pairs", "unmoved"),
    [
        ([0.5, 0.0, 1e-7], [], []),
        ([0.5, 0.0, 2e-6], [("a", "c")], []),
        ([0.5, math.nan, 0.0], [("a", "b")], []),
        ([0.0, 0.0, 0.0], [], ["a"]),
        ([0.0, 0.5, 0.0], [("a", "b")], ["a"]),
    ],
)
def test_a_leak_is_what_another_sample_moves_by(moved, pairs, unmoved):
    leaks = Leaks()
    leaks.add(Trial("a", [0], moved), "abc", bound=1e-6)
    assert (leaks.pairs, leaks.unmoved, leaks.trials) == (pairs, unmoved, 1)
    assert leaks.largest == pytest.approx(worst(moved[1:]), nan_ok=True)
    unseen = Leaks()
    unseen.add(Trial("a", [0], moved, unseen=[0]), "abc", bound=1e-6)
    assert (unseen.pairs, unseen.unmoved) == (pairs, [])


def test_errors_of_gradients_are_taken_together():
    stock = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(1)}
    ours = [("a", torch.tensor([3.0, 4.5])), ("b", torch.zeros(2)), ("d", torch.ones(1))]
    errors = gradient_errors(stock, ours)
    assert errors.keys() == {"a", "b"}
    assert errors["a"].relative == error_together(errors.values()) == pytest.approx(0.1)
    assert errors["b"].relative == 0.0
