"""What a program hands to `vlmpack.finetune`: named, checked together, and told apart on resume.

Ranks agree on what was handed over, or all of them say what differs.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
from support.handed_over import (
    Heard,
    Records,
    StepRaises,
    Typo,
    asked,
    half,
    metric_exits,
    metric_lies,
    two_sums,
)
from support.recipes import MINIMAL, changed
from support.toy_objective import FOCAL, focal

import vlmpack
from vlmpack.build.extensions import (
    NO_EXTENSIONS,
    Extensions,
    agree,
    extensions_of,
    missing,
    unused,
)
from vlmpack.build.source_text import fingerprint, why_not_pickled
from vlmpack.distributed import Ranks
from vlmpack.errors import ExtensionError, RecipeError
from vlmpack.evaluation.metrics import METRICS, Tally, checked_metric
from vlmpack.evaluation.predictions import Prediction
from vlmpack.recipe import identity, identity_differences, identity_hint, load_recipe
from vlmpack.recipe.notes import registered_in
from vlmpack.recipe.sources import one_of


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
        "note: rank 1 (and 1 other rank) has another sources['mine'] than rank 0. "
    )
    assert f"differ ({prints[0]}, {prints[1]}). The run uses rank 0's" in note
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


ROW = Prediction(
    key="a", shard="s", task=None, num_images=0, question="q", truth="t", answer="t", correct=True
)


def recipe(**changes: Any) -> Any:
    return load_recipe(changed(MINIMAL, **changes))


def test_what_is_handed_over_is_named_in_the_recipe() -> None:
    plain = recipe()
    named, extensions = extensions_of(
        recipe(data__train="python:mine", data__columns="python:asked"),
        sources={"mine": Records(3), "asked": asked},
        objective=focal,
        metrics={"half": half},
        callbacks=[Heard()],
    )
    assert named.objective.name == "python:focal" and named.objective.fingerprint
    assert named.evaluation.metrics == ("exact_match", "python:half")
    assert [each.name for each in registered_in(named)] == ["mine", "asked", "focal", "half"]
    assert extensions.data.sources.keys() == {"mine"} and extensions.objective is not None
    assert extensions.metrics_of(named)["python:half"]([ROW]).share == 0.5
    assert extensions.metrics_of(named)["exact_match"] is METRICS["exact_match"]
    assert extensions_of(plain) == (plain, NO_EXTENSIONS)


def test_another_text_of_the_objective_is_another_run() -> None:
    one, _ = extensions_of(recipe(), objective=focal)
    two, _ = extensions_of(recipe(), objective=lambda losses, batch: {"loss_sum": losses.sum()})
    same, _ = extensions_of(recipe(), objective=focal)
    assert identity(one) == identity(same)
    found = identity_differences(identity(one), identity(two))
    assert any("objective.fingerprint" in difference for difference in found)
    assert "objective.fingerprint" not in identity(recipe())
    assert "the objective's text and `version`, what it closes" in identity_hint(
        identity(one), {**identity(one), "objective.fingerprint": "other"}
    )
    own = extensions_of(recipe(), objective=FOCAL)[1].objective
    assert own is not None and (own.sum_names, own.divisor) == (FOCAL.sum_names, FOCAL.divisor)


def test_another_gamma_is_another_run() -> None:
    """It is in no text: what a function closes over decides what is learned."""

    def made(gamma: float) -> Any:
        def weighted(losses: Any, batch: Any) -> Any:
            return {"loss_sum": (gamma * losses).sum()}

        return extensions_of(recipe(), objective=weighted)[0]

    one, two, same = (identity(made(gamma)) for gamma in (1.0, 5.0, 1.0))
    assert one == same
    [found] = identity_differences(one, two)
    assert found.startswith("objective.fingerprint: ")


def test_an_objective_that_nobody_could_tell_from_another_is_a_problem_of_the_recipe() -> None:
    handle = threading.Lock()

    def locked(losses: Any, batch: Any) -> Any:
        with handle:
            return {"loss_sum": losses.sum()}

    with pytest.raises(RecipeError, match=r"objective has a state that cannot be looked at \(Type"):
        extensions_of(recipe(), objective=locked)
    locked.version = 1  # type: ignore[attr-defined]
    assert extensions_of(recipe(), objective=locked)[1].objective is not None


def test_all_that_is_wrong_is_told_at_once() -> None:
    def inside(record: Any) -> Any:
        return record

    with pytest.raises(RecipeError) as raised:
        extensions_of(
            recipe(data__num_workers=1),
            sources={"a b": asked, "local": inside, "class": Records, "number": 3},
            objective=3,  # type: ignore[arg-type]
            metrics={"none": None},  # type: ignore[dict-item]
            callbacks=[Heard, 4],
        )
    said = str(raised.value)
    for words in (
        "'a b' is no name",
        "sources['local'] cannot be sent to the loader processes",
        "define it at the top of a module, or set data.num_workers: 0",
        "sources['class'] is the class Records",
        "sources['number'] is an int; expected an object with __len__ and __getitem__",
        "objective is an int. Expected a vlmpack.Objective",
        "metrics['none'] is missing; expected a function",
        "callbacks[0] is the class Heard; expected an object: call it",
        "callbacks[1] is an int without any of on_step",
    ):
        assert words in said
    assert extensions_of(recipe(data__num_workers=0), sources={"local": inside})[1].data.functions


def test_values_of_another_kind_than_their_argument_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as raised:
        extensions_of(recipe(), sources=[Records(3)], metrics=[half], callbacks=Heard())  # type: ignore[arg-type]
    assert list(raised.value.problems) == [
        "callbacks is a Heard; expected a list of callbacks",
        "sources is a list; expected a dict from names to what they stand for",
        "metrics is a list; expected a dict from names to what they stand for",
    ]


def test_functions_that_cannot_be_called_are_told_before_the_run() -> None:
    class Silent:
        def on_step(self) -> None: ...

    def alone(losses) -> Any: ...  # type: ignore[no-untyped-def]

    def none_at_all() -> Any: ...

    def defaults(record: Any, size: int = 3, **more: Any) -> Any: ...

    with pytest.raises(RecipeError) as raised:
        extensions_of(
            recipe(data__num_workers=0),
            sources={"f": none_at_all, "right": defaults},
            objective=alone,
            metrics={"m": none_at_all, "builtin": max},
            callbacks=[Silent()],
        )
    expected = (
        "callbacks[0] (Silent): on_step takes (); expected one argument, the event",
        "sources['f'] takes (); expected one argument, the record",
        "objective takes (losses); expected two arguments, the losses of a",
        "metrics['m'] takes (); expected one argument, the predictions",
    )
    for found, words in zip(raised.value.problems, expected, strict=True):
        assert found.startswith(words)


def test_a_source_of_the_other_kind_is_named_as_that() -> None:
    with pytest.raises(RecipeError) as raised:
        extensions_of(
            recipe(data__train="python:f", data__columns="python:mine"),
            sources={"f": asked, "mine": Records(3)},
        )
    assert list(raised.value.problems) == [
        "data.train: sources['f'] is a function from a record to another, which data.columns "
        "names; expected an object with __len__ and __getitem__",
        "data.columns: sources['mine'] is an object with __len__ and __getitem__, which data.train "
        "names; expected a function from a record to another",
    ]


def test_what_a_recipe_names_and_nobody_hands_over_is_refused() -> None:
    named = recipe(
        data__train="python:mine",
        objective__name="python:focal",
        evaluation__metrics=["python:half"],
    )
    with pytest.raises(RecipeError) as raised:
        extensions_of(named, sources={"other": Records(3)})
    said = str(raised.value)
    assert "data.train: python:mine is not here" in said and "there are other" in said
    assert "vlmpack.finetune(recipe, metrics={'half': ...})" in said
    assert "vlmpack.finetune(recipe, objective=...)" in said
    assert len(missing(named)) == 3 and missing(recipe()) == []
    assert [line.partition(":")[0] for line in missing(named, data_alone=True)] == ["data.train"]


def test_what_is_handed_over_and_never_asked_is_said() -> None:
    """A source whose key was forgotten: the run trained on the recipe's own data without a word."""
    sources = {"mine": Records(3), "asked": asked}
    plain, extensions = extensions_of(recipe(), sources=sources, metrics={"half": half})
    assert unused(plain, extensions) == [
        "sources['mine'] was handed over and is never read: no key of the recipe names it "
        "(data.train: python:mine would)",
        "sources['asked'] was handed over and is never read: no key of the recipe names it "
        "(data.columns: python:asked would)",
        "metrics: half: never asked, as evaluation.generate is false",
    ]
    whole, extensions = extensions_of(
        recipe(
            data__train=[{"path": "python:mine", "columns": "python:asked"}],
            data__test="data/test.tar",
            evaluation__generate=True,
        ),
        sources=sources,
        metrics={"half": half},
    )
    assert unused(whole, extensions) == [] == unused(recipe(), NO_EXTENSIONS)


