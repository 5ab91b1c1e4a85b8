"""The plan as titled tables of text, in the order of the page."""

from __future__ import annotations

from vlmpack.forecast.communication import Traffic, TrafficFigures
from vlmpack.forecast.figures import (
    LongestRows,
    MeasuredChoice,
    MeasuredFigures,
    MemoryFigures,
    ReferenceFigures,
    RunPlan,
    SourceFigures,
)
from vlmpack.forecast.longest import CONTEXTS
from vlmpack.report.document import Column, Section, compact, one_line, share, times
from vlmpack.words import counted, duration, sized


def data_section(plan: RunPlan, max_sources: int) -> Section:
    """The sources, what is left out, and what weights make of it."""
    shown = list(plan.sources[:max_sources])
    # Without weights and data.epoch_size, an epoch draws each usable sample and known hole once.
    drawn = None
    if any(one.num_drawn != one.num_usable + sum(one.num_bad.values()) for one in plan.sources):
        drawn = sum(_drawn_tokens(one) for one in plan.sources)
    rows = [_source(source, one_line(source.name), drawn) for source in shown]
    if len(plan.sources) > 1:
        rows.append(_source(plan.total, "total", drawn, all_tokens=drawn))
    lines = [f"loss, vision: shares of the tokens; p5 to max: tokens of a {plan.unit}"]
    if drawn is not None:
        lines.append(
            f"drawn: {plan.units} of an epoch, by the weights; share: of the tokens of an epoch"
        )
    lines += [
        f"{count:,} more sources are in the page (--html) and in the JSON"
        for count in [len(plan.sources) - len(shown)]
        if count
    ]
    if plan.total.num_shrunk:
        shrunk = counted(plan.total.num_shrunk, plan.unit)
        lines.append(f"{shrunk} with images made smaller to fit")
    for reason, count in plan.total.num_dropped.items():
        lines.append(f"{counted(count, plan.unit)} dropped: {reason}")
    for kind, count in plan.total.num_bad.items():
        lines.append(f"{counted(count, plan.unit)} bad ({kind}): skipped as holes")
    if plan.left_out:
        first = plan.left_out[0]
        lines.append(f"the first of them: {one_line(first.key)} in {first.shard}: {first.reason}")
    elif not plan.total.num_shrunk:
        lines.append("nothing is dropped, shrunk or known to be bad")
    heads = ["source", plan.units, "usable", *(["drawn", "share"] if drawn is not None else [])]
    heads += ["tokens", "loss", "vision", "p5", "p50", "p95", "p99", "max"]
    return Section.of_figures("Data", heads, rows, *lines)


def _source(
    source: SourceFigures, name: str, drawn: float | None, *, all_tokens: float | None = None
) -> tuple[str, ...]:
    """A row of the table.

    `drawn` counts an epoch's tokens, unless each sample is drawn once. `all_tokens` is an exact
    count, used in place of the mean sample's.
    """
    lengths = source.length_percentiles
    epoch: tuple[str, ...] = ()
    if drawn is not None:
        part = _drawn_tokens(source) if all_tokens is None else all_tokens
        epoch = (compact(source.num_drawn), share(part / max(1.0, drawn), 0))
    return (
        name,
        compact(source.num_samples),
        compact(source.num_usable),
        *epoch,
        compact(source.num_tokens),
        share(source.label_share, 0),
        share(source.vision_share, 0),
        *(compact(lengths[p]) if lengths else "" for p in (5, 50, 95, 99, 100)),
    )


def _drawn_tokens(source: SourceFigures) -> float:
    """Tokens of an epoch: draws times the source's mean length, known holes included."""
    return source.num_drawn * source.num_tokens / max(1, source.num_usable)


MOST_WORDS = 100
"""Characters of a failed choice's error in the table's line."""


def time_sections(measured: MeasuredFigures) -> list[Section]:
    """The run's time by what it is spent on, and the choices by theirs."""
    return [_parts(measured), _choices(measured)]


