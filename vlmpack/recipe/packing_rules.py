"""Rules about rows: what they hold, which prefixes they share, and CUDA graphs over them.

A CUDA graph (`training.cuda_graphs`) does the same to every row. What depends on the segments of a
row, or moves in memory between steps, is refused by name. `rules.py` says what a rule is.
"""

from __future__ import annotations

from vlmpack.alignment import round_up
from vlmpack.capabilities.served import ServedModel
from vlmpack.recipe.derived import multiples, plan_alignment, row_tokens
from vlmpack.recipe.engine_rules import ModelConfig
from vlmpack.recipe.head_degrees import shares_heads, sizes_that_share
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import ModelSection, PackingSection, ParallelismSection, TrainingSection
from vlmpack.recipe.trainable import TrainableSection


def shared_rows_need_samples(
    packing: PackingSection, training: TrainingSection, objective: ObjectiveSection
) -> list[Problem]:
    """Samples of one micro-batch share a row, so one sample has nothing to share. A pair is two."""
    least = 1 if objective.learns_pairs else packing.facts.least_samples
    if training.micro_batch_size >= least:
        return []
    message = (
        f"{training.micro_batch_size}, but packing.mode '{packing.mode}' makes one row of the "
        "samples of a micro-batch, and one sample has nothing to share its row with. Use a "
        f"micro_batch_size >= {least}. Or use packing.mode: none, or online, which fills rows "
        "across micro-batches"
    )
    return [Problem(("training", "micro_batch_size"), message)]


def _what(packing: PackingSection, objective: ObjectiveSection) -> str:
    """What a global batch counts, and what that means."""
    if objective.learns_pairs:
        return "pairs, as in the unpacked run"
    if packing.packs_by_batch:
        return "samples, as in the unpacked run"
    return (
        "rows of several samples each (packing.scope: batch counts samples); `vlmpack plan` says "
        "how many samples that is"
    )


def planned_rows_are_micro_batches(
    packing: PackingSection, training: TrainingSection, objective: ObjectiveSection
) -> list[Problem]:
    """Online and offline rows are full by plan: a micro-batch is one row."""
    if not packing.facts.plans_rows or training.micro_batch_size == 1:
        return []
    message = (
        f"{training.micro_batch_size}, but packing.mode '{packing.mode}' fills each row by a "
        "token budget and a micro-batch is one row. Set it to 1. training.global_batch_size "
        f"{training.global_batch_size} then counts {_what(packing, objective)}"
    )
    return [Problem(("training", "micro_batch_size"), message)]


