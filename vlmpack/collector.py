"""Python's garbage collector while packages are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import without collecting garbage, of which imports make next to none.

    Else each collection looks through all that was imported before, which takes a third of the
    time of importing torch and transformers. Afterwards what was imported is in the oldest
    generation, so that the next quick collection does not look through it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what a program has frozen stays so
            gc.freeze()
            gc.unfreeze()
        gc.enable()
