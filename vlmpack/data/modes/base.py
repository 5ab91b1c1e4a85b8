"""What a packing mode is: how samples come to share rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from vlmpack.alignment import Alignment, round_up
from vlmpack.data.index.overlong import SampleLimits
from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.packers import AlignedSizes, Packer, Sizes
from vlmpack.data.plan.sharing import PlannedSamples
from vlmpack.data.plan.state import IdentityValue
from vlmpack.data.protocols import Collator
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.collate import PackCollator
from vlmpack.packing.row_layout import FixedShape
from vlmpack.recipe.packing_modes import ModeFacts, ModeName
from vlmpack.recipe.schema import PackingSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncut:
    """A split before it is cut.

    Args:
        global_batch_size, micro_batch_size: as `training` has them.
        sizes: tokens and patches of samples, by number.
        first_samples: the numbers of the first samples in the order of the run, for a dry run; None
            where shards are indexed as the run goes on.
        aligned_sizes: the same as `sizes` for rows that are planned: a pair takes each of its
            sequences rounded up; None where no sample is a pair.
        planned: what is planned of samples, where they were measured for what they share.
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
    """How a split's order is cut.

    Args:
        packer: cuts a window's order into global batches.
        window: samples in a window.
    """

    packer: Packer
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """How the collator lays a bin out.

    Args:
        padded: one row a sample, all as wide as the longest (mode `none`); else one row a bin.
        sequence_multiple: each segment of a packed row is filled up to a multiple of this.
        row_multiple: each row is filled up to a multiple of this.
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
        packing: the recipe's section.
        budget: of a planned row. Its bound on sequences may be open until the split is cut.
        multiples: of segments and rows, in tokens.
        captures: whether a graph replays the rows, which then have its shape.
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
        """What the recipe knows of it."""
        return self.packing.facts

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name

    def limits(self, seq_length: int) -> SampleLimits:
        """What one sample may have at most; `data.over_long` decides about others."""
        return SampleLimits(seq_length, self.budget.max_patches)

    @abstractmethod
    def cut(self, split: Uncut) -> Cutting:
        """The packer of a split, and the size of the windows that it works on. Whatever the recipe
        leaves open is settled here."""

    def identity(self, cutting: Cutting) -> dict[str, IdentityValue]:
        """What of the cutting decides the order, by key, beside what every mode has."""
        return {}

    def settled(self, packer: Packer) -> PackingMode:
        """The mode with the budget that the split was cut by: of a run that goes on, or of packs,
        it need not be what the recipe alone says."""
        return self if packer.budget is None else replace(self, budget=packer.budget)

    def collator(self, *, pad_token_id: int, num_position_axes: int) -> Collator:
        """What makes a batch of a bin; asked once the mode is settled.

        Args:
            pad_token_id: fills gaps.
            num_position_axes: of the model's positions, for empty bins.
        """
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
        """What is to be said where a captured graph replays next to no row.

        Args:
            fewest: samples that 19 of 20 rows hold at least (`fewest_samples`).
        """
        shape = self.fixed_shape() if self.captures else None
        if shape is None or shape.most_filled is None or fewest <= shape.most_filled:
            return None
        return (
            f"19 of 20 rows hold {fewest} samples or more and run eagerly: the graph takes rows of "
            f"up to {shape.most_filled} (training.cuda_graph_max_sequences); set it to "
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
