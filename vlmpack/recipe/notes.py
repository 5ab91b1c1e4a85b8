"""Notes on a recipe: settings without effect, checks that cannot be made here, and what is missing.

What may be missing is the package of an experiment tracker, or a value that a program hands over
(`python:NAME`, see `sources.one_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vlmpack.addresses import registered_name, unset_references
from vlmpack.alignment import round_up
from vlmpack.errors import RecipeError
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.derived import derive, graph_sequences, row_bounds
from vlmpack.recipe.engine_rules import read_model_config
from vlmpack.recipe.schema import EvaluationSection, LoggingSection, Recipe


def notes(recipe: Recipe, world_size: int = 1) -> list[str]:
    """One line per such setting, with what would make it count.

    Args:
        recipe: a recipe that `check_world` accepts for this number of processes.
        world_size: number of processes, at least 1.
    """
    return [
        *_about_data(recipe.data, recipe.evaluation),
        *_about_training(recipe),
        *_about_engine(recipe, world_size),
    ]


def _about_data(data: DataSection, evaluation: EvaluationSection) -> Iterator[str]:
    if data.test is not None and not evaluation.generate:
        yield "data.test is read only with evaluation.generate: true"
    if data.validation is None and evaluation.max_samples is not None:
        yield "evaluation.max_samples has no effect without data.validation"
    if not evaluation.generate and evaluation.generate_max_samples is not None:
        yield "evaluation.generate_max_samples has no effect without evaluation.generate: true"
    if (
        data.num_workers == 0
        and data.prefetch_batches != DataSection.model_fields["prefetch_batches"].default
    ):
        yield "data.prefetch_batches has no effect with data.num_workers: 0"
    # No error: a recipe may be checked on another machine than it runs on.
    texts = {f"data.storage.credentials.{name}": text for name, text in data.storage.credentials}
    for split, sources in data.splits().items():
        texts |= {f"data.{split}.{source.name}": source.path for source in sources}
    for key, text in texts.items():
        for name in unset_references(text or ""):
            yield f"{key} refers to the environment variable {name}, which is not set here"


def _about_training(recipe: Recipe) -> Iterator[str]:
    optim, packing, steps = recipe.optim, recipe.packing, recipe.training.max_steps
    if optim.schedule == "constant" and optim.min_lr_ratio > 0:
        yield "optim.min_lr_ratio has no effect with optim.schedule: constant"
    if steps is not None and optim.warmup_steps > steps:  # common in smoke runs, so no error
        yield (
            f"optim.warmup_steps {optim.warmup_steps} is more than training.max_steps {steps}, so "
            "the learning rate never reaches optim.lr"
        )
    if packing.alignment is not None and not packing.facts.plans_rows:
        yield f"packing.alignment has no effect with packing.mode: {packing.mode}"
    yield from _about_graphs(recipe)


def _about_graphs(recipe: Recipe) -> Iterator[str]:
    """Where only rows that are far from full fit a captured graph."""
    training, most = recipe.training, graph_sequences(recipe.training)
    if training.cuda_graphs == "none" or most is None:
        return
    bounds = row_bounds(recipe.packing, training, recipe.parallelism)
    width, enforced = bounds["max_tokens"], bounds["max_sequences"]
    filled = most * round_up(training.seq_length, bounds["alignment"])
    if filled < width and (enforced is None or enforced > most):
        yield (
            f"training.cuda_graph_max_sequences {most}: so few samples of training.seq_length "
            f"fill at most {filled:,} of a row's {width:,} tokens. Every fuller row runs eagerly. "
            "Use auto"
        )


def _about_engine(recipe: Recipe, world_size: int) -> Iterator[str]:
    """What has no effect on an engine, and what `model_rules` and `engine_rules` could not look
    at."""
    model, split = recipe.model, recipe.parallelism
    if model.backend == "hf" and not split.distributed_optimizer:
        yield "parallelism.distributed_optimizer has no effect with model.backend: hf"
    if model.backend == "hf" and split.overlap is not None:
        yield (
            "parallelism.overlap has no effect with model.backend: hf, where DDP and FSDP2 always "
            "overlap"
        )
    if model.memory_gib is not None and not model.recomputes_what_fits:
        yield "model.memory_gib has no effect without model.activation_checkpointing: auto"
    if split.sharding == "fsdp" and world_size == 1:
        yield "parallelism.sharding: fsdp shards nothing on one process"
    micro_batches = derive(recipe, world_size).gradient_accumulation_steps
    if micro_batches is not None and micro_batches < split.pipeline:
        # Megatron's schedule takes any number of micro-batches, so no error.
        yield (
            f"parallelism.pipeline {split.pipeline} is more than the {micro_batches} "
            "micro-batch(es) per optimizer step and model copy, so some stages are always idle. "
            "Lower training.micro_batch_size, or raise training.global_batch_size"
        )
    if Path(model.path).is_dir() and read_model_config(model) is None:
        sizes = ", and heads, layers and experts," if model.backend == "mcore" else ""
        yield (
            f"model.path: {model.path} holds no config.json to read, so what the model's family "
            f"can do{sizes} is unchecked"
        )
    if model.attention == "transformer_engine":
        yield "model.attention: transformer_engine is looked for at launch, with its GPU"


DEFAULT_TRACKER = "tensorboard"
"""Nobody has to ask for it, so nothing is refused for want of it."""


def missing_trackers(logging: LoggingSection) -> tuple[str, ...]:
    """Those whose package Python does not find; each is imported under the tracker's own name."""
    return tuple(
        name for name in logging.trackers if name != DEFAULT_TRACKER and find_spec(name) is None
    )


def trackers_advice(names: tuple[str, ...]) -> str:
    """What is wrong and what to do."""
    packages = " ".join(name.replace("_", "-") for name in names)
    return (
        f"logging.trackers asks for {', '.join(names)}, which is not installed here: "
        f"pip install {packages}, or take it out (metrics.jsonl has every figure)"
    )


def check_trackers(logging: LoggingSection) -> None:
    """As a launch, of a recipe that is checked here.

    Raises:
        RecipeError: the package of a tracker is not here.
    """
    if names := missing_trackers(logging):
        raise RecipeError([trackers_advice(names)])


class Registered(NamedTuple):
    """A value that a recipe names.

    Args:
        key: where, as messages say it.
        argument: of `vlmpack.finetune`, what it is looked for in.
        name: without `python:`.
    """

    key: str
    argument: str
    name: str


def registered_in(recipe: Recipe) -> list[Registered]:
    """All of a recipe's, in its own order."""
    named = ((key, argument, registered_name(text)) for key, argument, text in _texts(recipe))
    return [Registered(key, argument, name) for key, argument, name in named if name is not None]


def _texts(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    data = recipe.data
    for split, sources in data.splits().items():
        for source in sources:
            yield f"data.{split}", "sources", source.path
            if isinstance(source.columns, str):
                yield f"data.{split}.columns", "sources", source.columns
    if isinstance(data.columns, str):
        yield "data.columns", "sources", data.columns
    yield "objective.name", "objective", recipe.objective.name
    for name in recipe.evaluation.metrics:
        yield "evaluation.metrics", "metrics", name