def rows_hold_a_sample(
    packing: PackingSection, training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """The longest sample, rounded up, fits a row."""
    if not packing.facts.plans_rows:
        return []
    alignment = plan_alignment(packing, parallelism)
    longest = round_up(training.seq_length, alignment)
    if row_tokens(packing, training, parallelism) >= longest:
        return []
    message = (
        f"{packing.max_tokens}, but the longest sample takes {longest} tokens (training.seq_length "
        f"{training.seq_length}, rounded up to packing.alignment {alignment}). Use {longest} or "
        "more, or lower training.seq_length"
    )
    return [Problem(("packing", "max_tokens"), message)]


def saved_rows_have_packs(packing: PackingSection) -> list[Problem]:
    """Saved rows were made before."""
    if packing.facts.reads_packs and packing.path is None:
        message = (
            f"missing, but packing.mode '{packing.mode}' trains on packs that were made before: "
            "run `vlmpack pack RECIPE -o DIR` and set packing.path to DIR"
        )
        return [Problem(("packing", "path"), message)]
    return []


def packs_need_offline(packing: PackingSection) -> list[Problem]:
    """Saved packs are rows; mode online makes the same rows anew."""
    if packing.path is None or packing.facts.plans_rows:
        return []
    message = (
        f"'{packing.path}', but packing.mode '{packing.mode}' reads no saved packs; use "
        "packing.mode: offline, or leave it out"
    )
    return [Problem(("packing", "path"), message)]


def row_fields_need_rows(packing: PackingSection) -> list[Problem]:
    """What describes a planned row has no meaning elsewhere."""
    if packing.facts.plans_rows:
        return []
    unset = PackingSection()
    names = ("max_tokens", "max_vision_patches", "max_sequences", "scope", "pad_to_max_length")
    return [
        Problem(
            ("packing", name),
            f"{getattr(packing, name)}, but packing.mode '{packing.mode}' plans no rows; use "
            "packing.mode: online, or leave it out",
        )
        for name in (*names, "pad_cu_seqlens")
        if getattr(packing, name) != getattr(unset, name)
    ]


def fixed_boundaries_need_fixed_rows(packing: PackingSection) -> list[Problem]:
    """A boundary array of one size helps where the row has one size, too."""
    if not packing.pad_cu_seqlens or packing.pad_to_max_length:
        return []
    message = "true, but packing.pad_to_max_length is false; set both for rows of fixed shape"
    return [Problem(("packing", "pad_cu_seqlens"), message)]


def fixed_rows_fit_the_layout(
    packing: PackingSection, training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """A row of fixed width has no tail that could be rounded up any more."""
    if not packing.pad_to_max_length or not packing.facts.plans_rows:
        return []
    width, multiple = row_tokens(packing, training, parallelism), multiples(parallelism).row
    if width % multiple == 0:
        return []
    message = (
        f"true, but rows of {width} tokens (packing.max_tokens) are no multiple of {multiple}, as "
        f"parallelism needs; set packing.max_tokens: {round_up(width, multiple)}"
    )
    return [Problem(("packing", "pad_to_max_length"), message)]


def alignment_splits_over_context(
    packing: PackingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Planned lengths must stay whole when context parallelism cuts them."""
    if packing.alignment is None:
        return []
    return _uneven(("packing", "alignment"), packing.alignment, parallelism, ", or leave it out")


def seq_length_splits_over_context(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Context parallelism cuts each sequence into 2*CP equal chunks."""
    return _uneven(("training", "seq_length"), training.seq_length, parallelism)


def _uneven(
    key: KeyPath, length: int, parallelism: ParallelismSection, instead: str = ""
) -> list[Problem]:
    """What is wrong with a length that context parallelism cannot cut into 2*CP equal chunks."""
    chunks = 2 * parallelism.context
    if parallelism.context == 1 or length % chunks == 0:
        return []
    message = (
        f"{length} is not a multiple of 2 x parallelism.context = {chunks}; "
        f"use {round_up(length, chunks)}{instead}"
    )
    return [Problem(key, message)]


_GRAPHS = ("training", "cuda_graphs")

_OFF = "training.cuda_graphs: none"
"""How graphs are done without: `none` alone may be read as a value of the other field."""


def _no_graph(training: TrainingSection, is_so: object, why: str) -> list[Problem]:
    """One problem where graphs are asked for and something stands in their way."""
    if training.cuda_graphs == "none" or not is_so:
        return []
    return [Problem(_GRAPHS, f"{training.cuda_graphs!r}, but {why}")]


def graphs_replay_planned_rows(training: TrainingSection, packing: PackingSection) -> list[Problem]:
    """Rows of one width are those that a budget plans."""
    why = (
        f"the rows of packing.mode '{packing.mode}' share no width; use packing.mode: online or "
        f"offline, or {_OFF}"
    )
    return _no_graph(training, not packing.facts.plans_rows, why)


def graphs_read_boundaries(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """A loop over segments launches other kernels for every row."""
    why = (
        "model.attention: segments is a loop over each row's own lengths, which no graph can "
        f"replay. Use auto, torch_varlen or flash_attn, or {_OFF}"
    )
    return _no_graph(training, model.attention == "segments", why)


def graphs_hold_layers_of_ours(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """Nobody tried to capture Transformer Engine's layers with boundaries that change."""
    why = (
        "the layers of model.attention: transformer_engine were never captured; use auto, "
        f"torch_varlen or flash_attn, or {_OFF}"
    )
    return _no_graph(training, model.attention == "transformer_engine", why)


def graphs_hold_whole_rows_on_hf(
    training: TrainingSection, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """Nobody recorded the exchange of heads."""
    why = (
        f"parallelism.context is {parallelism.context}, and no graph has recorded the exchange of "
        f"heads that model.backend: hf shares rows by. Use {_OFF}"
    )
    return _no_graph(training, model.backend == "hf" and parallelism.context > 1, why)


def graphs_share_the_heads_of_a_row(
    training: TrainingSection, parallelism: ParallelismSection, config: ModelConfig
) -> list[Problem]:
    """Context parallelism of a captured row splits heads, since its segments vary."""
    heads = config.size("num_attention_heads")
    groups = config.size("num_key_value_heads") or heads
    tensor, context = parallelism.tensor, parallelism.context
    known = context > 1 and heads and not groups % tensor  # what else is refused has its own rule
    if not known:
        return []
    why = (
        f"parallelism.context: {context} with tensor: {tensor} cannot share out in a graph "
        f"the num_attention_heads {heads} and num_key_value_heads {groups} of "
        f"{config.folder}/config.json. Sizes that can: "
        f"{sizes_that_share(heads, groups, tensor)}. Or {_OFF}"
    )
    return _no_graph(training, not shares_heads(heads, groups, tensor, context), why)


def graphs_hold_one_row_at_a_time(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """A captured backward pass reads what its own forward pass left last."""
    why = (
        f"parallelism.pipeline: {parallelism.pipeline} has several rows under way at a time, and "
        f"a captured decoder keeps the activations of one. Set pipeline to 1, or {_OFF}"
    )
    return _no_graph(training, parallelism.pipeline > 1, why)


def graphs_need_whole_weights(
    training: TrainingSection, parallelism: ParallelismSection
) -> list[Problem]:
    """A graph reads weights where they lay when it was captured."""
    why = (
        "parallelism.sharding: fsdp gathers the weights of each layer into other memory in every "
        f"step. No graph replays the hooks that do it. Use sharding: none, or {_OFF}"
    )
    return _no_graph(training, parallelism.sharding == "fsdp", why)


def graphs_share_no_prefixes(training: TrainingSection, packing: PackingSection) -> list[Problem]:
    """What is shared decides how a row is computed."""
    why = (
        "packing.share_prefix: true makes attention follow what each row's samples share; use "
        f"false, or {_OFF}"
    )
    return _no_graph(training, packing.share_prefix, why)


def graphs_train_no_pairs(training: TrainingSection, objective: ObjectiveSection) -> list[Problem]:
    """Pairs have a reference pass, and rows of no fixed shape."""
    why = f"rows of objective.name '{objective.name}' have no fixed shape yet; use {_OFF}"
    return _no_graph(training, objective.learns_pairs, why)


def graphs_drop_nothing(training: TrainingSection, trainable: TrainableSection) -> list[Problem]:
    """Random numbers follow from each step's own seed, which a graph would have to be told."""
    why = (
        f"trainable.lora.dropout {trainable.lora.dropout} draws random numbers in every row; set "
        f"it to 0, or {_OFF}"
    )
    return _no_graph(training, trainable.drops(), why)


def graphs_need_plain_weights(
    training: TrainingSection, trainable: TrainableSection
) -> list[Problem]:
    """Nobody tried to capture the kernels of quantized weights."""
    quantize = trainable.lora.quantize
    why = f"trainable.lora.quantize {quantize!r} was never captured; use none, or {_OFF}"
    return _no_graph(training, trainable.uses("lora") and quantize != "none", why)


def graphs_have_no_router_loss(training: TrainingSection, model: ModelSection) -> list[Problem]:
    """The routers' logits stay inside of the captured part."""
    why = (
        f"model.router_aux_loss_coef {model.router_aux_loss_coef} needs the routers' logits, which "
        f"a captured decoder keeps to itself; set it to 0, or {_OFF}"
    )
    return _no_graph(training, model.router_aux_loss_coef, why)


def bounds_of_graphs_need_graphs(training: TrainingSection) -> list[Problem]:
    """A bound on what fits says nothing where there is nothing to fit."""
    bound = training.cuda_graph_max_sequences
    if training.cuda_graphs != "none" or bound == "auto":
        return []
    message = f"{bound}, but training.cuda_graphs is none; use decoder, or leave it out"
    return [Problem(("training", "cuda_graph_max_sequences"), message)]


_PREFIX = ("packing", "share_prefix")


def shared_rows_have_a_mode(packing: PackingSection) -> list[Problem]:
    """A mode has rows of several samples."""
    if not packing.share_prefix or packing.facts.shares_prefixes:
        return []
    pads = packing.facts.pads
    why = "has a row for each sample, and nothing to share" if pads else "shares no prefixes"
    message = (
        f"true, but packing.mode '{packing.mode}' {why}; use in_batch, online or offline, or leave "
        "it out"
    )
    return [Problem(_PREFIX, message)]


def shared_rows_have_any_shape(packing: PackingSection) -> list[Problem]:
    """What a row takes follows from what its samples share."""
    if not packing.share_prefix or not packing.pad_to_max_length:
        return []
    message = (
        "true, but rows of fixed shape (packing.pad_to_max_length) share no prefixes; leave one of "
        "them out"
    )
    return [Problem(_PREFIX, message)]


def shared_rows_have_an_engine(
    packing: PackingSection, model: ModelSection, parallelism: ParallelismSection
) -> list[Problem]:
    """The other engine's attention takes segments that are each by themselves."""
    if packing.share_prefix and model.backend == "hf" and parallelism.context > 1:
        message = (
            f"true, but parallelism.context is {parallelism.context}, and a row with shared "
            "prefixes is not cut; leave one of them out"
        )
        return [Problem(_PREFIX, message)]
    if not packing.share_prefix or model.backend == "hf":
        return []
    message = (
        f"true, but model.backend '{model.backend}' shares no prefixes, nor does Transformer "
        "Engine or context parallelism; use model.backend: hf, or leave it out"
    )
    return [Problem(_PREFIX, message)]


def shared_rows_have_no_router_loss(packing: PackingSection, model: ModelSection) -> list[Problem]:
    """That loss counts the tokens of a row."""
    if not packing.share_prefix or not model.router_aux_loss_coef:
        return []
    message = (
        f"true, but the balancing loss of a router (model.router_aux_loss_coef "
        f"{model.router_aux_loss_coef}) counts every token of a row, a shared one once. Leave one "
        "of them out"
    )
    return [Problem(_PREFIX, message)]


def families_share_prefixes(packing: PackingSection, served: ServedModel) -> list[Problem]:
    """A family's attention is the only thing that passes from token to token, and ours."""
    if not packing.share_prefix or served.unshared is None:
        return []
    message = f"true, but {served.title} cannot share prefixes: {served.unshared}; use false"
    return [Problem(_PREFIX, message)]
