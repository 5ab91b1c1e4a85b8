"""Where a step on a GPU spends its time, on a machine without one: `make operators`.

    python benchmarks/operators.py                      # every step of STEPS, as a table
    python benchmarks/operators.py full --by operator   # one of them, by operator
    python benchmarks/operators.py --write              # new budgets, where a step has got cheaper

Each step is recorded call by call on tensors without numbers (`operator_step.py`), at the widths of
a published model. Launches, calls into ATen, bytes and FLOPs are counted (`operator_cost.py`).
Seconds are those of a model of an H200, which a measured run took 1.22 times. Budgets of a layer
stand in `operator_budgets.json`, and a test holds every change to them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

from fake_cuda.guard import run_under_guard, why_not  # noqa: E402
from gpu_shapes import SHAPES  # noqa: E402
from operator_cost import HOST, PEAK, Cost  # noqa: E402
from operator_layers import kinds_of  # noqa: E402

BUDGETS = HERE / "operator_budgets.json"
BYTES = 1.01
"""Times the budget, which a change may reach without a new one."""

LORA = {"language": "lora", "vision": "frozen", "projector": "frozen"}
B3 = "qwen2_5_vl-3b"
STEPS: dict[str, dict[str, Any]] = {
    "full": {"shape": B3, "rows": 2, "tokens": 8192},
    "lora": {"shape": B3, "rows": 2, "tokens": 16384, **LORA},
    "lora in_batch": {"shape": B3, "rows": 4, "samples": 4, **LORA},
    "dpo": {"shape": B3, "rows": 2, "tokens": 8192, "pairs": True, **LORA},
    "hybrid": {"shape": "qwen3_5-2b", "rows": 2, "tokens": 8192},
    "gemma 4": {"shape": "gemma4-text", "rows": 2, "tokens": 8192},
}
"""Fields of `operator_step.Asked`. Every layer is computed again in the backward pass."""

Rows = dict[str, Cost]
REST = "rest"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step of the whole model.

    Args:
        tokens: real ones of the step.
        flops: of the model, by formula; recomputation does not count.
        parts: one layer of each kind, and the rest; each by "phase operator". The rest is negative
            where the first layer of a kind needs less than others.
        times: how many of each part the model has.
        peak: bytes of all tensors where they are most, weights and the optimizer's included.
        where: the module that moves most bytes by each operator, by part.
    """

    tokens: int
    flops: float
    parts: Mapping[str, Rows]
    times: Mapping[str, int]
    peak: float
    where: Mapping[str, Mapping[str, str]]

    def cost(self, part: str) -> Cost:
        """Of one of this part."""
        return sum(self.parts[part].values(), Cost())

    def whole(self) -> Cost:
        """Of the step."""
        found = Cost()
        for part, count in self.times.items():
            found = found.plus(self.cost(part), count)
        return found

    def seconds(self) -> float:
        """Of the step, by the model: the GPU's, or the host's where it is slower."""
        whole = self.whole()
        return max(whole.seconds, whole.calls * HOST)


def record(asked: Mapping[str, Any]) -> Recorded:
    """A step, from one with few layers and one more for each kind."""
    kinds = kinds_of(SHAPES[asked["shape"]])
    fewest = {kind: 2 if kinds[kind] > 4 else 1 for kind in kinds}
    layers = [fewest, *({**fewest, kind: fewest[kind] + 1} for kind in kinds)]
    steps = [{**asked, "layers": each} for each in layers]
    base, *more = run_under_guard("operator_step", steps, beside=[HERE])
    first, where = _by_operator(base)
    parts, places, rest = {}, {REST: where}, dict(first)
    peaks = Counter(base["peaks"])
    for kind, step in zip(kinds, more, strict=True):
        other, places[kind] = _by_operator(step)
        for phase, held in step["peaks"].items():
            peaks[phase] += (kinds[kind] - fewest[kind]) * (held - base["peaks"][phase])
        one = {name: cost.plus(first.get(name, Cost()), -1) for name, cost in other.items()}
        parts[kind] = {name: cost for name, cost in one.items() if cost.calls or cost.bytes}
        for name, cost in parts[kind].items():
            rest[name] = rest.get(name, Cost()).plus(cost, -fewest[kind])
    parts[REST] = rest
    return Recorded(
        base["tokens"], base["flops"], parts, {**kinds, REST: 1}, max(peaks.values()), places
    )


def _by_operator(step: Mapping[str, Any]) -> tuple[Rows, dict[str, str]]:
    rows: Rows = defaultdict(Cost)
    costliest: dict[str, tuple[float, str]] = {}
    for phase, module, name, cost in step["costs"]:
        key, made = f"{phase} {name}", Cost(**cost)
        rows[key] += made
        named = made.bytes if module else 0.0
        costliest[name] = max(costliest.get(name, (-1.0, "")), (named, module))
    return dict(rows), {name: module for name, (_, module) in costliest.items()}


