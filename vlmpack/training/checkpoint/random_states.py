"""States of torch's global generators."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """A copy of the states, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators back; a state of a device that is not here is left alone."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
