"""The turns of a record: its `system` put before them, and which of them are learnt.

    {"system": "Be brief.", "messages": [{"role": "assistant", "content": "Draft.", "loss": false},
                                         ...]}

Records of both schemas are read here alike, in shards and by `vlmpack data convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmpack.data.shards.keys import is_absent, refuse_unknown
from vlmpack.errors import schema_error

SYSTEM = "system"
"""The key beside the turns, and the role that it becomes."""

TURN_FIELDS: Mapping[str, tuple[str, str]] = {
    "messages": ("role", "content"),
    "conversations": ("from", "value"),
}
"""Schema -> the keys of a turn that hold its role and its content."""

LEARN_FLAGS = ("loss", "train", "weight")
"""Keys of a turn that say whether it is learnt."""

TURN_KEYS: Mapping[str, frozenset[str]] = {
    schema: frozenset((*names, *LEARN_FLAGS)) for schema, names in TURN_FIELDS.items()
}
"""Schema -> the keys of a turn that are read."""


def placed_turns(
    record: Mapping[str, object], schema: str, turns: Sequence[object]
) -> list[tuple[str, object]]:
    """(where, turn) of each turn, the record's `system` first.

    Args:
        record: with what stands beside the turns.
        schema: a key of TURN_FIELDS.
        turns: the record's, in order.

    Raises:
        DataError: (schema) a `system` that is no text, or beside a turn of the system.
    """
    placed = [(f"{schema}[{place}]", turn) for place, turn in enumerate(turns)]
    system = record.get(SYSTEM)
    if system is None or system == []:
        return placed
    if not isinstance(system, str):
        raise schema_error(
            f"'system' beside the turns is a {type(system).__name__}; expected a text"
        )
    role, content = TURN_FIELDS[schema]
    for where, turn in placed:
        if isinstance(turn, dict) and turn.get(role) == SYSTEM:
            raise schema_error(
                f"the record has 'system' beside the turns, and {where} is the system's too; "
                "expected one of them"
            )
    return [("'system'", {role: SYSTEM, content: system}), *placed]


def refuse_foreign(turn: Mapping[str, object], schema: str, where: str) -> None:
    """Raise DataError (schema) where a turn has a key that is not read, or no role.

    This goes before its role is looked at: a misspelt `role` is a key that is not read.

    Args:
        turn: with its keys.
        schema: a key of TURN_FIELDS.
        where: its place, for messages.
    """
    role = TURN_FIELDS[schema][0]
    if is_absent(turn.get(role)):
        for other, names in TURN_FIELDS.items():
            if other != schema and not any(is_absent(turn.get(name)) for name in names):
                raise schema_error(
                    f"{where} has the keys {names[0]!r} and {names[1]!r}: these are turns of "
                    f"{other!r}; rename the record's key {schema!r}"
                )
    refuse_unknown(turn, TURN_KEYS[schema], where)
    if role not in turn:
        found = ", ".join(repr(name[:60]) for name in list(turn)[:8]) or "nothing"
        raise schema_error(f"{where} has no key {role!r}; found {found}")


def is_learnt(turn: Mapping[str, object], role: str, where: str) -> bool:
    """Whether a turn's flags let it be learnt; without one it is.

    Args:
        turn: with its keys.
        role: `system`, `user` or `assistant`.
        where: its place, for messages.

    Raises:
        DataError: (schema) a flag that is neither yes nor no, two that disagree, or one that asks
            for what the assistant did not say.
    """
    if len(turn) <= 2:  # its role and its content
        return True
    said = {name: turn[name] for name in LEARN_FLAGS if turn.get(name) not in (None, [])}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise schema_error(
                f"{where}.{name} is {value!r}; expected true or false, 1 or 0: a turn is learnt "
                "or not, it has no weight in between"
            )
    if len(set(map(bool, said.values()))) > 1:
        flags = ", ".join(f"{name} {value!r}" for name, value in said.items())
        raise schema_error(f"{where} has flags that disagree: {flags}; expected one of them")
    if role != "assistant" and any(said.values()):
        raise schema_error(
            f"{where}.{next(iter(said))} asks that the {role}'s turn be learnt; only the "
            "assistant's are: remove the flag"
        )
    return all(said.values())
