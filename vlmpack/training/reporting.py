"""What a run reports of its steps: metrics.jsonl, the live line, experiment trackers, the log."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from vlmpack.data.loading.ledger import LEDGER_NAME, UNLEARNT, Ledger, SkipLimiter, SkipLimits
from vlmpack.distributed import Ranks
from vlmpack.recipe.schema import LoggingSection
from vlmpack.training.listener import Boundary, Listener, TrainStep, is_due
from vlmpack.training.metrics import TRACKED, MetricsLog, Progress, StepRow
from vlmpack.training.objective import Objective, ratios
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import Stepper
from vlmpack.training.trackers import Trackers
from vlmpack.words import counted, some_of

logger = logging.getLogger("vlmpack")


class Remarks(Listener):
    """Logs what a count of the objective means, the first time in a launch that it is not 0."""

    def __init__(self, objective: Objective, ranks: Ranks) -> None:
        self.objective = objective
        self.ranks = ranks
        self._said: set[str] = set()

    def on_step(self, step: TrainStep) -> None:
        """Report a count with the first sample that it is about. Collective if there is one."""
        for name, remark in () if step.sums.is_skipped else self.objective.remarks.items():
            if not step.sums.totals[name] or name in self._said:
                continue
            self._said.add(name)
            mine = [
                names[place]
                for names, micro_batch in zip(step.data.names, step.data.micro_batches, strict=True)
                for place in remark.which(micro_batch.batch)
            ]
            remarks = [one for rank in self.ranks.gather_objects(mine[:1]) for one in rank]
            count = int(step.sums.totals[name])
            said = f"{count:,} {remark.one if count == 1 else remark.many}"
            first = f", {'first ' if count > 1 else ''}{remarks[0]}"
            logger.warning("note: step %d: %s%s", step.step, said, first)


WINDOW, LEAST_WINDOW = 128, 32
"""Steps that a figure is compared with, and how many there must be."""
SPIKE = 20.0
"""Deviations above the median from which a figure is a spike. Gradient norms have long tails. In
clean runs of the demo they reach 13."""
MOST_SAMPLES = 64
"""Samples that a line names."""
LEAST_SHARE = 0.02
"""The least deviation, as a share of the median, or equal figures would make any a spike."""


class Spikes(Listener):
    """Logs a loss or a gradient norm far above those of the steps before, with the step's samples.

    A deviation is 1.4826 times the median distance from the median, which for normal figures is
    their standard deviation. A spike cannot move it. The window is in the checkpoint. It takes
    finite figures alone, so a step that was skipped never enters it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.windows = {name: deque[float](maxlen=WINDOW) for name in ("loss", "grad_norm")}
        self._high: set[str] = set()

    def on_step(self, step: TrainStep) -> None:
        """Report figures that have become spikes. Collective if there is one."""
        figures = {"loss": step.sums.loss, "grad_norm": step.sums.grad_norm}
        if not math.isfinite(math.fsum(math.nan if x is None else x for x in figures.values())):
            return
        found = {}
        for name, figure in figures.items():
            assert figure is not None
            window, deviations = self.windows[name], 0.0
            if len(window) >= LEAST_WINDOW:
                middle = median(window)
                spread = 1.4826 * median([abs(one - middle) for one in window])
                deviations = (figure - middle) / max(spread, LEAST_SHARE * abs(middle), 1e-12)
            window.append(figure)
            if deviations < SPIKE:
                self._high.discard(name)
            elif name not in self._high:
                self._high.add(name)
                found[name] = f"{name} {figure:.4g} after a median of {middle:.4g} "
                found[name] += f"({deviations:.0f} deviations)"
        if found:
            everyone = self.ranks.gather_objects([*chain.from_iterable(step.data.names)])
            samples = some_of(dict.fromkeys(chain.from_iterable(everyone)), MOST_SAMPLES)
            said = "; ".join(found.values())
            logger.warning("spike: step %d: %s. Its samples: %s", step.step, said, samples)

    def state(self) -> Mapping[str, Any]:
        return {"spikes": {name: [*window] for name, window in self.windows.items()}}

    def resume(self, state: Mapping[str, Any]) -> None:
        for name, figures in state.get("spikes", {}).items():
            self.windows[name].extend(figures)


