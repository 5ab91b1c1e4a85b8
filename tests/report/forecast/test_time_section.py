"""What `plan --measure` found, as tables: shares add up, and what is not told apart says so."""

from __future__ import annotations

from dataclasses import replace

from support.made_plans import measured_figures

from vlmpack.report.forecast.sections import time_sections


def test_parts_add_up_and_the_recipe_is_marked() -> None:
    measured = measured_figures()
    parts, settings = time_sections(measured)
    assert [row[0] for row in parts.rows] == [
        *("training steps", "launch", "validation", "answers", "checkpoint", "export", "the run")
    ]
    shares = [int(row[-1].removesuffix("%").removeprefix("<")) for row in parts.rows[:-1]]
    assert abs(sum(shares) - 100) <= len(shares) // 2, "each is rounded"
    assert "measured with 16 of 512 copies" in " ".join(parts.lines)
    assert settings.marked == (1,)
    assert settings.rows[1][0] == "the recipe as it is"


def test_what_is_as_near_as_a_setting_is_to_itself_is_not_told_apart() -> None:
    measured = measured_figures()
    _, settings = time_sections(measured)
    assert [row[-1] for row in settings.rows] == ["0.92", "1.00", "~1.01", "1.46", ""]
    assert "differed by up to 2%. Settings that are closer (~) count as equal" in " ".join(
        settings.lines
    )
    failed = settings.lines[-1]
    assert failed.endswith("Tried to allocate 2.00 GiB"), "one line of it"
    _, alone = time_sections(replace(measured, spread=None))
    assert [row[-1] for row in alone.rows][2] == "1.01"
    assert not any("count as equal" in line for line in alone.lines)
