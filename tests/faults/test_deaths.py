"""Runs that die are resumed: every pair of engine, source, processes and kind of save, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults.deaths import COVERING, DEATHS, Setting, run_chain

NAMED = {death.name: death for death in DEATHS}
SHORT = (
    "TERM",
    "kill -9 of the launcher",
    "kill -9 of one rank",
    "out of memory",
    "kill -9 of a loader",
    "INT",
    "STOP and CONT, then kill -9",
    "kill -9",
)
"""How the settings of COVERING die, in turn."""


def test_the_settings_cover_every_pair() -> None:
    values = [(s.engine, s.source, s.processes, s.asynchronous) for s in COVERING]
    for one in range(4):
        for other in range(one):
            wanted = {(a[one], b[other]) for a in values for b in values}
            assert {(each[one], each[other]) for each in values} == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        pytest.param(
            setting,
            name,
            id=f"{setting}-{name}",
            marks=pytest.mark.megatron if setting.engine == "mcore" else (),
        )
        for setting, name in zip(COVERING, SHORT, strict=True)
    ],
)
def test_a_run_that_dies_goes_on_as_if_it_had_not(
    tmp_path: Path, record_property: Any, setting: Setting, name: str
) -> None:
    outcomes = list(run_chain(tmp_path, setting, [NAMED[name]], seed=1))
    *deaths, end = outcomes
    assert [outcome.death for outcome in deaths] == [name], "guard: it was done before"
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert 0 < deaths[0].step < end.step
    record_property("injections", len(deaths))
    record_property("seconds", deaths[0].seconds)
    record_property("steps_lost", deaths[0].step - deaths[0].saved)
