"""Tiny models whose layers carry state: one packed row against its samples one by one.

The stock class computes each sample alone, as training without packing does with a micro-batch of
one; the same weights compute all of them in one row, whose recurrences are vlmpack's torch forms.
Forward and backward, in CPU seconds: what an idle core takes. Of three mixes of lengths, short ones
as in the demo's data, longer ones, and nine that fill a row of 4,096, since what packing saves is
what a sample costs however short it is. Losses are compared: the faster one computes the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from timing import processor_medians

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from support.hybrids import (  # noqa: E402
    gradients,
    hybrid,
    losses_alone,
    packed_losses,
    packing,
    row_params,
    samples,
)

MODEL_TYPES = ("qwen3_5_text", "nemotron_h", "lfm2")
MOST_DIFFERENCE = 1e-5
"""Between losses; they are about 6."""


def mixes() -> dict[str, list[int]]:
    """Lengths of samples, by what they are called in results."""
    draw = torch.Generator().manual_seed(0)
    return {
        "32 of 8 to 59": torch.randint(8, 60, (32,), generator=draw).tolist(),
        "32 of 60 to 199": torch.randint(60, 200, (32,), generator=draw).tolist(),
        "9 of 57 to 900": [57, 900, 300, 646, 120, 480, 750, 210, 633],
    }


def bench_hybrid(rounds: int) -> dict[str, object]:
    """Milliseconds of each model and mix, and how many times as fast the packed row is."""
    figures: dict[str, object] = {}
    for title, lengths in mixes().items():
        figures[f"{title}, tokens"] = sum(lengths)
        for model_type in MODEL_TYPES:
            seconds = _seconds(model_type, lengths, rounds)
            for name, value in seconds.items():
                figures[f"{title}, {model_type}, {name}_ms"] = value * 1e3
            times = seconds["alone"] / seconds["packed"]
            figures[f"{title}, {model_type}, times_as_fast"] = times
    return figures


def _seconds(model_type: str, lengths: Sequence[int], rounds: int) -> dict[str, float]:
    """Of all samples alone, and of the row."""
    stock, ours = hybrid(model_type), hybrid(model_type)  # of the same seed
    stock.set_attn_implementation("sdpa")
    ids, params = samples(lengths), row_params(lengths)

    def alone() -> torch.Tensor:
        losses = losses_alone(stock, ids)
        gradients(stock, losses)
        return torch.cat(losses).detach()

    def packed() -> torch.Tensor:
        losses = packed_losses(ours, ids, params)
        gradients(ours, losses)
        return torch.cat(losses).detach()

    with packing(ours):
        difference = float((alone() - packed()).abs().max())
        assert difference < MOST_DIFFERENCE, f"{model_type}: a loss differs by {difference:.1e}"
        return processor_medians({"alone": alone, "packed": packed}, rounds=rounds)
