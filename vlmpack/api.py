"""The Python door: `finetune` does what the command line does, with the same recipe.

import vlmpack

result = vlmpack.finetune("recipes/digits-demo.yaml", training__max_steps=20, run_dir="runs/x")
print(result.metrics_after, result.export)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpack.collector import collector_paused
from vlmpack.errors import RecipeError, naming_full_table
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.waits import logged_waits
from vlmpack.whole_file import not_world_writable
from vlmpack.words import raised

if TYPE_CHECKING:
    from vlmpack.build.extensions import Extensions
    from vlmpack.encode import Encoder
    from vlmpack.run.replay import Replay
    from vlmpack.run.sample import Drawing, SampleResult
    from vlmpack.run.servers import Server
    from vlmpack.training.objective import Objective, TokenSums
    from vlmpack.training.run_dir import RunDir


LAUNCH_IMPORTS = (
    "vlmpack.report",
    "vlmpack.run.launch",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto",
)
"""Modules that import what any run needs, with torch and most of transformers among it."""


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
        metrics_before: the recipe's `evaluation.metrics` of the test questions before training, 0
            to 1; of those with images, if any has some. Empty where nothing was asked.
        metrics_after: the same after training.
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
    metrics_before: Mapping[str, float]
    metrics_after: Mapping[str, float]
    figures: Mapping[str, Any]

    @property
    def exact_match_before(self) -> float | None:
        """`metrics_before["exact_match"]`; None where it was not measured."""
        return self.metrics_before.get("exact_match")

    @property
    def exact_match_after(self) -> float | None:
        """`metrics_after["exact_match"]`; None where it was not measured."""
        return self.metrics_after.get("exact_match")


def finetune(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    sources: Mapping[str, Any] | None = None,
    objective: Objective | TokenSums | None = None,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    callbacks: Sequence[object] = (),
    **overrides: Any,
) -> FinetuneResult:
    """Finetune a model as a recipe says; under torchrun, call it on every process.

    What the command line says of the run is logged at INFO by the logger `vlmpack`.

    Args:
        recipe: a path to a YAML recipe, a mapping of the same shape, or a loaded `Recipe`.
        sources: name -> an object or a function. The object has `__len__`, and a `__getitem__` that
            returns records. The recipe names it as `data.train: python:NAME`. The function makes
            one record of another, read from files or shards. It is named as `data.columns:
            python:NAME`.
        objective: a `vlmpack.Objective`, or a function. The function gets the (L,) losses of a
            micro-batch's label tokens, and the batch. It returns 0-d sums by name. The label tokens
            of the global batch divide its `loss_sum`.
        metrics: name -> a function from predictions (attributes question, truth, answer, task) to
            a share from 0 to 1; added to `evaluation.metrics`.
        callbacks: told on the main rank of steps, validations, answers, checkpoints and the end.
        overrides: fields to change, `__` for the dot: `training__max_steps=20`.

    Returns:
        Where everything is, and the run's figures. The same on every process.

    Raises:
        RecipeError: the recipe, or what was handed over, has problems; lists all of them.
        ExtensionError: an objective, a metric or a callback raised, or returned a wrong value. The
            message names it. An objective may fail in one process alone. The others then lose their
            connection.
        Preempted: SIGTERM was honoured; the same call resumes.
        VlmpackError: anything else that a user can act on.
    """
    with logged_waits():
        from vlmpack.build.worker_server import start_worker_server

        resolved = resolve(recipe, overrides)
        start_worker_server(resolved)  # beside the imports that follow
        with collector_paused():
            from vlmpack.build.extensions import extensions_of
            from vlmpack.handed_over import calling

        with calling("what the program hands over", _unless_it_exits):
            resolved, extensions = extensions_of(
                resolved, sources=sources, objective=objective, metrics=metrics, callbacks=callbacks
            )
        return run_recipe(resolved, extensions)


def _unless_it_exits(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    return RecipeError(f"what was handed over {raised(error)} when it was looked at")


def replay(
    dump: str | Path,
    *,
    sources: Mapping[str, Any] | None = None,
    objective: Objective | TokenSums | None = None,
    at_checkpoint: bool = False,
    **overrides: Any,
) -> Replay:
    """Compute a step that was not finite again; what `vlmpack replay` does.

    Args:
        dump: a file in the `dumps/` of a run folder.
        sources, objective: as `finetune` was given them.
        at_checkpoint: train nothing before the step, so that its weights are older.
        overrides: fields of the run's recipe to change, `__` for the dot.

    Raises:
        VlmpackError: no such dump or run, or other data than the run's.
    """
    from vlmpack.build.extensions import extensions_of
    from vlmpack.run.replay import recipe_of
    from vlmpack.run.replay import replay as replayed

    path = Path(dump)
    recipe = recipe_of(path, {name.replace("__", "."): v for name, v in overrides.items()})
    recipe, extensions = extensions_of(recipe, sources=sources, objective=objective)
    return replayed(path, recipe, extensions, at_checkpoint=at_checkpoint)


def sample(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    rewards: Mapping[str, Callable[..., Any]] | Sequence[str],
    drawing: Drawing | None = None,
    server: Server | None = None,
    sources: Mapping[str, Any] | None = None,
    on_prompts: Callable[[int], None] = lambda count: None,
    **overrides: Any,
) -> SampleResult:
    """Draw answers to a recipe's prompts, and keep them with what they earn; what `vlmpack sample`
    does. The same call goes on where it was stopped.

    Args:
        out: folder of the answers.
        rewards: name -> a function from a prediction (attributes question, truth, answer, task,
            shapes) to a number, or None where it has nothing to count; or names of metrics. A
            record's reward is the sum.
        drawing: what is drawn and how, a `vlmpack.Drawing`; None for its defaults.
        server: to draw from, a `vlmpack.run.servers.Server`; None for transformers' own generation
            in this process.
        sources: as of `finetune`.
        on_prompts: told how many more prompts are done.
        overrides: fields of the recipe to change, `__` for the dot.

    Raises:
        VlmpackError: bad arguments, recipe, model or data; a folder of another sampling.
        ExtensionError: a reward raised, or returned no finite number.
    """
    from vlmpack.build.extensions import extensions_of
    from vlmpack.evaluation.rollouts import rewards_of
    from vlmpack.run.sample import Drawing, SampleOrder, sample_recipe

    order = SampleOrder(
        drawing=drawing or Drawing(),
        out=Path(out),
        rewards=rewards_of(rewards),
        on_prompts=on_prompts,
    )
    resolved, extensions = extensions_of(resolve(recipe, overrides), sources=sources)
    if server is None:
        return sample_recipe(resolved, order, extensions=extensions)
    from vlmpack.run.servers import Served

    def served(encoder: Encoder) -> Served:
        return Served(server, resolved.data.storage, order.drawing, encoder)

    return sample_recipe(resolved, order, served, extensions)


def resolve(
    recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Mapping[str, Any]
) -> Recipe:
    """The recipe with overrides applied and checked.

    Raises:
        RecipeError: lists all problems.
    """
    return load_recipe(recipe, {name.replace("__", "."): v for name, v in overrides.items()})


def import_for(recipe: Recipe) -> None:
    """Import together what a run would import bit by bit up to its first step.

    Megatron stays out of it, since a run sets its variables before.
    """
    for name in LAUNCH_IMPORTS:
        import_module(name)
    if recipe.model.backend == "hf":
        import_module("vlmpack.backends.hf.engine")


def run_recipe(recipe: Recipe, extensions: Extensions | None = None) -> FinetuneResult:
    """Run a resolved recipe on this process: resume or start, train, evaluate, export, report."""
    with collector_paused():
        import_for(recipe)
        from vlmpack.build.extensions import NO_EXTENSIONS
        from vlmpack.report import write_report
        from vlmpack.run.launch import launch

    with naming_full_table(), not_world_writable():
        return _result(launch(recipe, write_report, extensions or NO_EXTENSIONS))


def _result(run_dir: RunDir) -> FinetuneResult:
    """What result.json says."""
    from vlmpack.evaluation.metrics import written_metrics

    figures = run_dir.final_figures()
    report = run_dir.path / "report"
    own = {field.name for field in fields(FinetuneResult)} - {"metrics_before", "metrics_after"}
    return FinetuneResult(
        run_dir=run_dir.path,
        export=run_dir.export if run_dir.export.is_dir() else None,
        report=report if report.is_dir() else None,
        metrics_before=written_metrics(figures, "before"),
        metrics_after=written_metrics(figures, "after"),
        figures=figures,
        **{name: figures[name] for name in own & figures.keys()},
    )