def budget_of(recorded: Recorded) -> dict[str, dict[str, list[float]]]:
    """[launches, megabytes] of each operator, by part. The optimizer is left out: its kernels take
    many tensors each."""
    found = {}
    for part, rows in recorded.parts.items():
        sums: dict[str, Cost] = defaultdict(Cost)
        for name, cost in rows.items():
            phase, _, operator = name.partition(" ")
            if phase != "optimizer":
                sums[operator] += cost
        found[part] = {
            name: [round(cost.launches), round(cost.bytes / 1e6)]
            for name, cost in sorted(sums.items())
            if round(cost.launches) or cost.bytes >= 1e6
        }
    return found


def write_budgets(budgets: Mapping[str, Any]) -> None:
    """One line for each operator."""
    text = json.dumps(budgets, indent=1, sort_keys=True)
    text = re.sub(r"\[\s+(-?\d+),\s+(-?\d+)\s+\]", r"[\1, \2]", text)
    BUDGETS.write_text(text + "\n", encoding="utf-8")


def over_budget(recorded: Recorded, budget: Mapping[str, Any]) -> list[str]:
    """One line for each part that costs more than its budget, with the operators that do."""
    found = []
    for part, now in budget_of(recorded).items():
        then = budget.get(part, {})
        sums = [[sum(each[k] for each in rows.values()) for k in (0, 1)] for rows in (now, then)]
        (launches, megabytes), (allowed, most) = sums
        if launches <= allowed and megabytes <= most * BYTES:
            continue
        more = [
            f"{name} ({recorded.where[part].get(name) or 'no module'}) has {own[0]} launches and "
            f"{own[1]:,} MB, allowed are {was[0]} and {was[1]:,}"
            for name, own in now.items()
            if own[0] > (was := then.get(name, [0, 0]))[0] or own[1] > was[1] * BYTES
        ]
        found.append(
            f"{part}: {launches} launches and {megabytes:,} MB, allowed are {allowed} and "
            f"{most:,}; " + "; ".join(more)
        )
    return found


def summary(name: str, step: Recorded) -> str:
    """A line of the table."""
    whole, seconds = step.whole(), step.seconds()
    return (
        f"{name:14} {whole.launches:8,.0f} {whole.calls:9,.0f} {whole.bytes / 1e12:6.2f} "
        f"{whole.flops / 1e12:8.0f} {1e3 * seconds:8.0f} {step.tokens / seconds:9,.0f} "
        f"{step.flops / seconds / PEAK:6.1%} {step.peak / 2**30:6.1f}"
    )


HEADING = (
    f"{'step':14} {'launches':>8} {'calls':>9} {'TB':>6} {'TFLOP':>8} {'ms':>8} "
    f"{'tokens/s':>9} {'MFU':>6} {'GiB':>6}"
)


def details(step: Recorded, *, by: str, top: int) -> list[str]:
    """Lines for the parts of a step, or for its costliest operators."""
    lines = [f"  {'':44} {'launches':>8} {'GB':>8} {'ms':>7}"]
    rows: Rows = {}
    for part, count in step.times.items():
        if by == "part":
            rows[f"{part} x {count}"] = Cost().plus(step.cost(part), count)
            continue
        for name, cost in step.parts[part].items():
            rows[f"{name}, {part}"] = Cost().plus(cost, count)
    ordered = sorted(rows.items(), key=lambda row: -row[1].seconds)
    return lines + [
        f"  {name[:44]:44} {cost.launches:8,.0f} {cost.bytes / 1e9:8.1f} {1e3 * cost.seconds:7.1f}"
        for name, cost in ordered[:top]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(STEPS)}; all where none is named")
    parser.add_argument("--by", choices=("part", "operator"), default="part")
    parser.add_argument("--top", type=int, default=12, help="lines of each step")
    # A step is recorded with one layer of each kind, so "every n-th layer" has no figures here.
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="full",
        help="model.activation_checkpointing",
    )
    parser.add_argument("--write", action="store_true", help="write the budgets of these steps")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.steps if name not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    if why := why_not():
        parser.exit(1, f"operators: {why}\n")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    budgets = json.loads(BUDGETS.read_text(encoding="utf-8")) if BUDGETS.exists() else {}
    print(HEADING)
    for name in given.steps or STEPS:
        step = record({**STEPS[name], "recompute": given.recompute})
        print(summary(name, step), *details(step, by=given.by, top=given.top), sep="\n", flush=True)
        if given.recompute == "full":
            budgets[name] = budget_of(step)
    if given.write:
        write_budgets(budgets)


if __name__ == "__main__":
    main()
