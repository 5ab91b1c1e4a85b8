"""Variables of the chat template for all conversations alike: `data.chat_template_kwargs`.

A record's own go before them, name by name. An exported folder notes them, as it notes the date.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vlmpack.encode.expressed import unread_variable
from vlmpack.encode.sample import strings
from vlmpack.errors import ModelError
from vlmpack.file_format import EXPORT_NOTE
from vlmpack.whole_file import read_json

NOTE = "vlmpack-chat-template-kwargs.json"
"""In an exported folder: the variables that its conversations were trained with."""

TAKEN = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("sanitize_control_tokens", "documents"),
    }
)
"""Arguments of `apply_chat_template` that are no variables of the template's."""


def is_variable(name: str) -> bool:
    """Whether a template could have a variable of that name."""
    return name not in TAKEN and name.isidentifier()


def refuse_variables(
    variables: Mapping[str, Any], *, read: Collection[str], special: Collection[str], where: str
) -> None:
    """Raise ModelError where the template of a model folder cannot take variables.

    Args:
        variables: given for all conversations.
        read: names that the template reads.
        special: tokens that no text may spell, the image marker among them.
        where: the model folder, for the message.
    """
    for name, value in variables.items():
        if not is_variable(name):
            raise ModelError(
                f"data.chat_template_kwargs: {name[:60]!r} is no variable of a template; expected "
                "such as enable_thinking or reasoning_effort"
            )
        if unread := unread_variable(name, read):
            raise ModelError(f"data.chat_template_kwargs: {unread}; model.path: {where}")
        for token in special:
            if token and any(token in text for text in strings(value)):
                raise ModelError(
                    f"data.chat_template_kwargs: {name} spells the special token {token!r}, which "
                    "the tokenizer would read as structure"
                )


def write_variables(folder: Path, variables: Mapping[str, Any]) -> None:
    """Say in an exported folder which variables its model was trained with; `vlmpack generate`
    takes them.

    Args:
        folder: the export's.
        variables: without any nothing is written.
    """
    if variables:
        note = {
            "chat_template_kwargs": dict(variables),
            "meaning": "Variables that the chat template got in all conversations that this model "
            "was finetuned on, but where a record had its own. Whoever asks it gives them too.",
        }
        (folder / NOTE).write_text(
            json.dumps(EXPORT_NOTE.mark(note), indent=2) + "\n", encoding="utf-8"
        )


def given_or_noted(given: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """The variables that are given; for None those of an exported folder's note, where there is one
    that can be read."""
    if given is not None:
        return dict(given)
    try:
        note: Any = read_json(folder / NOTE)
        EXPORT_NOTE.take(note, folder / NOTE, ModelError)
        return dict(note["chat_template_kwargs"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