def _parts(measured: MeasuredFigures) -> Section:
    own = measured.own
    assert own.speed is not None and own.training_seconds is not None  # it failed otherwise
    parts = [("training steps", measured.run_steps, own.speed.seconds)]
    parts += [(stage.what, stage.times, stage.seconds) for stage in measured.stages]
    total = max(1e-9, measured.seconds)
    rows = []
    for what, repeats, each in parts:
        spent = repeats * each
        rows.append(
            (what, f"{repeats:,}", duration(each), duration(spent), share(spent / total, 0))
        )
    return Section.of_figures(
        f"Time of the run, from {counted(own.speed.measured_steps, 'measured step')}",
        ("what", "times", "each", "in all", "share"),
        [*rows, ("the run", "", "", duration(total), "")],
        f"on {measured.device}, with {counted(measured.processes, 'process', 'processes')}; a "
        f"step waits {duration(own.speed.data_wait_seconds)} for its data "
        f"({share(own.speed.data_wait_share, 0)})",
        "answers are timed with the model as it was given: a trained one may stop earlier",
        *measured.notes,
    )


def _choices(measured: MeasuredFigures) -> Section:
    own = measured.own

    def row(choice: MeasuredChoice) -> tuple[str, ...]:
        name = choice.change or "the recipe as it is"
        if choice.speed is None or choice.training_seconds is None:
            return (name, "failed", "", "", "")
        relative = choice.training_seconds / max(1e-9, own.training_seconds or 0.0)
        # What is as near as one setting is to itself may be either.
        near = choice.change and abs(relative - 1) <= (measured.spread or 0.0)
        return (
            name,
            duration(choice.speed.seconds),
            share(choice.speed.data_wait_share, 0),
            duration(choice.training_seconds),
            f"{'~' if near else ''}{relative:.2f}",
        )

    lines = []
    if measured.spread is not None:
        lines.append(
            "the fastest ones and the recipe as it is were measured twice, and differed by up to "
            f"{share(measured.spread, 0)}. Settings that are closer (~) count as equal"
        )
    for one in measured.choices:
        if one.failure:
            lines.append(f"{one.change}: {one.failure.splitlines()[0][:MOST_WORDS]}")
    return Section.of_figures(
        "What changes no loss, the fastest first",
        ("setting", "a step", "waits\nfor data", "all steps", "relative"),
        map(row, measured.choices),
        *lines,
        marked=(i for i, one in enumerate(measured.choices) if not one.change),
    )


def traffic_section(traffic: TrafficFigures) -> Section:
    """By part: who takes part, messages, bytes, and how long the links take."""
    links = traffic.links

    def row(part: Traffic) -> tuple[str, ...]:
        star = " *" if part.what in traffic.overlapped else ""
        milliseconds = 1000 * part.seconds(links)
        return (
            part.what + star, f"{part.group} {part.ranks}", part.kind, f"{part.calls:,}",
            sized(part.num_bytes), sized(part.sent), f"{milliseconds:.3g}",
        )  # fmt: skip

    hidden = traffic.seconds - traffic.exposed_seconds
    return Section.of_figures(
        f"What {traffic.where} sends in an optimizer step, an estimate",
        ("what", "ranks", "how", "messages", "tensors", "sent", "ms"),
        map(row, traffic.parts),
        "tensors are whole, before any algorithm. A ring sends them. ms assume "
        f"{links.node_gbs:g} GB/s a GPU between the {links.gpus_per_node} of a node and "
        f"{links.network_gbs:g} GB/s between nodes (--node-gbs, --network-gbs)",
        f"{1000 * traffic.seconds:.3g} ms in all, one after the other"
        + (f"; *: {1000 * hidden:.3g} ms of them beside compute" if hidden else ""),
        *traffic.notes,
        words=3,
    )


MAX_SOURCES = 12
"""Sources with a row of their own; the page and the JSON have more."""
_ON_GPUS = "for GPUs, in bfloat16; on CPU, model.dtype: auto computes in float32 and needs more"


