"""The image marker's spelling inside a user's text: it stays text.

    "What does <image> mean?"          a user's words; also the spelling of the image token
    "What does ####### mean?"          hidden while the chat template is applied
    "~~~~~~~ What does <image> mean?"  the template's markers renamed, the user's put back
    [IMG] What does < image > mean ?   by a copy of the tokenizer that calls the token ~~~~~~~

Every spelling is as long as the marker, so places in the text hold throughout. The tokenizer itself
is never changed, so threads may share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmpack.encode.sample import Beside, Message, TextPart, strings
from vlmpack.errors import schema_error

HIDDEN, _RENAMED = "\U000f1e00", "\U000f1e01"
"""Private-use characters: no text that is meant to be read has them."""
_ESCAPED = ("\\u000f1e00", "\\udb87\\ude00")
"""The first as Python and as JSON write it in ASCII, in small letters."""


def hide_literals(messages: tuple[Message, ...], marker: str) -> tuple[tuple[Message, ...], bool]:
    """The messages with the marker's spelling in their texts hidden, and whether there was any.

    Raises:
        DataError: (schema) a text that spells the marker and has one of our characters too.
    """
    texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
    texts += [text for message in messages for text in strings(message.fields)]
    if not marker or not any(marker in text for text in texts):
        return messages, False
    _refuse_marks(texts, marker)
    hidden = HIDDEN * len(marker)
    return tuple(
        replace(
            message,
            parts=tuple(
                TextPart(part.text.replace(marker, hidden)) if isinstance(part, TextPart) else part
                for part in message.parts
            ),
            fields=_hidden(message.fields, marker),
        )
        for message in messages
    ), True


def hide_beside(beside: Beside, marker: str) -> tuple[Beside, bool]:
    """What stands beside the turns, as `hide_literals` has it.

    Raises:
        DataError: (schema) as there.
    """
    texts = [*strings(beside.tools), *strings(beside.variables)]
    if not marker or not any(marker in text for text in texts):
        return beside, False
    _refuse_marks(texts, marker)
    return Beside(_hidden(beside.tools, marker), _hidden(beside.variables, marker)), True


def refuse_escaped(text: str) -> None:
    """Raise DataError (schema) where a template wrote a hidden marker as an escape, which nobody
    could tell from other text again: as Python writes a list out, or JSON in ASCII."""
    if any(escape in text.lower() for escape in _ESCAPED):
        raise schema_error(
            "the text of a tool, a call or a thought spells the image marker, and the chat "
            "template writes it escaped; remove the marker from there"
        )


def _refuse_marks(texts: Sequence[str], marker: str) -> None:
    if any(mark in text for text in texts for mark in (HIDDEN, _RENAMED)):
        raise schema_error(
            f"the text spells {marker!r} and holds a character (U+F1E00 or U+F1E01) that is used "
            f"to tell it from the places of images; remove one of them",
        )


def _hidden(value: Any, marker: str) -> Any:
    """A JSON value with the marker hidden in all of its strings."""
    if isinstance(value, str):
        return value.replace(marker, HIDDEN * len(marker))
    if isinstance(value, Mapping):
        return {_hidden(key, marker): _hidden(item, marker) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hidden(item, marker) for item in value)
    return value


def put_back(text: str, marker: str) -> str:
    """A rendered text with the user's markers spelt out and the template's renamed."""
    count = len(marker)
    return text.replace(marker, _RENAMED * count).replace(HIDDEN * count, marker)


def renamed_tokenizer(tokenizer: Any, marker: str) -> Any:
    """A copy of a fast tokenizer's backend that knows the marker's token under another name.

    Args:
        tokenizer: transformers' fast tokenizer.
        marker: the content of one of its added tokens, or plain text.
    """
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    name = _RENAMED * len(marker)
    for token in content["added_tokens"]:
        if token["content"] == marker:
            token["content"] = name
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        content["model"]["vocab"] = [
            [name if token == marker else token, score] for token, score in vocabulary
        ]
    elif marker in vocabulary:
        vocabulary[name] = vocabulary.pop(marker)
    renamed = Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    assert renamed.token_to_id(name) == backend.token_to_id(marker)
    return renamed
