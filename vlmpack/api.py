"""The Python door: `finetune` does what the command line does, with the same recipe.

import vlmpack

result = vlmpack.finetune("recipes/digits-demo.yaml", training__max_steps=20, run_dir="runs/x")
print(result.exact_match_after, result.export)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpack.activity import ACTIVITY
from vlmpack.errors import VlmpackError
from vlmpack.recipe import (
    Recipe,
    check_world,
    dump_recipe,
    identity,
    identity_differences,
    identity_hint,
    identity_notes,
    load_recipe,
    notes,
)

if TYPE_CHECKING:
    from vlmpack.distributed import Ranks
    from vlmpack.training.run_dir import RunDir
    from vlmpack.training.stop import StopFlag

logger = logging.getLogger("vlmpack")

_FIGURES = (
    "steps",
    "train_seconds",
    "real_tokens",
    "padded_tokens",
    "tokens_per_second",
    "exact_match_before",
    "exact_match_after",
    "digit_accuracy_after",
)
"""Fields of FinetuneResult that result.json holds under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """What a finished run left behind.

    Args:
        run_dir: the run's folder.
        export: the finetuned model in transformers format, if the recipe asks for one.
        report: the folder with pictures, if there is one.
        steps: optimizer steps taken.
        train_seconds: seconds spent in training steps, over all launches of the run.
        real_tokens: tokens of samples that were trained.
        padded_tokens: slots that rows padded to the longest sample of each micro-batch would take.
        tokens_per_second: real tokens per second of training.
        exact_match_before: share of the test questions answered exactly before training, 0 to 1;
            of those with images, if any has some.
        exact_match_after: the same after training.
        digit_accuracy_after: share of characters read right in `read` questions after training.
        figures: all of result.json.
    """

    run_dir: Path
    export: Path | None
    report: Path | None
    steps: int
    train_seconds: float
    real_tokens: int
    padded_tokens: int
    tokens_per_second: float
    exact_match_before: float | None
    exact_match_after: float | None
    digit_accuracy_after: float | None
    figures: Mapping[str, Any]


def finetune(recipe: Recipe | Mapping[str, Any] | str | Path, **overrides: Any) -> FinetuneResult:
    """Finetune a model as a recipe says; under torchrun, call it on every process.

    Args:
        recipe: a path to a YAML recipe, a mapping of the same shape, or a loaded `Recipe`.
        overrides: fields to change, `__` for the dot: `training__max_steps=20`.

    Returns:
        Where everything is, and the run's figures. The same on every process.

    Raises:
        RecipeError: the recipe has problems; lists all of them.
        Preempted: SIGTERM was honoured; the same call resumes.
        VlmpackError: anything else that a user can act on.
    """
    return run_recipe(resolve(recipe, overrides))


def resolve(
    recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Mapping[str, Any]
) -> Recipe:
    """The recipe with overrides applied and checked.

    Raises:
        RecipeError: lists all problems.
    """
    return load_recipe(recipe, {name.replace("__", "."): v for name, v in overrides.items()})


def run_recipe(recipe: Recipe) -> FinetuneResult:
    """Run a resolved recipe on this process: resume or start, train, evaluate, export, report."""
    from vlmpack.build.worker_server import start_worker_server

    start_worker_server(recipe)  # beside the imports below
    from vlmpack.build.date import settle_date
    from vlmpack.distributed import (
        start_process_group,
        stop_process_group,
        world_size_from_environment,
    )
    from vlmpack.run.watch import watched
    from vlmpack.training.metrics import require_trackers
    from vlmpack.training.run_dir import RunDir
    from vlmpack.training.stop import StopFlag, interrupt_told, stop_on_sigterm

    check_world(recipe, world_size=world_size_from_environment())
    split = recipe.parallelism
    ranks = start_process_group(
        tensor=split.tensor,
        context=split.context,
        pipeline=split.pipeline,
        timeout_seconds=split.timeout_seconds,
    )
    try:
        run_dir = RunDir(Path(recipe.run_dir))
        stop = StopFlag()
        watch = watched(ranks, recipe.logging.watch_seconds)
        with watch, run_dir.entered(ranks), stop_on_sigterm(stop):
            recipe = settle_date(recipe, ranks, run_dir)
            for note in notes(recipe, ranks.world_size):
                logger.warning("note: %s", note)
            ranks.on_main(lambda: _record_recipe(recipe, run_dir))
            if ranks.on_main(lambda: _is_finished(recipe, run_dir)):
                logger.info("this run is finished; delete %s to train again", run_dir.path)
            else:
                ranks.on_main(lambda: require_trackers(recipe.logging))
                with interrupt_told(run_dir):
                    _train(recipe, ranks, run_dir, stop)
            return _result(run_dir)
    finally:
        stop_process_group()


def _record_recipe(recipe: Recipe, run_dir: RunDir) -> None:
    """Check whose run this is, then write down the resolved recipe."""
    from vlmpack.run.packs import packs_note
    from vlmpack.training.run_dir import write_atomically

    current = identity(recipe)
    recorded = run_dir.recorded_identity() or current
    for note in identity_notes(recorded, current):
        logger.warning("note: %s", note)
    other_packs = packs_note(run_dir.recipe, recipe)
    if other_packs is not None:
        logger.warning("note: %s", other_packs)
    new_era = recipe.checkpoint.on_data_change != "refuse"
    run_dir.check_identity(
        current,
        partial(identity_differences, new_era=new_era),
        hint=identity_hint(recorded, current),
    )
    write_atomically(run_dir.recipe, dump_recipe(recipe))


def _is_finished(recipe: Recipe, run_dir: RunDir) -> bool:
    """Whether result.json is that of this very recipe (a longer one goes on)."""
    if not run_dir.result.is_file():
        return False
    figures = json.loads(run_dir.result.read_text(encoding="utf-8"))
    return bool(figures.get("identity") == identity(recipe))


def _train(recipe: Recipe, ranks: Ranks, run_dir: RunDir, stop: StopFlag) -> None:
    """Train, with evaluation by generation around it, and leave result, export and report."""
    from vlmpack.report import write_report
    from vlmpack.run.result import (
        evaluate_by_generation,
        export_model,
        test_questions,
        write_result,
    )
    from vlmpack.run.session import open_session

    session = open_session(recipe, ranks, run_dir, stop)
    questions = test_questions(session)
    before = evaluate_by_generation(session, "before", questions)
    session.run()
    after = evaluate_by_generation(session, "after", questions)
    export_model(session)

    def finish() -> None:
        write_result(session, before, after)
        try:
            write_report(run_dir.path, test_samples=questions or None)
        except VlmpackError as error:
            logger.warning("no report: %s", error)

    ACTIVITY.enter_alone("writing the report")
    ranks.on_main(finish)


def _result(run_dir: RunDir) -> FinetuneResult:
    """What result.json says."""
    figures = json.loads(run_dir.result.read_text(encoding="utf-8"))
    report = run_dir.path / "report"
    return FinetuneResult(
        run_dir=run_dir.path,
        export=run_dir.export if run_dir.export.is_dir() else None,
        report=report if report.is_dir() else None,
        figures=figures,
        **{name: figures[name] for name in _FIGURES},
    )
