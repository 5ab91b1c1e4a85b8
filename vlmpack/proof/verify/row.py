"""A micro-batch of the samples that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmpack.alignment import Alignment
from vlmpack.data.protocols import Collator
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample
from vlmpack.proof.rows.row import Row, RowRules, cut_row


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow(Row):
    """A row of some of the samples.

    Args:
        numbers: of its samples among all that are verified.
    """

    numbers: tuple[int, ...]


def make_row(
    collator: Collator,
    samples: Sequence[EncodedSample],
    numbers: Sequence[int],
    encoder: Encoder,
    *,
    row_multiple: int,
    context: int = 1,
) -> VerifiedRow:
    """Some of the samples as one micro-batch.

    Args:
        collator: that makes it.
        samples: all that are verified.
        numbers: of those that are in it, in its order.
        encoder: the samples'.
        row_multiple: of the row's slots, as the parallel layout needs it, whatever the collator
            makes them.
        context: CP.
    """
    chosen = [samples[number] for number in numbers]
    batch = collator(chosen)
    return VerifiedRow(
        batch=batch,
        alone=tuple(chosen),
        rules=RowRules(
            context=context,
            multiples=Alignment(collator.pad_to_multiple_of, row_multiple),
            placeholder_id=encoder.placeholder_id,
            pad_token_id=encoder.pad_token_id,
        ),
        planned=tuple(sample.key for sample in chosen),
        slices=cut_row(batch, context) if context > 1 else (),
        numbers=tuple(numbers),
    )
