"""Rules about captured decoders (`training.cuda_graphs`); `rules.py` says what a rule is.

A captured part does the same to every row: whatever follows from a row's segments, or is not in
the same place in every step, is refused here by name.
"""

from __future__ import annotations

from vlmpack.recipe.model_rules import ModelConfig
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import (
    ModelSection,
    PackingSection,
    ParallelismSection,
    TrainingSection,
)
from vlmpack.recipe.shared_sizes import shares_heads
from vlmpack.recipe.trainable import TrainableSection

_KEY = ("training", "cuda_graphs")

_OFF = "training.cuda_graphs: none"
"""How graphs are done without: `none` alone may be read as a value of the other field."""


def _refused(training: TrainingSection, is_so: object, why: str) -> list[Problem]:
    """One problem where graphs are asked for and something stands in their way."""
    if training.cuda_graphs == "none" or not is_so:
        return []
    return [Problem(_KEY, f"{training.cuda_graphs!r}, but {why}")]


def graphs_replay_planned_rows(training: TrainingSection, packing: PackingSection) -> list[Problem]:
    """Rows of one width are those that a budget plans."""
    why = (
        f"the rows of packing.mode '{packing.mode}' share no width; use packing.mode: online or "
        f"offline, or {_OFF}"
    )
    return _refused(training, not packing.facts.plans_rows, why)


def graphs_read_boundaries(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """A loop over segments launches other kernels for every row."""
    why = (
        "model.attention: segments is a loop over each row's own lengths, which no graph can "
        f"replay; use auto, torch_varlen or flash_attn, or {_OFF}"
    )
    return _refused(training, model.attention == "segments", why)


def graphs_hold_layers_of_ours(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """Nobody tried to capture Transformer Engine's layers with boundaries that change."""
    why = (
        "the layers of model.attention: transformer_engine were never captured; use auto, "
        f"torch_varlen or flash_attn, or {_OFF}"
    )
    return _refused(training, model.attention == "transformer_engine", why)


def graphs_share_the_heads_of_a_row(
    training: TrainingSection, parallelism: ParallelismSection, config: ModelConfig
) -> list[Problem]:
    """Ranks that share a row in context parallelism each run all of it for some of its heads, as
    cutting segments would follow their lengths."""
    heads = config.size("num_attention_heads")
    groups = config.size("num_key_value_heads") or heads
    tensor, context = parallelism.tensor, parallelism.context
    known = context > 1 and heads and not groups % tensor  # what else is refused has its own rule
    if not known:
        return []
    fitting = [c for c in range(1, heads + 1) if shares_heads(heads, groups, tensor, c)]
    why = (
        f"parallelism.context: {context} with tensor: {tensor} shares out the num_attention_heads "
        f"{heads} and num_key_value_heads {groups} of {config.folder}/config.json in a graph, and "
        f"these do not divide so; sizes that do: {', '.join(map(str, fitting))}; or {_OFF}"
    )
    return _refused(training, not shares_heads(heads, groups, tensor, context), why)


def graphs_hold_one_row_at_a_time(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """A captured backward pass reads what its own forward pass left last."""
    why = (
        f"parallelism.pipeline: {parallelism.pipeline} has several rows under way at a time, and "
        f"a captured decoder keeps the activations of one; set pipeline to 1, or {_OFF}"
    )
    return _refused(training, parallelism.pipeline > 1, why)


def graphs_need_whole_weights(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """A graph reads weights where they lay when it was captured."""
    why = (
        "parallelism.sharding: fsdp gathers the weights of each layer into other memory in every "
        f"step, by hooks that no graph replays; use sharding: none, or {_OFF}"
    )
    return _refused(training, parallelism.sharding == "fsdp", why)


def graphs_share_no_prefixes(training: TrainingSection, packing: PackingSection) -> list[Problem]:
    """What is shared decides how a row is computed."""
    why = (
        "packing.share_prefix: true makes attention follow what each row's samples share; use "
        f"false, or {_OFF}"
    )
    return _refused(training, packing.share_prefix, why)


def graphs_train_no_pairs(training: TrainingSection, objective: ObjectiveSection) -> list[Problem]:
    """Pairs have a reference pass, and rows of no fixed shape."""
    why = f"rows of objective.name '{objective.name}' have no fixed shape yet; use {_OFF}"
    return _refused(training, objective.learns_pairs, why)


def graphs_drop_nothing(training: TrainingSection, trainable: TrainableSection) -> list[Problem]:
    """Random numbers follow from each step's own seed, which a graph would have to be told."""
    why = (
        f"trainable.lora.dropout {trainable.lora.dropout} draws random numbers in every row; set "
        f"it to 0, or {_OFF}"
    )
    return _refused(training, trainable.drops(), why)


def graphs_need_plain_weights(
    training: TrainingSection, trainable: TrainableSection
) -> list[Problem]:
    """Nobody tried to capture the kernels of quantized weights."""
    quantize = trainable.lora.quantize
    why = f"trainable.lora.quantize {quantize!r} was never captured; use none, or {_OFF}"
    return _refused(training, trainable.uses("lora") and quantize != "none", why)


def graphs_have_no_router_loss(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """The routers' logits stay inside of the captured part."""
    why = (
        f"model.router_aux_loss_coef {model.router_aux_loss_coef} needs the routers' logits, which "
        f"a captured decoder keeps to itself; set it to 0, or {_OFF}"
    )
    return _refused(training, model.router_aux_loss_coef, why)


def bounds_of_graphs_need_graphs(training: TrainingSection) -> list[Problem]:
    """A bound on what fits says nothing where there is nothing to fit."""
    found = training.cuda_graph_max_sequences
    if training.cuda_graphs != "none" or found == "auto":
        return []
    message = f"{found}, but training.cuda_graphs is none; use decoder, or leave it out"
    return [Problem(("training", "cuda_graph_max_sequences"), message)]