def sections(plan: RunPlan, *, max_sources: int = MAX_SOURCES) -> tuple[Section, ...]:
    made = [
        data_section(plan, max_sources),
        _modes(plan),
        _sequences(plan),
        _imbalance(plan),
        _batch(plan),
    ]
    if plan.reference is not None:
        made.append(_reference(plan.reference))
    made.append(_memory(plan.memory) if plan.memory is not None else _no_memory())
    if plan.longest is not None:
        made.append(_longest(plan.longest))
    if plan.traffic is not None:
        made.append(traffic_section(plan.traffic))
    if plan.measured is not None:
        made += time_sections(plan.measured)
    made.append(Section(title="Notes", lines=plan.notes))
    return tuple(made)


def _modes(plan: RunPlan) -> Section:
    rows, lines = [], []
    for mode in plan.modes:
        full, about = mode.row_fill, "~" if mode.is_estimated else ""
        rows.append(
            (
                mode.name,
                about + compact(mode.rows),
                about + compact(mode.slots),
                share(mode.padding),
                "" if full is None else share(full),
                f"{about if mode.counts_rows else ''}{mode.steps:,}",
                compact(mode.mean_batch_samples),
                f"{mode.compute:.2f}",
            )
        )
    epochs = "1 epoch" if plan.epochs == 1 else f"{plan.epochs:.3g} epochs"
    run = f"the run: {counted(plan.run_steps, 'step', 'steps')}, {epochs}"
    row_tokens = max(mode.row_tokens for mode in plan.modes)
    if any(mode.is_estimated for mode in plan.modes):
        lines = [f"~: packed from a part of the {plan.units}; as the recipe's mode it is exact"]
    heads = ("mode", "rows", "slots", "padding", "row\nfull", "steps", f"{plan.units}\na step")
    return Section.of_figures(
        "One epoch under every packing mode",
        (*heads, "compute"),
        rows,
        f"recipe: {plan.mode.name}, {plan.steps_per_epoch:,} steps an epoch, on "
        f"{counted(plan.data_parallel, 'model copy', 'model copies')} of "
        f"{counted(plan.world_size, 'process', 'processes')}; {run}",
        "slots are computed tokens and padding. row full is the tokens of the "
        f"{row_tokens:,} that a planned row may hold. compute is FLOPs relative to none",
        *lines,
        marked=(i for i, mode in enumerate(plan.modes) if mode.is_recipes),
    )


def _sequences(plan: RunPlan) -> Section:
    figures = plan.sequences
    listed = ", ".join(f"{name} {value}" for name, value in figures.percentiles.items())
    average = f"{figures.mode}: {figures.mean:.1f} on average, {listed}"
    ends = ", ".join(f"{name} {share(part, 1)}" for name, part in figures.bound_by.items())
    if figures.mode.endswith(", batch"):
        buffer = f"no {plan.unit} of the step is left that fits (packing.scope: batch)"
    elif figures.waiting == 1:
        buffer = f"the next {plan.unit} did not fit"
    else:
        buffer = (
            f"no {plan.unit} that waited fitted, as at the end of a window; {figures.waiting:,} "
            f"{plan.units} wait"
        )
    bound = f"rows ended by: {ends}; buffer: {buffer}"
    if plan.unit == "pair":  # their rows have no fixed shape
        return Section(title="Pairs in a row, two sequences each", lines=(average, bound))
    return Section(
        title="Samples in a row, and the most of them (packing.max_sequences)",
        columns=(
            Column("max\nsequences"),
            Column("from", is_text=True),
            *map(Column, ("rows\ncovered", "eager\ninstead", "rows more\nif enforced")),
            *map(Column, ("slots\nin tails", "bytes of\nboundaries")),
        ),
        rows=tuple(
            (
                str(choice.max_sequences),
                choice.basis,
                share(choice.covered, 2),
                share(1 - choice.covered, 2),
                share(choice.extra_rows, 2),
                share(choice.tails, 1),
                f"{choice.boundary_bytes:,}",
            )
            for choice in figures.choices
        ),
        marked=tuple(i for i, choice in enumerate(figures.choices) if choice.is_recipes),
        lines=(
            average,
            bound,
            "choices are percentiles rounded up to 8, from rows without a bound over the first "
            f"{figures.dry_run_samples:,} samples: enforce one by packing.max_sequences, or let "
            "the rows above it run eagerly",
            "training.cuda_graphs: decoder fills the covered rows up (slots in tails). Whatever "
            "the bound, it keeps embeddings and positions of one row and a second copy of the "
            "decoder's trained gradients. cuda_graph_max_sequences: auto covers the fullest row",
        ),
    )