def median(figures: Iterable[float]) -> float:
    """The upper one of two in the middle."""
    ordered = sorted(figures)
    return ordered[len(ordered) // 2]


class SkipNotes(Listener):
    """Logs the first skipped sample of a launch, and again whenever there are ten times more."""

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
        holes = step.sums.num_skipped - step.sums.num_unlearnt
        self.note(holes)
        self.limiter.check(samples=step.data.num_samples, skipped=holes)

    def note(self, skipped: int) -> None:
        """Counts a step's skipped samples, of all ranks."""
        self._skipped += skipped
        if self._skipped < self._next:
            return
        while self._next <= self._skipped:
            self._next *= 10
        if not logger.isEnabledFor(logging.WARNING):
            return
        lines = [
            line
            for line in self.ledger.lines()
            if line["batch"] is not None and line["class"] != UNLEARNT
        ]
        why = ""
        if lines:
            last = lines[-1]
            why = f"; the last is {last['key']!r} in {last['shard']} ({last['class']}): "
            why += str(last["reason"])
        logger.warning(
            "%-14s %s of this launch left out%s. %s lists them",
            "skipped",
            counted(self._skipped, "sample"),
            why,
            LEDGER_NAME,
        )


class _Outlets(NamedTuple):
    metrics: MetricsLog
    progress: Progress
    trackers: Trackers


@dataclass(slots=True, kw_only=True)
class Reporting(Listener):
    """Where a run's figures go. The main rank alone reports; on the others every call does nothing.

    Args:
        config: the recipe's identity, for trackers.
    """

    section: LoggingSection
    run_dir: RunDir
    config: Mapping[str, Any]
    total_steps: int
    stepper: Stepper
    _outlets: _Outlets | None = None

    def on_start(self, here: Boundary) -> None:
        if not self.stepper.ranks.is_main:
            return
        interval = self.section.interval_steps
        self._outlets = _Outlets(
            MetricsLog(self.run_dir.metrics, resume_step=here.step),
            Progress(self.section.progress, total_steps=self.total_steps, interval_steps=interval),
            Trackers(self.section, self.run_dir.path, self.config),
        )
        self._outlets.progress.start(here.step)

    def on_step(self, step: TrainStep) -> None:
        """Report a step; later listeners find its row in `step.row`."""
        if self._outlets is None:
            return
        metrics, progress, trackers = self._outlets
        row = step_row(self.stepper, step)
        step.row = row.as_row()
        metrics.write(step.row)
        progress.update(row)
        if row.skipped:
            trackers.log({"skipped": 1.0}, step.step)
        elif is_due(step.step, self.section.interval_steps):
            self._say_sources(step.step, step.sums.totals)
            tracked = {name: getattr(row, name) for name in TRACKED}
            trackers.log(tracked | dict(row.reported), step.step)

    def evaluated(self, step: int, figures: Mapping[str, float | None], **more: int) -> None:
        """Report an evaluation.

        Args:
            figures: by their names in metrics.jsonl.
            more: columns of metrics.jsonl alone.
        """
        if self._outlets is not None:
            self._outlets.metrics.write({"step": step, **figures, **more})
            self._outlets.trackers.log(figures, step)

    def validated(
        self, step: int, figures: Mapping[str, float | None], totals: Mapping[str, float]
    ) -> None:
        """Report a validation, in the log too.

        Args:
            totals: sums and counts over all ranks.
        """
        if self._outlets is None:
            return
        labels = int(totals["num_label_tokens"])
        self.evaluated(step, figures, validation_label_tokens=labels)
        figures_shown = [(n, figures[f"validation_{n}"]) for n in self.stepper.objective.shown]
        shown = "".join(f", {n} {'-' if x is None else f'{x:.4f}'}" for n, x in figures_shown)
        logger.info("step %d: validation loss %.4f%s", step, figures["validation_loss"], shown)
        self._say_sources(step, totals, "validation of ")

    def _say_sources(self, step: int, totals: Mapping[str, float], what: str = "") -> None:
        for source, report in self.stepper.objective.by_source.items():
            ratios_of = {n: x for n, x in ratios(totals, report).items() if x is not None}
            if ratios_of:
                said = "  ".join(f"{n.replace('_', ' ')} {x:.4f}" for n, x in ratios_of.items())
                logger.info("step %d: %s%s  %s", step, what, source, said)

    def close(self) -> None:
        outlets, self._outlets = self._outlets, None  # a second call waits for no tracker again
        if outlets is not None:
            outlets.progress.stop()
            outlets.metrics.close()
            outlets.trackers.close()


def step_row(stepper: Stepper, step: TrainStep) -> StepRow:
    sums, data = step.sums, step.data
    return StepRow(
        step=step.step,
        epoch=data.epoch,
        loss=sums.loss,
        loss_divisor=stepper.objective.divided_by(sums.totals),
        grad_norm=sums.grad_norm,
        learning_rate=stepper.schedule(step.step - 1),
        num_tokens=sums.num_tokens,
        num_shared_tokens=sums.num_shared_tokens,
        num_shared_patches=sums.num_shared_patches,
        num_slots=sums.num_slots,
        num_padded_slots=sums.num_padded_slots,
        num_label_tokens=sums.num_label_tokens,
        num_samples=sums.num_samples,
        num_skipped=sums.num_skipped,
        num_rows=data.num_rows,
        num_eager_rows=sums.num_eager_rows,
        imbalance=data.imbalance,
        read_seconds=sum(micro.read_seconds for micro in data.micro_batches),
        encode_seconds=sum(micro.encode_seconds for micro in data.micro_batches),
        reported=stepper.reported(sums),
        skipped=sums.is_skipped,
        **step.seconds,
    )
