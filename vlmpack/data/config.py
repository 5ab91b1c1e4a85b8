"""What the data layer is told; the recipe is mapped onto this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vlmpack.data.index.overlong import OverLong, SampleLimits
from vlmpack.data.index.table import Int64s
from vlmpack.data.loading.loader import LoaderSettings
from vlmpack.data.modes import PackingMode, Uncut
from vlmpack.data.plan.packers import Sizes
from vlmpack.data.plan.shares import RowCost, token_cost
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.recipe.schema import OnErrorSection
from vlmpack.recipe.sources import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """One split: its sources, how it is cut into batches, and what errors do."""

    key: str = "data.train"
    """The recipe's key of this split, for messages."""
    sources: tuple[Source, ...]
    """At least one; with weights for all of them or for none."""
    seq_length: int
    """The longest sample, in tokens."""
    mode: PackingMode
    """How samples come to share rows."""
    micro_batch_size: int
    """Samples in a bin; rows, hence 1, where the mode plans rows."""
    global_batch_size: int
    """Samples in a global batch; rows where `packing.counts_rows` says so."""
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

    @property
    def limits(self) -> SampleLimits:
        """What one sample may have at most."""
        return SampleLimits(self.seq_length, self.mode.budget.max_patches)

    def uncut(self, sizes: Sizes, first_samples: Callable[[], Int64s] | None) -> Uncut:
        """The split as its mode cuts it."""
        return Uncut(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            sizes=sizes,
            first_samples=first_samples,
        )

    @property
    def weighted(self) -> bool:
        """Whether sources are blended by weight."""
        return any(source.weight is not None for source in self.sources)
