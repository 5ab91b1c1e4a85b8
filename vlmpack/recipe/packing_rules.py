"""Rules about how samples share rows. `rules.py` says what a rule is."""

from __future__ import annotations

from vlmpack.alignment import round_up
from vlmpack.recipe.derived import multiples, plan_alignment, row_tokens
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import PackingSection, ParallelismSection, TrainingSection


def shared_rows_need_samples(
    packing: PackingSection, training: TrainingSection, objective: ObjectiveSection
) -> list[Problem]:
    """A row is made of the samples of one micro-batch, so one sample has no row to share. A pair
    is two sequences already."""
    least = 1 if objective.learns_pairs else packing.facts.least_samples
    if training.micro_batch_size >= least:
        return []
    message = (
        f"{training.micro_batch_size}, but packing.mode '{packing.mode}' makes one row of the "
        "samples of a micro-batch, and one sample has nothing to share its row with; use a "
        f"micro_batch_size >= {least}, or packing.mode: online, which fills rows across "
        "micro-batches, or none"
    )
    return [Problem(("training", "micro_batch_size"), message)]


def _what(packing: PackingSection, objective: ObjectiveSection) -> str:
    """What a global batch counts, and what that means."""
    if objective.learns_pairs:
        return "pairs, as in the unpacked run"
    if packing.varies_in_rows:
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
        "token budget and a micro-batch is one row; set it to 1. training.global_batch_size "
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
        f"{training.seq_length}, rounded up to packing.alignment {alignment}); use {longest} or "
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
