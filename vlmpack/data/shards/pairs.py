"""The two answers of a pair, beside the turns of its prompt.

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
     "chosen": "A cat.", "rejected": [{"role": "assistant", "content": "A dog."}]}

An answer is a text, a turn of the assistant, or a list of turns that begins and ends with the
assistant's (results of tools may stand between). Images belong to the prompt, which both answers
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlmpack.data.shards.keys import PAIR_KEYS, is_absent, number_text
from vlmpack.encode.sample import Message
from vlmpack.errors import schema_error
from vlmpack.words import counted, kind_of

Turns = tuple[Message, ...]


def answers_of(
    record: Mapping[str, Any],
    read: Callable[[object, str], Message],
    said: Callable[[str], Mapping[str, str]],
) -> tuple[Turns, ...]:
    """The chosen answer and the rejected one; empty where the record is no pair.

    Args:
        record: with its keys.
        read: a turn of the record's schema, and its place for messages -> what it says.
        said: a text as a turn of the assistant in that schema.

    Raises:
        DataError: (schema) one answer without the other, or one that is no answer.
    """
    given = [name for name in PAIR_KEYS if not is_absent(record.get(name))]
    if not given:
        return ()
    if len(given) == 1:
        [missing] = {*PAIR_KEYS} - {*given}
        found = "no" if record.get(missing) is None else "an empty"
        raise schema_error(
            f"the record has {given[0]!r}, but {found} {missing!r} answer; expected both, or one "
            "answer as the last of the turns"
        )
    return tuple(_answer(name, record[name], read, said) for name in PAIR_KEYS)


def _answer(
    name: str,
    value: object,
    read: Callable[[object, str], Message],
    said: Callable[[str], Mapping[str, str]],
) -> Turns:
    turns: list[Any] = value if isinstance(value, list) else [number_text(value)]
    found = []
    for place, turn in enumerate(turns):
        where = f"{name}[{place}]" if isinstance(value, list) else name
        if not isinstance(turn, str | dict):
            others = "" if isinstance(value, list) else ", or a list of turns"
            raise schema_error(
                f"{where} is {kind_of(turn)}; expected a text or a turn of the assistant{others}"
            )
        message = read(said(turn) if isinstance(turn, str) else turn, where)
        if message.shown:
            raise schema_error(
                f"{where} shows an image inside an answer; expected the images of a pair in its "
                "prompt, which both answers share"
            )
        found.append(message)
    roles = [message.role for message in found]
    odd = sorted({*roles} - {"assistant", "tool"})
    if odd or roles[0] != "assistant" or roles[-1] != "assistant":
        raise schema_error(
            f"{name!r} is {counted(len(roles), 'turn')} of {', '.join(roles)}; expected an answer "
            "alone, that begins and ends with the assistant's turn: what was asked stands in the "
            "turns before"
        )
    if not any(message.learn for message in found if message.role == "assistant"):
        raise schema_error(f"the data excludes all of {name!r} from the loss; nothing is compared")
    return tuple(found)
