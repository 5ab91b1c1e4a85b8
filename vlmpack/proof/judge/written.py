"""A collator that writes into its samples: what it is given are copies, and what it wrote is told.

A dataset in memory hands out the same samples in the next epoch, as the collator left them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vlmpack.proof.judge.alone import CPU, Alone, Sample, copied, on
from vlmpack.proof.judge.computed import Run
from vlmpack.proof.judge.findings import Finding, failed
from vlmpack.proof.measure import Check
from vlmpack.words import raised

NAME = "samples"


def check_written(
    run: Run,
    alone: Alone,
    samples: Sequence[Any],
    handed: Sequence[Any],
    reference: Sequence[Sample],
) -> list[Finding]:
    """Whether a second batch of the samples, in another order, is the same after the collator wrote
    into them; nothing where it left them as they are.

    Args:
        alone: a sample -> the model's own arguments for it.
        samples: as they are given.
        handed: those that the collator got, after it made a batch of them.
        reference: each sample alone.
    """
    told = _first_written(alone, handed, reference)
    if not told:
        return []
    try:
        again = run.make(copied(handed[::-1]))
    except Exception as error:
        other = f"the collator {raised(error)}"
    else:
        names = _differing(run.make(copied(samples[::-1])), again)
        other = f"it has other {', '.join(names)}" if names else ""
    told = f"the collator writes into its samples ({told})"
    if not other:
        detail = f"{told}; a second batch of them is the same"
        return [Finding(Check(name=NAME, status="pass", detail=detail))]
    detail = f"{told}, and a second batch of them is another: {other}"
    look_at = "what it changes in place, which has to be a copy"
    return [failed(NAME, "samples written", detail, look_at)]


def _first_written(alone: Alone, handed: Sequence[Any], reference: Sequence[Sample]) -> str:
    """What of the first sample that is not as it was; empty where all are."""
    for number, (one, before) in enumerate(zip(handed, reference, strict=True)):
        try:
            names = _differing(before.given, on(dict(alone(copied(one))), CPU))
        except Exception as error:
            return f"sample {number}, which {raised(error)} when it is read again"
        if names:
            return f"{', '.join(names)} of sample {number}"
    return ""


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Names of tensors that differ, and of what only one has."""
    return [
        name
        for name in dict.fromkeys([*one, *two])
        if name not in one or name not in two or not _same(one[name], two[name])
    ]


def _same(one: Any, two: Any) -> bool:
    """Whether two tensors are equal, NaN and NaN too; what is no tensor is not looked at."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return True
    if one.shape != two.shape:
        return False
    return bool(((one == two) | ((one != one) & (two != two))).all())
