"""Where the host waits for the device in an optimizer step: once, to read what the step came to.

The list of third-party code is of the versions in constraints.txt, and by line on purpose: another
line of the same file is another wait, which somebody has to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

OURS = ("a list", "vlmpack/training/step.py")
"""What `Stepper.train` reads: sums, counts and the gradient's norm in one tensor."""

_PADDING = "the stock tower's patches are padded: it asks whether any are, and takes those out"

THIRD_PARTY: dict[str, str] = {
    "transformers/masking_utils.py:354": _PADDING,
    "transformers/models/gemma4/modeling_gemma4.py:2105": _PADDING,
}
"""By place, why."""

BACKWARD: dict[str, dict[str, str]] = {}
"""By family, what autograd itself waits for there, and why."""

OF_TRAINED_TOWERS = {
    family: {"how many a mask selects": _PADDING}
    for family in ("gemma4", "gemma4-dense", "gemma4-mixture")
}
"""By family, what autograd waits for where the tower trains, and why."""


def unknown_waits(
    family: str, waits: Sequence[Sequence[str]], *, tower_trains: bool = False
) -> list[tuple[str, str]]:
    """Waits that no list has, as what and where; the step's own read must be there, once."""
    found = [(what, place) for what, place in waits]
    own = [wait for wait in found if wait[1].startswith(f"{OURS[1]}:")]
    assert [what for what, _ in own] == [OURS[0]]
    known = {(what, "backward") for what in BACKWARD.get(family, ())}
    if tower_trains:
        known |= {(what, "backward") for what in OF_TRAINED_TOWERS.get(family, ())}
    return [
        wait
        for wait in found
        if wait not in own and wait not in known and wait[1] not in THIRD_PARTY
    ]
