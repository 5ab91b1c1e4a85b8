"""A loss or a gradient norm far above those before it is logged with all samples of its step."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import single_rank

from vlmpack.training.reporting import LEAST_WINDOW, SPIKE, WINDOW, Spikes, median

Figures = tuple[float | None, float]


class _TwoRanks:
    """This process and another one, whose samples are asked for only where there is a spike."""

    asked = 0

    def gather_objects(self, value: list[str]) -> list[list[str]]:
        self.asked += 1
        return [value, [name.upper() for name in value]]


def take(spikes: Spikes, figures: Iterable[Figures], start: int = 0) -> None:
    """Steps with a loss and a gradient norm each."""
    for number, (loss, norm) in enumerate(figures, start + 1):
        sums = SimpleNamespace(loss=loss, grad_norm=norm)
        data = SimpleNamespace(names=[[f"a{number}", f"b{number}"], [f"c{number}"]])
        step: Any = SimpleNamespace(step=number, sums=sums, data=data)
        spikes.on_step(step)


def noisy(count: int, seed: int = 0) -> list[Figures]:
    """Losses that fall to 1.5 with normal noise, and norms whose logarithm is normal."""
    draw = random.Random(seed)
    return [
        (1.5 + 2 * math.exp(-n / 100) + draw.gauss(0, 0.05), math.exp(draw.gauss(0, 0.3)))
        for n in range(count)
    ]


def test_a_spike_is_named_once_with_the_samples_of_all_ranks(caplog):
    ranks: Any = _TwoRanks()
    figures = noisy(400)
    figures[299:303] = [(5.9, 1.0), (6.1, 1.0), (1.5, 1.0), (1.5, 50.0)]
    take(Spikes(ranks), figures)
    first, second = caplog.messages
    before = [loss for loss, _ in figures[299 - WINDOW : 299]]
    middle = statistics.median_high(before)
    spread = 1.4826 * statistics.median_high(abs(loss - middle) for loss in before)
    deviations = (5.9 - middle) / max(spread, 0.02 * middle)
    assert deviations > SPIKE
    assert first == (
        f"spike: step 300: loss 5.9 after a median of {middle:.4g} ({deviations:.0f} deviations). "
        "Its samples: a300, b300, c300, A300, B300, C300"
    )
    assert second.startswith("spike: step 303: grad_norm 50 after a median of ")
    assert ranks.asked == 2


def test_noise_is_none(caplog):
    for seed in range(10):
        take(Spikes(single_rank()), noisy(1000, seed))
    equal = [(1.0, 1.0)] * 200
    take(Spikes(single_rank()), [*equal, (1.1, 1.1), *equal])
    assert caplog.messages == []


def test_the_first_steps_are_compared_with_nothing(caplog):
    early = noisy(LEAST_WINDOW - 1)
    take(Spikes(single_rank()), [*early, (50.0, 1.0)])
    assert caplog.messages == []
    take(Spikes(single_rank()), [*early, (1.5, 1.0), (50.0, 1.0)])
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "figure", [(None, 0.0), (math.nan, 1.0), (1.5, math.inf), (-math.inf, 1.0)]
)
def test_a_step_without_finite_figures_never_enters_the_window(caplog, figure):
    spikes, alike = Spikes(single_rank()), Spikes(single_rank())
    take(spikes, noisy(200))
    take(spikes, [figure] * WINDOW)
    take(alike, noisy(200))
    assert spikes.windows == alike.windows
    take(spikes, [(20.0, 1.0)])
    assert len(caplog.messages) == 1


def test_a_run_that_resumes_says_what_the_unbroken_one_says(caplog):
    figures = noisy(200)
    figures[110] = figures[150] = (5.9, 60.0)
    take(Spikes(single_rank()), figures)
    unbroken = [*caplog.messages]
    assert len(unbroken) == 2
    caplog.clear()
    before, after = Spikes(single_rank()), Spikes(single_rank())
    take(before, figures[:100])
    after.resume(json.loads(json.dumps(before.state())))
    take(after, figures[100:], start=100)
    assert caplog.messages == unbroken
    caplog.clear()
    take(Spikes(single_rank()), figures[100:], start=100)  # without the window
    assert len(caplog.messages) < 2


def test_the_median_is_the_upper_of_two():
    assert median([3, 1, 2]) == 2 and median([4, 1, 3, 2]) == 3
