"""Samples that training skips, said where a person sees it: in the log, and in the last lines."""

from __future__ import annotations

import logging

from vlmpack.data.loading.ledger import LEDGER_NAME, Ledger, SkipLimiter, SkipLimits
from vlmpack.training.listener import Listener, TrainStep
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")


class SkipNotes(Listener):
    """One line for the first skipped sample of a launch, and one whenever they are ten times more.

    Args:
        ledger: has each with its reason.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.limiter = SkipLimiter(SkipLimits(), ledger)
        self._skipped = 0
        self._next = 1

    def on_step(self, step: TrainStep) -> None:
        """Count a step's skipped samples, and end the run where they are too many.

        Raises:
            DataLimitError: they are.
        """
        self.note(step.sums.num_skipped)
        self.limiter.check(samples=step.data.num_samples, skipped=step.sums.num_skipped)

    def note(self, skipped: int) -> None:
        """Counts a step's skipped samples, of all ranks.

        Args:
            skipped: their number; the ledger has their lines already.
        """
        self._skipped += skipped
        if self._skipped < self._next:
            return
        while self._next <= self._skipped:
            self._next *= 10
        if not logger.isEnabledFor(logging.WARNING):
            return
        lines = [line for line in self.ledger.lines() if line["batch"] is not None]
        why = ""
        if lines:
            last = lines[-1]
            why = f"; the last is {last['key']!r} in {last['shard']} ({last['class']}): " + str(
                last["reason"]
            )
        logger.warning(
            "%-14s %s of this launch left out%s. %s lists them",
            "skipped",
            counted(self._skipped, "sample"),
            why,
            LEDGER_NAME,
        )
