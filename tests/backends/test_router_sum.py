"""The routers' loss of a step is added up in double, and taken once."""

from __future__ import annotations

import torch

from vlmpack.backends.engine import ROUTER_REPORT, ROUTER_SUM, RouterSum
from vlmpack.training.objective import ratios

CPU = torch.device("cpu")


def test_micro_batches_add_up_and_the_next_step_begins_at_zero() -> None:
    report, weight = RouterSum(), torch.tensor(1.5, requires_grad=True)
    report.add(weight * 100)
    report.add(torch.tensor(1.0 + 2.0**-20, dtype=torch.float64) * 30)
    found = report.take(CPU)[ROUTER_SUM]
    assert found.dtype is torch.float64
    assert not found.requires_grad
    assert float(found) == 180 + 30 * 2.0**-20, "float32 would lose it"
    assert ratios({ROUTER_SUM: 180.0, "num_tokens": 130.0}, ROUTER_REPORT) == {
        "router_loss": 180 / 130
    }
    empty = report.take(CPU)[ROUTER_SUM]
    assert (empty.shape, empty.dtype, float(empty)) == ((), torch.float64, 0.0)
    report.add(torch.tensor(3.0))
    report.clear()
    assert float(report.take(CPU)[ROUTER_SUM]) == 0.0, "of a step that nobody took"


def test_a_step_without_a_token_reports_none() -> None:
    assert ratios({ROUTER_SUM: 0.0, "num_tokens": 0.0}, ROUTER_REPORT) == {"router_loss": None}
