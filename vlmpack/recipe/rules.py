"""Rules across keys and sections: one pure function per rule.

A rule names what it needs as its parameters and returns the problems it found, with both numbers
and the knob to turn. A parameter is a top-level key of the recipe, or `config` (the model folder's
config.json), `served` (its line of the capability table), `world_size`, `sections` (all keys there
are). `RULES` is the list that `load_recipe` runs; a rule is left out while something that it needs
is unknown or has problems of its own. The rules about sources are in `data_rules.py`, about rows in
`packing_rules.py`, places on disk in `path_rules.py`, about megatron-core in `mcore_rules.py`,
about the model's own sizes in `model_rules.py`, what its family can do in `capability_rules.py`,
about what is trained in `trainable_rules.py`, about the number of processes in `world_rules.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import signature

from vlmpack.capabilities.limits import ENGINE_LIMITS, Feature
from vlmpack.capabilities.served import SERVED
from vlmpack.errors import RecipeError
from vlmpack.recipe.capability_rules import (
    attention_runs_the_family,
    engine_runs_the_family,
    family_has_the_features,
    image_bounds_are_the_familys,
    images_cost_less_when_shrunk,
    model_is_served,
    peft_is_installed,
)
from vlmpack.recipe.data_rules import (
    epoch_size_needs_weights,
    evaluation_has_data,
    source_names_differ,
    tokens_need_weights,
    weights_are_complete,
    weights_are_for_training,
)
from vlmpack.recipe.images import pixel_bounds_leave_room
from vlmpack.recipe.mcore_rules import (
    aux_loss_needs_mcore,
    fsdp_needs_hf,
    mcore_is_installed,
    transformer_engine_needs_mcore,
)
from vlmpack.recipe.model_rules import (
    experts_are_there,
    layers_split_over_processes,
    read_model_config,
)
from vlmpack.recipe.packing_rules import (
    alignment_splits_over_context,
    fixed_boundaries_need_fixed_rows,
    fixed_rows_fit_the_layout,
    packs_need_offline,
    planned_rows_are_micro_batches,
    row_fields_need_rows,
    rows_hold_a_sample,
    saved_rows_have_packs,
    saved_rows_settle_the_scope,
    shared_rows_need_samples,
)
from vlmpack.recipe.path_rules import (
    index_dir_is_local,
    model_is_local,
    packs_are_local,
    run_dir_is_local,
    sources_are_readable,
    stores_are_safe,
)
from vlmpack.recipe.problems import Document, Problem, render
from vlmpack.recipe.schema import (
    EvaluationSection,
    LoggingSection,
    ModelSection,
    ParallelismSection,
    Recipe,
    TrainingSection,
)
from vlmpack.recipe.trainable_rules import (
    components_are_there,
    four_bits_are_whole,
    four_bits_have_their_package,
    learning_rates_are_used,
    learning_rates_have_components,
    lora_needs_hf,
    lora_settings_are_used,
    something_is_trained,
    targets_are_named,
)
from vlmpack.recipe.world_rules import (
    experts_split_over_processes,
    global_batch_splits_over_copies,
    world_splits_into_copies,
)


def one_length_of_run(training: TrainingSection) -> list[Problem]:
    """Exactly one of max_steps and num_epochs."""
    if training.max_steps is None and training.num_epochs is None:
        message = "the length of the run is missing; add 'max_steps: 1000' or 'num_epochs: 1'"
        return [Problem(("training",), message)]
    if training.max_steps is not None and training.num_epochs is not None:
        message = (
            f"{training.num_epochs}, but max_steps is set too ({training.max_steps}); "
            "keep one of them"
        )
        return [Problem(("training", "num_epochs"), message)]
    return []


def hf_is_data_parallel_only(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Everything but data parallelism is Megatron's."""
    if model.backend != "hf":
        return []
    limits = ENGINE_LIMITS["hf"]
    sizes: tuple[tuple[str, int, Feature], ...] = (
        ("tensor", parallelism.tensor, "TP"),
        ("pipeline", parallelism.pipeline, "PP"),
        ("context", parallelism.context, "CP"),
        ("expert", parallelism.expert, "EP"),
    )
    problems = [
        Problem(
            ("parallelism", name),
            f"{size} {limits[feature]}; with 'hf' it is 1, and parallelism.sharding: fsdp "
            "spreads a model's memory",
        )
        for name, size, feature in sizes
        if size > 1
    ]
    if parallelism.sequence:
        message = f"true {limits['SP']}, and parallelism.tensor >= 2; with 'hf' it is false"
        problems.append(Problem(("parallelism", "sequence"), message))
    return problems


def sequence_needs_tensor(model: ModelSection, parallelism: ParallelismSection) -> list[Problem]:
    """Sequence parallelism shards over the tensor-parallel processes."""
    if model.backend != "mcore" or not parallelism.sequence or parallelism.tensor > 1:
        return []
    message = (
        "true, but parallelism.tensor is 1 and sequence parallelism shards activations over the "
        "tensor-parallel processes; set it to false, or tensor to 2 or more"
    )
    return [Problem(("parallelism", "sequence"), message)]


