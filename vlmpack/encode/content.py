"""How a chat template takes the content of a turn: as a string, or as a list of parts.

    {"role": "assistant", "content": "7"}
    {"role": "assistant", "content": [{"type": "text", "text": "7"}]}

Templates of vision-language models get parts, those of language models strings. But some take only
one of the two, for one role or for all: `message['content'] + '<|im_end|>'` fails on a list, and
`{{ message['content'] }}` writes the list itself out. Which form a role's turns have is asked of
the template, once, with a word in each form.

What a turn has beside its content (calls, thoughts) goes to the template as it is. A turn that
calls tools and says nothing has no content at all, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from vlmpack.encode.changes import CALLS
from vlmpack.encode.sample import ImagePart, Message, Role, TextPart, said
from vlmpack.errors import DataError, schema_error

Form = Literal["parts", "string"]

Apply = Callable[[list[dict[str, Any]]], str]
"""Turns in transformers' spelling -> the template's text."""

_WORD = "vlmpackword"
_CALL = {"type": "function", "id": "vlmpack00", "function": {"name": "f", "arguments": {"a": 1}}}
_ASKED_WITH: Mapping[Role, tuple[Role, ...]] = {
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "system": ("system", "user"),
    "tool": ("user", "assistant", "tool"),
}
"""Role -> a conversation that has one turn of it; those of a user are asked first."""


def find_forms(apply: Apply, preferred: Form) -> dict[Role, Form]:
    """The form of each role's turns: the preferred one, unless the template takes the other alone.

    Args:
        apply: the template.
        preferred: for turns that it takes in both, or in neither.
    """
    other: Form = "string" if preferred == "parts" else "parts"
    forms: dict[Role, Form] = {}
    for role in _ASKED_WITH:
        forms[role] = preferred
        if not _takes(apply, role, forms) and _takes(apply, role, forms | {role: other}):
            forms[role] = other
    return forms


def _takes(apply: Apply, role: Role, forms: Mapping[Role, Form]) -> bool:
    """Whether the template writes the word of a turn, and nothing of the list that it stands in."""
    turns = [said(each, _WORD if each == role else "x") for each in _ASKED_WITH[role]]
    if role == "tool":
        turns[1] = Message("assistant", (), fields={CALLS: [_CALL]})
        turns[2] = replace(turns[2], fields={"name": "f", "tool_call_id": _CALL["id"]})
    try:
        text = apply(turn_dicts(turns, forms))
    except DataError:
        return False
    return _WORD in text and "'type'" not in text and '"type"' not in text


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
    has_images = any(isinstance(part, ImagePart) for part in message.parts)
    # A question with images is a list in every template that writes images at all.
    if form == "string" and not (has_images and message.role == "user"):
        if has_images:
            raise schema_error(
                f"the {message.role}'s turn has an image, but the chat template takes it as a "
                f"string alone; put the image into a user's turn, or use a template that takes a "
                f"list of parts",
            )
        return message.text
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in message.parts or (TextPart(""),)
    ]