def test_names_are_known_ones_or_of_programs() -> None:
    check = one_of(["a"])
    assert check("a") == "a" and check("python:b") == "python:b"
    with pytest.raises(RecipeError, match=r"'python:' is not one of sft, dpo"):
        recipe(objective__name="python:")
    with pytest.raises(RecipeError, match="is no program's; leave it out"):
        recipe(objective__fingerprint="12")


def test_text_version_and_state_make_a_fingerprint() -> None:
    small, large, again = Records(3), Records(4), Records(3)
    assert fingerprint(small) == fingerprint(again) != fingerprint(large)
    again.version = 2
    assert fingerprint(again) != fingerprint(small)
    assert fingerprint(partial(half, 1)) != fingerprint(partial(half, 2)) != fingerprint(half)
    assert fingerprint(FOCAL) != fingerprint(focal)
    made: dict[str, Any] = {}
    exec("def nowhere(record): return record", made)
    with pytest.raises(ValueError, match="Give it a `version`"):
        fingerprint(made["nowhere"])
    made["nowhere"].version = 1
    assert fingerprint(made["nowhere"])


def test_a_value_of_an_interactive_session_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    assert why_not_pickled(asked) is None
    monkeypatch.setattr(asked, "__module__", "__main__")
    monkeypatch.delattr(__main__, "__file__", raising=False)
    assert "interactive session" in str(why_not_pickled(asked))


