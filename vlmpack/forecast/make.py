"""A plan of a run, from the samples of a split, a recipe and a model's sizes. Nothing is read.

Imbalance of ranks follows from FLOPs of the language model and the vision tower
(`vlmpack.packing.balance`). No time is measured, so slower kernels on short sequences do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, sqrt

import numpy as np
import torch

from vlmpack.build.engine import EngineSpec
from vlmpack.data.config import DataConfig
from vlmpack.data.index.table import Int64s
from vlmpack.data.modes import PackingMode
from vlmpack.data.plan.batches import DRY_RUN_SAMPLES, Plan, Position, dry_run_order
from vlmpack.data.plan.packers import Scope
from vlmpack.data.plan.rank_bins import Floats, RowCost
from vlmpack.data.plan.windows import WindowPlan
from vlmpack.data.shards.naming import describe_keys
from vlmpack.data.splits.split import Split
from vlmpack.data.splits.summary import Totals, fewest_samples, share_words
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.communication import Links, StepRows, TrafficFigures, traffic_figures
from vlmpack.forecast.figures import (
    SAME_BATCH,
    BatchFigures,
    ImbalanceFigures,
    LargestMicroBatch,
    LongestRows,
    MemoryFigures,
    ModeFigures,
    Progress,
    ReferenceFigures,
    RunPlan,
    SourceFigures,
    counted,
    silent,
)
from vlmpack.forecast.longest import Layout, longest_row
from vlmpack.forecast.memory import SHARE, given_room, least_that_fits, memory_figures
from vlmpack.forecast.modes import (
    SHARED,
    EpochTotals,
    ModePlanner,
    PlannedMode,
    mode_figures,
    planned_of,
    sharing_note,
)
from vlmpack.forecast.parameters import ModelSizes
from vlmpack.forecast.sources import left_out, sequence_figures, source_figures
from vlmpack.forecast.trained import EVERY_WEIGHT, TrainedSizes
from vlmpack.packing import balance
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.prefix_rows import PlannedSample, shared_rows
from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.engine_rules import read_model_config
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.schema import ModelSection, PackingSection, ParallelismSection
from vlmpack.words import sized

MAX_STEPS = 64
"""Steps that are averaged at most: dealing one to 64 ranks takes up to 20 ms."""

MAX_RANKS = 64
MAX_SIZES = 5


REFERENCE_BYTES = 24
"""Bytes that a reference keeps of a pair: its number, and two log-probabilities."""


ASSUMED_GIB = 80
"""What `auto` may count on where plan runs without a GPU: an H100 or A100 has so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan.

    Args:
        packing: the recipe's section; `config` may stand in for its mode.
        split: opened, every shard indexed.
        sizes: None if the model folder lacks them.
        unsized: why `sizes` is None, for the notes; may be empty.
        full_rows: plan memory and traffic for rows full in tokens and patches, whatever the data.
        copies_saves: whether checkpoints are written in the background.
        layouts: whose longest rows are sought.
    """

    engine: EngineSpec
    objective: ObjectiveSection
    packing: PackingSection
    config: DataConfig
    split: Split
    sizes: ModelSizes | None
    world_size: int
    trained: TrainedSizes = EVERY_WEIGHT
    unsized: str = ""
    full_rows: bool = False
    answers: bool = False
    copies_saves: bool = False
    links: Links = field(default_factory=Links)
    layouts: tuple[Layout, ...] = ()

    @property
    def copies(self) -> int:
        return data_parallel_size(self.engine.parallelism, self.world_size)


def plan_figures(inputs: PlanInputs, progress: Progress = silent) -> RunPlan:
    """Every figure of the plan."""
    engine, config, split = inputs.engine, inputs.config, inputs.split
    copies, fitted = inputs.copies, split.fitted
    dry = _dry_run(inputs)
    budget = _resolved_budget(inputs, dry)
    planner = ModePlanner(config=config, fitted=fitted, budget=budget, progress=progress)
    pairs = inputs.objective.learns_pairs
    planned = _all_modes(planner, inputs, pairs=pairs)
    by_name = {mode.name: mode for mode in planned}
    own = next(mode for mode in planned if mode.is_recipes)
    scope: Scope = "batch" if pairs else "stream"
    rows = own if own.plans_rows else by_name[planner.mode("online", scope).label]
    # Rows of fixed shape hold no pairs and share nothing.
    fixed = not pairs and own.planned is None
    sequences = sequence_figures(rows, dry.tokens, dry.patches, fixed=fixed)
    drawn = [source.num_draws for source in split.plan.sources]
    names = [source.name for source in config.sources]
    counts = [numbers.shape[0] for _, numbers in split.numbers()]
    sources, total = source_figures(
        fitted,
        names,
        [count if draws is None else draws for count, draws in zip(counts, drawn, strict=True)],
        config.limits,
    )
    none, all_once = by_name["none"], not config.weighted
    whole = EpochTotals.of(none, total, all_once=all_once)
    modes = tuple(mode_figures(each, copies, config.row_cost, none, whole) for each in planned)
    figures = {mode.name: mode for mode in modes}
    steps = figures[own.name].steps
    run_steps = _run_steps(inputs, own, steps, progress)
    epochs = config.training.num_epochs
    model, memory, longest = _memory(inputs, figures[own.name])
    return RunPlan(
        model=engine.model.path,
        world_size=inputs.world_size,
        data_parallel=copies,
        sources=sources,
        total=total,
        left_out=left_out(fitted),
        steps_per_epoch=steps,
        epochs=float(epochs) if epochs is not None else run_steps / max(1, steps),
        run_steps=run_steps,
        modes=modes,
        sequences=sequences,
        imbalance=imbalance_figures(own, copies, config.row_cost),
        batch=batch_figures(inputs, figures[own.name], figures["none"], sequences.mean),
        memory=memory,
        longest=longest,
        notes=(
            *_notes(inputs, own, figures["in_batch"].micro_batch_size),
            *_saves_note(inputs, memory),
            *_sentinel_notes(inputs, figures[own.name]),
        ),
        unit="pair" if pairs else "sample",
        reference=_reference(inputs, steps),
        traffic=_traffic(inputs, model, figures[own.name], total),
    )


def batch_figures(
    inputs: PlanInputs, own: ModeFigures, unpacked: ModeFigures, samples_per_row: float
) -> BatchFigures:
    """The recipe's global batch, the unpacked run's, and a learning rate for it.

    Adam-type optimizers keep their dynamics when the learning rate grows with the square root of
    the batch (Malladi et al., 2205.10287). The rule is for small changes and noisy gradients, so it
    is a hint.

    Args:
        own, unpacked: the recipe's mode, and mode `none`.
    """
    size, rate = inputs.config.training.global_batch_size, inputs.engine.policy.optim.lr
    keeping = None  # scope `batch` keeps the samples of a step by itself, as pairs always are
    if not (inputs.packing.packs_by_batch or inputs.objective.learns_pairs):
        rows = size / max(1.0, samples_per_row)
        keeping = max(1, round(rows / inputs.copies)) * inputs.copies
    growth = own.mean_batch_samples / max(1e-9, unpacked.mean_batch_samples)
    return BatchFigures(
        global_batch_size=size,
        counts_rows=own.counts_rows,
        samples=own.mean_batch_samples,
        tokens=own.mean_batch_tokens,
        unpacked_samples=unpacked.mean_batch_samples,
        unpacked_tokens=unpacked.mean_batch_tokens,
        samples_per_row=samples_per_row,
        keeping_size=keeping,
        learning_rate=rate,
        scaled_learning_rate=None if abs(growth - 1) < SAME_BATCH else rate * sqrt(growth),
    )


def _traffic(
    inputs: PlanInputs, model: ModelSection, own: ModeFigures, total: SourceFigures
) -> TrafficFigures | None:
    """What a rank sends in a mean step; None if the model's sizes are unknown."""
    if inputs.sizes is None:
        return None
    engine, replicas = inputs.engine, max(1, own.steps) * inputs.copies
    whole = inputs.config.training.global_batch_size
    micro_batches = ceil(whole / own.micro_batch_size / inputs.copies)
    slots, features = own.slots / replicas, own.tokens * total.vision_share / replicas
    if inputs.full_rows:
        row = _largest(inputs, own)
        slots = micro_batches * row.max_row_slots
        features = micro_batches * row.max_row_patches * total.features_of_patch
    rows = StepRows(micro_batches=micro_batches, slots=slots, features=features)
    return traffic_figures(
        model,
        _with_degree(model, engine.parallelism),
        inputs.sizes,
        rows,
        world_size=inputs.world_size,
        trained=inputs.trained,
        links=inputs.links,
    )


