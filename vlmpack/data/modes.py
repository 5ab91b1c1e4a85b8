"""How samples come to share rows. A packing mode is a value with all that depends on it.

    cut        a window's order -> its global batches and their bins, and the size of a window
    identity   the settings of the cut that decide the order. A run cannot resume with others
    collator   makes one batch of a bin's samples
    shape      the slots that such a batch takes, for callers that encode no sample (`vlmpack plan`)
    label      its name in tables

A mode holds the recipe's `packing` section, the budget of a row, and the multiples that the
parallel layout needs. `vlmpack/recipe/schema.py` has what the recipe's rules need of a mode. That
is its name, whether rows are planned by a budget, and the fields that a run may not change.

A new mode is a line there, a subclass of PackingMode here, and a line in MODES. It writes `cut`,
and a packer if none of vlmpack/data/plan/packers.py fits. It overrides the other methods if it
makes several rows a bin or rows of a set width, as `in_batch` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from vlmpack.alignment import Alignment, round_up
from vlmpack.data.index.table import Int64s, SampleLimits
from vlmpack.data.plan.packers import (
    STREAMED_SAMPLES_PER_ROW,
    AlignedSizes,
    BudgetPacker,
    FixedPacker,
    Packer,
    PlannedSamples,
    Sizes,
    window_samples,
)
from vlmpack.data.plan.state import IdentityValue
from vlmpack.data.protocols import Collator
from vlmpack.errors import RecipeError
from vlmpack.packing.budget import DEFAULT_MAX_SEQUENCES, RowBudget
from vlmpack.packing.collate import PackCollator, PadCollator
from vlmpack.packing.row_layout import FixedShape
from vlmpack.recipe.schema import ModeFacts, ModeName, PackingSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncut:
    """A split before it is cut.

    Args:
        first_samples: the first sample numbers in the order of the run, for a dry run; None where
            shards are indexed as the run goes on.
        aligned_sizes: `sizes` for planned rows, where each sequence of a pair is rounded up; None
            without pairs.
        planned: what is planned of samples that share prefixes.
    """

    global_batch_size: int
    micro_batch_size: int
    sizes: Sizes
    first_samples: Callable[[], Int64s] | None
    aligned_sizes: AlignedSizes | None = None
    planned: PlannedSamples | None = None

    def planned_sizes(self, alignment: int) -> Sizes:
        """Tokens and patches of samples, as a planned row counts them."""
        aligned = self.aligned_sizes
        return self.sizes if aligned is None else lambda numbers: aligned(numbers, alignment)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a split's order is cut."""

    packer: Packer
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """How the collator lays a bin out.

    Args:
        padded: one row a sample, all as wide as the longest (mode `none`); else one row a bin.
        width: packed rows are filled up to this many tokens; 0 for rows of any width.
        most_filled: samples up to which a row is filled up; None for any number.
    """

    padded: bool = False
    sequence_multiple: int = 1
    row_multiple: int = 1
    width: int = 0
    most_filled: int | None = None


@dataclass(frozen=True, kw_only=True)
class PackingMode(ABC):
    """How samples come to share rows.

    Args:
        budget: of a planned row. Its bound on sequences may be open until the split is cut.
        graph_sequences: samples up to which a row fits the graph; it may be open until the split is
            cut.
    """

    packing: PackingSection
    budget: RowBudget
    multiples: Alignment
    captures: bool = False
    graph_sequences: int | None = None

    @property
    def name(self) -> ModeName:
        """The mode's name, `packing.mode` of the recipe."""
        return self.packing.mode

    @property
    def facts(self) -> ModeFacts:
        """The recipe's facts about the mode."""
        return self.packing.facts

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name

    def limits(self, seq_length: int) -> SampleLimits:
        """The most that one sample may have. `data.over_long` decides about others."""
        return SampleLimits(seq_length, self.budget.max_patches)

    def most_patches(self, patches: int) -> int:
        """So many vision patches, or fewer where a row may have no more."""
        return min(patches, self.budget.max_patches or patches)

    @abstractmethod
    def cut(self, split: Uncut) -> Cutting:
        """The packer of a split and its window size. Settings that the recipe leaves open are
        decided here."""

    def waiting(self, tokens: Int64s) -> int:
        """Samples that planned rows are chosen from; 1 where rows keep the order."""
        return self.budget.waiting(tokens)

    def identity(self, cutting: Cutting) -> dict[str, IdentityValue]:
        """The settings of the cut that decide the order, by key, besides those of every mode."""
        return {}

    def resolved(self, packer: Packer) -> PackingMode:
        """The mode with the budget by which the split was cut, which a resumed run or packs may
        set."""
        return self if packer.budget is None else replace(self, budget=packer.budget)

    def collator(self, *, pad_token_id: int, num_position_axes: int) -> Collator:
        """The function that makes a batch of a bin, once the budget is final."""
        return PackCollator(
            pad_token_id=pad_token_id,
            num_position_axes=num_position_axes,
            pad_to_multiple_of=self.multiples.sequence,
            total_multiple_of=self.multiples.row,
            fixed=self.fixed_shape(),
            share_prefix=self.packing.share_prefix,
        )

    def fixed_shape(self) -> FixedShape | None:
        """The shape of all rows, where they have one."""
        return None

    def unreplayed(self, fewest: int) -> str | None:
        """A warning where 19 of 20 rows have too many samples (`fewest`) for a captured graph; else
        None."""
        shape = self.fixed_shape() if self.captures else None
        if shape is None or shape.most_filled is None or fewest <= shape.most_filled:
            return None
        return (
            f"19 of 20 rows hold {fewest} samples or more and run eagerly. The graph takes rows "
            f"of up to {shape.most_filled} (training.cuda_graph_max_sequences). Set it to "
            f"{round_up(fewest, 8)} or more, or training.cuda_graphs: none"
        )

    def shape(self) -> RowShape:
        """How that collator lays a bin out."""
        fixed = self.fixed_shape()
        return RowShape(
            sequence_multiple=self.multiples.sequence,
            row_multiple=self.multiples.row,
            width=0 if fixed is None else fixed.row_tokens,
            most_filled=None if fixed is None else fixed.most_filled,
        )


