"""What a program passes to `vlmpack.finetune` besides a recipe, checked before anything is read.

A recipe names it as `python:NAME`; see `recipe.sources.one_of`. Only its fingerprints are written,
so that a resume with other code is refused, or begins a new index.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmpack.addresses import registered_name
from vlmpack.build.checked_objective import checked_objective
from vlmpack.build.source_text import fingerprint, why_not_pickled
from vlmpack.data.files.registered import NOTHING, Function, MapStyle, Registered
from vlmpack.distributed import Ranks, world_size_from_environment
from vlmpack.errors import RecipeError
from vlmpack.evaluation.metrics import METRICS, Metric, checked_metric
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.notes import registered_in
from vlmpack.training.callbacks import check_callbacks, hooks_of
from vlmpack.training.objective import Objective, TokenSums
from vlmpack.words import counted, kind_of, unfit_signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """Checked values of a program.

    Args:
        objective: what `objective.name: python:...` stands for.
        metrics: by name, without `python:`.
        hooks: those of the callbacks that are called: once ranks have agree, the main rank's.
        problems: what is wrong on this process, where there are others: all of them raise it.
    """

    data: Registered = NOTHING
    objective: Objective | None = None
    objective_fingerprint: str | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: tuple[object, ...] = ()
    hooks: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()

    def metrics_of(self, recipe: Recipe) -> dict[str, Metric]:
        """The metrics that a recipe names, by its names for them."""
        named = ((name, registered_name(name)) for name in recipe.evaluation.metrics)
        return {name: METRICS[name] if own is None else self.metrics[own] for name, own in named}


NO_EXTENSIONS = Extensions()


def extensions_of(
    recipe: Recipe,
    *,
    sources: Mapping[str, Any] | None = None,
    objective: Objective | TokenSums | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[object] = (),
) -> tuple[Recipe, Extensions]:
    """Check what a program passed, and name its objective and metrics in the recipe.

    Sources are named by the recipe itself.

    Raises:
        RecipeError: lists all that is wrong. Where there are several processes that is in
            `problems`: one that ended by itself would leave the others waiting.
    """
    problems = [*check_callbacks(callbacks)]
    callbacks = callbacks if isinstance(callbacks, list | tuple) else ()
    named_sources, wrong = _by_name("sources", sources)
    problems += wrong
    data, wrong = _registered(named_sources, will_be_sent=recipe.data.workers > 0)
    problems += wrong
    made, wrong = _objective(recipe, objective)
    problems += wrong
    print_, wrong = _objective_fingerprint(objective)
    problems += wrong
    own: dict[str, Metric] = {}
    named_metrics, wrong = _by_name("metrics", metrics)
    problems += wrong
    for name, metric in named_metrics.items():
        problems += _bad_name("metrics", name)
        if not callable(metric):
            problems.append(f"metrics[{name!r}] is {kind_of(metric)}; expected a function")
        elif unfit := unfit_signature(metric, 1):
            problems.append(
                f"metrics[{name!r}] takes {unfit}; expected one argument, the predictions"
            )
        own[name] = checked_metric(metric, f"python:{name}")
    extensions = Extensions(
        data=data,
        objective=made,
        objective_fingerprint=print_,
        metrics=own,
        callbacks=tuple(callbacks),
        hooks=hooks_of(callbacks),
    )
    if not problems:
        try:
            recipe = _named(recipe, extensions, objective)
            problems = missing(recipe, extensions)
        except RecipeError as error:
            problems = [*error.problems]
    if problems and world_size_from_environment() == 1:
        raise RecipeError(problems)
    return recipe, replace(extensions, problems=tuple(problems))


def missing(
    recipe: Recipe,
    extensions: Extensions = NO_EXTENSIONS,
    *,
    data_alone: bool = False,
    call: str = "vlmpack.finetune(recipe",
) -> list[str]:
    """The names in a recipe for which the program passed nothing.

    Args:
        data_alone: check sources and functions alone, for callers that do not train.
        call: the beginning of the call that a message names.
    """
    problems = []
    for key, argument, name in registered_in(recipe):
        if data_alone and argument != "sources":
            continue
        there: Mapping[str, object] = {
            "sources": extensions.data.functions
            if key.endswith("columns")
            else extensions.data.sources,
            "metrics": extensions.metrics,
            "objective": {name: 1} if extensions.objective is not None else {},
        }[argument]
        if name in there:
            continue
        if argument == "sources" and name in extensions.data.fingerprints:
            problems.append(f"{key}: {_other_kind(key, name)}")
            continue
        given = f"{argument}=..." if argument == "objective" else f"{argument}={{{name!r}: ...}}"
        had = f"; there are {', '.join(there)}" if there else ""
        what = "a function" if key.endswith("columns") else "this"
        problems.append(
            f"{key}: python:{name} is not here; {what} is handed over by a program: "
            f"{call}, {given}){had}"
        )
    return list(dict.fromkeys(problems))


def _other_kind(key: str, name: str) -> str:
    if key.endswith("columns"):
        return (
            f"sources[{name!r}] is an object with __len__ and __getitem__, which data.train names; "
            "expected a function from a record to another"
        )
    return (
        f"sources[{name!r}] is a function from a record to another, which data.columns names; "
        "expected an object with __len__ and __getitem__"
    )


def unused(recipe: Recipe, extensions: Extensions) -> list[str]:
    """The names that this run does not use. No error, as a program may serve several runs."""
    named = {name for _, argument, name in registered_in(recipe) if argument == "sources"}
    data = extensions.data
    said = [
        f"sources[{name!r}] was handed over and is never read: no key of the recipe names it "
        f"({key}: python:{name} would)"
        for key, values in (("data.train", data.sources), ("data.columns", data.functions))
        for name in values
        if name not in named
    ]
    if extensions.metrics and not recipe.evaluation.generate:
        listed = ", ".join(extensions.metrics)
        said.append(f"metrics: {listed}: never asked, as evaluation.generate is false")
    return said


def _by_name(argument: str, given: object) -> tuple[Mapping[str, Any], list[str]]:
    if given is None or isinstance(given, Mapping):
        return given or {}, []
    return {}, [
        f"{argument} is {kind_of(given)}; expected a dict from names to what they stand for"
    ]


def _registered(sources: Mapping[str, Any], *, will_be_sent: bool) -> tuple[Registered, list[str]]:
    maps: dict[str, MapStyle] = {}
    functions: dict[str, Function] = {}
    prints: dict[str, str] = {}
    problems: list[str] = []
    for name, value in sources.items():
        where = f"sources[{name!r}]"
        problems += _bad_name("sources", name)
        if not inspect.isclass(value) and all(
            hasattr(value, method) for method in ("__len__", "__getitem__")
        ):
            maps[name] = value
        elif callable(value) and not inspect.isclass(value):
            functions[name] = value
            if unfit := unfit_signature(value, 1):
                problems.append(f"{where} takes {unfit}; expected one argument, the record")
        else:
            found = f"the class {value.__name__}" if inspect.isclass(value) else kind_of(value)
            problems.append(
                f"{where} is {found}; expected an object with __len__ and __getitem__, or a "
                "function from a record to one with 'messages'"
            )
            continue
        try:
            prints[name] = fingerprint(value)
        except ValueError as error:
            problems.append(f"{where} {error}")
        why = why_not_pickled(value) if will_be_sent else None
        if why is not None:
            problems.append(
                f"{where} cannot be sent to the loader processes ({why}); define it at the top of "
                "a module, or set data.num_workers: 0"
            )
    return Registered(maps, functions, prints), problems


def _objective(
    recipe: Recipe, given: Objective | TokenSums | None
) -> tuple[Objective | None, list[str]]:
    if given is None:
        return None, []
    if recipe.objective.learns_pairs:
        return None, [
            f"objective: the recipe's own is {recipe.objective.name}; expected one of two"
        ]
    if isinstance(given, Objective):
        return checked_objective(given), []
    if callable(given) and not inspect.isclass(given):
        if unfit := unfit_signature(given, 2):
            return None, [
                f"objective takes {unfit}; expected two arguments, the losses of a micro-batch's "
                "label tokens and the batch"
            ]
        return checked_objective(given), []
    return None, [
        f"objective is {kind_of(given)}. Expected a vlmpack.Objective, or a function from the (L,) "
        "losses of a micro-batch's label tokens and the batch to sums by name, 'loss_sum' among "
        "them"
    ]


def _objective_fingerprint(given: object) -> tuple[str | None, list[str]]:
    try:
        return None if given is None else fingerprint(given), []
    except ValueError as error:
        return None, [f"objective {error}"]


def _named(recipe: Recipe, extensions: Extensions, given: Objective | TokenSums | None) -> Recipe:
    changes: dict[str, object] = {}
    if extensions.objective is not None:
        name = recipe.objective.name
        if registered_name(name) is None:
            own_name = f"python:{getattr(given, '__name__', '')}"
            is_one = registered_name(own_name) is not None  # a lambda's is none
            changes["objective.name"] = own_name if is_one else "python:objective"
        changes["objective.fingerprint"] = extensions.objective_fingerprint
    elif (
        recipe.objective.fingerprint is not None and registered_name(recipe.objective.name) is None
    ):
        changes["objective.fingerprint"] = None
    own = tuple(f"python:{name}" for name in extensions.metrics)
    if new := [name for name in own if name not in recipe.evaluation.metrics]:
        changes["evaluation.metrics"] = [*recipe.evaluation.metrics, *new]
    return load_recipe(recipe, changes) if changes else recipe


def _bad_name(argument: str, name: object) -> list[str]:
    if isinstance(name, str) and registered_name(f"python:{name}") is not None:
        return []
    return [f"{argument}: {name!r} is no name; expected letters, digits, '.', '_' and '-'"]


logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a rank was given, to be compared with other ranks."""

    names: Mapping[str, tuple[str, ...]]
    objective: str | None
    hooks: frozenset[str]
    fingerprints: Mapping[str, str]
    problems: tuple[str, ...]