def _with_degree(model: ModelSection, split: ParallelismSection) -> ParallelismSection:
    """With the number of ranks that exchange heads, where the recipe leaves it out."""
    config = read_model_config(model) if model.backend == "hf" and split.context > 1 else None
    if config is None:
        return split
    degree = config.head_degrees.chosen(split, model.recomputed)
    return split.model_copy(update={"context_heads": degree})


def _reference(inputs: PlanInputs, steps: int) -> ReferenceFigures | None:
    """What the reference model computes; None where there is none."""
    objective = inputs.objective
    if not objective.learns_pairs:
        return None
    fitted = inputs.split.fitted
    num_pairs = int(fitted.eligible.sum())
    totals = Totals.of((fitted.table, span) for span in fitted.good())
    return ReferenceFigures(
        num_pairs=num_pairs,
        num_tokens=totals.num_tokens,
        num_patches=totals.num_patches,
        steps=steps / 3,
        num_bytes=num_pairs * REFERENCE_BYTES if objective.keeps_reference else 0,
        is_kept=objective.keeps_reference,
    )


def _largest(inputs: PlanInputs, own: ModeFigures) -> LargestMicroBatch | ModeFigures:
    if not inputs.full_rows:
        return own
    return LargestMicroBatch(1, *inputs.config.mode.budget.full_row(own.max_row_patches))


