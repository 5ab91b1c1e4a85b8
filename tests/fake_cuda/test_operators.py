"""What each layer of a step costs on a GPU, held to `benchmarks/operator_budgets.json`."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from fake_cuda.guard import why_not
from support.shards import ROOT

BENCHMARKS = str(ROOT / "benchmarks")
with patch.object(sys, "path", [BENCHMARKS, *sys.path]):  # it has a run.py, as tests/ has a run/
    from gpu_table import of_recorded, predicted_seconds, read_model
    from host_calls import Host, asked_of
    from operator_cost import PRODUCT, Cost
    from operator_layers import BLOCK, FULL_BLOCK, TEXT
    from operators import BUDGETS, STEPS, Recorded, budget_of, over_budget, record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LIMITS = json.loads(BUDGETS.read_text(encoding="utf-8"))
SPARE = 0.98
"""Share of its budget that a layer takes at least. One that takes less gets a new budget."""


@cache
def recorded(name: str, **changes: str) -> Recorded:
    return record({**STEPS[name], **changes})


@pytest.mark.cases(slow=("full", "lora"))
@pytest.mark.parametrize("name", STEPS)
def test_no_layer_costs_more_than_its_budget(name: str) -> None:
    step = recorded(name)
    assert step.tokens > 10_000 and step.parts.keys() == LIMITS[name].keys()
    assert over_budget(step, LIMITS[name]) == []
    for part, limits in LIMITS[name].items():
        rows = budget_of(step)[part]
        for k in (0, 1):
            now, then = (sum(each[k] for each in some.values()) for some in (rows, limits))
            assert now >= SPARE * then, f"{part}: {now} of {then}: write new budgets"


@pytest.mark.cases(slow=("full", "lora"))
@pytest.mark.parametrize("name", STEPS)
def test_the_table_of_a_gpu_has_the_model_of_today(name: str) -> None:
    """What `gpu_table.py` compares a card with. `--record` writes it anew."""
    kept, fresh = read_model()[name], of_recorded(recorded(name))
    assert kept["tokens"] == fresh["tokens"] and kept["flops"] == pytest.approx(fresh["flops"])
    assert predicted_seconds(kept, {}) == pytest.approx(predicted_seconds(fresh, {}), rel=0.03)
    assert predicted_seconds(fresh, {}) == pytest.approx(recorded(name).seconds(), rel=1e-3)
    assert all(fresh["seconds"][kind] > 0 for kind in ("products", "bytes"))


def test_an_extra_cast_is_named() -> None:
    """Control: every linear layer widens its input, which autocast narrows again."""
    found = over_budget(recorded("full", plant="cast"), LIMITS["full"])
    text = next(line for line in found if line.startswith("text layer"))
    assert "_to_copy bfloat16 -> float32 (model.language_model.layers.N." in text
    assert "_to_copy float32 -> bfloat16 (model.language_model.layers.N." in text


def test_products_are_those_of_the_formula() -> None:
    """FLOPs of a forward pass and its gradients, by the family's own formula: the recorder misses
    none and counts none twice. Recomputation comes on top."""
    step = recorded("full")
    again = sum(
        count * cost.flops
        for part, count in step.times.items()
        for name, cost in step.parts[part].items()
        if name.startswith("recompute")
    )
    assert again > 0
    assert step.whole().flops - again == pytest.approx(step.flops, rel=0.02)


def test_the_peak_is_that_of_tensors_that_live_at_once() -> None:
    """By hand: full finetuning holds weights, gradients and both moments in float32, and working
    weights of all but the embedding. The head shares that one, and its gradient waits in float32
    for the embedding's. A layer that is computed again keeps its input. The rest, 5%, are logits
    and the tower's inputs."""
    weights, inputs = 3_754_622_976, 8_192 * 2_048 * 4 * 36
    head = 151_936 * 2_048
    known = 4 * 4 * weights + 2 * (weights - head) + 4 * head + inputs
    step, kept = recorded("full"), recorded("full", recompute="none")
    assert known < step.peak < 1.05 * known
    norms, attention, mlp = 2 * (4 + 2) * 2_048, 2 * (2 * 2_048 + 2 * 256), 2 * 3 * 11_008
    assert kept.peak - step.peak > 36 * 8_192 * (norms + attention + mlp - 4 * 2_048)


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
@pytest.mark.parametrize("name", ["full", "lora"])
def test_plan_says_what_a_step_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, recompute: str
) -> None:
    """To 10%, the bound that `vlmpack plan` is held to; what is recomputed changes it by more."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from operator_step import Asked
    from support.shaped_plan import planned

    peak = recorded(name, recompute=recompute).peak
    asked = Asked(**STEPS[name], recompute=recompute, layers={})
    said = planned(asked, tmp_path / "model").total
    print(f"{name}, {recompute}: {peak / 2**30:.1f} GiB held, {said / 2**30:.1f} planned")
    assert said == pytest.approx(peak, rel=0.1)
    if recompute != "none":
        assert recorded(name, recompute="none").peak > 1.15 * peak


def test_products_of_a_tower_of_odd_width_run_at_full_rate() -> None:
    """Its MLP is 3,420 wide, and computed at 3,424."""
    rows = recorded("full").parts[BLOCK]
    cost = sum((rows[name] for name in ("forward addmm", "recompute addmm")), Cost())
    assert cost.flops / cost.seconds > 0.95 * PRODUCT


HOST_LIMITS = {"aten": 3_183, "python": 12_470}
"""Of a LoRA step, `in_batch`, with two text layers, two blocks and one that sees whole images."""


def test_the_host_calls_no_more_than_it_did() -> None:
    """Calls into ATen and functions of Python that a step enters. `benchmarks/host_calls.py --top`
    lists those of a whole model."""
    with Host(asked_of("lora in_batch", "none", {TEXT: 2, BLOCK: 2, FULL_BLOCK: 1})) as host:
        counted = host.ask("count")
    now = {"aten": counted["aten"], "python": sum(counted["python"].values())}
    assert counted["python"]["vlmpack"] > 1_000
    for name, limit in HOST_LIMITS.items():
        assert now[name] <= limit, f"{name}: {now[name]} of {limit}: {counted['functions'][:40]}"
        if name == "aten" or sys.version_info < (3, 12):  # whose comprehensions are no functions
            assert now[name] >= SPARE * limit, f"{name}: {now[name]} of {limit}: set a new limit"
