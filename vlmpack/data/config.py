"""What the data layer is told; the recipe is mapped onto this."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vlmpack.data.index.overlong import OverLong, SampleLimits
from vlmpack.data.loading.loader import LoaderSettings
from vlmpack.data.plan.packers import Scope
from vlmpack.data.plan.shares import RowCost, token_cost
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.errors import RecipeError
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.schema import OnErrorSection
from vlmpack.recipe.sources import Source

PackingMode = Literal["none", "in_batch", "online", "offline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PacksConfig:
    """Packs that were made before, and what the recipe says of their rows: they must agree."""

    path: Path
    """The folder that `vlmpack pack` wrote."""
    max_tokens: int | None = None
    """Tokens in a row at most; None: as the packs have it."""
    max_patches: int | None = None
    """Vision patches in a row at most; None for no bound."""
    max_sequences: int | None = None
    """Samples in a row at most; None: as the packs have it."""
    alignment: int | None = None
    """Multiple of planned lengths; None: as the packs have it."""
    sequence_multiple: int = 1
    """Multiple of each segment that the parallel layout needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """One split: its sources, how it is cut into batches, and what errors do."""

    key: str = "data.train"
    """The recipe's key of this split, for messages."""
    sources: tuple[Source, ...]
    """At least one; with weights for all of them or for none."""
    seq_length: int
    """The longest sample, in tokens."""
    mode: PackingMode = "in_batch"
    """How bins are filled: `micro_batch_size` consecutive samples, or rows by a budget."""
    budget: RowBudget | None = None
    """Mode `online`: what a row holds. `max_sequences: None` is settled by a dry run where all
    samples are known, else DEFAULT_MAX_SEQUENCES."""
    packs: PacksConfig | None = None
    """Mode `offline`: the packs."""
    scope: Scope = "stream"
    """Mode `online`: whether rows are filled over a window, or inside a global batch's samples."""
    micro_batch_size: int
    """Samples in a bin; rows, hence 1, in modes `online` and `offline`."""
    global_batch_size: int
    """Samples in a global batch; rows in modes `online` and `offline`, and scope `stream`."""
    balance: Literal["none", "cost"] = "cost"
    """Whether the bins of a global batch are dealt to ranks by cost, or in turn."""
    row_cost: RowCost = token_cost
    """What a bin costs on the model at hand."""
    seed: int = 0
    """Of the order."""
    shuffle: Literal["auto", "global", "window", "none"] = "auto"
    """`global` indexes every shard before the first batch, `window` as the run goes on. `auto` is
    settled when a run begins: `window` where any shard is remote, or where the local shards that
    are not indexed yet hold more than `index_first_bytes`; else `global`."""
    index_first_bytes: int = 32 << 30
    """Under `auto`: local shards without an index that are indexed before the first batch."""
    on_data_change: Literal["refuse", "new_era", "new_segment"] = "refuse"
    """What a resume with other shards or weights does: stop with the differences, or begin a new
    era, which is a new epoch of the new data."""
    weights: Literal["samples", "tokens"] = "samples"
    """What the sources' weights are shares of. `tokens` needs to know every sample's length."""
    epoch_size: int | None = None
    """Samples in an epoch where the sources have weights; default: all of them together."""
    over_long: OverLong = "error"
    """What happens to samples above `seq_length`."""
    on_error: OnErrorSection = field(default_factory=OnErrorSection)
    """What happens to bad samples."""
    unknown_keys: Literal["report", "refuse"] = "report"
    """What happens to records with keys that are not read and mean nothing that we know."""
    caps: SampleCaps = field(default_factory=SampleCaps)
    """Limits of one sample."""
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    """Workers and time limits."""
    index_dir: Path | None = None
    """Where index and lengths are kept; default: $VLMPACK_CACHE/index or ~/.cache/vlmpack/index."""
    index_processes: int = 8
    """Processes that make the index, where there are many shards."""
    index_timeout_seconds: float = 1800.0
    """The longest wait for another process that makes the index, without a new part."""
    num_probed: int = 256
    """Samples that are encoded at start to check the predicted lengths."""

    def __post_init__(self) -> None:
        problems = []
        if (self.mode == "online") != (self.budget is not None):
            problems.append(f"packing.mode: {self.mode}, with the row budget {self.budget}")
        if (self.mode == "offline") != (self.packs is not None):
            problems.append(f"packing.mode: {self.mode}, with packing.path {self.packs}")
        if problems:
            raise RecipeError(problems)

    @property
    def limits(self) -> SampleLimits:
        """What one sample may have at most."""
        rows = self.budget or self.packs
        return SampleLimits(self.seq_length, rows.max_patches if rows else None)

    @property
    def weighted(self) -> bool:
        """Whether sources are blended by weight."""
        return any(source.weight is not None for source in self.sources)
