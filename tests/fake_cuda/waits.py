"""Where the host waits for the device in an optimizer step: once, to read what the step came to.

The list of third-party code is of the versions in constraints.txt, and by line on purpose: another
line of the same file is another wait, which somebody has to look at.
"""

from __future__ import annotations

OURS = ("a list", "vlmpack/training/step.py")
"""What `Stepper.train` reads: sums, counts and the gradient's norm in one tensor."""

_PADDING = "the stock tower's patches are padded: it asks whether any are, and takes those out"

THIRD_PARTY: dict[str, str] = {
    "transformers/masking_utils.py:369": _PADDING,
    "transformers/models/gemma4/modeling_gemma4.py:2112": _PADDING,
}
"""By place, why."""

BACKWARD: dict[str, dict[str, str]] = {}
"""By family, what autograd itself waits for there, and why."""
