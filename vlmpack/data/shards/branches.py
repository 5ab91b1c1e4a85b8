"""The branches of a record that holds several samples, behind the turns that they have in common.

    {"messages": [{"role": "user", "content": [{"type": "image"}]}],
     "branches": [[{"role": "user", "content": "What is it?"},
                   {"role": "assistant", "content": "A cat."}],
                  [{"role": "user", "content": "Where?"},
                   {"role": "assistant", "content": "On a mat."}]]}

Each branch is a sample of its own, `key#0`, `key#1`, ...: the common turns, which are not learnt,
and then its own. A branch that begins with the user's turn where the common turns end with one
goes on with that turn: above, image and question stand in one turn. A branch that is a text is an
answer alone. Images belong to the common turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vlmpack.data.shards.keys import BRANCHES, PAIR_KEYS, is_absent, number_text
from vlmpack.encode.sample import Message, Shown, TextPart
from vlmpack.errors import schema_error
from vlmpack.limits import MAX_BRANCHES, MAX_TURNS
from vlmpack.words import kind_of

Turns = tuple[Message, ...]

_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "system": ("user",),
    "user": ("user", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Whose the last common turn is -> whose the first turn of a branch may be."""


def branch_key(key: str, branch: int | None) -> str:
    """The key of a sample: its record's, with the number of its branch where there are some."""
    return key if branch is None else f"{key}#{branch}"


def record_key(key: str, branch: int | None) -> str:
    """The key of a sample's record."""
    return key if branch is None else key.removesuffix(f"#{branch}")


def branches_of(
    record: Mapping[str, Any],
    common: Turns,
    read: Callable[[object, str], Message],
    said: Callable[[str], Mapping[str, str]],
) -> tuple[Turns, ...]:
    """The turns of each branch; empty where the record is one sample.

    Args:
        record: with its keys.
        common: the turns that the branches follow.
        read: a turn of the record's schema, and its place for messages -> what it says.
        said: a text as a turn of the assistant in that schema.

    Raises:
        DataError: (schema) no list of branches; two answers of a pair beside them; a branch that
            is empty, shows an image, does not follow the common turns, or teaches nothing.
    """
    value = record.get(BRANCHES)
    if value is None or value == []:
        return ()
    if beside := [name for name in PAIR_KEYS if not is_absent(record.get(name))]:
        raise schema_error(
            f"the record has {BRANCHES!r} and {beside[0]!r}; expected one of them: a pair is a "
            "record of its own, and samples of one image stand together by data.group_by: image"
        )
    if not isinstance(value, list):
        raise schema_error(f"{BRANCHES!r} is {kind_of(value)}; expected a list, an item a branch")
    if len(value) > MAX_BRANCHES:
        raise schema_error(f"{len(value):,} branches; at most {MAX_BRANCHES:,} are read")
    return tuple(_branch(turns, n, common, read, said) for n, turns in enumerate(value))


def joined(common: Turns, branch: Turns) -> tuple[Turns, int]:
    """The turns of a branch's sample, and how many of them are common turns as they are.

    Args:
        common: the turns that all branches follow; none of them is learnt.
        branch: the branch's own.
    """
    begin = tuple(replace(message, learn=False) for message in common)
    if begin[-1].role != "user" or branch[0].role != "user":
        return (*begin, *branch), len(begin)
    turn = replace(begin[-1], parts=_as_one((*begin[-1].parts, *branch[0].parts)))
    return (*begin[:-1], turn, *branch[1:]), len(begin) - 1


def _as_one(parts: tuple[TextPart | Shown, ...]) -> tuple[TextPart | Shown, ...]:
    """Parts with neighbouring texts as one, as they would stand in one turn."""
    found: list[TextPart | Shown] = []
    for part in parts:
        if found and isinstance(part, TextPart) and isinstance(last := found[-1], TextPart):
            found[-1] = TextPart(last.text + part.text)
        else:
            found.append(part)
    return tuple(found)


def _branch(
    value: object,
    number: int,
    common: Turns,
    read: Callable[[object, str], Message],
    said: Callable[[str], Mapping[str, str]],
) -> Turns:
    where = f"{BRANCHES}[{number}]"
    value = number_text(value)
    turns = [said(value)] if isinstance(value, str) and value else value
    if not isinstance(turns, list) or not turns:
        found = "empty" if not turns else kind_of(turns)
        raise schema_error(f"{where} is {found}; expected a list of turns, or an answer's text")
    if len(turns) > MAX_TURNS:
        raise schema_error(f"{where} has {len(turns):,} turns; at most {MAX_TURNS:,} are read")
    messages = []
    for place, turn in enumerate(turns):
        message = read(turn, f"{where}[{place}]")
        if message.shown:
            raise schema_error(
                f"{where}[{place}] shows an image inside a branch; expected the images of such a "
                "record in the turns before, which all branches share"
            )
        messages.append(message)
    before, first = common[-1].role, messages[0].role
    if first not in _FOLLOWS[before] or any(m.role == "system" for m in messages):
        expected = " or ".join(f"the {role}'s" for role in _FOLLOWS[before])
        raise schema_error(
            f"{where} has turns of {', '.join(m.role for m in messages)}, and the turns before end "
            f"with the {before}'s; expected it to begin with {expected}, and no turn of the "
            "system's"
        )
    if not any(message.role == "assistant" and message.learn for message in messages):
        raise schema_error(
            f"{where} has no turn of the assistant that is learnt; expected an answer in each: "
            "the turns before are common to all, and are not learnt"
        )
    return tuple(messages)
