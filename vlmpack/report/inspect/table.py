"""A row's figures as text: one line a segment, and the totals."""

from __future__ import annotations

from pathlib import PurePosixPath

from vlmpack.alignment import round_up
from vlmpack.proof.rows.opening import Segment, ShownRow

COLUMNS = ("", "key", "shard", "tokens", "image", "loss", "logical", "physical", "positions")
WORDS = ("key", "shard")
"""Columns of the table of segments; numbers but for the words."""


def table_rows(row: ShownRow) -> list[tuple[str, ...]]:
    """One line a segment, as COLUMNS; ranges are first and last slot."""
    return [_cells(row, segment) for segment in row.segments]


def _cells(row: ShownRow, segment: Segment) -> tuple[str, ...]:
    sample = segment.sample
    begin, end = segment.logical
    return (
        str(segment.number),
        segment.name,
        PurePosixPath(sample.shard).name if sample is not None else "",
        f"{segment.length:,}",
        f"{num_image_tokens(segment):,}",
        f"{sample.num_labels:,}" if sample is not None else "0",
        f"{begin:,}-{end - 1:,}" if end > begin else "none",
        f"{segment.start:,}-{segment.end - 1:,}" if segment.slots else "none",
        ", ".join(dict.fromkeys(f"{low}-{high:,}" for low, high in row.position_range(segment))),
    )


def num_image_tokens(segment: Segment) -> int:
    """Placeholder tokens of a segment."""
    runs = segment.sample.runs if segment.sample is not None else ()
    return sum(run.num_tokens for run in runs if run.kind == "image")


def totals(row: ShownRow) -> dict[str, str]:
    """The figures of the whole row, by name."""
    batch, segments, context = row.batch, row.segments, row.rules.context
    gaps = sum(s.slots - s.length for s in segments if s.sample is not None)
    tail = sum(s.slots for s in segments if s.sample is None)
    what = "pairs" if batch.num_pairs else "samples"
    found = {
        what: f"{len(batch.keys):,}",
        "tokens": _tokens(row),
        "fill": _fill(row),
        "padding": f"{gaps + tail:,} slots ({_parts(row, gaps, tail)})",
        "loss tokens": f"{batch.num_label_tokens:,}",
    }
    if batch.num_shared_tokens:
        patches = batch.num_shared_patches
        found["shared"] = f"{batch.num_shared_tokens:,} tokens, {patches:,} patches not repeated"
    if (media := batch.media) is not None:
        patches = sum(t * h * w for t, h, w in media.grid_thw)
        tokens = sum(media.num_tokens)
        found["images"] = f"{media.num_images:,}: {tokens:,} tokens, {patches:,} patches"
    if (flops := row.flops()) is not None:
        share = f", {flops[1] / sum(flops):.0%} of it vision" if flops[1] else ""
        found["cost"] = f"{_flops(sum(flops))} a training step{share}"
    if context > 1:
        found["CP"] = f"{context} ranks, {batch.num_slots // context:,} slots each"
    if row.shown.holes:
        found["left out"] = f"{len(row.shown.holes)} bad samples"
    return found


def _tokens(row: ShownRow) -> str:
    """Tokens and slots as they are computed: what samples share, once."""
    batch = row.batch
    found = f"{batch.num_tokens - batch.num_shared_tokens:,} in {batch.num_slots:,} slots"
    if not batch.num_shared_tokens:
        return found
    slots = round_up(row.ends[-1], row.rules.multiples.row)
    return f"{found} ({batch.num_tokens:,} in {slots:,} with nothing shared)"


def _flops(count: float) -> str:
    """A count as text: 12.3 GFLOP."""
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if count >= size:
            return f"{count / size:.3g} {name}FLOP"
    return f"{count / 1e6:.3g} MFLOP"


def _fill(row: ShownRow) -> str:
    batch = row.batch
    tokens, budget = batch.num_tokens - batch.num_shared_tokens, row.rules.budget
    fill = f"{tokens / max(1, batch.num_slots):.1%}"
    if budget is None:
        return fill
    return f"{fill}; {tokens / budget.max_tokens:.1%} of the budget {budget.max_tokens:,}"


def _parts(row: ShownRow, gaps: int, tail: int) -> str:
    if row.is_padded:
        return f"rows of {row.num_slots // row.shown.num_rows:,}"
    return f"{gaps:,} in alignment gaps, {tail:,} in the tail"
