"""That all ranks were handed over the same, told once at launch.

In: what each rank's program handed to `vlmpack.finetune`. Out: what the run works with, or, on all
ranks, what is wrong and what differs. Sources, functions, objective and metrics have to be there
everywhere, or ranks train different things, or wait for one another for ever. Callbacks are the
main rank's; which hooks these have decides on every rank where the ranks meet. The fingerprints of
sources and functions are the main rank's too, since a state may hold what is a process's own (a
path, a cache, a number of the rank); where they differ that is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vlmpack.build.extensions import Extensions
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a rank says of what it was handed over.

    Args:
        names: by the argument of `vlmpack.finetune`, of functions with that word; of callbacks
            their classes.
        objective: its fingerprint.
        hooks: of its callbacks.
        fingerprints: of sources and functions.
        problems: what is wrong with it, or what its recipe names and nobody handed over.
    """

    names: Mapping[str, tuple[str, ...]]
    objective: str | None
    hooks: frozenset[str]
    fingerprints: Mapping[str, str]
    problems: tuple[str, ...]


def agreed(extensions: Extensions, ranks: Ranks, problems: Sequence[str] = ()) -> Extensions:
    """What the run works with on every rank: the main rank's fingerprints and hooks. Collective.

    Args:
        extensions: handed over to this rank.
        ranks: who this process is.
        problems: of this rank's recipe with it, to be raised by all, as those of `extensions` are.

    Raises:
        RecipeError: on all ranks alike: one has problems, or was handed over something else than
            the main rank.
    """
    everywhere: list[_Told] = ranks.gather_objects(_told(extensions, problems))
    main = everywhere[0]
    wrong = [
        problem if len(of) == len(everywhere) else f"{_who(of)}: {problem}"
        for problem, of in _by_rank(told.problems for told in everywhere).items()
    ]
    if found := [*wrong, *_said_of(_from_main(told, main) for told in everywhere)]:
        raise RecipeError(found)
    if ranks.is_main:
        for note in _said_of(_other_prints(told, main) for told in everywhere):
            logger.warning("note: %s", note)
    data = replace(extensions.data, fingerprints=main.fingerprints)
    return replace(extensions, data=data, hooks=main.hooks)


def _told(extensions: Extensions, problems: Sequence[str]) -> _Told:
    data = extensions.data
    functions = (f"{name} (a function)" for name in sorted(map(str, data.functions)))
    return _Told(
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
    """What is said -> the ranks of which it is."""
    found: dict[str, list[int]] = {}
    for rank, said in enumerate(each):
        for one in dict.fromkeys(said):
            found.setdefault(one, []).append(rank)
    return found


def _said_of(each: Iterable[Sequence[str]]) -> list[str]:
    """Where ranks have something else than the main rank; a line for what several have alike."""
    return [f"{_who(ranks)} {said}" for said, ranks in _by_rank(each).items()]


def _from_main(told: _Told, main: _Told) -> list[str]:
    every = "; every process has to hand over the same"
    found = [
        f"has {_listed(told.names[argument])} as {argument}, and rank 0 "
        f"{_listed(main.names[argument])}{every}"
        for argument in ("sources", "metrics")
        if told.names[argument] != main.names[argument]
    ]
    if (told.objective is None) != (main.objective is None):
        has, other = ("none", "one") if told.objective is None else ("one", "none")
        found.append(f"has {has} as objective, and rank 0 {other}{every}")
    elif told.objective != main.objective:
        found.append(
            f"has another objective than rank 0: its text, its `version`, what it closes over, its "
            f"defaults or its state differ ({told.objective}, {main.objective}){every}"
        )
    theirs = told.names["callbacks"]
    if theirs and theirs != main.names["callbacks"]:
        found.append(
            f"has {_listed(theirs)} as callbacks, and rank 0 {_listed(main.names['callbacks'])}; "
            "rank 0's are called, so the others hand over the same or none"
        )
    return found


def _other_prints(told: _Told, main: _Told) -> list[str]:
    return [
        f"has another sources[{name!r}] than rank 0: its text, its `version`, what it closes over, "
        f"its defaults or its state differ ({told.fingerprints[name]}, {known}); the run goes by "
        "rank 0's, and each rank reads its own"
        for name, known in main.fingerprints.items()
        if told.fingerprints[name] != known
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _who(ranks: Sequence[int]) -> str:
    more = f" (and {counted(len(ranks) - 1, 'other rank')})" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"