def agree(extensions: Extensions, ranks: Ranks, problems: Sequence[str] = ()) -> Extensions:
    """What the run works with on every rank: the main rank's fingerprints and hooks. Collective.

    Args:
        problems: of this rank's recipe with it, to be raised by all, as those of `extensions` are.

    Raises:
        RecipeError: on all ranks alike: one has problems, or was handed over something else than
            the main rank.
    """
    everywhere: list[_Report] = ranks.gather_objects(_report(extensions, problems))
    main = everywhere[0]
    wrong = [
        problem if len(of) == len(everywhere) else f"{_who(of)}: {problem}"
        for problem, of in _by_rank(report.problems for report in everywhere).items()
    ]
    if lines := [*wrong, *_said_of(_from_main(report, main) for report in everywhere)]:
        raise RecipeError(lines)
    if ranks.is_main:
        for note in _said_of(_other_prints(report, main) for report in everywhere):
            logger.warning("note: %s", note)
    data = replace(extensions.data, fingerprints=main.fingerprints)
    return replace(extensions, data=data, hooks=main.hooks)


def _report(extensions: Extensions, problems: Sequence[str]) -> _Report:
    data = extensions.data
    functions = (f"{name} (a function)" for name in sorted(map(str, data.functions)))
    return _Report(
        names={
            "sources": (*sorted(map(str, data.sources)), *functions),
            "metrics": tuple(sorted(map(str, extensions.metrics))),
            "callbacks": tuple(type(one).__name__ for one in extensions.callbacks),
        },
        objective=extensions.objective_fingerprint,
        hooks=extensions.hooks,
        fingerprints=dict(data.fingerprints),
        problems=(*extensions.problems, *problems),
    )


