"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

OF_OTHERS = (
    # flash-linear-attention's modules without a packed row, which it imports with the others.
    "ignore:Flash Attention is not installed:ImportWarning",
    # torch's own, of the thread that runs backward passes.
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
    # torch's own: its compiler asks each tensor that it traces for a gradient.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
"""What kernels and compilers warn of on a GPU; as an error it ends what it warns of."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder pass over these warnings; any other is an error, as everywhere."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            for warning in OF_OTHERS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def forget_the_device() -> Iterator[None]:
    """accelerate keeps the device of a process's first engine: it refuses one on the CPU behind one
    on the GPU, and moves one on the GPU to the CPU behind the other. Here are both."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
