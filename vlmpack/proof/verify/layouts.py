"""The ways in which the samples are laid out: the run's own rows, and packed ones beside
padded; and which samples share a row."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpack.alignment import round_up
from vlmpack.build.engine import EngineSpec
from vlmpack.data.pipeline import TrainData
from vlmpack.data.protocols import Collator
from vlmpack.packing import EncodedSample, PackCollator
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.derived import multiples


def layouts(spec: EngineSpec, train: TrainData) -> list[tuple[str, Collator]]:
    """The run's own rows; for padded ones also the packed row that other modes would make.

    Returns:
        What the names of a layout's checks begin with, and its collator.
    """
    own = train.dataset.collator
    if not train.config.mode.facts.pads:
        return [("", own)]
    encoder, wanted = spec.encoder, multiples(spec.parallelism)
    packed = PackCollator(
        pad_token_id=encoder.pad_token_id,
        num_position_axes=encoder.num_position_axes,
        pad_to_multiple_of=wanted.sequence,
        total_multiple_of=wanted.row,
    )
    return [("padded: ", own), ("packed: ", packed)]


def group_samples(
    samples: Sequence[EncodedSample],
    count: int,
    collator: Collator,
    *,
    budget: RowBudget | None,
) -> list[list[int]]:
    """Which samples share a row: at most `count` of them, and what the row has room for. More than
    two pairs are in two rows or more.

    Args:
        samples: by number.
        count: samples of a row.
        collator: that makes the rows.
        budget: of a row; None for no bound. A longer sample has a row of its own.
    """
    if collator.fixed is not None and collator.fixed.max_sequences is not None:
        count = min(count, collator.fixed.max_sequences)
    groups: list[list[int]] = [[]]
    filled = 0
    for number, sample in enumerate(samples):
        lengths = sample.sequences or (sample.length,)
        slots = sum(round_up(length, collator.pad_to_multiple_of) for length in lengths)
        over = budget is not None and not budget.takes(filled + slots)
        if groups[-1] and (over or len(groups[-1]) == count):
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += slots
    if len(groups) == 1 and len(samples) > 2 and samples[0].sequences:
        # Two rows of unlike numbers of pairs: a mean of their means is another one.
        cut = len(samples) - len(samples) // 3
        return [groups[0][:cut], groups[0][cut:]]
    return groups


def rows_in_words(count: int, *, padded: bool) -> str:
    """What an engine runs on, for the log."""
    if padded:
        return f"{count} batch{'es' if count != 1 else ''} of padded rows"
    return f"{count} packed row{'s' if count != 1 else ''}"
