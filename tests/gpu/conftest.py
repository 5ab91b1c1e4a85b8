"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget_the_device() -> Iterator[None]:
    """accelerate keeps the device of a process's first engine: it refuses one on the CPU behind one
    on the GPU, and moves one on the GPU to the CPU behind the other. Here are both."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
