"""How samples come to share rows. A packing mode is a value: whatever depends on it asks it.

    cut        a window's order -> its global batches and their bins; how large a window is
    identity   what of the cut decides the order, so that a run does not go on with another
    collator   what makes one batch of a bin's samples
    shape      the slots that such a batch takes, for those who encode no sample (`vlmpack plan`)
    label      what tables call it

A mode holds the recipe's `packing` section, the budget of a row that follows from it, and the
multiples that the parallel layout asks for. `base.py` has the class, `in_batch.py` and `online.py`
the modes. What the recipe's rules must know of a mode stands in vlmpack/recipe/packing_modes.py:
its name, whether rows are planned by a budget, the fields that a run may not change.

A new mode is a line there, a module here with a subclass of PackingMode, and a line in MODES. It
writes `cut` (and a packer, where neither of vlmpack/data/plan/packers.py does), and overrides the
other methods where its rows are not one a bin, of any width, as those of `in_batch` are.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmpack.data.modes.base import Cutting, PackingMode, RowShape, Uncut
from vlmpack.data.modes.in_batch import InBatch, Padded
from vlmpack.data.modes.online import Offline, Online
from vlmpack.recipe.packing_modes import ModeName

__all__ = [
    "MODES",
    "Cutting",
    "InBatch",
    "Offline",
    "Online",
    "Padded",
    "PackingMode",
    "RowShape",
    "Uncut",
]

MODES: Mapping[ModeName, type[PackingMode]] = {
    "none": Padded,
    "in_batch": InBatch,
    "online": Online,
    "offline": Offline,
}