def _memory(
    inputs: PlanInputs, own: ModeFigures
) -> tuple[ModelSection, MemoryFigures | None, LongestRows | None]:
    """The model section as a GPU resolves it, its memory, and rows that fit; None if its sizes are
    unknown."""
    engine, sizes = inputs.engine, inputs.sizes
    model, split, row = engine.model.resolved("bfloat16"), engine.parallelism, _largest(inputs, own)
    if sizes is None:
        return model, None, None
    planned = Layout(split, inputs.world_size, step=1)

    def estimate(
        model: ModelSection,
        layout: Layout = planned,
        row: LargestMicroBatch | ModeFigures = row,
    ) -> MemoryFigures:
        return memory_figures(
            model,
            layout.parallelism,
            sizes,
            row,
            global_batch_size=inputs.config.training.global_batch_size,
            world_size=layout.world_size,
            trained=inputs.trained,
            forms=forms_on(torch.device("cuda"), model, captured=engine.captures),
            answers=inputs.answers,
        )

    room, where = given_room(model)
    if not room and torch.cuda.is_available():
        room, where = torch.cuda.mem_get_info()[0], "what is free on the GPU here"
    if not room:
        room, where = ASSUMED_GIB << 30, "an assumed GPU (model.memory_gib says another)"
    patches = inputs.config.mode.most_patches
    longest = LongestRows(
        room=round(SHARE * room),
        where=f"{SHARE:.0%} of the {sized(room)} of {where}",
        own=split.context,
        rows=tuple(
            longest_row(model, layout, row, room, estimate, most_patches=patches)
            for layout in inputs.layouts
        ),
    )
    if not model.recomputes_what_fits:
        return model, estimate(model), longest
    return *least_that_fits(model, split, estimate, room, where), longest