def _imbalance(plan: RunPlan) -> Section:
    title = "Imbalance across data-parallel ranks"
    if not plan.imbalance:
        why = "a global batch is one micro-batch: there is nothing to share out"
        return Section(title=title, lines=(why,))
    steps = max(one.steps for one in plan.imbalance)
    rows = []
    for one in plan.imbalance:
        loads = (one.total_dealt, one.total_balanced, one.vision_dealt, one.vision_balanced)
        rows.append((str(one.data_parallel), str(one.micro_batches), *map(times, loads)))
    return Section.of_figures(
        title,
        ("ranks", "rows\neach", "total,\nin turn", "\nby cost", "vision,\nin turn", "\nby cost"),
        rows,
        f"largest cost of a rank over the mean, averaged over {steps} steps. 1.10 means that a "
        "step waits 10% for its slowest rank. Cost is FLOPs, and in turn is packing.balance: none",
        words=0,
        marked=(i for i, one in enumerate(plan.imbalance) if one.is_recipes),
    )


def _batch(plan: RunPlan) -> Section:
    batch = plan.batch
    unit = "rows" if batch.counts_rows else plan.units
    if batch.scaled_learning_rate is None:
        rate = f"learning rate: {batch.learning_rate:g} stays, a step trains as many {plan.units}"
    else:
        rate = (
            f"learning rate, a hint: the batch is {batch.growth:.3g} times the unpacked one, and "
            f"AdamW's square-root rule (Malladi et al., 2205.10287) makes {batch.learning_rate:g} "
            f"-> {batch.scaled_learning_rate:.3g}"
        )
    size = batch.global_batch_size
    ours = (f"{plan.mode.name} ({size} {unit})", batch.samples, batch.tokens)
    alone = (f"unpacked ({size} {plan.units})", batch.unpacked_samples, batch.unpacked_tokens)
    return Section.of_figures(
        "Effective batch",
        ("a step trains", plan.units, "tokens"),
        [(name, *map(compact, counts)) for name, *counts in (ours, alone)],
        *(*_keeping_size(plan), *_in_packs(plan), rate),
        marked=(0,),
    )


def _in_packs(plan: RunPlan) -> tuple[str, ...]:
    """The global batch size in packs, as NeMo-Aligner counts it; nothing without pairs."""
    batch = plan.batch
    if plan.unit != "pair":
        return ()
    return (
        f"every step trains exactly {batch.global_batch_size} pairs, the last of an epoch perhaps "
        "fewer. NeMo-Aligner counts packs. For as many pairs on average, its global batch size is "
        f"GBS / pairs per row = {batch.global_batch_size} / {batch.samples_per_row:.2f} = "
        f"{max(1, round(batch.in_packs))}",
    )


def _reference(figures: ReferenceFigures) -> Section:
    what = (
        f"{figures.num_pairs:,} pairs ({figures.num_tokens:,} tokens, {figures.num_patches:,} "
        f"patches), about as long as {figures.steps:,.0f} of its steps"
    )
    if not figures.is_kept:
        return Section(
            title="Reference model, adapters off in each step",
            lines=(f"one more forward pass a step; in an epoch over {what}",),
        )
    return Section(
        title="Reference model, a pass before the first step",
        lines=(
            f"one forward pass over the run's {what}; what is there already is not made again, and "
            "validation's pairs come on top",
            "memory: the run's own weights, without gradients, optimizer and kept activations, so "
            f"less than a step takes; on disk {figures.num_bytes / 1e6:,.3g} MB",
        ),
    )


