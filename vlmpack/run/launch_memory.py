"""The memory that a launch will need, beside what its machine has, said before any weight is read.

A process that takes more than the machine has is ended by the kernel without a word. So the plan's
estimate is made once more from what a launch knows: the model's headers and the lengths of the
samples that are indexed.
"""

from __future__ import annotations

import logging

import numpy as np

from vlmpack.build.compute import settled_model
from vlmpack.build.setup import Setup
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import ModelError
from vlmpack.forecast.activations import recurrences_on
from vlmpack.forecast.figures import MemoryFigures
from vlmpack.forecast.memory import LargestMicroBatch, memory_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.run.machine_memory import Room, room_of

logger = logging.getLogger("vlmpack")

DRAWN = 1000
"""Micro-batches that are drawn for the largest one, where rows are not planned by a budget."""


def say_memory(setup: Setup, train: TrainData) -> None:
    """One line: the estimate, what there is; a warning with the knobs where it is more. Of the main
    rank alone.

    A model folder without the sizes that the estimate needs is passed over.
    """
    ranks = setup.ranks
    room = room_of(ranks.device)
    try:
        sizes = read_sizes(setup.encoder.folder)
    except ModelError:
        return
    if sizes is None or room is None:
        return
    model = settled_model(setup.recipe.model, ranks.device)
    figures = memory_figures(
        model,
        setup.recipe.parallelism,
        sizes,
        largest_micro_batch(train),
        global_batch_size=train.config.training.global_batch_size,
        world_size=ranks.world_size,
        trained=trained_sizes(setup.policy, setup.encoder),
        recurrences=recurrences_on(ranks.device, model),
    )
    line = memory_line(figures, room)
    if figures.total * room.processes > room.size:
        logger.warning("%-14s %s\n%s", "memory", line, ADVICE)
    else:
        logger.info("%-14s %s", "memory", line)


ADVICE = (
    "That is more than there is: the kernel (or CUDA) may end this run without a word. Less: "
    "trainable.* frozen or lora, parallelism.sharding: fsdp or model.backend: mcore over more "
    "processes, model.activation_checkpointing: true, a smaller training.micro_batch_size, "
    "packing.max_tokens, packing.max_vision_patches or training.seq_length. `vlmpack plan` has the "
    "figures one by one"
)


def memory_line(figures: MemoryFigures, room: Room) -> str:
    """The estimate and what there is, in words."""
    parts = ("weights", "gradients", "optimizer", "activations", "logits")
    each = ", ".join(f"{name} {_gib(getattr(figures, name))}" for name in parts)
    shared = f", for {room.processes} processes" if room.processes > 1 else ""
    blind = figures.tower_parameters > 0 and figures.row_patches == 0
    without = ", without the vision tower's activations" if blind else ""
    return (
        f"about {_gib(figures.total)} GiB a process ({each}{without}); {room.where} has "
        f"{_gib(room.size)} GiB{shared}"
    )


def largest_micro_batch(train: TrainData) -> LargestMicroBatch:
    """Its slots: of a planned row its budget; else the largest of many drawn micro-batches. Its
    patches: the budget's, 0 without one: no length of a sample says how many it has."""
    mode, micro = train.config.mode, train.config.training.micro_batch_size
    if mode.facts.plans_rows:
        return LargestMicroBatch(1, mode.budget.max_tokens, mode.budget.max_patches or 0)
    lengths = train.split.usable_tokens()
    if not lengths.size:
        return LargestMicroBatch(micro, 0, 0)
    drawn = np.random.default_rng(0).choice(lengths, (DRAWN, micro))
    rows = drawn.max(axis=1) * micro if mode.facts.pads else drawn.sum(axis=1)
    return LargestMicroBatch(micro, int(rows.max()), 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
