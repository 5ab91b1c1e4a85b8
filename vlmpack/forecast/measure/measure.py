"""A recipe and its plan -> how long the run takes here."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch

from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.data.config import SplitKey
from vlmpack.data.loading.ledger import Ledger
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.forecast.figures import RunPlan
from vlmpack.forecast.measure.choices import choices
from vlmpack.forecast.measure.launched import MeasuredRunError, Tell
from vlmpack.forecast.measure.speed import spread_of
from vlmpack.forecast.measure.surroundings import Counts, measured_stages
from vlmpack.forecast.measure.trials import Layout, Trials, measured_recipe
from vlmpack.forecast.measured import MeasuredFigures, Stage
from vlmpack.recipe import Recipe, derive
from vlmpack.recipe.derived import smallest_world
from vlmpack.words import counted, sized

BYTES_OF_A_SHORT_RUN = 12 + 4
"""That a run of two steps writes of a trained weight at most: a checkpoint, and an export."""


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
        MeasuredRunError: the recipe as it is fails; says what it said, and where all of that is.
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
        whole = measured_recipe(layout, {"run_dir": str(folder / "whole")})
        tell(f"measuring a run of 2 steps, from its launch to its export{_bytes_beside(plan)}")
        stages = measured_stages(whole, layout.processes, counts, tell)
        trials = Trials(layout, plan, folder, seconds, tell)
        trials.measure({})
        if others:
            for change in choices(whole, layout.processes):
                trials.try_out(change)
            for change in trials.contenders():
                trials.try_out(change)
            trials.measure({})
    except MeasuredRunError as error:
        raise _with_log_kept(error, Path(recipe.run_dir)) from None
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
            choices=trials.ranked(),
            stages=stages,
            spread=spread_of(trials.tried.values()),
            notes=_notes(layout, stages),
        ),
    )


def _with_log_kept(error: MeasuredRunError, run_dir: Path) -> MeasuredRunError:
    """The error of the recipe as it is, with what its processes said put beside `run_dir`."""
    if error.log is None:
        return error
    kept = run_dir.with_name(f"{run_dir.name}.measured.log")
    shutil.copyfile(error.log, kept)
    return MeasuredRunError(f"{error.said}\nall that it said is in {kept}")


def _bytes_beside(plan: RunPlan) -> str:
    """What the short run writes; nothing where nobody knows the model's sizes."""
    if plan.memory is None:
        return ""
    trained, whole = plan.memory.rank_trained, plan.memory.parameters
    return (
        f"; up to {sized(BYTES_OF_A_SHORT_RUN * trained + 4 * whole)} beside run_dir, removed again"
    )


def _layout_here(recipe: Recipe, plan: RunPlan) -> Layout:
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
    return Layout(
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
    data = data_spec(recipe, build_encoder(recipe), Ranks())
    opened = open_split(data, key, Ledger(None))
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


def _notes(layout: Layout, stages: Sequence[Stage]) -> tuple[str, ...]:
    notes = []
    evaluation = layout.recipe.evaluation
    if evaluation.best is not None:
        each = next(stage.seconds for stage in stages if stage.what == "checkpoint")
        notes.append(
            "evaluation.best writes a checkpoint at each step that is a new best one, "
            f"{each:.3g} s each: none of them is in these figures"
        )
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
