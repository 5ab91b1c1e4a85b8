"""The sum of a mixture's load-balancing loss over the micro-batches of one optimizer step.

    a micro-batch -> its loss, a mean over layers, times its real tokens -> added on the device
    sums of all ranks / real tokens of the step -> `router_loss` beside the loss

So a row is weighted by its tokens, and the figure does not depend on the recipe's coefficient. It
is 1 where all experts are chosen alike, and E / K where the same K of E experts get every token
(2101.03961, equation 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROUTER_SUM = "router_loss_sum"

ROUTER_REPORT: Mapping[str, tuple[str, str]] = {"router_loss": (ROUTER_SUM, "num_tokens")}
"""Column of metrics.jsonl -> (sum, the count that divides it)."""


@dataclass(slots=True)
class RouterSum:
    """What one engine's routers add to, while gradients are wanted, and its stepper takes.

    Args:
        total: what was added since the step began, 0-d float64; None for nothing.
    """

    total: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss.

        Args:
            loss: 0-d, times the real tokens of its micro-batch. One layer's loss is its part of the
                mean over layers, and a rank with part of a row adds that part.
        """
        loss = loss.detach().double()
        self.total = loss if self.total is None else self.total + loss

    def clear(self) -> None:
        """Begin a step."""
        self.total = None

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """The step's sum by its name, 0-d float64 on the device, not read here; then zero."""
        total = self.total
        self.clear()
        if total is None:
            total = torch.zeros((), dtype=torch.float64, device=device)
        return {ROUTER_SUM: total}