class InBatch(PackingMode):
    """The samples of one micro-batch become one row."""

    def cut(self, split: Uncut) -> Cutting:
        """See PackingMode: consecutive samples, `micro_batch_size` to a bin."""
        packer = FixedPacker(split.global_batch_size, split.micro_batch_size)
        return Cutting(packer, window_samples(split.global_batch_size))


class Padded(InBatch):
    """The same bins as padded rows: the baseline that everything is measured against."""

    def collator(self, *, pad_token_id: int, num_position_axes: int) -> Collator:
        """See PackingMode."""
        return PadCollator(
            pad_token_id=pad_token_id,
            num_position_axes=num_position_axes,
            pad_to_multiple_of=self.multiples.row,
        )

    def shape(self) -> RowShape:
        """See PackingMode."""
        return RowShape(padded=True, row_multiple=self.multiples.row)


class Online(PackingMode):
    """Rows filled up to a budget while training: over a window, or inside a global batch's
    samples."""

    packer: ClassVar[type[BudgetPacker]] = BudgetPacker
    """What makes rows; a mode with others names a subclass that overrides `rows`."""

    @property
    def label(self) -> str:
        """See PackingMode."""
        return f"{self.name}, {self.packing.scope}"

    def cut(self, split: Uncut) -> Cutting:
        """See PackingMode: decided by a dry run over the first samples, where there are some."""
        per_row, in_rows = STREAMED_SAMPLES_PER_ROW, self.packing.counts_rows
        packer = self.packer(
            budget=self.budget,
            global_batch_size=split.global_batch_size,
            scope=self.packing.scope,
            sizes=split.planned_sizes(self.budget.alignment),
            planned=split.planned,
        )
        has_open = self.budget.max_sequences is None or (
            self.captures and self.graph_sequences is None
        )
        if split.first_samples is None:
            packer = replace(packer, budget=self.budget.resolved(None))
        elif in_rows or has_open:
            order = split.first_samples()
            rows = packer.rows(order)
            per_row = -(-order.shape[0] // max(1, len(rows)))
            fullest = max(map(len, rows), default=None)
            packer = replace(packer, budget=self.budget.resolved(rows), fullest=fullest)
        return Cutting(packer, window_samples(split.global_batch_size, per_row if in_rows else 0))

    def identity(self, cutting: Cutting) -> dict[str, IdentityValue]:
        """See PackingMode."""
        budget = self.resolved(cutting.packer).budget
        identity: dict[str, IdentityValue] = {
            **budget.knobs,
            "packing.scope": self.packing.scope,
            "window": cutting.window,
        }
        packer = cutting.packer
        if isinstance(packer, BudgetPacker) and packer.planned is not None:
            identity["packing.share_prefix"] = True
        return identity

    def resolved(self, packer: Packer) -> PackingMode:
        """See PackingMode; also sets how many samples fit a graph.

        The fullest row counts, since with many processes a step soon has one that does not fit and
        all wait for it. A boundary only costs 4 bytes and thread blocks that end at once.
        """
        mode = super().resolved(packer)
        if not mode.captures or mode.graph_sequences is not None:
            return mode
        fullest = packer.fullest if isinstance(packer, BudgetPacker) else None
        known = (None if fullest is None else round_up(fullest, 8), mode.budget.max_sequences)
        most = [bound for bound in known if bound is not None]
        return replace(mode, graph_sequences=min(most, default=DEFAULT_MAX_SEQUENCES))

    def fixed_shape(self) -> FixedShape | None:
        """A captured graph's shape, or that of `packing.pad_to_max_length` and
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
                "packing.pad_cu_seqlens: true needs a number of sequences in a row; set "
                "packing.max_sequences"
            )
        return FixedShape(row_tokens=self.budget.max_tokens, max_sequences=most)


class Offline(Online):
    """Rows that `vlmpack pack` cut in mode `online` and saved: vlmpack/data/packs opens them."""

    @property
    def label(self) -> str:
        """See PackingMode."""
        return "offline, saved"


MODES: Mapping[ModeName, type[PackingMode]] = {
    "none": Padded,
    "in_batch": InBatch,
    "online": Online,
    "offline": Offline,
}
