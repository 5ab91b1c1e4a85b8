"""What `model.activation_checkpointing: auto` comes to: the least that fits, by plan's estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vlmpack.forecast.figures import MemoryFigures
from vlmpack.recipe.engine_rules import why_not_selective
from vlmpack.recipe.schema import ModelSection, ParallelismSection, Recomputed, described
from vlmpack.words import sized

LADDER: tuple[Recomputed, ...] = ("none", "selective", 4, 3, 2, "full")
"""From no matrix product that is computed again to all of them."""

SHARE = 0.9
"""An estimate may fill this share of the memory: it leaves out the CUDA context, NCCL's buffers,
temporaries of kernels and fragmentation."""

Estimate = Callable[[ModelSection], MemoryFigures]
"""The fullest rank's bytes with one of the ladder's values."""


def given_room(model: ModelSection) -> tuple[int, str]:
    """Bytes of `model.memory_gib`, and whose they are in words; 0 where it is not set."""
    return round((model.memory_gib or 0) * 2**30), "model.memory_gib"


def least_that_fits(
    model: ModelSection,
    split: ParallelismSection,
    estimate: Estimate,
    room: int,
    where: str,
) -> tuple[ModelSection, MemoryFigures]:
    """The model section with the first value of the ladder whose estimate fits; the last where none
    does.

    Args:
        model: its dtype settled. What it says of recomputation is replaced.
        split: how the model is spread.
        estimate: of a model section.
        room: bytes that one process has.
        where: whose they are, in words.

    Returns:
        The section, and its figures with the reason.
    """
    fits = SHARE * room
    tried: list[str] = []
    for value in LADDER:
        if value == "selective" and why_not_selective(model, split) is not None:
            continue
        chosen = model.model_copy(update={"activation_checkpointing": value})
        figures = estimate(chosen)
        if figures.total <= fits or value == LADDER[-1]:
            break
        tried.append(f"{value} at {sized(figures.total)}")
    verb = "fits" if figures.total <= fits else "does not fit either"
    reason = (
        f"auto: about {sized(figures.total)}, which {verb} in {SHARE:.0%} of the "
        f"{sized(room)} of {where}"
    )
    if tried:
        reason += f"; too large: {', '.join(tried)}"
    return chosen, replace(figures, recomputed=f"{described(value)} ({reason})")
