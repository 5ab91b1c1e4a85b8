"""What the index holds of a split, by name: the account that the plan itself is checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import PlanSource
from vlmpack.data.plan.packs import PackPlan
from vlmpack.data.plan.streams import StreamSource
from vlmpack.proof.audit.findings import Audit, listed
from vlmpack.training.record import SampleName


class IndexedNames:
    """The samples of a split.

    Args:
        train: the split.
    """

    def __init__(self, train: TrainData) -> None:
        self.train = train

    @cached_property
    def usable(self) -> list[Counter[SampleName]]:
        """Per source, the samples that an epoch may draw, bad ones included: they become holes."""
        table, eligible = self.train.fitted.table, self.train.fitted.eligible
        found = []
        for first, last in zip(table.source_starts[:-1], table.source_starts[1:], strict=True):
            numbers = (eligible[first:last].nonzero()[0] + first).tolist()
            found.append(Counter(self._name(number) for number in numbers))
        return found

    def check_epoch(self, audit: Audit, epoch: int, planned: Mapping[SampleName, int]) -> None:
        """Every usable sample is planned once in an epoch."""
        wanted: Counter[SampleName] = Counter()
        for source in self.usable:
            wanted.update(source)
        drawn = Counter(planned)
        if missed := list((wanted - drawn).elements()):
            audit.fault(f"epoch {epoch}: in the index, but not planned: {listed(missed)}")
        if extra := list((drawn - wanted).elements()):
            audit.fault(f"epoch {epoch}: planned more often than the index has: {listed(extra)}")

    def check_draws(self, audit: Audit, epoch: int, planned: Mapping[SampleName, int]) -> None:
        """With weights: since the start, a source's draws are spread evenly over its samples."""
        counts = Counter(name for source in self.usable for name in source)
        sources: Sequence[PlanSource | StreamSource] = self.train.plan.sources
        for source, names in zip(sources, self.usable, strict=True):
            if any(counts[name] > 1 for name in names):
                audit.notes.append(f"{source.name} shares shards with another source: not compared")
                continue
            draws, size = (epoch + 1) * (source.num_draws or 0), sum(names.values())
            found = sum(planned.get(name, 0) for name in names)
            if found != draws:
                audit.fault(
                    f"epoch {epoch}: {source.name}: {found} samples are planned since the start, "
                    f"expected {draws}"
                )
            # A plan goes on in an epoch where the one before stopped; saved packs begin anew.
            times = epoch + 1 if isinstance(self.train.plan, PackPlan) else 1
            part = draws // times
            least, most = times * (part // max(1, size)), times * -(-part // max(1, size))
            odd = [
                name
                for name, copies in names.items()
                if not least * copies <= planned.get(name, 0) <= most * copies
            ]
            if odd:
                audit.fault(
                    f"epoch {epoch}: {source.name}: not planned {least} or {most} times since the "
                    f"start: {listed(odd)}"
                )

    def check_dropped(self, audit: Audit, lines: Sequence[Mapping[str, Any]]) -> None:
        """Over-long samples that the plan leaves out are in the ledger, and no others.

        Args:
            lines: of the ledger.
        """
        if not self.train.epoch_length().exact:
            return
        fitted = self.train.fitted
        wanted = {self._name(item.number) for item in fitted.dropped}
        shards = {stamp.path for stamp in fitted.table.shards}
        found = {
            SampleName(line["shard"], line["key"])
            for line in lines
            if line["batch"] is None and line["class"] == "too_long" and line["shard"] in shards
        }
        if missing := sorted(wanted - found):
            audit.fault(f"left out as too long, but not in the ledger: {listed(missing)}")
        if extra := sorted(found - wanted):
            audit.fault(f"the ledger calls these too long, the plan does not: {listed(extra)}")

    def _name(self, number: int) -> SampleName:
        ref = self.train.fitted.table.ref(number)
        return SampleName(ref.shard, ref.key)
