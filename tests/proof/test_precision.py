"""TF32 is off while something is proven, whichever of torch's ways turned it on, and on afterwards.

What it changes is seen on a GPU alone: tests/gpu/test_judge_on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign import packing
from support.judged import Case

from vlmpack.proof.judge import judge
from vlmpack.proof.measure import full_float32
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
