"""What one check found: of a row, of a model, of a run's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "shown", "too few", "not shown"]
"""`shown`: a figure without a bound. `too few`: too little data for the bound to mean anything.
`not shown`: nothing could be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of what was checked.

    Args:
        name: what is checked.
        status: see `Status`.
        measured: the largest difference that was found; None where it is no number.
        bound: the largest that passes; None for an exact comparison, or none.
        noise: the same measure between two unpacked runs; None where there is none.
        detail: where the largest difference lies, what was found first, or what was compared.
        look_at: what to look at where the check fails.
    """

    name: str
    status: Status
    measured: float | None = None
    bound: float | None = None
    noise: float | None = None
    detail: str = ""
    look_at: str = ""

    @property
    def fails(self) -> bool:
        """Whether it failed."""
        return self.status == "fail"

    @property
    def sentence(self) -> str:
        """What was found and, where it failed, what to look at: the same from every command."""
        hint = f"; look at {self.look_at}" if self.fails and self.look_at else ""
        return self.detail + hint
