"""30 optimizer steps of a tiny Qwen3.5 in float32, and how far they drift from the same in double.

Which part is the delta rule's? The same run is made with the rule in its place: transformers' own
chunks and ours, both in float32, and ours packed with the rule alone in double. `reordered` is the
stock model with the samples of a step summed in the reverse order: what a run differs from itself
by. It is held against the stock model in double, one sample at a time, its rule token by token.

    OMP_NUM_THREADS=1 python benchmarks/bench_drift.py --seeds 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from support.hybrids import (  # noqa: E402
    CPU,
    hybrid,
    losses_alone,
    packed_losses,
    packing,
    row_params,
    samples,
)
from support.recurrences import delta_rule  # noqa: E402

from vlmpack.backends.hf.recurrence import kernel_places  # noqa: E402
from vlmpack.proof.verify.recurrent import recurrences_alone, torch_forms  # noqa: E402
from vlmpack.recurrence import choose_recurrence  # noqa: E402

STEPS, LR = 30, 1e-3
LENGTHS = (40, 90, 17, 66)
"""Tokens of the samples of a step."""
PUBLISHED = (0.1, 16.0)
"""The smallest and the largest decay A that published models draw."""


@contextmanager
def token_by_token(model: Any) -> Iterator[None]:
    """The stock model with its delta rule as its definition says, in the dtype of its arguments."""

    def rule(query: Tensor, key: Tensor, value: Tensor, *, g: Any, beta: Any, **given: Any) -> Any:
        normalize = bool(given.get("use_qk_l2norm_in_kernel"))
        parts = (x[0].double() for x in (query, key, value, g, beta))
        return delta_rule(*parts, normalize=normalize)[None].to(query.dtype), None

    before = []
    for module, function, kernel in kernel_places(model):
        if kernel == "chunk_gated_delta_rule":
            before.append((module, function, getattr(module, function)))
            setattr(module, function, rule)
    assert before, "the model has no delta rule"
    try:
        yield
    finally:
        for module, function, was in before:
            setattr(module, function, was)


def curve(
    model: Any,
    losses: Callable[[Any, Sequence[Tensor]], list[Tensor]],
    seed: int,
    *,
    reverse: bool = False,
    steps: int = STEPS,
) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """The mean loss of each step, the parameters behind the last one as one vector, and the
    gradients of the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    found, first = [], {}
    for step in range(steps):
        ids = samples(LENGTHS, seed=1000 * seed + step)
        values = torch.cat(losses(model, ids[::-1] if reverse else ids))
        optimizer.zero_grad(set_to_none=True)
        values.mean().backward()
        if not step:
            first = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found.append(float(values.detach().double().mean()))
    return found, flat(model), first


def flat(model: Any) -> Tensor:
    return torch.cat([one.detach().double().flatten() for one in model.parameters()])


def packed(model: Any, ids: Sequence[Tensor]) -> list[Tensor]:
    return packed_losses(model, ids, row_params([len(one) for one in ids]))


def drifts(seed: int, decays: tuple[float, float], steps: int = STEPS) -> dict[str, list[float]]:
    """Way of computing -> the largest error of a loss, the distance of the last parameters over the
    way that they went, and the error of the first step's gradients (L2, relative)."""
    choice = choose_recurrence("auto", device=CPU, dtype=torch.float32)
    double_rule = replace(choice, delta_rule=torch_forms(torch.float64).delta_rule)
    float32_rule = partial(recurrences_alone, dtype=torch.float32)
    ways: dict[str, tuple[Callable[[Any], Any], Any, bool]] = {
        "stock": (nullcontext, losses_alone, False),
        "stock, reordered": (nullcontext, losses_alone, True),
        "stock, our rule": (float32_rule, losses_alone, False),
        "stock, rule in double": (token_by_token, losses_alone, False),
        "packed": (packing, packed, False),
        "packed, rule in double": (partial(packing, choice=double_rule), packed, False),
    }
    wanted_model = hybrid("qwen3_5_text", decays).double()
    start = flat(wanted_model)
    with token_by_token(wanted_model):
        wanted = curve(wanted_model, losses_alone, seed, steps=steps)
    way = float((wanted[1] - start).norm())
    found = {}
    for name, (context, losses, reverse) in ways.items():
        model = hybrid("qwen3_5_text", decays)
        with context(model):
            ours = curve(model, losses, seed, reverse=reverse, steps=steps)
        loss = max(abs(a - b) for a, b in zip(ours[0], wanted[0], strict=True))
        error = sum(float((ours[2][n] - g).square().sum()) for n, g in wanted[2].items())
        scale = sum(float(g.square().sum()) for g in wanted[2].values())
        found[name] = [loss, float((ours[1] - wanted[1]).norm()) / way, (error / scale) ** 0.5]
    return found


def main() -> None:
    """A table for mild decays, and one for those of published models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    for title, decays in (("A of 0.02 to 0.5", (0.02, 0.5)), ("A of 0.1 to 16", PUBLISHED)):
        by_seed = [drifts(seed, decays, given.steps) for seed in range(given.seeds)]
        print(f"{title}, {given.steps} steps, {given.seeds} seeds: the median (the largest)")
        print(f"  {'':24} {'loss':>18} {'of the way':>18} {'first gradients':>18}")
        for name in by_seed[0]:
            cells = []
            for n in range(3):
                values = sorted(one[name][n] for one in by_seed)
                cells.append(f"{values[len(values) // 2]:.1e} ({values[-1]:.1e})")
            print(f"  {name:24} " + " ".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
