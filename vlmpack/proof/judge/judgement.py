"""What was found about a packing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from vlmpack.proof.measure import Check

Fault = Literal[
    "",
    "isolation",
    "positions over the row",
    "one-axis positions",
    "other positions",
    "label shift",
    "double shift",
    "labels across samples",
    "labels on padding",
    "other labels",
    "pixels swapped",
    "other pixels",
    "tokens lost",
    "samples written",
    "mean of means",
    "other loss",
    "other gradients",
    "refused",
]
"""What a failed check is called; empty where it passed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check, and the fault that it shows.

    Args:
        check: what was compared, the figure, its bound, and where it differs first.
        fault: its name; empty where the check passed.
    """

    check: Check
    fault: Fault = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """All that was compared; `str()` of it is a table.

    Args:
        findings: in the order in which a fault has consequences.
        samples: how many were compared.
        label_tokens: of all of them.
    """

    findings: tuple[Finding, ...]
    samples: int
    label_tokens: int

    @property
    def passed(self) -> bool:
        """Whether the batch computes what its samples do alone."""
        return not self.faults

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the faults, the first one first."""
        return tuple(dict.fromkeys(one.fault for one in self.findings if one.fault))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "passed": self.passed,
            "faults": list(self.faults),
            "samples": self.samples,
            "label_tokens": self.label_tokens,
            "checks": [asdict(one.check) | {"fault": one.fault} for one in self.findings],
        }

    def __str__(self) -> str:
        said = [f"{self.samples} samples, {self.label_tokens} label tokens"]
        for one in self.findings:
            check = one.check
            figure = "" if check.measured is None else f" {check.measured:.1e}"
            bound = "" if check.bound is None else f" (bound {check.bound:.0e})"
            fault = f" {one.fault.upper()}:" if one.fault else ""
            said.append(f"  {check.status:9} {check.name}:{fault}{figure}{bound} {check.sentence}")
        verdict = "right" if self.passed else f"wrong: {', '.join(self.faults)}"
        judged = ("pass", "fail")
        unseen = [one.check.name for one in self.findings if one.check.status not in judged]
        verdict += f"; not judged: {', '.join(unseen)}" if unseen else ""
        return "\n".join([*said, verdict])
