"""Settings of a recipe, each measured in processes of its own, the best of them twice."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlmpack.forecast.figures import RunPlan
from vlmpack.forecast.measure.choices import Change, words
from vlmpack.forecast.measure.launched import MeasuredRunError, Tell, first_steps
from vlmpack.forecast.measure.speed import (
    is_enough,
    per_token,
    scaled,
    speed_of,
    steps_ahead,
    together,
)
from vlmpack.forecast.measured import MeasuredChoice, StepSpeed
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.show import dump_recipe
from vlmpack.training.run_dir import RunDir

QUIET: Mapping[str, Any] = {
    "training.verify": False,
    "evaluation.generate": False,
    "evaluation.generate_interval_steps": None,
    "evaluation.interval_steps": None,
    "evaluation.best": None,
    "evaluation.patience": None,
    "checkpoint.interval_steps": None,
    "export.enabled": False,
    "export.weights": "last",
}
"""What a run is told whose steps alone are looked at."""
CONTENDERS = 2
"""Settings that are measured once more, beside the recipe as it is: the fastest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """On what is measured.

    Args:
        recipe: of the run.
        processes: that are measured; `world_size` of the run.
        copies: of the model among them; `all_copies` of the run.
    """

    recipe: Recipe
    processes: int
    world_size: int
    copies: int
    all_copies: int


def measured_recipe(layout: Layout, changes: Change) -> Recipe:
    """The recipe as it is measured: nothing is tracked, nobody waits for a display."""
    recipe = layout.recipe
    batch = recipe.training.global_batch_size * layout.copies // layout.all_copies
    fixed: dict[str, Any] = {
        "training.global_batch_size": batch,
        "logging.trackers": [],
        "logging.progress": "none",
        "checkpoint.resume": "never",
    }
    if recipe.objective.keeps_reference:
        kept = recipe.objective.reference_dir or str(RunDir(Path(recipe.run_dir)).reference)
        fixed["objective.reference_dir"] = kept
    return load_recipe(recipe, {**fixed, **changes})


class Trials:
    """Settings, each measured in processes of its own.

    Args:
        layout: on what.
        plan: of the recipe.
        folder: for what they write.
        seconds: of steps that are measured each time.
        tell: what is waited for.
    """

    def __init__(
        self, layout: Layout, plan: RunPlan, folder: Path, seconds: float, tell: Tell
    ) -> None:
        self.layout, self.plan, self.folder = layout, plan, folder
        self.seconds, self.tell = seconds, tell
        self.changes: dict[str, Change] = {}
        self.tried: dict[str, list[StepSpeed]] = {}
        self.failures: dict[str, str] = {}

    def try_out(self, change: Change) -> None:
        """As `measure`; one that fails is kept as such."""
        try:
            self.measure(change)
        except MeasuredRunError as error:
            self.tried[words(change)] = []
            self.failures[words(change)] = error.said

    def measure(self, change: Change) -> None:
        """The first steps of the recipe with a change.

        Raises:
            MeasuredRunError: they fail.
        """
        name = words(change)
        again = " once more" if name in self.tried else ""
        what = name or "the recipe as it is"
        self.tell(f"measuring {what}{again}: its first steps, {self.seconds:g} s of them")
        run_dir = self.folder / f"{len(self.tried)}-{len(self.tried.get(name, ()))}"
        recipe = measured_recipe(self.layout, {**QUIET, **change, "run_dir": str(run_dir)})
        ahead = steps_ahead(recipe.data, self._micro_batches(recipe))
        try:
            rows = first_steps(
                dump_recipe(recipe),
                run_dir,
                self.layout.processes,
                partial(is_enough, ahead=ahead, seconds=self.seconds),
                self.tell,
            )
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        speed = speed_of(rows, ahead)
        if speed is None:
            raise MeasuredRunError("the run took no step")
        self.changes[name] = change
        self.tried.setdefault(name, []).append(speed)

    def _micro_batches(self, recipe: Recipe) -> float:
        """How many a mean step has for each copy; one is a row where rows are planned."""
        mode, copies = self.plan.mode, self.layout.all_copies
        if recipe.packing.facts.plans_rows:
            return mode.rows / max(1, mode.steps) / copies
        training = recipe.training
        return training.global_batch_size / training.micro_batch_size / self.layout.copies

    def contenders(self) -> list[Change]:
        """The fastest of the changes, the slower one first. Measured once more, and the recipe as
        it is behind them, they show as spread what changed on this machine meanwhile."""
        others = [name for name, speeds in self.tried.items() if name and speeds]
        others.sort(key=lambda name: per_token(self.tried[name][0]))
        return [self.changes[name] for name in reversed(others[:CONTENDERS])]

    def ranked(self) -> tuple[MeasuredChoice, ...]:
        """All of them, the fastest first, those that failed last. The recipe as it is is carried
        over to the run by the slots of a mean step, which the plan knows; each to as many tokens,
        of which every setting trains the same."""
        mode, layout = self.plan.mode, self.layout
        own = together(self.tried[""])
        slots = mode.slots / max(1, mode.steps) * layout.copies / layout.all_copies
        own = scaled(own, slots / own.slots if slots and own.slots else 1.0)
        found = []
        for name, speeds in self.tried.items():
            if not speeds:
                failure = self.failures[name]
                found.append(
                    MeasuredChoice(
                        change=name, speed=None, training_seconds=None, passes=0, failure=failure
                    )
                )
                continue
            speed = together(speeds)
            speed = scaled(speed, own.tokens / max(1.0, speed.tokens))
            found.append(
                MeasuredChoice(
                    change=name,
                    speed=speed,
                    training_seconds=speed.seconds * self.plan.run_steps,
                    passes=len(speeds),
                )
            )
        return _fastest_first(found)


def _fastest_first(found: Sequence[MeasuredChoice]) -> tuple[MeasuredChoice, ...]:
    """Those that failed last."""
    return tuple(
        sorted(found, key=lambda one: (one.training_seconds is None, one.training_seconds or 0.0))
    )