def _keeping_size(plan: RunPlan) -> tuple[str, ...]:
    """The hint for a batch in rows; None if the mode keeps the unpacked run's samples."""
    batch = plan.batch
    if batch.keeping_size is None:
        return ()
    whole, kept = batch.global_batch_size, batch.keeping_size
    line = (
        f"global_batch_size counts rows here: a step trains about {batch.samples:,.0f} samples, "
        f"not {whole:,}; packing.scope: batch trains exactly {whole:,}"
    )
    if kept >= whole:  # no smaller number of rows
        return (line,)
    copies = f", a multiple of the {plan.data_parallel} model copies" * (plan.data_parallel > 1)
    return (
        f"{line}, and training.global_batch_size={kept} about {batch.kept_samples:,.0f}{copies}",
    )


def _memory(memory: MemoryFigures) -> Section:
    parts = (
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("logits", memory.logits),
        *([("answers", memory.answers)] if memory.answers else []),
        ("total", memory.total),
    )
    flight = f", {memory.rows_in_flight} in flight" if memory.rows_in_flight > 1 else ""
    part = memory.rank_trained != memory.rank_parameters
    trained = f" {memory.rank_trained:,} trained on that rank;" if part else ""
    return Section(
        title=f"Memory of a rank, an estimate ({memory.where}, {memory.dtype})",
        columns=tuple(Column(name) for name, _ in parts),
        rows=(tuple(sized(size) for _, size in parts),),
        lines=(
            f"{compact(memory.parameters)} parameters, {compact(memory.tower_parameters)} of them "
            f"in the vision tower, from {memory.counted_from};{trained} micro-batch of "
            f"{memory.row_tokens:,} slots and {memory.row_patches:,} patches{flight}",
            f"computed again in the backward pass: {memory.recomputed}",
            *memory.formula,
            *([_PAGED.format(sized(memory.paged))] if memory.paged else []),
            *([_OFFLOADED.format(sized(memory.offloaded))] if memory.offloaded else []),
            *([_ANSWERS] if memory.answers else []),
            *([_ON_GPUS] if memory.dtype == "bfloat16" else []),
        ),
    )


_PAGED = (
    "not in the total: {} of moments in pages, on the GPU while there is room, else on the host"
)
_OFFLOADED = "not in the total: {} of activations in pinned memory of the host"
_ANSWERS = (
    "answers: a whole copy of the model on each rank, in the place of activations and logits, as "
    "no step runs then. Its cache of keys and values is left out"
)


def _longest(longest: LongestRows) -> Section:
    rows = longest.rows
    return Section(
        title="The longest row that fits, by the GPUs that share it",
        columns=(
            *map(Column, ("context", "GPUs", "tokens", "patches", "memory")),
            Column("computed again", is_text=True),
        ),
        rows=tuple(
            (
                str(row.context), str(row.world_size), f"{row.tokens:,}" if row.tokens else "none",
                f"{row.patches:,}", sized(row.total), row.recomputed,
            )
            for row in rows
        ),
        marked=tuple(i for i, row in enumerate(rows) if row.context == longest.own),
        lines=(
            f"micro-batches that fill {longest.where}. Patches are in proportion to those of the "
            "micro-batch above, up to packing.max_vision_patches. A missing parallelism.context of "
            f"{', '.join(map(str, CONTEXTS))} breaks a rule of the recipe",
        ),
    )  # fmt: skip


def _no_memory() -> Section:
    why = "no estimate: the sizes of the model are not known; the notes say why"
    return Section(title="Memory of a rank", lines=(why,))
