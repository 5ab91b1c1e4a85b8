"""How a chat template takes the content of a turn: as a string, or as a list of parts.

    {"role": "assistant", "content": "7"}
    {"role": "assistant", "content": [{"type": "text", "text": "7"}]}

Templates of vision-language models get parts, those of language models strings. But some take only
one of the two, for one role or for all: `message['content'] + '<|im_end|>'` fails on a list, and
`{{ message['content'] }}` writes the list itself out. Which form a role's turns have is asked of
the template, once, with words in each form. One that alters the words takes them all the same, as
`apply_chat_template` writes them.

What a turn has beside its content (calls, thoughts) goes to the template as it is, but for the
arguments of calls where the template takes their JSON as a text alone: DeepSeek's adds it to a text
and fails on an object, and `{{ call.arguments }}` would write the object as Python does, with
single quotes and None. A turn that calls tools and says nothing has no content at all, as in
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from vlmpack.encode.changes import CALLS
from vlmpack.encode.sample import Message, Role, Shown, TextPart, VideoPart, said
from vlmpack.errors import DataError, schema_error

Form = Literal["parts", "string"]

Apply = Callable[[list[dict[str, Any]]], str]
"""Turns in transformers' spelling -> the template's text."""

_WORD = "vlmpackword"
_WORDS = f"The quick brown Fox jumps over {'the Dog, ' * 200}1 time."
_ARGUMENTS = {_WORD: _WORD}
_CALL = {"type": "function", "id": "vlmpack00", "function": {"name": "f", "arguments": _ARGUMENTS}}
_CALLED = Message("assistant", (), fields={CALLS: [_CALL]})
_ASKED_WITH: Mapping[Role, tuple[Role, ...]] = {
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "system": ("system", "user"),
    "tool": ("user", "assistant", "tool"),
}
"""Role -> a conversation that has one turn of it; those of a user are asked first."""


def takes_text_arguments(apply: Apply) -> bool:
    """Whether a template takes the arguments of a call as JSON in a text, and no object.

    Args:
        apply: the template.
    """
    whole = json.dumps(_ARGUMENTS)
    for form in ("parts", "string"):
        turns = turn_dicts([said("user", "x"), _CALLED], dict.fromkeys(_ASKED_WITH, form))
        written = _text_of(apply, turns)
        if _WORD in written and str(_ARGUMENTS) not in written:
            return False
        if whole in _text_of(apply, with_text_arguments(turns)):
            return True
    return False


def with_text_arguments(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns in transformers' spelling, the arguments of their calls as JSON in a text."""
    return [
        {**turn, CALLS: [_with_text(call) for call in turn[CALLS]]} if CALLS in turn else {**turn}
        for turn in turns
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _text_of(apply: Apply, turns: list[dict[str, Any]]) -> str:
    """The template's text; empty where it refuses the turns."""
    try:
        return apply(turns)
    except DataError:
        return ""


def find_forms(apply: Apply, preferred: Form) -> dict[Role, Form]:
    """The form of each role's turns: the preferred one, unless the template takes the other alone.

    Args:
        apply: the template.
        preferred: for turns that it takes in both, or in neither.
    """
    other = _other(preferred)
    forms: dict[Role, Form] = {}
    for role in _ASKED_WITH:
        forms[role] = preferred
        if not _takes(apply, role, forms) and _takes(apply, role, forms | {role: other}):
            forms[role] = other
    return forms


def differing_forms(apply: Apply, preferred: Form) -> list[Role]:
    """The roles whose turns a template takes in both forms and writes in two ways.

    Args:
        apply: the template.
        preferred: the form that the others' turns have.
    """
    found = []
    for role in _ASKED_WITH:
        forms = dict.fromkeys(_ASKED_WITH, preferred)
        both = (forms, forms | {role: _other(preferred)})
        if all(_takes(apply, role, each) for each in both):
            one, two = (_text_of(apply, turn_dicts(_asked(role, _WORDS), each)) for each in both)
            found += [role] if one != two else []
    return found


def _other(form: Form) -> Form:
    return "string" if form == "parts" else "parts"


def _takes(apply: Apply, role: Role, forms: Mapping[Role, Form]) -> bool:
    """Whether what the template writes follows from the words of a turn, and not from the list that
    they stand in."""
    one, two = (
        _text_of(apply, turn_dicts(_asked(role, word), forms)) for word in (_WORD, _WORD[::-1])
    )
    return one != two and not writes_list(one)


def writes_list(text: str) -> bool:
    """Whether a template wrote the list of a turn's parts out, as Python or JSON."""
    return "'type'" in text.lower() or '"type"' in text.lower()


def _asked(role: Role, word: str) -> list[Message]:
    """A conversation with a word in a turn of a role."""
    turns = [said(each, word if each == role else "x") for each in _ASKED_WITH[role]]
    if role == "tool":
        turns[1] = _CALLED
        turns[2] = replace(turns[2], fields={"name": "f", "tool_call_id": _CALL["id"]})
    return turns


def turn_dicts(messages: Sequence[Message], forms: Mapping[Role, Form]) -> list[dict[str, Any]]:
    """Turns in transformers' spelling.

    Raises:
        DataError: (schema) an image in a turn that must be a string.
    """
    return [_turn_dict(message, forms[message.role]) for message in messages]


def _turn_dict(message: Message, form: Form) -> dict[str, Any]:
    if not message.parts and CALLS in message.fields:
        return {"role": message.role, **message.fields}
    return {"role": message.role, "content": _content(message, form), **message.fields}


def _content(message: Message, form: Form) -> str | list[dict[str, str]]:
    has_images = bool(message.shown)
    # A question with images is a list in every template that writes images at all.
    if form == "string" and not (has_images and message.role == "user"):
        if has_images:
            raise schema_error(
                f"the {message.role}'s turn has an image, but the chat template takes it as a "
                f"string alone; put the image into a user's turn, or use a template that takes a "
                f"list of parts",
            )
        return message.text
    return [_part(part) for part in message.parts or (TextPart(""),)]


def _part(part: TextPart | Shown) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "video" if isinstance(part, VideoPart) else "image"}
