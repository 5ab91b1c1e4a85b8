"""What follows from a recipe and the number of processes; none of it is a knob."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, TypedDict

from vlmpack.alignment import Alignment, alignment, round_up
from vlmpack.recipe.schema import PackingSection, ParallelismSection, Recipe, TrainingSection

_DEFAULT_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """Sizes of a run on `world_size` processes."""

    world_size: int
    """The processes of the run."""

    data_parallel: int
    """Copies of the model, each with its own part of every global batch."""

    gradient_accumulation_steps: int | None
    """Micro-batches per optimizer step and process; None where each step has its own number of
    rows (`packing.scope: batch`)."""

    alignment: int
    """Planned lengths are rounded up to a multiple of this many tokens."""

    sequence_multiple: int
    """Each sequence in a packed row is padded to a multiple of this many tokens."""

    row_multiple: int
    """A packed row is padded to a multiple of this many tokens."""

    max_row_tokens: int
    """Upper bound of a micro-batch's tokens, padding included."""


class DerivedRow(NamedTuple):
    """One line of the derived-values table."""

    name: str
    value: int | str
    formula: str


def data_parallel_size(parallelism: ParallelismSection, world_size: int) -> int:
    """Copies of the model among `world_size` processes, a multiple of the size of one copy."""
    return world_size // (parallelism.tensor * parallelism.pipeline * parallelism.context)


def smallest_world(parallelism: ParallelismSection) -> int:
    """The fewest processes that the layout fits on.

    They hold one copy of the model, or several if these share experts. HSDP needs two in each
    sharded copy.
    """
    if parallelism.replicate > 1:
        return 2 * parallelism.replicate
    of_stage = lcm(parallelism.tensor * parallelism.context, parallelism.expert)
    return of_stage * parallelism.pipeline


def multiples(parallelism: ParallelismSection) -> Alignment:
    """What segments and rows of this layout are multiples of."""
    return alignment(
        context_parallel=parallelism.context,
        tensor_parallel=parallelism.tensor,
        sequence_parallel=parallelism.sequence,
    )


def plan_alignment(packing: PackingSection, parallelism: ParallelismSection) -> int:
    """`packing.alignment`, or the smallest multiple of 2*CP that is at least 8: with CP a power
    of two that is max(2*CP, 8)."""
    if packing.alignment is not None:
        return packing.alignment
    return round_up(_DEFAULT_ALIGNMENT, 2 * parallelism.context)


def longest_sample(training: TrainingSection, alignment: int, *, pairs: bool = False) -> int:
    """Tokens that the longest sample takes in a planned row.

    Each sequence of a pair is rounded up. w + l <= seq_length takes up(w) + up(l), which is at most
    a multiple below seq_length + 2 A - 1.
    """
    if not pairs:
        return round_up(training.seq_length, alignment)
    return (training.seq_length + 2 * alignment - 2) // alignment * alignment


def row_tokens(
    packing: PackingSection,
    training: TrainingSection,
    parallelism: ParallelismSection,
    *,
    pairs: bool = False,
) -> int:
    """Tokens that a planned row holds at most: `packing.max_tokens`, or the longest sample's."""
    if packing.max_tokens is not None:
        return packing.max_tokens
    return longest_sample(training, plan_alignment(packing, parallelism), pairs=pairs)


class RowBounds(TypedDict):
    """What a planned row holds, as vlmpack/packing takes it: None where nothing bounds it, or
    where a dry run of the packer will say."""

    max_tokens: int
    max_patches: int | None
    max_sequences: int | None
    alignment: int


def row_bounds(
    packing: PackingSection,
    training: TrainingSection,
    parallelism: ParallelismSection,
    *,
    pairs: bool = False,
) -> RowBounds:
    """What a planned row holds, with what the recipe leaves out filled in."""
    return RowBounds(
        max_tokens=row_tokens(packing, training, parallelism, pairs=pairs),
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=plan_alignment(packing, parallelism),
    )


def graph_sequences(training: TrainingSection) -> int | None:
    """Samples up to which a row fits a captured graph; None where a dry run will say."""
    bound = training.cuda_graph_max_sequences
    return None if bound == "auto" else bound


def derive(recipe: Recipe, world_size: int) -> Derived:
    """The sizes of a run.

    Args:
        recipe: a recipe that `check_world` accepts for this number of processes.
        world_size: number of processes, at least 1.
    """
    parallelism, training = recipe.parallelism, recipe.training
    copies = data_parallel_size(parallelism, world_size)
    multiple = multiples(parallelism)
    longest = round_up(training.seq_length, multiple.sequence)
    row = training.micro_batch_size * longest
    if recipe.packing.facts.plans_rows:
        pairs = recipe.objective.learns_pairs
        row = row_tokens(recipe.packing, training, parallelism, pairs=pairs)
    return Derived(
        world_size=world_size,
        data_parallel=copies,
        gradient_accumulation_steps=None
        if recipe.packing.packs_by_batch
        else training.global_batch_size // (training.micro_batch_size * copies),
        alignment=plan_alignment(recipe.packing, parallelism),
        sequence_multiple=multiple.sequence,
        row_multiple=multiple.row,
        max_row_tokens=round_up(row, multiple.row),
    )


def derived_rows(recipe: Recipe, world_size: int) -> list[DerivedRow]:
    """The derived values, each with its formula filled in, for a table."""
    values, training, split = derive(recipe, world_size), recipe.training, recipe.parallelism
    micro = training.micro_batch_size
    copy = f"{split.tensor} tensor x {split.pipeline} pipeline x {split.context} context"
    units = "pairs" if recipe.objective.learns_pairs else "samples"
    steps = DerivedRow(
        "gradient accumulation",
        "varies",
        f"the rows of each step's {training.global_batch_size} {units} / {values.data_parallel}",
    )
    if values.gradient_accumulation_steps is not None:
        steps = steps._replace(
            value=values.gradient_accumulation_steps,
            formula=f"global {training.global_batch_size} / (micro {micro} x "
            f"{values.data_parallel})",
        )
    return [
        DerivedRow("world size", world_size, "processes"),
        DerivedRow("data parallel", values.data_parallel, f"{world_size} / ({copy})"),
        steps,
        DerivedRow(
            "plan alignment",
            values.alignment,
            "tokens, packing.alignment"
            if recipe.packing.alignment is not None
            else "tokens, the multiple of 2 x context from 8 up",
        ),
        DerivedRow("sequence multiple", values.sequence_multiple, "tokens, from context"),
        DerivedRow("row multiple", values.row_multiple, "tokens, from context and tensor"),
        DerivedRow(
            "longest micro-batch",
            values.max_row_tokens,
            "tokens, packing.max_tokens"
            if recipe.packing.facts.plans_rows
            else f"tokens, {micro} x seq_length {training.seq_length}",
        ),
    ]
