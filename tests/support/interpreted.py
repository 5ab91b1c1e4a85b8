"""Kernels that are written in Triton, run for real on a CPU: by Triton's interpreter, in a process
of its own that has Triton and their packages on its path.

`make kernels` installs them into .kernels, in the versions of `kernel_packages.txt`. They never
enter the project's own environment, where transformers would take them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.shards import ROOT
from torch import Tensor

from vlmpack.recurrence import RowSegments, StepSize

LIMITS = (0.1, 2.0)
"""Of a step of the scan."""
FOLDER = ROOT / ".kernels"
WANTED = ROOT / "tests/support/kernel_packages.txt"


@dataclass(frozen=True)
class Case:
    """A kind of recurrence, and the lengths of the segments that it is told of."""

    kind: str
    lengths: tuple[int, ...]


def why_not_installed() -> str | None:
    """One phrase, where the packages are not there in the versions that are wanted."""
    stamp = FOLDER / ".installed"
    if not stamp.exists():
        return "make kernels installs Triton and the kernels' packages: .kernels is not there"
    if stamp.read_text() != WANTED.read_text():
        return "make kernels installs other versions than .kernels has (kernel_packages.txt)"
    return None


def drawn(kind: str, total: int, widths: tuple[int, int] = (24, 20)) -> list[Tensor]:
    """Float32 inputs of a row; `widths` of keys (or states) and values (or channels)."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    key, value = widths
    if kind == "convolution":
        return [normal(1, value, total), normal(value, 4), normal(value)]
    if kind == "delta_rule":
        q, k, v = normal(1, total, 1, key), normal(1, total, 1, key), normal(1, total, 2, value)
        return [q, k, v, -0.1 * normal(1, total, 2).abs(), normal(1, total, 2).sigmoid()]
    b, c = (normal(1, total, 1, key) for _ in range(2))
    x, dt = normal(1, total, 2, value), normal(1, total, 2)
    return [x, dt, b, c, -normal(2).abs(), normal(2), normal(2)]


def applied(
    function: Callable[..., Tensor], kind: str, tensors: Sequence[Tensor], row: RowSegments
) -> Tensor:
    """A kernel of ours, or a torch form, of such inputs."""
    if kind == "convolution":
        return function(*tensors, row, activation="silu")
    if kind == "delta_rule":
        return function(*tensors, row, normalize=True)
    x, dt, b, c, a, skip, bias = tensors
    step_size = StepSize(bias=bias, softplus=True, limits=LIMITS)
    return function(x, dt, a, b, c, row, skip=skip, step_size=step_size)


class Interpreter:
    """The process; requests one at a time.

    Args:
        packages: which of the worker's it imports.
    """

    def __init__(self, packages: str = "recurrences") -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "support.interpreted_worker",
                str(FOLDER),
                packages,
            ],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, ROOT / "tests", ROOT))),
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, function: str, *arguments: Any) -> Any:
        """What this function of the worker gives.

        Raises:
            RuntimeError: with the traceback of the other process, or where it has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump((function, arguments), self.process.stdin)
            self.process.stdin.flush()
            fine, answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"the interpreter ended with {self.process.wait()}") from error
        if not fine:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
