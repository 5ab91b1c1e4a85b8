"""A recipe and its plan -> how long the run takes here."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from vlmpack.build.data import build_encoder, open_split
from vlmpack.build.setup import Setup
from vlmpack.data.config import SplitKey
from vlmpack.data.loading.ledger import Ledger
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.forecast.figures import RunPlan
from vlmpack.forecast.measure.choices import Change, choices, words
from vlmpack.forecast.measure.launched import MeasuredRunError, first_steps
from vlmpack.forecast.measure.speed import is_enough, scaled, speed_of, steps_ahead
from vlmpack.forecast.measure.surroundings import Counts, measured_stages
from vlmpack.forecast.measured import MeasuredChoice, MeasuredFigures
from vlmpack.recipe import Recipe, derive, load_recipe
from vlmpack.recipe.derived import smallest_world
from vlmpack.recipe.show import dump_recipe
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted

Tell = Callable[[str], None]
"""Told what is waited for, a line each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
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


def measure_plan(
    recipe: Recipe, plan: RunPlan, *, seconds: float, others: bool, tell: Tell
) -> RunPlan:
    """The plan with the time of its run, from its first steps on the device that is there. What is
    measured is written beside `run_dir` and removed; trackers are told nothing.

    Args:
        recipe: of the plan.
        plan: of the recipe; its `world_size` is the run's. Where fewer devices are here, fewer
            copies of the model are measured, each with its part of the global batch.
        seconds: of steps that are measured for each choice, warm-up left out.
        others: whether choices that change no loss are measured, too.
        tell: what is waited for.

    Raises:
        RecipeError: a copy of the model needs more devices than are here, or the global batch
            cannot be shared out over the copies that are measured.
        MeasuredRunError: the recipe as it is fails; says what it said.
        VlmpackError: the folder beside `run_dir` cannot be written.
    """
    layout = _layout_here(recipe, plan)
    counts = Counts(
        steps=plan.run_steps,
        questions=_samples(recipe, "data.test") if recipe.evaluation.generate else 0,
        validated=_samples(recipe, "data.validation"),
    )
    folder = _folder_beside(Path(recipe.run_dir))
    try:
        whole = _measured_recipe(layout, {"run_dir": str(folder / "whole")})
        tell("measuring a run of 2 steps, from its launch to its export")
        stages = measured_stages(whole, layout.processes, counts)
        wanted: list[Change] = [{}]
        if others:
            wanted += choices(whole, layout.processes)
        found = [
            _choice(layout, plan, change, folder / str(number), seconds, tell)
            for number, change in enumerate(wanted)
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(
        plan,
        measured=MeasuredFigures(
            device=device_words(),
            processes=layout.processes,
            copies=layout.copies,
            all_copies=layout.all_copies,
            run_steps=plan.run_steps,
            choices=_fastest_first(found),
            stages=stages,
            notes=_notes(layout),
        ),
    )


def _choice(
    layout: _Layout, plan: RunPlan, change: Change, run_dir: Path, seconds: float, tell: Tell
) -> MeasuredChoice:
    """Measure one choice.

    Raises:
        MeasuredRunError: the recipe as it is fails.
    """
    name = words(change)
    tell(f"measuring {name or 'the recipe as it is'}: its first steps, {seconds:g} s of them")
    quiet: dict[str, Any] = {"evaluation.generate": False, "training.verify": False}
    recipe = _measured_recipe(layout, {**quiet, **change, "run_dir": str(run_dir)})
    mode = plan.mode
    ahead = steps_ahead(recipe.data, mode.rows / max(1, mode.steps) / layout.all_copies)
    try:
        rows = first_steps(
            dump_recipe(recipe),
            run_dir,
            layout.processes,
            partial(is_enough, ahead=ahead, seconds=seconds),
        )
    except MeasuredRunError as error:
        if not change:
            raise
        return MeasuredChoice(change=name, speed=None, training_seconds=None, failure=error.said)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    speed = speed_of(rows, ahead)
    if speed is None:
        raise MeasuredRunError("the run took no step")
    # Other splits into micro-batches have other slots: their own steps are the measure.
    slots = mode.slots / max(1, mode.steps) * layout.copies / layout.all_copies
    if "training.micro_batch_size" not in change:
        speed = scaled(speed, slots)
    return MeasuredChoice(change=name, speed=speed, training_seconds=speed.seconds * plan.run_steps)


def _fastest_first(found: Sequence[MeasuredChoice]) -> tuple[MeasuredChoice, ...]:
    """Those that failed last."""
    return tuple(
        sorted(found, key=lambda one: (one.training_seconds is None, one.training_seconds or 0.0))
    )


def _measured_recipe(layout: _Layout, changes: Change) -> Recipe:
    """The recipe as it is measured: nothing is tracked or kept, nobody waits for a display."""
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


def _layout_here(recipe: Recipe, plan: RunPlan) -> _Layout:
    """As many copies of the model as there are devices for, up to those of the run."""
    smallest, here = smallest_world(recipe.parallelism), _devices()
    if smallest > here:
        raise RecipeError(
            [
                "--measure: one copy of the model takes "
                f"{counted(smallest, 'process', 'processes')}, here are {device_words()}; expected "
                "as many devices: measure on such a machine"
            ]
        )
    processes = min(plan.world_size, here // smallest * smallest)
    copies = derive(recipe, processes).data_parallel
    batch, all_copies = recipe.training.global_batch_size, plan.data_parallel
    if batch * copies % all_copies:
        raise RecipeError(
            [
                f"--measure: training.global_batch_size {batch} for {all_copies} copies of the "
                f"model cannot be measured with the {copies} that fit here; expected a whole "
                "number of samples or rows for each: set --world-size to what is here"
            ]
        )
    return _Layout(
        recipe=recipe,
        processes=processes,
        world_size=plan.world_size,
        copies=copies,
        all_copies=all_copies,
    )


def _devices() -> int:
    """GPUs, or the cores that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def device_words() -> str:
    """`2 x NVIDIA H200`, or the cores that this process may use."""
    if gpus := torch.cuda.device_count():
        return f"{gpus} x {torch.cuda.get_device_name(0)}"
    return f"{counted(_devices(), 'core')} of a CPU ({platform.machine()})"


def _samples(recipe: Recipe, key: SplitKey) -> int:
    """Usable samples of a split that is evaluated each time; 0 without one."""
    setup = Setup(recipe=recipe, ranks=Ranks(), encoder=build_encoder(recipe))
    opened = open_split(setup, key, Ledger(None))
    if opened is None:
        return 0
    try:
        opened.split.index_all()
        count = int(opened.split.fitted.eligible.sum())
    finally:
        opened.split.close()
    evaluation = recipe.evaluation
    most = evaluation.max_samples if key == "data.validation" else evaluation.generate_max_samples
    return count if most is None else min(count, most)


def _folder_beside(run_dir: Path) -> Path:
    """A new folder on the run's disk."""
    try:
        run_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f"{run_dir.name}.measured-", dir=run_dir.absolute().parent))
    except OSError as error:
        raise VlmpackError(
            f"--measure writes beside run_dir: {error}; expected a folder that can be written"
        ) from None


def _notes(layout: _Layout) -> tuple[str, ...]:
    notes = []
    if layout.copies < layout.all_copies:
        notes.append(
            f"measured with {layout.copies} of {layout.all_copies} copies of the model, each with "
            "its part of the global batch: what copies send each other is not in these figures"
        )
    if layout.recipe.objective.keeps_reference:
        notes.append(
            "the reference of the pairs was computed meanwhile and is kept: the run finds it, and "
            "it is in no figure here"
        )
    return tuple(notes)
