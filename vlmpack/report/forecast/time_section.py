"""How long the run takes, as titled tables of text."""

from __future__ import annotations

from vlmpack.forecast.figures import MeasuredChoice, MeasuredFigures
from vlmpack.report.forecast.numbers import share
from vlmpack.report.forecast.section import Column, Section
from vlmpack.words import counted, duration

MOST_WORDS = 100
"""Characters of what a choice that failed said, in the table's line."""


def time_sections(measured: MeasuredFigures) -> list[Section]:
    """The run's time by what it is spent on, and the choices by theirs."""
    return [_parts(measured), _choices(measured)]


def _parts(measured: MeasuredFigures) -> Section:
    own = measured.own
    assert own.speed is not None and own.training_seconds is not None  # it failed otherwise
    parts = [("training steps", measured.run_steps, own.speed.seconds)]
    parts += [(stage.what, stage.times, stage.seconds) for stage in measured.stages]
    total = max(1e-9, measured.seconds)
    return Section(
        title=f"Time of the run, from {counted(own.speed.measured_steps, 'measured step')}",
        columns=(
            Column("what", is_text=True),
            *map(Column, ("times", "each", "in all", "share")),
        ),
        rows=(
            *(
                (
                    what,
                    f"{times:,}",
                    duration(each),
                    duration(times * each),
                    share(times * each / total, 0),
                )
                for what, times, each in parts
            ),
            ("the run", "", "", duration(total), ""),
        ),
        lines=(
            f"on {measured.device}, with {counted(measured.processes, 'process', 'processes')}; a "
            f"step waits {duration(own.speed.data_wait_seconds)} for its data "
            f"({share(own.speed.data_wait_share, 0)})",
            "answers are timed with the model as it was given: a trained one may stop earlier",
            *measured.notes,
        ),
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

    return Section(
        title="What changes no loss, the fastest first",
        columns=(
            Column("setting", is_text=True),
            *map(Column, ("a step", "waits\nfor data", "all steps", "relative")),
        ),
        rows=tuple(map(row, measured.choices)),
        marked=tuple(i for i, one in enumerate(measured.choices) if not one.change),
        lines=(
            *_spread_line(measured),
            *(
                f"{one.change}: {one.failure.splitlines()[0][:MOST_WORDS]}"
                for one in measured.choices
                if one.failure
            ),
        ),
    )


def _spread_line(measured: MeasuredFigures) -> tuple[str, ...]:
    if measured.spread is None:
        return ()
    return (
        "the fastest ones and the recipe as it is were measured twice, and differed by up to "
        f"{share(measured.spread, 0)}: settings that are closer (~) are not told apart",
    )
