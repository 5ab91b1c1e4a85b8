"""Ranks agree on what was handed over, or all of them say what differs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from support.handed_over import Heard, Records, StepRaises, Typo, asked, half, two_sums
from support.recipes import MINIMAL, changed
from support.toy_objective import focal

from vlmpack.build.extensions import NO_EXTENSIONS, Extensions, agree, extensions_of
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError
from vlmpack.recipe import load_recipe


def of(**handed_over: Any) -> Extensions:
    return extensions_of(load_recipe(changed(MINIMAL)), **handed_over)[1]


def over_ranks(
    *each: Extensions, problems: tuple[str, ...] = ()
) -> list[Extensions | tuple[str, ...]]:
    """What each rank ends with, its problems where it raises; a thread stands for a rank.

    Args:
        each: what it was handed over.
        problems: of the last rank.
    """
    told: list[Any] = [None] * len(each)
    all_told = Barrier(len(each), timeout=20)

    class Gathers(Ranks):
        def gather_objects(self, value: Any) -> list[Any]:
            told[self.rank] = value
            all_told.wait()
            return told

    def rank(number: int) -> Extensions | tuple[str, ...]:
        own = problems if number == len(each) - 1 else ()
        try:
            return agree(each[number], Gathers(rank=number), own)
        except RecipeError as error:
            return error.problems

    with ThreadPoolExecutor(len(each)) as threads:
        return list(threads.map(rank, range(len(each))))


def test_nothing_and_the_same_are_agreed_on() -> None:
    assert over_ranks(NO_EXTENSIONS, NO_EXTENSIONS) == [NO_EXTENSIONS, NO_EXTENSIONS]
    given = {"sources": {"mine": Records(3), "asked": asked}, "objective": focal}
    found = over_ranks(*(of(**given, metrics={"half": half}) for _ in range(3)))
    assert all(isinstance(one, Extensions) for one in found)


def test_the_main_ranks_callbacks_are_everybodys() -> None:
    """The usual pattern is `callbacks=[...] if rank == 0 else []`: the others have to come to where
    the main rank tells them."""
    first, second = over_ranks(of(callbacks=[Heard()]), NO_EXTENSIONS)
    assert isinstance(first, Extensions) and isinstance(second, Extensions)
    assert second.callbacks == () and second.hooks == first.hooks >= {"on_step", "on_end"}
    same = over_ranks(of(callbacks=[Heard()]), of(callbacks=[Heard()]))
    assert all(isinstance(one, Extensions) for one in same)


def test_the_main_ranks_fingerprints_of_sources_are_everybodys_and_others_are_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A source may hold what is a process's own; it is said once, by the main rank."""
    first, second = (of(sources={"mine": Records(count)}) for count in (3, 4))
    assert first.data.fingerprints != second.data.fingerprints
    found = over_ranks(first, second, second)
    for each in found:
        assert isinstance(each, Extensions) and each.data.fingerprints == first.data.fingerprints
    prints = (second.data.fingerprints["mine"], first.data.fingerprints["mine"])
    [note] = caplog.messages
    assert note.startswith(
        "note: rank 1 (and 1 other rank) has another sources['mine'] than rank 0: "
    )
    assert f"differ ({prints[0]}, {prints[1]}); the run goes by rank 0's" in note
    caplog.clear()
    over_ranks(first, first)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("main", "other", "said"),
    [
        ({}, {"sources": {"mine": Records(3)}}, "has mine as sources, and rank 0 none; every"),
        ({"sources": {"asked": asked}}, {}, "has none as sources, and rank 0 asked (a fun"),
        (
            {"sources": {"mine": Records(3)}},
            {"sources": {"mine": asked}},
            "has mine (a function) as sources, and rank 0 mine; every process has to hand over",
        ),
        ({"metrics": {"half": half}}, {}, "has none as metrics, and rank 0 half; every process"),
        ({"objective": focal}, {}, "has none as objective, and rank 0 one; every process"),
        ({"objective": focal}, {"objective": two_sums}, "has another objective than rank 0: its"),
        ({}, {"callbacks": [Heard()]}, "has Heard as callbacks, and rank 0 none; rank 0's are"),
        (
            {"callbacks": [StepRaises()]},
            {"callbacks": [Heard()]},
            "has Heard as callbacks, and rank 0 StepRaises; rank 0's are called, so the others",
        ),
    ],
)
def test_what_differs_is_said_by_all(main: Any, other: Any, said: str) -> None:
    """Ranks trained by different objectives before, or waited for one another for ever."""
    found = over_ranks(of(**main), of(**other))
    assert found[0] == found[1] and isinstance(found[0], tuple)
    [problem] = found[0]
    assert problem.startswith(f"rank 1 {said}")


def test_ranks_that_differ_alike_share_a_line_and_ones_problems_are_raised_by_all() -> None:
    found = over_ranks(of(metrics={"half": half}), NO_EXTENSIONS, NO_EXTENSIONS, problems=("own",))
    assert found[0] == found[1] == found[2] and isinstance(found[0], tuple)
    own, difference = found[0]
    assert own == "rank 2: own"
    assert difference.startswith("rank 1 (and 1 other rank) has none as metrics, and rank 0 half")


def test_the_problems_of_one_rank_are_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of callbacks that the main rank alone hands over, too: it had raised before they met."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    typo, wrong = of(callbacks=[Typo()]), of(metrics={3: half, "half": half})
    found = over_ranks(typo, NO_EXTENSIONS)
    assert found[0] == found[1]
    assert found[0] == ("rank 0: callbacks[0] (Typo) has on_stpe; did you mean on_step?",)
    [number] = over_ranks(wrong, wrong)[0]  # type: ignore[misc]
    assert number.startswith("metrics: 3 is no name")
