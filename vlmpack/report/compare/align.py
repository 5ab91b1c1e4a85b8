"""Losses of two runs brought beside each other: by step where both trained the same samples, and by
the samples that each has seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from vlmpack.report.compare.read import ComparedRun, StepLoss

NUM_WINDOWS = 10

NOISE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
"""Type that is computed in -> how far two losses of the same samples and weights may lie apart,
relative to them, where only the order of additions differs: some 80 roundings in float32, and 2 to
5 in the 16-bit types."""


@dataclass(frozen=True, slots=True)
class SameBatches:
    """Steps of both runs that trained the same samples.

    Args:
        steps: those, in order.
        first_other: the first step of both that trained other ones; None where there is none.
        is_recorded: known from the records of samples; otherwise from equal counts of samples,
            tokens and label tokens.
    """

    steps: tuple[int, ...]
    first_other: int | None
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far losses of the same samples lie apart.

    Args:
        noise: the largest relative difference that is taken for noise.
        first: the first step beyond it, with both losses; None where there is none.
        largest: the step that differs most, with both losses.
        within: the largest relative difference of the steps before the first.
    """

    noise: float
    first: tuple[int, float, float] | None
    largest: tuple[int, float, float]
    within: float


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of as many samples in both runs.

    Args:
        samples: seen at its end.
        tokens: real tokens that each run has seen there, as far as its steps end before it.
        losses: mean of each run over the steps that end in it; None where none does.
    """

    samples: int
    tokens: tuple[int, int]
    losses: tuple[float | None, float | None]


def same_batches(a: ComparedRun, b: ComparedRun) -> SameBatches:
    """The steps of both with a loss that trained the same samples."""
    common = sorted(a.losses.keys() & b.losses.keys())
    is_recorded = all(step in a.batches and step in b.batches for step in common)
    same = [
        step
        for step in common
        if (
            a.batches[step] == b.batches[step]
            if is_recorded
            else a.losses[step].counts == b.losses[step].counts
        )
    ]
    others = [step for step in common if step not in set(same)]
    return SameBatches(tuple(same), min(others, default=None), is_recorded)


def noise_of(a: ComparedRun, b: ComparedRun) -> float:
    """That of the coarser type of the two."""
    return max(NOISE.get(run.dtype, NOISE["float32"]) for run in (a, b))


def divergence(
    a: ComparedRun, b: ComparedRun, steps: Iterable[int], noise: float
) -> Divergence | None:
    """Where losses part, over steps of the same samples; None without such a step."""
    rows = [(step, a.losses[step].loss, b.losses[step].loss) for step in steps]
    if not rows:
        return None
    first = next((row for row in rows if relative(*row[1:]) > noise), None)
    before = [relative(*row[1:]) for row in rows if first is None or row[0] < first[0]]
    return Divergence(
        noise, first, max(rows, key=lambda row: relative(*row[1:])), max(before, default=0.0)
    )


def relative(one: float, other: float) -> float:
    """The difference, relative to the larger of the two."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


def windows(a: ComparedRun, b: ComparedRun, count: int = NUM_WINDOWS) -> list[Window]:
    """Stretches up to where the shorter run ends, of about as many steps of the run that has fewer
    up to there, so that none is empty of them; steps count where they end."""
    ends = [sorted({one.samples for one in run.losses.values()}) for run in (a, b)]
    end = min(one[-1] for one in ends)
    fewer = min(([samples for samples in one if samples <= end] for one in ends), key=len)
    count = min(count, len(fewer))
    edges = [0, *(fewer[round(len(fewer) * n / count) - 1] for n in range(1, count)), end]
    made = []
    for low, high in pairwise(edges):
        stretches = [
            [one for one in run.losses.values() if low < one.samples <= high] for run in (a, b)
        ]
        if high > low:
            seen = (_tokens_until(a, high), _tokens_until(b, high))
            made.append(Window(high, seen, (mean_loss(stretches[0]), mean_loss(stretches[1]))))
    return made


def mean_loss(steps: Iterable[StepLoss]) -> float | None:
    """The mean over what the losses are means of; None without any."""
    given = list(steps)
    weight = sum(one.weight for one in given)
    return sum(one.loss * one.weight for one in given) / weight if weight else None


def _tokens_until(run: ComparedRun, samples: int) -> int:
    return max((one.tokens for one in run.losses.values() if one.samples <= samples), default=0)
