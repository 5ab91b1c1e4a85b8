"""A recipe and its plan -> how long the run takes here.

Each setting that changes no loss is measured in its own processes, and the best of them twice. One
short run measures everything around the steps: answers, validation, checkpoints, the export.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.data.config import SplitKey
from vlmpack.data.loading.ledger import Ledger
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.forecast.figures import MeasuredChoice, MeasuredFigures, RunPlan, Stage, StepSpeed
from vlmpack.forecast.launched import (
    MeasuredRunError,
    Tell,
    first_steps,
    is_enough,
    per_token,
    scaled,
    speed_of,
    spread_of,
    steps_ahead,
    together,
    whole_run,
)
from vlmpack.recipe import Recipe, derive, load_recipe
from vlmpack.recipe.derived import smallest_world
from vlmpack.recipe.show import dump_recipe
from vlmpack.training.run_dir import RunDir
from vlmpack.words import counted, sized

Change = Mapping[str, Any]


STEPS = 2
"""Optimizer steps of the short run."""


MOST_QUESTIONS = 64
"""Answered, and samples validated, in the short run; rounded up to a whole batch of each process.
"""


AT_THE_END: Mapping[str, Any] = {
    "evaluation.generate_interval_steps": None,
    "evaluation.interval_steps": None,
    "evaluation.best": None,
    "evaluation.patience": None,
    "checkpoint.interval_steps": None,
    "export.weights": "last",
}
"""Overrides of a run that does everything once."""


QUIET: Mapping[str, Any] = {
    **AT_THE_END,
    "training.verify": False,
    "evaluation.generate": False,
    "export.enabled": False,
}
"""Overrides of a run whose steps are measured."""


CONTENDERS = 2
"""How many of the fastest settings are measured once more."""


BYTES_OF_A_SHORT_RUN = 12 + 4
"""That a run of two steps writes of a trained weight at most: a checkpoint, and an export."""


def measure_plan(
    recipe: Recipe, plan: RunPlan, *, seconds: float, others: bool, tell: Tell
) -> RunPlan:
    """The plan with the time of its run, from its first steps on this machine's devices.

    Measured runs are written next to `run_dir` and removed; trackers get nothing.

    Args:
        plan: its `world_size` is the run's. On fewer devices fewer model copies are measured, each
            with its part of the global batch.
        seconds: of measured steps for each choice, without warm-up.
        others: measure choices that change no loss, too.

    Raises:
        RecipeError: a model copy needs more devices than there are, or the global batch cannot be
            divided over the measured copies.
        MeasuredRunError: the unchanged recipe fails; with its output and the place of its log.
        VlmpackError: the folder next to `run_dir` cannot be written.
    """
    layout = _layout_here(recipe, plan)
    counts = Counts(
        steps=plan.run_steps,
        questions=_samples(recipe, "data.test") if recipe.evaluation.generate else 0,
        validated=_samples(recipe, "data.validation"),
    )
    folder = _short_run_folder(Path(recipe.run_dir))
    try:
        whole = measured_recipe(layout, {"run_dir": str(folder / "whole")})
        tell(f"measuring a run of 2 steps, from its launch to its export{_bytes_written(plan)}")
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
    """The error of the unchanged recipe, with its log moved next to `run_dir`."""
    if error.log is None:
        return error
    log = run_dir.with_name(f"{run_dir.name}.measured.log")
    shutil.copyfile(error.log, log)
    return MeasuredRunError(f"{error.said}\nall that it said is in {log}")


def _bytes_written(plan: RunPlan) -> str:
    """What the short run writes; 0 if the model's sizes are not known."""
    if plan.memory is None:
        return ""
    trained, whole = plan.memory.rank_trained, plan.memory.parameters
    return (
        f"; up to {sized(BYTES_OF_A_SHORT_RUN * trained + 4 * whole)} beside run_dir, removed again"
    )