def _by_rank(each: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = {}
    for rank, said in enumerate(each):
        for one in dict.fromkeys(said):
            ranks_of.setdefault(one, []).append(rank)
    return ranks_of


def _said_of(each: Iterable[Sequence[str]]) -> list[str]:
    """Where ranks differ from the main rank; equal differences share a line."""
    return [f"{_who(ranks)} {said}" for said, ranks in _by_rank(each).items()]


def _from_main(report: _Report, main: _Report) -> list[str]:
    every = "; every process has to hand over the same"
    lines = [
        f"has {_listed(report.names[argument])} as {argument}, and rank 0 "
        f"{_listed(main.names[argument])}{every}"
        for argument in ("sources", "metrics")
        if report.names[argument] != main.names[argument]
    ]
    if (report.objective is None) != (main.objective is None):
        has, other = ("none", "one") if report.objective is None else ("one", "none")
        lines.append(f"has {has} as objective, and rank 0 {other}{every}")
    elif report.objective != main.objective:
        lines.append(
            f"has another objective than rank 0: its text, its `version`, what it closes over, its "
            f"defaults or its state differ ({report.objective}, {main.objective}){every}"
        )
    theirs = report.names["callbacks"]
    if theirs and theirs != main.names["callbacks"]:
        lines.append(
            f"has {_listed(theirs)} as callbacks, and rank 0 {_listed(main.names['callbacks'])}; "
            "rank 0's are called, so the others hand over the same or none"
        )
    return lines


def _other_prints(report: _Report, main: _Report) -> list[str]:
    return [
        f"has another sources[{name!r}] than rank 0. Its text, its `version`, what it closes "
        f"over, its defaults or its state differ ({report.fingerprints[name]}, {known}). The run "
        "uses rank 0's, and each rank reads its own"
        for name, known in main.fingerprints.items()
        if report.fingerprints[name] != known
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _who(ranks: Sequence[int]) -> str:
    more = f" (and {counted(len(ranks) - 1, 'other rank')})" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"
