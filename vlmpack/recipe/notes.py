"""Settings that have no effect, or less than they say, and checks that cannot be made here."""

from __future__ import annotations

from vlmpack.addresses import unset_references
from vlmpack.recipe.derived import derive
from vlmpack.recipe.model_rules import read_model_config
from vlmpack.recipe.schema import (
    DataSection,
    EvaluationSection,
    LoggingSection,
    ModelSection,
    PackingSection,
    ParallelismSection,
    Recipe,
    TrainingSection,
)
from vlmpack.recipe.trackers import absent_trackers, trackers_advice
from vlmpack.recipe.trainable import OptimSection


def notes(recipe: Recipe, world_size: int = 1) -> list[str]:
    """One line per such setting, with what would make it count.

    Args:
        recipe: a recipe that `check_world` accepts for this number of processes.
        world_size: number of processes, at least 1.
    """
    found = [
        *_unread_splits(recipe.data, recipe.evaluation),
        *_idle_schedule(recipe.optim),
        *_long_warmup(recipe.optim, recipe.training),
        *_idle_workers(recipe.data),
        *_idle_alignment(recipe.packing),
        *_idle_distributed_optimizer(recipe.model, recipe.parallelism),
        *_idle_stages(recipe, world_size),
        *_unchecked_model(recipe.model),
        *_unset_variables(recipe.data),
        *_absent_trackers(recipe.logging),
    ]
    if recipe.checkpoint.on_data_change == "new_segment":
        found.append(
            "checkpoint.on_data_change: new_segment is now called new_era, which does the same; "
            "the next release takes new_era alone"
        )
    if recipe.parallelism.sharding == "fsdp" and world_size == 1:
        found.append("parallelism.sharding: fsdp shards nothing on one process")
    return found


def _unchecked_model(model: ModelSection) -> list[str]:
    """What `model_rules` and `engine_rules` could not look at."""
    found = []
    if model.backend == "mcore" and read_model_config(model) is None:
        found.append(
            f"{model.path} holds no config.json to read, so heads, layers and experts are unchecked"
        )
    if model.attention == "transformer_engine":
        found.append("model.attention: transformer_engine is looked for at launch, with its GPU")
    return found


def _unset_variables(data: DataSection) -> list[str]:
    """No error: a recipe may be checked on another machine than it runs on."""
    values = data.storage.credentials.model_dump()
    texts = {f"data.storage.credentials.{name}": text for name, text in values.items() if text}
    for split in ("train", "validation", "test"):
        for source in getattr(data, split) or ():
            texts[f"data.{split}.{source.name}"] = source.path
    return [
        f"{key} refers to the environment variable {name}, which is not set here"
        for key, text in texts.items()
        for name in unset_references(text)
    ]


def _absent_trackers(logging: LoggingSection) -> list[str]:
    """No error: a recipe may be checked on another machine than it runs on. A launch refuses."""
    names = absent_trackers(logging)
    return [f"{trackers_advice(names)}; a launch here would be refused"] if names else []


def _unread_splits(data: DataSection, evaluation: EvaluationSection) -> list[str]:
    found = []
    if data.test is not None and not evaluation.generate:
        found.append("data.test is read only with evaluation.generate: true")
    if data.validation is None and evaluation.max_samples is not None:
        found.append("evaluation.max_samples has no effect without data.validation")
    if not evaluation.generate and evaluation.generate_max_samples is not None:
        found.append(
            "evaluation.generate_max_samples has no effect without evaluation.generate: true"
        )
    return found


def _idle_schedule(optim: OptimSection) -> list[str]:
    if optim.schedule == "constant" and optim.min_lr_ratio > 0:
        return ["optim.min_lr_ratio has no effect with optim.schedule: constant"]
    return []


def _long_warmup(optim: OptimSection, training: TrainingSection) -> list[str]:
    """Common in smoke runs of a few steps, so no error."""
    if training.max_steps is None or optim.warmup_steps <= training.max_steps:
        return []
    return [
        f"optim.warmup_steps {optim.warmup_steps} is more than training.max_steps "
        f"{training.max_steps}, so the learning rate never reaches optim.lr"
    ]


def _idle_alignment(packing: PackingSection) -> list[str]:
    if packing.alignment is not None and not packing.facts.plans_rows:
        return [f"packing.alignment has no effect with packing.mode: {packing.mode}"]
    return []


def _idle_distributed_optimizer(model: ModelSection, parallelism: ParallelismSection) -> list[str]:
    if model.backend == "hf" and not parallelism.distributed_optimizer:
        return ["parallelism.distributed_optimizer has no effect with model.backend: hf"]
    return []


def _idle_stages(recipe: Recipe, world_size: int) -> list[str]:
    """Megatron's schedule takes any number of micro-batches, so no error."""
    stages = recipe.parallelism.pipeline
    micro_batches = derive(recipe, world_size).gradient_accumulation_steps
    if micro_batches is None or micro_batches >= stages:
        return []
    return [
        f"parallelism.pipeline {stages} is more than the {micro_batches} micro-batch(es) per "
        "optimizer step and model copy, so some stages are always idle; lower "
        "training.micro_batch_size, or raise training.global_batch_size"
    ]


def _idle_workers(data: DataSection) -> list[str]:
    default = DataSection.model_fields["prefetch_batches"].default
    if data.num_workers == 0 and data.prefetch_batches != default:
        return ["data.prefetch_batches has no effect with data.num_workers: 0"]
    return []
