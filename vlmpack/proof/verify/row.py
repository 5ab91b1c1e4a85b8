"""A micro-batch of the samples that are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmpack.alignment import Alignment
from vlmpack.data.protocols import Collator
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.rows.row import Row, RowRules, cut_row


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow(Row):
    """A row of some of the samples.

    Args:
        samples: that were collated; pairs, or those of `alone`.
        numbers: of its sequences among all that are verified.
    """

    samples: tuple[EncodedSample, ...]
    numbers: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sequences, for messages."""
        return tuple(part.key for part in in_sequences(self.samples))


def in_sequences(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """What the stock model runs: the samples, or of pairs their sequences, chosen and rejected in
    turn, each with its images and a name of its own."""
    found = []
    for sample in samples:
        parts = sequences_of(sample)
        sides = ("",) if len(parts) == 1 else (" (chosen)", " (rejected)")
        named = zip(parts, sides, strict=True)
        found += [replace(part, key=sample.key + side) for part, side in named]
    return found


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
        samples: all that are verified; pairs, or none of them.
        numbers: of those that are in it, in its order.
        encoder: the samples'.
        row_multiple: of the row's slots, as the parallel layout needs it, whatever the collator
            makes them.
        context: CP.
    """
    chosen = [samples[number] for number in numbers]
    batch = collator(chosen)
    sequences = max(1, len(chosen[0].sequences))
    return VerifiedRow(
        batch=batch,
        alone=tuple(part for sample in chosen for part in sequences_of(sample)),
        rules=RowRules(
            context=context,
            multiples=Alignment(collator.pad_to_multiple_of, row_multiple),
            placeholder_ids=encoder.placeholder_ids,
            pad_token_id=encoder.pad_token_id,
        ),
        planned=tuple(sample.key for sample in chosen),
        slices=cut_row(batch, context) if context > 1 else (),
        sequences=sequences,
        samples=tuple(chosen),
        numbers=tuple(n * sequences + k for n in numbers for k in range(sequences)),
    )