def _layout_here(recipe: Recipe, plan: RunPlan) -> Layout:
    """As many model copies as the devices allow, up to those of the run."""
    smallest, here = smallest_world(recipe.parallelism), _devices()
    if smallest > here:
        raise RecipeError(
            f"--measure: one copy of the model takes {counted(smallest, 'process', 'processes')}, "
            f"and this machine has {device_words()}. Expected as many devices, so measure on a "
            "larger machine"
        )
    processes = min(plan.world_size, here // smallest * smallest)
    copies = derive(recipe, processes).data_parallel
    batch, all_copies = recipe.training.global_batch_size, plan.data_parallel
    if batch * copies % all_copies:
        raise RecipeError(
            f"--measure: training.global_batch_size {batch} for {all_copies} copies of the model "
            f"cannot be measured with the {copies} that fit here. Expected a whole number of "
            "samples or rows for each. Set --world-size to what is here"
        )
    return Layout(
        recipe=recipe,
        processes=processes,
        world_size=plan.world_size,
        copies=copies,
        all_copies=all_copies,
    )


def _devices() -> int:
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def device_words() -> str:
    """`2 x NVIDIA H200`, or the cores that this process may use."""
    if gpus := torch.cuda.device_count():
        return f"{gpus} x {torch.cuda.get_device_name(0)}"
    return f"{counted(_devices(), 'core')} of a CPU ({platform.machine()})"


def _samples(recipe: Recipe, key: SplitKey) -> int:
    """Usable samples of a split that is evaluated each time; 0 without one."""
    data = data_spec(recipe, build_encoder(recipe), Ranks())
    evaluated = open_split(data, key, Ledger(None))
    if evaluated is None:
        return 0
    try:
        evaluated.split.index_all()
        count = int(evaluated.split.fitted.eligible.sum())
    finally:
        evaluated.split.close()
    evaluation = recipe.evaluation
    most = evaluation.max_samples if key == "data.validation" else evaluation.generate_max_samples
    return count if most is None else min(count, most)


def _short_run_folder(run_dir: Path) -> Path:
    try:
        run_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(prefix=f"{run_dir.name}.measured-", dir=run_dir.absolute().parent))
    except OSError as error:
        raise VlmpackError(
            f"--measure writes next to run_dir: {error}; expected a folder that can be written"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The processes and model copies of a measurement.

    Args:
        processes: that are measured; `world_size` of the run.
        copies: of the model among them; `all_copies` of the run.
    """

    recipe: Recipe
    processes: int
    world_size: int
    copies: int
    all_copies: int


def measured_recipe(layout: Layout, changes: Change) -> Recipe:
    """The recipe with changes, for a measured run without trackers and display."""
    recipe = layout.recipe
    batch = recipe.training.global_batch_size * layout.copies // layout.all_copies
    fixed: dict[str, Any] = {
        "training.global_batch_size": batch,
        "logging.trackers": [],
        "logging.progress": "none",
        "checkpoint.resume": "never",
    }
    if recipe.objective.keeps_reference:
        reference_dir = recipe.objective.reference_dir or str(
            RunDir(Path(recipe.run_dir)).reference
        )
        fixed["objective.reference_dir"] = reference_dir
    return load_recipe(recipe, {**fixed, **changes})


class Trials:
    """Settings, each measured in processes of its own."""

    def __init__(
        self, layout: Layout, plan: RunPlan, folder: Path, seconds: float, tell: Tell
    ) -> None:
        self.layout, self.plan, self.folder = layout, plan, folder
        self.seconds, self.tell = seconds, tell
        self.changes: dict[str, Change] = {}
        self.tried: dict[str, list[StepSpeed]] = {}
        self.failures: dict[str, str] = {}

    def try_out(self, change: Change) -> None:
        """As `measure`, but a failure is kept as a result."""
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
        """Micro-batches of a mean step and copy; a micro-batch is one row if rows are planned."""
        mode, copies = self.plan.mode, self.layout.all_copies
        if recipe.packing.facts.plans_rows:
            return mode.rows / max(1, mode.steps) / copies
        training = recipe.training
        return training.global_batch_size / training.micro_batch_size / self.layout.copies

    def contenders(self) -> list[Change]:
        """The fastest of the changes, the slower one first, to be measured once more.

        The unchanged recipe follows. Their spread shows what changed on this machine meanwhile.
        """
        others = [name for name, speeds in self.tried.items() if name and speeds]
        others.sort(key=lambda name: per_token(self.tried[name][0]))
        return [self.changes[name] for name in reversed(others[:CONTENDERS])]

    def ranked(self) -> tuple[MeasuredChoice, ...]:
        """All choices, the fastest first, failures last.

        The unchanged recipe is scaled to the run by the slots of a mean step. Each choice is scaled
        to as many tokens, since every setting trains the same tokens.
        """
        mode, layout = self.plan.mode, self.layout
        own = together(self.tried[""])
        slots = mode.slots / max(1, mode.steps) * layout.copies / layout.all_copies
        own = scaled(own, slots / own.slots if slots and own.slots else 1.0)
        measured = []
        for name, speeds in self.tried.items():
            speed = together(speeds) if speeds else None
            if speed is not None:
                speed = scaled(speed, own.tokens / max(1.0, speed.tokens))
            made = MeasuredChoice(
                change=name,
                speed=speed,
                training_seconds=None if speed is None else speed.seconds * self.plan.run_steps,
                passes=len(speeds),
                failure=self.failures.get(name, ""),
            )
            measured.append(made)
        measured.sort(key=lambda one: (one.training_seconds is None, one.training_seconds or 0.0))
        return tuple(measured)


def choices(recipe: Recipe, world_size: int) -> list[Change]:
    """Changes of one key each that leave every loss as it is, up to the rounding of sums.

    They concern micro-batches, recomputation, workers and balancing. Changes that the recipe's
    rules refuse are left out.
    """
    return [
        change for change in _candidate_changes(recipe, world_size) if _is_allowed(recipe, change)
    ]


def words(change: Change) -> str:
    """`data.num_workers=2`, as the command line takes it; empty for the recipe as it is."""
    return " ".join(f"{name}={value}" for name, value in change.items())


def _candidate_changes(recipe: Recipe, world_size: int) -> Iterator[Change]:
    """Changes that may make a step faster or smaller, whether the rules allow them or not."""
    training, packing = recipe.training, recipe.packing
    copies = derive(recipe, world_size).data_parallel
    if not packing.facts.plans_rows:
        micro, whole = training.micro_batch_size, training.global_batch_size // copies
        sizes = {_below(micro, whole), _above(micro, whole)} - {micro}
        yield from ({"training.micro_batch_size": size} for size in sorted(sizes))
    for value in ("none", "selective", "full"):
        if value != recipe.model.recomputed:
            yield {"model.activation_checkpointing": value}
    workers, cores = recipe.data.workers, len(os.sched_getaffinity(0)) // world_size
    numbers = {workers // 2, max(1, 2 * workers)} - {workers}
    yield from ({"data.num_workers": n} for n in sorted(numbers) if n <= max(1, cores))
    if packing.facts.plans_rows and copies > 1:
        yield {"packing.balance": "none" if packing.balance == "cost" else "cost"}


def _below(size: int, whole: int) -> int:
    """The largest divisor of `whole` up to half of `size`; else `size`."""
    return max((n for n in range(1, size // 2 + 1) if whole % n == 0), default=size)


def _above(size: int, whole: int) -> int:
    """The smallest divisor of `whole` from twice `size` on; else `size`."""
    return min((n for n in range(2 * size, whole + 1) if whole % n == 0), default=size)


def _is_allowed(recipe: Recipe, change: Change) -> bool:
    try:
        load_recipe(recipe, change)
    except RecipeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of the whole run.

    Args:
        questions: answered each time.
        validated: samples of each validation.
    """

    steps: int
    questions: int
    validated: int


def measured_stages(
    recipe: Recipe, processes: int, counts: Counts, tell: Tell
) -> tuple[Stage, ...]:
    """Launch, validations, answers, checkpoints, export: how often, and how long each.

    Args:
        recipe: with a `run_dir` of its own, which does not exist yet.

    Raises:
        MeasuredRunError: the short run failed.
    """
    batch_size = recipe.evaluation.batch_size * processes
    few = -(-MOST_QUESTIONS // batch_size) * batch_size
    short = {
        **AT_THE_END,
        "training.max_steps": STEPS,
        "training.num_epochs": None,
        "optim.warmup_steps": 0,
        "evaluation.max_samples": min(few, counts.validated or few),
        "evaluation.generate_max_samples": min(few, counts.questions or few),
    }
    run_dir = Path(recipe.run_dir)
    wall = whole_run(dump_recipe(load_recipe(recipe, short)), run_dir, processes, tell)
    written = RunDir(run_dir).final_figures()
    spent: Mapping[str, float] = written["seconds_of_launch"]
    return _stages(recipe, counts, spent, wall - float(written["train_seconds"]), few)


def _stages(
    recipe: Recipe, counts: Counts, spent: Mapping[str, float], other_seconds: float, few: int
) -> tuple[Stage, ...]:
    """The stages of the whole run.

    Args:
        spent: seconds by phase of the short run, which answered twice and validated at its end.
        other_seconds: its seconds outside of training steps.
        few: samples that it validated or answered at most.
    """
    evaluation, steps = recipe.evaluation, counts.steps
    validation, first_batch = (
        spent.get("validation", 0.0),
        spent.get("validation: its first batch", 0.0),
    )
    answers = spent.get("answering questions", 0.0)
    checkpoint = spent.get("saving a checkpoint", 0.0) + spent.get("publishing a checkpoint", 0.0)
    export = spent.get("exporting the model", 0.0)
    stages = [
        Stage(
            what="launch",
            times=1,
            seconds=other_seconds - first_batch - validation - answers - checkpoint - export,
        )
    ]
    if counts.validated:
        times = _times(steps, evaluation.interval_steps) + recipe.objective.learns_pairs
        measured = 1 + recipe.objective.learns_pairs
        share = counts.validated / min(few, counts.validated)
        each = (first_batch + validation * share) / measured
        stages.append(Stage(what="validation", times=times, seconds=each))
    if counts.questions:
        share = counts.questions / min(few, counts.questions)
        interval = evaluation.generate_interval_steps
        times = 2 if interval is None else 1 + _times(steps, interval)
        stages.append(Stage(what="answers", times=times, seconds=answers / 2 * share))
    interval = None if recipe.checkpoint.asynchronous else recipe.checkpoint.interval_steps
    stages.append(Stage(what="checkpoint", times=_times(steps, interval), seconds=checkpoint))
    if recipe.export.enabled:
        stages.append(Stage(what="export", times=1, seconds=export))
    return tuple(stages)


def _times(steps: int, interval: int | None) -> int:
    """How often something is done that is due every `interval` steps and at the end."""
    return 1 if interval is None else -(-steps // interval)
