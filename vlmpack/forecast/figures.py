"""The figures of a plan, and those of `vlmpack plan --measure`, in seconds.

Shares are fractions of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from vlmpack.forecast.communication import TrafficFigures

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)


SAME_BATCH = 0.02  # change of the batch below which it counts as the same: last ones are short


T = TypeVar("T")

Unit = Literal["sample", "pair"]
"""A unit is what a sample is called: of preference training, a pair."""


Progress = Callable[[str, int, int | None], None]
"""Called with the work, its amount so far, and its total (None if unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """One source of `data.train`, or all of them together.

    Args:
        num_samples: in the shards, with bad and over-long ones, without those that
            `data.validation` holds back.
        num_usable: that an epoch can train on.
        num_drawn: draws from it in an epoch. Without weights these are the usable ones and the
            known holes.
        num_dropped: left out because they are too long, by the limit that they break.
        num_shrunk: whose images are made smaller.
        num_bad: known to be bad, by class; they stay as holes.
        num_tokens, num_image_tokens, num_label_tokens, num_patches: of the usable samples, once
            each.
        length_percentiles: percentile -> tokens of a usable sample; empty where there is none.
        length_histogram: upper edges of equal bins of tokens, and the usable samples in each.
    """

    name: str
    num_samples: int
    num_usable: int
    num_drawn: int
    num_dropped: dict[str, int]
    num_shrunk: int
    num_bad: dict[str, int]
    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    num_patches: int
    length_percentiles: dict[int, int]
    length_histogram: tuple[tuple[int, int], ...]

    @property
    def vision_share(self) -> float:
        """Share of image tokens among the tokens."""
        return self.num_image_tokens / max(1, self.num_tokens)

    @property
    def features_of_patch(self) -> float:
        """Image tokens of a vision patch; 0 without images."""
        return self.num_image_tokens / max(1, self.num_patches)

    @property
    def label_share(self) -> float:
        """Share of label tokens among the tokens."""
        return self.num_label_tokens / max(1, self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One sample that will not be trained, and why."""

    key: str
    shard: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """The first epoch under one packing mode.

    Args:
        is_recipes: whether this is the recipe's mode.
        is_estimated: whether it was extrapolated from a part of the samples.
        micro_batch_size: samples in a micro-batch; 1 row if rows are planned.
        steps: optimizer steps of the epoch at the recipe's `training.global_batch_size`.
        held_tokens: tokens in rows, where shared ones count once.
        slots: computed, padding included, empty bins too.
        empty_rows: bins without samples that complete the model copies' last batches.
        row_tokens: capacity of a row; 0 if rows are not planned.
        compute: FLOPs relative to mode `none` over the same samples.
        max_row_slots, max_row_patches: the largest micro-batch.
        mean_batch_samples, mean_batch_tokens: of a whole global batch.
    """

    name: str
    is_recipes: bool
    is_estimated: bool
    micro_batch_size: int
    steps: int
    counts_rows: bool
    samples: int
    rows: int
    tokens: int
    held_tokens: int
    slots: int
    empty_rows: int
    row_tokens: int
    vision_patches: int
    compute: float
    max_row_slots: int
    max_row_patches: int
    mean_batch_samples: float
    mean_batch_tokens: float

    @property
    def fill(self) -> float:
        """Tokens in rows per computed slot: `fill` of metrics.jsonl, over the epoch."""
        return self.held_tokens / max(1, self.slots)

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1 - self.fill

    @property
    def row_fill(self) -> float | None:
        """Tokens in rows per token that these may hold; None where rows are not planned."""
        return self.held_tokens / max(1, self.rows * self.row_tokens) if self.row_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundChoice:
    """One choice of the most samples in a row.

    Args:
        basis: where it comes from.
        covered: share of unbounded rows that keep it. The others would run without a CUDA graph.
        extra_rows: rows that the packer makes more when it enforces the bound, as a share.
        tails: share of the slots that tails fill where the covered rows are filled up for a graph
            and the others are not.
        boundary_bytes: of `cu_seqlens` with so many samples; what else a graph keeps of a row
            is the same for all bounds.
        is_recipes: whether the recipe's plan has this bound.
    """

    basis: str
    max_sequences: int
    covered: float
    extra_rows: float
    tails: float
    boundary_bytes: int
    is_recipes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFigures:
    """Samples in a row.

    Args:
        percentiles: percentile -> samples.
        histogram: (samples in a row, rows).
        bound_by: bound -> share of the rows that it ended; `buffer` where no sample that waited
            fitted, as in the last row of a window. Empty where rows are not planned.
        waiting: samples that the rows of the dry run are chosen from; 1 where they keep the order.
        dry_run_samples: samples that the choices below were packed from, without a bound.
        choices: for fixed shapes; empty where rows are not planned and none were packed.
    """

    mode: str
    mean: float
    percentiles: dict[str, int]
    histogram: tuple[tuple[int, int], ...]
    bound_by: dict[str, float]
    waiting: int
    dry_run_samples: int
    choices: tuple[BoundChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImbalanceFigures:
    """Largest load of a rank over the mean one, averaged over steps.

    Args:
        steps: the number of averaged steps, spread over the epoch.
        total_dealt, vision_dealt: bins dealt in turn.
        total_balanced, vision_balanced: bins dealt by cost. The vision's is 1 if there is none.
        is_recipes: whether the run has so many ranks.
    """

    data_parallel: int
    micro_batches: int
    steps: int
    total_dealt: float
    vision_dealt: float
    total_balanced: float
    vision_balanced: float
    is_recipes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """The global batch of an optimizer step, compared with the unpacked run's.

    Args:
        global_batch_size: of the recipe, in rows or samples.
        samples, tokens: of a mean global batch of the recipe's mode.
        unpacked_samples, unpacked_tokens: of mode `none` at the same `global_batch_size`.
        samples_per_row: of the recipe's mode, or of rows that fill `training.seq_length`.
        keeping_size: global batch in rows that keeps the unpacked run's samples per step, a
            multiple of the model copies; None if the mode keeps them anyway.
        scaled_learning_rate: by the square root of the batch's growth; None if unchanged.
    """

    global_batch_size: int
    counts_rows: bool
    samples: float
    tokens: float
    unpacked_samples: float
    unpacked_tokens: float
    samples_per_row: float
    keeping_size: int | None
    learning_rate: float
    scaled_learning_rate: float | None

    @property
    def kept_samples(self) -> float:
        """Samples of a step with `keeping_size` rows. It differs from the unpacked run's by
        rounding."""
        return (self.keeping_size or 0) * max(1.0, self.samples_per_row)

    @property
    def in_packs(self) -> float:
        """The batch in rows, at their mean number of samples, for trainers that count packs."""
        return self.global_batch_size / max(1.0, self.samples_per_row)

    @property
    def growth(self) -> float:
        """Samples of a step, over the unpacked run's."""
        return self.samples / max(1e-9, self.unpacked_samples)


@dataclass(frozen=True, slots=True)
class LargestMicroBatch:
    """Its samples, computed slots and vision patches."""

    micro_batch_size: int
    max_row_slots: int
    max_row_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Bytes of the fullest rank; see `vlmpack.forecast.memory` for the formula.

    Args:
        parameters: of the whole model; `tower_parameters` of these in the vision tower.
        rank_parameters: that the fullest rank computes with, before sharding over replicas, without
            adapters; `rank_trained` are updated there, with adapters.
        paged: bytes of moments that may leave the GPU; in no total.
        again: recomputed activations, one layer at a time.
        offloaded: activations that wait in pinned host memory; in no total.
        recomputed: the resolved `model.activation_checkpointing`, with the reason for `auto`.
        row_tokens, row_patches: the micro-batch that the activations are of.
        rows_in_flight: micro-batches whose activations a stage holds at once.
        formula: in words, with what is left out.
        answers: bytes of the whole copy that answers questions, if the model is sharded.
    """

    parameters: int
    tower_parameters: int
    counted_from: str
    rank_parameters: int
    rank_trained: int
    where: str
    dtype: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    again: int
    logits: int
    recomputed: str
    row_tokens: int
    row_patches: int
    rows_in_flight: int
    formula: tuple[str, ...]
    paged: int = 0
    offloaded: int = 0
    answers: int = 0

    @property
    def total(self) -> int:
        """All parts that exist at once. Logits are gone before a layer is computed again, and a
        copy that answers questions exists only between steps."""
        step = self.activations + max(0, self.logits - self.again)
        return self.weights + self.gradients + self.optimizer + max(step, self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRow:
    """The longest row that fits where `context` of `world_size` GPUs share each row.

    Args:
        tokens, patches: its; 0 where none fits.
        recomputed: `model.activation_checkpointing` of this row, in words.
        total: bytes of the fullest rank; of the shortest row where none fits.
    """

    world_size: int
    context: int
    tokens: int
    patches: int
    recomputed: str
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRows:
    """By the number of GPUs that share a row.

    Args:
        room: bytes that may be filled, and `where` they are, in words.
        own: `context` of the recipe.
    """

    room: int
    where: str
    own: int
    rows: tuple[LongestRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFigures:
    """The forward pass of a reference model over the pairs of an epoch.

    Args:
        num_pairs, num_tokens, num_patches: of the pairs that are trained; those of validation come
            on top.
        steps: optimizer steps that take about as long. A step's backward pass counts as two forward
            passes.
        num_bytes: that are kept on disk.
        is_kept: whether it is made once, before the first step; else in every step.
    """

    num_pairs: int
    num_tokens: int
    num_patches: int
    steps: float
    num_bytes: int
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that `vlmpack plan` shows.

    Args:
        world_size, data_parallel: processes, and model copies among them.
        epochs: of the run, perhaps a part of one.
        sequences, imbalance, batch, memory: see their classes. `memory` is None if the model folder
            lacks the sizes.
        longest: None as `memory`.
        traffic: what a rank sends in a step; None for one process, or if sizes are unknown.
        measured: the time of the run; None if it was not asked for.
    """

    model: str
    world_size: int
    data_parallel: int
    sources: tuple[SourceFigures, ...]
    total: SourceFigures
    left_out: tuple[LeftOut, ...]
    steps_per_epoch: int
    epochs: float
    run_steps: int
    modes: tuple[ModeFigures, ...]
    sequences: SequenceFigures
    imbalance: tuple[ImbalanceFigures, ...]
    batch: BatchFigures
    memory: MemoryFigures | None
    longest: LongestRows | None = None
    notes: tuple[str, ...] = field(default=())
    unit: Unit = "sample"
    reference: ReferenceFigures | None = None
    traffic: TrafficFigures | None = None
    measured: MeasuredFigures | None = None

    @property
    def units(self) -> str:
        return f"{self.unit}s"

    @property
    def mode(self) -> ModeFigures:
        return next(mode for mode in self.modes if mode.is_recipes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """A mean step of the run.

    Args:
        measured_steps: the number of steps measured. Those before are left out, as they warm up and
            find their data read ahead.
        data_wait_seconds: of these, waited for the loader.
        slots: tokens and padding that a mean measured step computed, over all processes.
        tokens: real ones among them, as each sample has them alone.
    """

    measured_steps: int
    seconds: float
    data_wait_seconds: float
    slots: float
    tokens: float

    @property
    def data_wait_share(self) -> float:
        """Share of a step that is waited for the loader."""
        return self.data_wait_seconds / max(1e-9, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """One way to run the recipe that changes no loss.

    Args:
        change: `KEY=VALUE` of the recipe; empty for the recipe as it is.
        speed: of a mean step of the run; None where it could not be measured.
        training_seconds: of all steps of the run; None as `speed`.
    """

    change: str
    speed: StepSpeed | None
    training_seconds: float | None
    passes: int = 1
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work besides training steps: how often it is done, and seconds of each."""

    what: str
    times: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures:
    """The time of a run, predicted.

    Args:
        processes: that ran them; `copies` of the model among them, of `all_copies` of the run.
        choices: the unchanged recipe and others, the fastest first.
        spread: the largest relative difference between two measurements of one setting; None if
            nothing was measured twice. Closer settings count as equal.
        notes: what is not in these figures.
    """

    device: str
    processes: int
    copies: int
    all_copies: int
    run_steps: int
    choices: tuple[MeasuredChoice, ...]
    stages: tuple[Stage, ...]
    spread: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> MeasuredChoice:
        return next(choice for choice in self.choices if not choice.change)

    @property
    def seconds(self) -> float:
        stage_seconds = sum(stage.times * stage.seconds for stage in self.stages)
        return (self.own.training_seconds or 0.0) + stage_seconds


def silent(what: str, done: int, total: int | None) -> None:
    """A Progress that does nothing."""


def counted(items: Iterable[T], what: str, total: int | None, progress: Progress) -> Iterator[T]:
    progress(what, 0, total)
    for done, item in enumerate(items, start=1):
        progress(what, done, total)
        yield item