def global_batch_is_whole(training: TrainingSection) -> list[Problem]:
    """A global batch is a whole number of micro-batches."""
    total, micro = training.global_batch_size, training.micro_batch_size
    if total % micro == 0:
        return []
    nearest = max(round(total / micro), 1) * micro
    message = (
        f"{total} is not a multiple of training.micro_batch_size {micro}; "
        f"use {nearest}, or a micro_batch_size that divides {total}"
    )
    return [Problem(("training", "global_batch_size"), message)]


def seq_length_splits_over_context(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Context parallelism cuts each sequence into 2*CP equal chunks."""
    chunks = 2 * parallelism.context
    if parallelism.context == 1 or training.seq_length % chunks == 0:
        return []
    message = (
        f"{training.seq_length} is not a multiple of 2 x parallelism.context = {chunks}; "
        f"use {-(-training.seq_length // chunks) * chunks}"
    )
    return [Problem(("training", "seq_length"), message)]


def metrics_differ(evaluation: EvaluationSection) -> list[Problem]:
    """A metric is reported once."""
    twice = {name for name in evaluation.metrics if evaluation.metrics.count(name) > 1}
    return [
        Problem(("evaluation", "metrics"), f"'{name}' is listed more than once")
        for name in sorted(twice)
    ]


def trackers_differ(logging: LoggingSection) -> list[Problem]:
    """A tracker is started once."""
    twice = {name for name in logging.trackers if logging.trackers.count(name) > 1}
    return [
        Problem(("logging", "trackers"), f"'{name}' is listed more than once")
        for name in sorted(twice)
    ]


RULES: tuple[Callable[..., list[Problem]], ...] = (
    one_length_of_run,
    shared_rows_need_samples,
    planned_rows_are_micro_batches,
    rows_hold_a_sample,
    saved_rows_have_packs,
    packs_need_offline,
    row_fields_need_rows,
    fixed_boundaries_need_fixed_rows,
    fixed_rows_fit_the_layout,
    saved_rows_settle_the_scope,
    mcore_is_installed,
    transformer_engine_needs_mcore,
    aux_loss_needs_mcore,
    fsdp_needs_hf,
    hf_is_data_parallel_only,
    sequence_needs_tensor,
    global_batch_is_whole,
    seq_length_splits_over_context,
    alignment_splits_over_context,
    weights_are_complete,
    weights_are_for_training,
    epoch_size_needs_weights,
    tokens_need_weights,
    source_names_differ,
    evaluation_has_data,
    trackers_differ,
    metrics_differ,
    pixel_bounds_leave_room,
    something_is_trained,
    lora_settings_are_used,
    targets_are_named,
    lora_needs_hf,
    four_bits_have_their_package,
    four_bits_are_whole,
    learning_rates_are_used,
    model_is_local,
    sources_are_readable,
    stores_are_safe,
    index_dir_is_local,
    packs_are_local,
    run_dir_is_local,
    experts_are_there,
    layers_split_over_processes,
    components_are_there,
    learning_rates_have_components,
    peft_is_installed,
    model_is_served,
    engine_runs_the_family,
    attention_runs_the_family,
    family_has_the_features,
    images_cost_less_when_shrunk,
    image_bounds_are_the_familys,
    world_splits_into_copies,
    experts_split_over_processes,
    global_batch_splits_over_copies,
)


def broken_rules(
    sections: Mapping[str, object],
    base_dir: str | os.PathLike[str] | None = None,
    world_size: int | None = None,
) -> list[Problem]:
    """The problems of every rule whose arguments are all there.

    Args:
        sections: the top-level keys of a recipe whose own types are right.
        base_dir: folder that a relative `model.path` starts at. None: the current directory.
        world_size: processes of the run; None where nobody knows yet.
    """
    known: dict[str, object] = {**sections, "sections": sections}
    model = sections.get("model")
    config = read_model_config(model, base_dir) if isinstance(model, ModelSection) else None
    if config is not None:
        known["config"] = config
        model_type = config.content.get("model_type")
        if isinstance(model_type, str) and model_type in SERVED:
            known["served"] = SERVED[model_type]
    if world_size is not None:
        known["world_size"] = world_size
    return [
        problem
        for rule, needs in ((rule, signature(rule).parameters) for rule in RULES)
        if needs.keys() <= known.keys()
        for problem in rule(**{name: known[name] for name in needs})
    ]


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the recipe cannot run on this number of processes."""
    names = ("parallelism", "training", "packing")
    sections = {name: getattr(recipe, name) for name in names}
    if problems := broken_rules(sections, world_size=world_size):
        raise RecipeError(render(problems, Document(None)))
