"""What the log says of an objective's counts and sources, on the way."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vlmpack.data.loading.global_step import GlobalStep
from vlmpack.distributed import Ranks
from vlmpack.training.objective import Objective, ratios
from vlmpack.training.record import StepSamples

logger = logging.getLogger("vlmpack")


class Remarks:
    """The words of an objective in one launch.

    Args:
        objective: what is minimised.
        ranks: who this process is.
    """

    def __init__(self, objective: Objective, ranks: Ranks) -> None:
        self.objective = objective
        self.ranks = ranks
        self._said: set[str] = set()

    def say(
        self, step: int, totals: Mapping[str, float], data: GlobalStep, samples: StepSamples
    ) -> None:
        """Say what a count means, and of which sample, the first time in a launch that it is not 0.
        Collective then: the totals are the same on all ranks, the sample is one rank's.

        Args:
            step: optimizer steps taken.
            totals: sums and counts over all ranks.
            data: this rank's micro-batches.
            samples: their names.
        """
        for name, remark in self.objective.remarks.items():
            if not totals[name] or name in self._said:
                continue
            self._said.add(name)
            mine = [
                names[place]
                for names, micro_batch in zip(samples.names, data.micro_batches, strict=True)
                for place in remark.which(micro_batch.batch)
            ]
            found = [one for rank in self.ranks.gather_objects(mine[:1]) for one in rank]
            count = int(totals[name])
            said = f"{count:,} {remark.one if count == 1 else remark.many}"
            first = f", {'first ' if count > 1 else ''}{found[0]}"
            logger.warning("note: step %d: %s%s", step, said, first)

    def say_sources(self, step: int, totals: Mapping[str, float], what: str = "") -> None:
        """One line for each source of the data that the objective reports by itself.

        Args:
            step: optimizer steps taken.
            totals: sums and counts over all ranks.
            what: before the source's name.
        """
        for source, report in self.objective.by_source.items():
            found = {n: x for n, x in ratios(totals, report).items() if x is not None}
            if found:
                said = "  ".join(f"{n.replace('_', ' ')} {x:.4f}" for n, x in found.items())
                logger.info("step %d: %s%s  %s", step, what, source, said)