@pytest.mark.parametrize(
    ("returned", "share"), [(0.25, 0.25), (1, 1.0), (None, None), (Tally(1, 4), 0.25)]
)
def test_what_a_metric_may_return(returned: Any, share: float | None) -> None:
    metric = checked_metric(lambda rows: returned, "python:m")
    assert metric([ROW]).share == share
    assert metric([]).share is None, "it is not asked about nothing"


@pytest.mark.parametrize("returned", [1.5, -0.1, float("nan"), "0.5", True, Tally(3, 1)])
def test_what_it_may_not(returned: Any) -> None:
    with pytest.raises(ExtensionError, match=r"metric python:m returned .*\. Expected a share"):
        checked_metric(lambda rows: returned, "python:m")([ROW])
    with pytest.raises(ExtensionError, match=r"returned 1\.5"):
        checked_metric(metric_lies, "python:m")([ROW])
    with pytest.raises(ExtensionError, match=r"metric python:m raised SystemExit: 0"):
        checked_metric(metric_exits, "python:m")([ROW])


@pytest.mark.parametrize(
    ("handed_over", "said"),
    [
        ({"callbacks": [Typo()]}, "has on_stpe; did you mean on_step?"),
        ({"sources": {"mine": 3}}, "sources['mine'] is an int"),
        ({"objective": 3}, "objective is an int"),
        ({"metrics": {"a b": half}}, "'a b' is no name"),
        ({"sources": {"other": Records(3)}}, "data.train: python:mine is not here"),
    ],
)
def test_of_several_processes_none_ends_before_they_have_met(
    monkeypatch: pytest.MonkeyPatch, handed_over: dict[str, Any], said: str
) -> None:
    """With `callbacks=[...] if rank == 0 else []` the main rank alone may be wrong: it had ended,
    and the others waited for it."""
    named = recipe(data__train="python:mine")
    with pytest.raises(RecipeError) as raised:
        extensions_of(named, **handed_over)
    assert any(said in problem for problem in raised.value.problems)
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, extensions = extensions_of(named, **handed_over)
    assert extensions.problems == raised.value.problems


def test_names_that_the_recipe_refuses_are_no_process_own_end_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = "evaluation.metrics: of no use"

    def refuses(*_: Any) -> Any:
        raise RecipeError([refused])

    monkeypatch.setattr("vlmpack.build.extensions.load_recipe", refuses)
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain = recipe()
    assert extensions_of(plain, metrics={"half": half})[1].problems == (refused,)


def test_what_exits_while_it_is_looked_at_ends_the_run() -> None:
    """Its state is asked for before anything is read."""

    class Leaves(Records):
        def __getstate__(self) -> Any:
            sys.exit(0)

    with pytest.raises(RecipeError, match=r"raised SystemExit: 0 \(test_extensions\.py, line"):
        vlmpack.finetune(changed(MINIMAL), sources={"mine": Leaves(3)})