def _all_modes(planner: ModePlanner, inputs: PlanInputs, *, pairs: bool) -> list[PlannedMode]:
    """Figures in the table's order. Of pairs, only modes whose rows stay in a global batch."""
    own, offline = planner.own(inputs.split), inputs.packing.facts.reads_packs
    saved = own.mode.facts.reads_packs
    offline = offline and not saved  # planned anew: `own` stands in for it
    own = replace(own, is_recipes=not offline)

    def planned(mode: PackingMode, micro: int = 1) -> PlannedMode:
        return own if own.name == mode.label else planner.other(mode, micro)

    scopes: tuple[Scope, ...] = ("batch",) if pairs else ("stream", "batch")
    rows = [planned(planner.mode("online", scope)) for scope in scopes]
    micro, least = own.micro_batch_size, 1 if pairs else 2
    if own.plans_rows or micro < least:
        bins = rows[0].layout.bins
        num_rows = max(least, round(float(bins.mean())) if bins.size else least)
        micro = _dividing(planner.config.training.global_batch_size // inputs.copies, num_rows)
    none, in_batch = planned(planner.mode("none"), micro), planned(planner.mode("in_batch"), micro)
    scope: Scope = "batch" if pairs or (offline and inputs.packing.packs_by_batch) else "stream"
    if saved:
        packed = own
    elif own.planned is not None:
        online = rows[scopes.index(scope)]
        packed = planner.offline_shared(online, scope, is_recipes=offline)
    else:
        packed = planner.offline(own, scope, is_recipes=offline)
    modes = [none, in_batch, *rows, packed]
    return modes if any(own is mode for mode in modes) else [*modes, own]


def _dividing(whole: int, number: int) -> int:
    """The largest divisor of `whole` up to `number`."""
    return max(size for size in range(1, number + 1) if max(1, whole) % size == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DryRun:
    """The first samples in packing order.

    Args:
        tokens, patches: (n,) theirs, each sequence of a pair rounded up.
        planned: the plan of samples whose prefixes are shared.
    """

    tokens: Int64s
    patches: Int64s
    planned: list[PlannedSample] | None

    def rows(self, budget: RowBudget) -> list[list[int]]:
        """The rows, as places, that a budget makes of the samples."""
        if self.planned is None:
            return budget.rows(self.tokens, self.patches)
        return shared_rows(self.planned, self.patches, budget)


def _dry_run(inputs: PlanInputs) -> _DryRun:
    split, plan = inputs.split, inputs.split.plan
    if isinstance(plan, WindowPlan):
        order = plan.plan_window(0, 0, split.start()).order
    elif isinstance(plan, Plan):
        order = dry_run_order(plan)
    else:
        seed, packer = inputs.config.training.seed, plan.packer
        order = dry_run_order(
            Plan(plan.sources, seed=seed, shuffle="global", window=DRY_RUN_SAMPLES, packer=packer)
        )
    tokens = inputs.config.mode.budget.planned(split.sequence_tokens(order))
    planned = planned_of(split)
    return _DryRun(
        tokens=tokens,
        patches=split.sizes(order)[1],
        planned=None if planned is None else planned(order),
    )


def _resolved_budget(inputs: PlanInputs, dry: _DryRun) -> RowBudget:
    """The budget of planned rows, with the bound on sequences and the buffer of a new run."""
    mode = inputs.config.mode
    if mode.facts.reads_packs:
        return replace(mode.budget, buffer=None)
    return mode.budget if mode.facts.plans_rows else mode.budget.resolved(dry.rows(mode.budget))


def _run_steps(inputs: PlanInputs, own: PlannedMode, first: int, progress: Progress) -> int:
    """Global batches of the run; `first` are in its first epoch."""
    training, plan = inputs.config.training, inputs.split.plan
    if training.max_steps is not None:
        return training.max_steps
    epochs = training.num_epochs
    assert epochs is not None  # one of the two is set, the recipe's rules see to it
    if epochs == 1 or own.is_part or plan.packer.num_batches(1) is not None:
        return epochs * first
    if own.own_name:  # later epochs permute the packs
        return first + (epochs - 1) * ceil(own.layout.bins.size / training.global_batch_size)
    if isinstance(plan, WindowPlan):
        return int(plan.steps_until(epochs, Position(), inputs.split.start()))
    later = counted(range(1, epochs), "packing: later epochs", epochs - 1, progress)
    return first + sum(plan.num_steps(epoch) for epoch in later)


def _notes(inputs: PlanInputs, own: PlannedMode, micro: int) -> tuple[str, ...]:
    notes = [inputs.unsized] if inputs.unsized else []
    if own.held is not None:
        notes.append(sharing_note(own.layout, own.held))
    if eager := own.mode.unreplayed(fewest_samples(own.layout.bins)):
        notes.append(eager)
    units = "samples"
    if inputs.objective.learns_pairs:
        units = "pairs"
        notes.append(
            "a pair is two sequences: its tokens are those of both, its patches are counted once"
        )
    if own.plans_rows:
        notes.append(
            f"none and in_batch are shown with micro-batches of {micro} {units}, about as many as "
            "a planned row or a global batch holds; training.micro_batch_size is "
            f"{own.micro_batch_size}"
        )
    elif micro != own.micro_batch_size:
        notes.append(
            f"in_batch is shown with micro-batches of {micro} {units}; "
            f"training.micro_batch_size is {own.micro_batch_size}"
        )
    if own.is_part:
        notes.append(
            f"rows, steps and fill are estimates, from windows with {own.layout.numbers.size:,} "
            f"{units} that the seed draws; {units} and tokens are counted"
        )
    if inputs.config.share is not None:
        words = share_words(inputs.config, inputs.split.fitted, units)
        notes.append(f"data.validation: {words}; the figures here are of the others")
    if inputs.split.fitted.table.bad.any():
        notes.append(f"bad {units} keep their place in a batch as holes, so no other moves")
    notes.append(
        f"{units} whose damage shows only when they are read (an image that cannot be decoded) are "
        "not known here; a run counts them as holes"
    )
    if unknown := inputs.split.fitted.table.unknown_keys:
        notes.append(f"keys of records that are not read: {describe_keys(unknown)}")
    if isinstance(plan := inputs.split.plan, Plan) and (filed := plan.filed):
        notes.append(
            f"the order of {sum(filed):,} samples lies in {plan.folder}: {sized(4 * sum(filed))} "
            f"for each pass, and {sized(16 * max(filed))} more while the largest is made"
        )
    if isinstance(plan, WindowPlan):
        notes.append(
            "data.shuffle is window: the recipe's mode is planned by it, the other modes by a "
            "shuffle over all samples"
        )
    if own.own_name == SHARED:
        notes.append(
            "packing.path holds no packs yet; with packing.share_prefix they are the rows of "
            f"online, {own.mode.packing.scope}, so offline has its figures"
        )
    elif own.own_name:
        scope, inside = "stream", ""
        if own.mode.packing.packs_by_batch:
            scope, inside = "batch", " inside each global batch"
        notes.append(
            f"packing.path holds no packs yet, so offline is planned by best-fit-decreasing{inside}"
            f"; with --planner stream it has the figures of online, {scope}"
        )
    return tuple(notes)


def _saves_note(inputs: PlanInputs, memory: MemoryFigures | None) -> tuple[str, ...]:
    """What the copy of a background save takes: trained weights and moments, dealt out to the ranks
    that hold the same."""
    if memory is None or not inputs.copies_saves:
        return ()
    split, trained, count = inputs.engine.parallelism, inputs.trained, memory.rank_trained
    copied = 4 * count + sum(trained.moments.bytes_of(count)) - 6 * trained.rounded
    copied //= inputs.world_size // (split.tensor * split.pipeline)
    return (
        f"checkpoint.asynchronous: a save holds a copy of about {sized(copied)} in the host memory "
        "of each rank until it is written, and there is never a second one",
    )


def _sentinel_notes(inputs: PlanInputs, own: ModeFigures) -> tuple[str, ...]:
    """What the sentinel costs, of mean steps. A backward pass counts as two forward passes."""
    training, lora = inputs.config.training, inputs.engine.policy.lora
    interval = training.sentinel_interval
    if interval is None:
        return ()
    samples = max(1.0, own.mean_batch_samples / inputs.copies)
    passes, again = 1 / samples, ""
    if lora is not None and lora.dropout > 0:
        per_copy = training.global_batch_size / inputs.copies / training.micro_batch_size
        passes, again = passes + 1 / max(1.0, per_copy), ", and a row again without dropout"
    return (
        f"every {interval:,} steps the sentinel runs one sample of about {samples:,.1f} alone, "
        f"forward{again}: {passes / (3 * interval):.3%} of what the steps compute",
    )


def imbalance_figures(
    mode: PlannedMode, copies: int, row_cost: RowCost
) -> tuple[ImbalanceFigures, ...]:
    """For the run's model copies, and for other numbers of them that divide its global batch.

    Args:
        row_cost: (n, k) costs of bins: language, then vision where the model has it.
    """
    layout = mode.layout
    if not layout.steps.size:
        return ()
    held = mode.held
    costs = row_cost(
        layout.by_bin(layout.tokens) if held is None else held.tokens,
        layout.by_bin(layout.squares) if held is None else held.squares,
        mode.image_sums(layout.patches),
        patch_squares=mode.image_sums(layout.patches**2),
    )
    whole = int(np.median(layout.steps))
    sizes = [2**k for k in range(1, 20) if 2**k <= min(whole, MAX_RANKS)]
    if mode.counts_rows or not mode.plans_rows:  # else nobody knows how many rows a batch has
        sizes = [size for size in sizes if whole % size == 0]
    chosen = sorted({copies, *sizes[-MAX_SIZES:]} - {1})
    places = _whole_steps(layout.steps, whole)
    steps = [
        costs[start : start + count]
        for start, count in zip(
            layout.step_starts[places].tolist(), layout.steps[places].tolist(), strict=True
        )
    ]
    return tuple(_for_ranks(steps, size, is_recipes=size == copies) for size in chosen)


def _whole_steps(steps: Int64s, whole: int) -> Int64s:
    """Places of at most MAX_STEPS global batches, spread; short ones only where all are."""
    places = np.flatnonzero(2 * steps >= whole)
    picked = np.linspace(0, places.size - 1, num=min(MAX_STEPS, places.size))
    return places[picked.astype(np.int64)]


def _for_ranks(steps: list[Floats], ranks: int, *, is_recipes: bool) -> ImbalanceFigures:
    dealt, balanced = [], []
    for costs in steps:
        filled = np.concatenate([costs, np.zeros((-len(costs) % ranks, costs.shape[1]))])
        turns = np.arange(len(filled)).reshape(-1, ranks).T
        dealt.append(_max_over_mean(filled, turns))
        balanced.append(_max_over_mean(filled, balance(filled, ranks)))
    mean_dealt, mean_balanced = np.mean(dealt, axis=0), np.mean(balanced, axis=0)
    return ImbalanceFigures(
        data_parallel=ranks,
        micro_batches=max(-(-len(costs) // ranks) for costs in steps),
        steps=len(steps),
        total_dealt=float(mean_dealt[0]),
        vision_dealt=float(mean_dealt[1]),
        total_balanced=float(mean_balanced[0]),
        vision_balanced=float(mean_balanced[1]),
        is_recipes=is_recipes,
    )


def _max_over_mean(costs: Floats, dealt: Int64s) -> tuple[float, float]:
    """(all phases, vision) of one step; 1 if there is no such cost."""
    loads = costs[dealt].sum(axis=1)
    vision = loads[:, 1:].sum(axis=1)
    return _ratio(loads.sum(axis=1)), _ratio(vision)


def _ratio(loads: Floats) -> float:
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
