"""What a layout finds under a key of a record: a text, or rounds that went before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.data.shards.json_text import number_text, parse_json
from vlmpack.errors import schema_error
from vlmpack.words import kind_of


def has_value(value: object) -> bool:
    """Whether a cell holds anything: a table has a null, or an empty text, where nothing is."""
    return value is not None and value != ""


def text_of(record: Mapping[str, Any], name: str, layout: str) -> str:
    """The text under a key.

    Args:
        record: with its keys.
        name: the key.
        layout: for messages.

    Raises:
        DataError: (schema) nothing is there, or no text.
    """
    value = record.get(name)
    if not has_value(value):
        found = ", ".join(repr(key[:60]) for key in list(record)[:8]) or "nothing"
        missing = "an empty" if value == "" else "no"
        raise schema_error(f"the record has {missing} {name!r}, as {layout} has it; found {found}")
    if not isinstance(value, str):
        raise schema_error(f"{name!r} is {kind_of(value)}; expected a text, as {layout} has it")
    return value


def answer_of(record: Mapping[str, Any], name: str, layout: str) -> str:
    """As `text_of`, of an answer, which may be a number or a boolean of JSON."""
    return text_of({**record, name: number_text(record.get(name))}, name, layout)


def asked(text: object) -> dict[str, Any]:
    """A turn of the user."""
    return {"role": "user", "content": text}


def answered(text: object) -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text}


def past_turns(history: object) -> list[dict[str, Any]]:
    """The turns of the rounds before, [[question, answer], ...], or JSON of that: all of them are
    learnt, as ms-swift and LLaMA-Factory have it.

    Raises:
        DataError: (schema) no such list.
    """
    if not has_value(history):
        return []
    if isinstance(history, str):
        try:
            history = parse_json(history)
        except (ValueError, RecursionError) as error:
            raise schema_error(f"'history' is text that is no JSON: {error}") from None
    expected = "expected [[question, answer], ...]"
    if not isinstance(history, list):
        raise schema_error(f"'history' is {kind_of(history)}; {expected}")
    turns = []
    for place, pair in enumerate(history):
        if isinstance(pair, list) and len(pair) == 2:
            pair = [pair[0], number_text(pair[1])]
        if not isinstance(pair, list) or [type(item) for item in pair] != [str, str]:
            raise schema_error(f"history[{place}] is no pair of texts; {expected}")
        turns += [asked(pair[0]), answered(pair[1])]
    return turns
