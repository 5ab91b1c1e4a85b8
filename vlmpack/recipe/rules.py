"""Rules across keys and sections: one pure function per rule.

A rule takes the sections that it needs and returns the problems it found, with both numbers and
the knob to turn. `RULES` is the list that `load_recipe` runs; a rule is left out while one of its
sections has problems of its own. The rules about sources are in `data_rules.py`, about rows in
`packing_rules.py`, places on disk in `path_rules.py`, about megatron-core in `mcore_rules.py`,
about the model's own sizes in `model_rules.py`, what its family can do in `capability_rules.py`,
about what is trained in `trainable_rules.py`, about the number of processes in `world_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from vlmpack.capabilities import ENGINE_LIMITS, Feature
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
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import (
    LoggingSection,
    ModelSection,
    ParallelismSection,
    TrainingSection,
)
from vlmpack.recipe.trainable_rules import (
    four_bits_are_whole,
    four_bits_have_their_package,
    learning_rates_are_used,
    lora_needs_hf,
    lora_settings_are_used,
    something_is_trained,
    targets_are_named,
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


def trackers_differ(logging: LoggingSection) -> list[Problem]:
    """A tracker is started once."""
    twice = {name for name in logging.trackers if logging.trackers.count(name) > 1}
    return [
        Problem(("logging", "trackers"), f"'{name}' is listed more than once")
        for name in sorted(twice)
    ]


class Rule(NamedTuple):
    """A rule and the top-level keys of the recipe that it takes, in order."""

    check: Callable[..., list[Problem]]
    needs: tuple[str, ...]


RULES: tuple[Rule, ...] = (
    Rule(one_length_of_run, ("training",)),
    Rule(shared_rows_need_samples, ("packing", "training")),
    Rule(planned_rows_are_micro_batches, ("packing", "training")),
    Rule(rows_hold_a_sample, ("packing", "training", "parallelism")),
    Rule(saved_rows_have_packs, ("packing",)),
    Rule(packs_need_offline, ("packing",)),
    Rule(row_fields_need_rows, ("packing",)),
    Rule(fixed_boundaries_need_fixed_rows, ("packing",)),
    Rule(fixed_rows_fit_the_layout, ("packing", "training", "parallelism")),
    Rule(saved_rows_settle_the_scope, ("packing",)),
    Rule(mcore_is_installed, ("model",)),
    Rule(transformer_engine_needs_mcore, ("model",)),
    Rule(aux_loss_needs_mcore, ("model",)),
    Rule(fsdp_needs_hf, ("model", "parallelism")),
    Rule(hf_is_data_parallel_only, ("model", "parallelism")),
    Rule(sequence_needs_tensor, ("model", "parallelism")),
    Rule(global_batch_is_whole, ("training",)),
    Rule(seq_length_splits_over_context, ("training", "parallelism")),
    Rule(alignment_splits_over_context, ("packing", "parallelism")),
    Rule(weights_are_complete, ("data",)),
    Rule(weights_are_for_training, ("data",)),
    Rule(epoch_size_needs_weights, ("data",)),
    Rule(tokens_need_weights, ("data",)),
    Rule(source_names_differ, ("data",)),
    Rule(evaluation_has_data, ("data", "evaluation")),
    Rule(trackers_differ, ("logging",)),
    Rule(pixel_bounds_leave_room, ("images",)),
    Rule(something_is_trained, ("trainable",)),
    Rule(lora_settings_are_used, ("trainable",)),
    Rule(targets_are_named, ("trainable",)),
    Rule(lora_needs_hf, ("model", "trainable")),
    Rule(four_bits_have_their_package, ("trainable",)),
    Rule(four_bits_are_whole, ("parallelism", "trainable")),
    Rule(learning_rates_are_used, ("optim", "trainable")),
    Rule(model_is_local, ("model",)),
    Rule(sources_are_readable, ("data",)),
    Rule(stores_are_safe, ("data",)),
    Rule(index_dir_is_local, ("data",)),
    Rule(packs_are_local, ("packing",)),
    Rule(run_dir_is_local, ("run_dir",)),
)


def broken_rules(sections: Mapping[str, object]) -> list[Problem]:
    """The problems of every rule whose sections are all there.

    Args:
        sections: the top-level keys of a recipe whose own types are right.
    """
    return [
        problem
        for rule in RULES
        if all(name in sections for name in rule.needs)
        for problem in rule.check(*(sections[name] for name in rule.needs))
    ]
