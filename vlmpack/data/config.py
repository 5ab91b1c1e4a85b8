"""The settings of a split: the recipe's data section, and what follows from its other sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from vlmpack.data.index.table import GroupBy, Int64s, SampleLimits
from vlmpack.data.loading.loader import WorkerSettings
from vlmpack.data.modes import PackingMode, Uncut
from vlmpack.data.plan.packers import AlignedSizes, PlannedSamples, Sizes
from vlmpack.data.plan.rank_bins import RowCost, token_cost
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.schema import TrainingSection
from vlmpack.recipe.sources import Share, Source

SplitKey = Literal["data.train", "data.validation", "data.test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """One split of the recipe's data, with what the rest of the recipe says of it."""

    data: DataSection
    """The recipe's section."""
    key: SplitKey = "data.train"
    """The split, as messages name it too."""
    training: TrainingSection
    """The recipe's section; of an evaluation split, with the batch sizes of evaluation."""
    mode: PackingMode
    """How samples come to share rows."""
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    """The recipe's section, which decides how rollouts are read."""
    row_cost: RowCost = token_cost
    """What a bin costs on the model at hand."""
    new_era: bool = False
    """Whether a resume with other shards or weights begins a new epoch of the new data, or
    stops."""
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    """How loader workers are kept going."""
    num_probed: int = 256
    """Samples that are encoded at start to check the predicted lengths."""

    @property
    def limits(self) -> SampleLimits:
        """The most that one sample may have."""
        return self.mode.limits(self.training.seq_length)

    def uncut(
        self,
        sizes: Sizes,
        first_samples: Callable[[], Int64s] | None,
        aligned_sizes: AlignedSizes | None = None,
        planned: PlannedSamples | None = None,
    ) -> Uncut:
        """The split as its mode cuts it."""
        return Uncut(
            global_batch_size=self.training.global_batch_size,
            micro_batch_size=self.training.micro_batch_size,
            sizes=sizes,
            first_samples=first_samples,
            aligned_sizes=aligned_sizes,
            planned=planned,
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the split, with weights for all or none. A share of `data.train` has its
        sources."""
        if self.key == "data.validation" and self.share is not None:
            return tuple(one.model_copy(update={"weight": None}) for one in self.data.train)
        return getattr(self.data, self.key.removeprefix("data.")) or ()

    @property
    def share(self) -> Share | None:
        """The share of `data.train` that `data.validation` holds back, for these two splits."""
        share = self.data.validation
        return share if isinstance(share, Share) and self.key != "data.test" else None

    @property
    def weights(self) -> Literal["samples", "tokens"]:
        """The quantity that the sources' weights share out, if they have weights."""
        return self.data.weights if self.key == "data.train" else "samples"

    @property
    def group_by(self) -> GroupBy:
        """What stands together in the order."""
        if self.key != "data.train":
            return "none"
        return self.data.group_by or ("group" if self.objective.learns_rollouts else "none")

    @property
    def keeps_turns(self) -> bool:
        """Whether samples of one group keep their order, since each continues a conversation."""
        return self.data.learn == "each_answer"

    @property
    def epoch_size(self) -> int | None:
        """Samples in an epoch if the sources have weights. None for all of them together."""
        return self.data.epoch_size if self.key == "data.train" else None

    @property
    def caps(self) -> SampleCaps:
        """Limits of one sample."""
        return SampleCaps(max_image_pixels=self.data.max_image_pixels)

    @property
    def weighted(self) -> bool:
        """Whether sources are blended by weight."""
        return any(source.weight is not None for source in self.sources)
