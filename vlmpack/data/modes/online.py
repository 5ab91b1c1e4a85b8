"""Modes `online` and `offline`: rows filled up to a budget."""

from __future__ import annotations

from dataclasses import replace

from vlmpack.alignment import round_up
from vlmpack.data.modes.base import Cutting, PackingMode, Uncut
from vlmpack.data.plan.packers import (
    STREAMED_SAMPLES_PER_ROW,
    BudgetPacker,
    Packer,
    window_samples,
)
from vlmpack.data.plan.state import IdentityValue
from vlmpack.errors import RecipeError
from vlmpack.packing.budget import DEFAULT_MAX_SEQUENCES
from vlmpack.packing.planned import shared_rows
from vlmpack.packing.row_layout import FixedShape


class Online(PackingMode):
    """Rows filled up to a budget, while training: over a window (`packing.scope: stream`), or
    inside the samples of a global batch."""

    @property
    def label(self) -> str:
        """See PackingMode."""
        return f"{self.name}, {self.packing.scope}"

    def cut(self, split: Uncut) -> Cutting:
        """See PackingMode: settled by a dry run over the first samples, where there are some."""
        per_row, in_rows = STREAMED_SAMPLES_PER_ROW, self.packing.counts_rows
        sizes = split.planned_sizes(self.budget.alignment)
        planned, fullest = split.planned, None
        if split.first_samples is None:
            budget = self.budget.settled(None)
        elif (
            not in_rows
            and self.budget.max_sequences is not None
            and (not self.captures or self.graph_sequences is not None)
        ):
            budget = self.budget  # nothing is left to settle
        else:
            order = split.first_samples()
            tokens, patches = sizes(order)
            if planned is None:
                rows = self.budget.rows(tokens, patches)
            else:
                rows = shared_rows(planned(order), patches, self.budget)
            per_row = -(-order.shape[0] // max(1, len(rows)))
            budget = self.budget.settled(rows)
            fullest = max(map(len, rows), default=None)
        packer = BudgetPacker(
            budget=budget,
            global_batch_size=split.global_batch_size,
            scope=self.packing.scope,
            sizes=sizes,
            planned=planned,
            fullest=fullest,
        )
        return Cutting(packer, window_samples(split.global_batch_size, per_row if in_rows else 0))

    def identity(self, cutting: Cutting) -> dict[str, IdentityValue]:
        """See PackingMode."""
        budget = self.settled(cutting.packer).budget
        found: dict[str, IdentityValue] = {
            **budget.knobs,
            "packing.scope": self.packing.scope,
            "window": cutting.window,
        }
        packer = cutting.packer
        if isinstance(packer, BudgetPacker) and packer.planned is not None:
            found["packing.share_prefix"] = True
        return found

    def settled(self, packer: Packer) -> PackingMode:
        """See PackingMode; what fits a graph is settled too.

        The fullest row, not most rows: with many processes a step soon has one that does not fit,
        and all wait for it, while a boundary costs 4 bytes and thread blocks that end at once.
        """
        mode = super().settled(packer)
        if not mode.captures or mode.graph_sequences is not None:
            return mode
        fullest = packer.fullest if isinstance(packer, BudgetPacker) else None
        known = (None if fullest is None else round_up(fullest, 8), mode.budget.max_sequences)
        most = [bound for bound in known if bound is not None]
        return replace(mode, graph_sequences=min(most, default=DEFAULT_MAX_SEQUENCES))

    def fixed_shape(self) -> FixedShape | None:
        """See PackingMode: a captured graph's, or that of `packing.pad_to_max_length` and
        `packing.pad_cu_seqlens`."""
        if self.captures and self.graph_sequences is not None:
            return FixedShape(
                row_tokens=self.budget.max_tokens,
                max_sequences=self.graph_sequences,
                overflows=True,
            )
        if not self.packing.pad_to_max_length:
            return None
        most = self.budget.max_sequences if self.packing.pad_cu_seqlens else None
        if self.packing.pad_cu_seqlens and most is None:
            raise RecipeError(
                [
                    "packing.pad_cu_seqlens: true, but the number of sequences in a row is not "
                    "settled; set packing.max_sequences"
                ]
            )
        return FixedShape(row_tokens=self.budget.max_tokens, max_sequences=most)


class Offline(Online):
    """Rows that `vlmpack pack` cut in mode `online` and saved: vlmpack/data/packs opens them."""

    @property
    def label(self) -> str:
        """See PackingMode."""
        return "offline, saved"
