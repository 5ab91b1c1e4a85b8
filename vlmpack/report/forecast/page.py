"""One HTML file: the pictures, then every table. It needs nothing beside it; text is escaped."""

from __future__ import annotations

from pathlib import Path

from vlmpack.forecast.figures import RunPlan
from vlmpack.report.document import render
from vlmpack.report.forecast.numbers import compact, share
from vlmpack.report.forecast.pictures import draw_pictures
from vlmpack.report.forecast.section import Column, Section
from vlmpack.report.forecast.sections import sections
from vlmpack.report.picture import Picture
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

MAX_SOURCES = 1000


def write_page(plan: RunPlan, path: Path, *, title: str) -> None:
    """Draw the pictures and write the page.

    Raises:
        CapabilityError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    write_atomically(path, render_page(plan, draw_pictures(plan), title=title))


def render_page(plan: RunPlan, pictures: list[Picture], *, title: str) -> str:
    """The page as HTML."""
    mode, none = plan.mode, plan.modes[0]
    samples = f"{compact(plan.total.num_tokens)} tokens"
    return render(
        "plan.html",
        title=title,
        about=f"plan of {plan.model}, packing.mode {mode.name}, "
        f"{counted(plan.world_size, 'process', 'processes')}",
        figures=[
            (plan.units, compact(plan.total.num_usable), samples),
            ("steps", f"{plan.run_steps:,}", f"{plan.steps_per_epoch:,} an epoch"),
            ("padding", share(mode.padding), f"{share(none.padding)} unpacked"),
            (
                f"{plan.units} a step",
                compact(plan.batch.samples),
                f"{compact(plan.batch.tokens)} tokens",
            ),
        ],
        pictures=pictures,
        sections=[*sections(plan, max_sources=MAX_SOURCES), *_left_out(plan)],
    )


def _left_out(plan: RunPlan) -> list[Section]:
    """The samples that are not trained, as far as the plan names them."""
    if not plan.left_out:
        return []
    return [
        Section(
            title=f"Not trained, the first {len(plan.left_out)}",
            columns=tuple(Column(name, is_text=True) for name in ("key", "shard", "why")),
            rows=tuple((one.key, one.shard, one.reason) for one in plan.left_out),
        )
    ]
