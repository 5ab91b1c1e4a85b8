"""What a planned row may hold, and the rows that samples make of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmpack.alignment import round_up
from vlmpack.packing.limits import Integers
from vlmpack.packing.offline import plan_packs
from vlmpack.packing.stream import StreamPacker, buffer_for

DEFAULT_MAX_SEQUENCES = 32
"""Sequences in a row at most, where no dry run says more: what the packer makes of common mixes
holds fewer (ALGORITHMS: at most 31)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """The most that a row may hold, with lengths rounded up to `alignment` first.

    A sample that is known to be bad has no tokens. It takes a place of the smallest size, so that
    its hole is counted in its row.

    Args:
        max_patches: vision patches; None for no bound.
        max_sequences: samples; None for no bound.
        alignment: multiple that each sample's length counts as, in tokens.
        buffer: samples that rows of a stream are chosen from; None to follow the lengths of the
            window.
    """

    max_tokens: int
    max_patches: int | None = None
    max_sequences: int | None = None
    alignment: int = 1
    buffer: int | None = None

    def full_row(self, patches: int) -> tuple[int, int]:
        """Tokens and vision patches of a full row. `patches` is used if nothing bounds them."""
        return self.max_tokens, patches if self.max_patches is None else self.max_patches

    @property
    def knobs(self) -> dict[str, int | None]:
        """By the recipe's keys, as an identity has them."""
        return {
            "packing.max_tokens": self.max_tokens,
            "packing.max_vision_patches": self.max_patches,
            "packing.max_sequences": self.max_sequences,
            "packing.alignment": self.alignment,
        }

    def __str__(self) -> str:
        return self.text("samples")

    def text(self, units: str) -> str:
        """The budget in words. `units` is the word for samples."""
        most = "" if self.max_sequences is None else f" and {self.max_sequences} {units}"
        return f"{self.max_tokens:,} tokens{most}"

    def takes(self, num_tokens: int) -> bool:
        """Whether a row may hold so many tokens."""
        return num_tokens <= self.max_tokens

    def planned(self, sequences: Integers) -> Integers:
        """(n,) tokens that samples count as, by the rounded lengths of `sequences`, (n, k)."""
        planned: Integers = (-(-sequences // self.alignment) * self.alignment).sum(axis=1)
        return planned

    def fill(self, num_tokens: int, num_rows: int) -> float:
        """Tokens over the slots of full rows."""
        return num_tokens / max(1, num_rows * self.max_tokens)

    def tails(self, filled: Integers, others: int) -> float:
        """The share of slots that tails fill where some rows are filled up and others are not.

        Args:
            filled: (n,) tokens of the rows that are.
            others: tokens of the others, all together.
        """
        slots = filled.shape[0] * self.max_tokens + others
        tails = slots - others - int(filled.sum())
        return float(tails / max(1, slots))

    def ends(
        self, tokens: Integers, patches: Integers, samples: Integers, num_images: int
    ) -> dict[str, float]:
        """The share of rows that each bound ended, by the first bound that applies.

        The bounds are tested in this order: no room for the tokens of a mean sample, for the
        patches of a mean sample with some, for another sample. `buffer` means that there was room,
        but no waiting sample fitted.

        Args:
            tokens, patches, samples: (n,) of the rows; n at least 1.
            num_images: samples that have patches.
        """
        is_full = {"tokens": (self.max_tokens - tokens) * samples.sum() < tokens.sum()}
        if self.max_patches is not None:
            is_full["vision budget"] = (self.max_patches - patches) * num_images < patches.sum()
        if self.max_sequences is not None:
            is_full["sequences"] = samples >= self.max_sequences
        is_full["buffer"] = np.ones(samples.shape, np.bool_)
        first = np.argmax(np.stack(list(is_full.values())), axis=0)
        shares = np.bincount(first, minlength=len(is_full)) / first.size
        return {name: share for name, share in zip(is_full, shares.tolist(), strict=True) if share}

    def waiting(self, tokens: Integers) -> int:
        """Samples that the rows of a window are chosen from."""
        if self.buffer is not None:
            return self.buffer
        units = -(-np.maximum(tokens, 1) // self.alignment)
        return buffer_for(units, self.max_tokens // self.alignment)

    def rows(self, tokens: Integers, patches: Integers) -> list[list[int]]:
        """Rows of samples that come in order, filled by StreamPacker, as places in that order."""
        packer = StreamPacker(
            self.max_tokens,
            buffer_size=self.waiting(tokens),
            second_budget=self.max_patches,
            alignment=self.alignment,
            max_sequences=self.max_sequences,
        )
        rows: list[list[int]] = []
        for length, second in zip(np.maximum(tokens, 1).tolist(), patches.tolist(), strict=True):
            rows += packer.push(length, second)
        return rows + packer.flush()

    def packs(self, tokens: Integers, patches: Integers) -> list[Integers]:
        """Rows of samples that are all known, chosen by `plan_packs`, as places."""
        return plan_packs(
            np.maximum(tokens, 1),
            self.max_tokens,
            second=None if self.max_patches is None else patches,
            second_budget=self.max_patches,
            alignment=self.alignment,
            max_sequences=self.max_sequences,
        )

    def resolved(self, rows: Sequence[Sequence[int]] | None) -> RowBudget:
        """The budget, with the bound on sequences that a dry run's rows advise where it has none.

        `rows` is None where nothing could be tried.
        """
        if self.max_sequences is not None:
            return self
        most = DEFAULT_MAX_SEQUENCES
        if rows is not None:
            most = advised_max_sequences([len(row) for row in rows])
        return replace(self, max_sequences=most)


def advised_max_sequences(sequences: Sequence[int] | Integers) -> int:
    """A bound on a row's sequences that nearly all rows of a dry run keep.

    It is their 99.9th percentile, rounded up to a multiple of 8 (the size of a fixed `cu_seqlens`).
    """
    if not len(sequences):
        return DEFAULT_MAX_SEQUENCES
    place = -(-999 * len(sequences) // 1000) - 1
    return round_up(int(np.sort(np.asarray(sequences))[place]), 8)
