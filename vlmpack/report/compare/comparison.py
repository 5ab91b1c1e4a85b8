"""Two runs, and what was found out about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmpack.report.compare.align import (
    Divergence,
    SameBatches,
    Window,
    divergence,
    noise_of,
    same_batches,
    windows,
)
from vlmpack.report.compare.differences import not_comparable
from vlmpack.report.compare.read import ComparedRun, read_compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Args:
        a, b: the runs.
        reasons: why their losses cannot be compared; empty where they can.
        same: steps that trained the same samples.
        parted: how far their losses lie apart; None without such a step, or with a reason.
        windows: mean losses over stretches of as many samples.
    """

    a: ComparedRun
    b: ComparedRun
    reasons: tuple[str, ...]
    same: SameBatches
    parted: Divergence | None
    windows: tuple[Window, ...]


def compare_runs(a: Path, b: Path, *, noise: float | None = None) -> Comparison:
    """Read two run folders, and compare them.

    Args:
        a, b: the folders.
        noise: the largest relative difference of two losses that is taken for noise; None for that
            of the type which the runs computed in.

    Raises:
        RunDirError: one is no run folder, has no step with a loss, or has a damaged file.
    """
    one, other = read_compared("A", a), read_compared("B", b)
    reasons = tuple(not_comparable(one, other))
    same = same_batches(one, other)
    bound = noise_of(one, other) if noise is None else noise
    return Comparison(
        a=one,
        b=other,
        reasons=reasons,
        same=same,
        parted=None if reasons else divergence(one, other, same.steps, bound),
        windows=tuple(windows(one, other)),
    )
