"""Where images stand that a record names, and whose place nothing in its turns says.

TRL and ms-swift put them, in their order, before the first text of the user; so it is done here.
LLaMA-Factory and LLaVA refuse such records, and theirs (`conversations`) are refused here as well.
Some places marked and others not is a mistake to all of them but ms-swift, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vlmpack.data.shards.keys import PAIR_KEYS, is_absent
from vlmpack.data.shards.turns import IMAGE_MARKER, named_images
from vlmpack.errors import schema_error
from vlmpack.words import counted


def with_images_first(record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with the images that stand beside its `messages` shown in them, and whether that
    took a change: none where a turn shows an image or marks a place.

    Raises:
        DataError: (schema) the prompt of a pair has no text of the user that they could go before.
    """
    turns = record.get("messages")
    if not isinstance(turns, list) or not (count := len(named_images(record))):
        return record, False
    if any(map(_shows, _contents(turns))):
        return record, False
    pair = [record.get(name) for name in PAIR_KEYS]
    if any(_shows(content) for one in pair for content in _contents(one)):
        return record, False
    asked = [n for n, t in enumerate(turns) if isinstance(t, dict) and t.get("role") == "user"]
    is_text = all(isinstance(content, str | None) for content in _contents(turns))
    if not is_text or not asked or not isinstance(turns[asked[0]].get("content"), str):
        if all(map(is_absent, pair)):
            return record, False  # the reader of turns says what is missing
        raise schema_error(
            f"the record names {counted(count, 'image')}, and no turn of its prompt shows one; "
            f"expected an image part ({{'type': 'image'}}) or {IMAGE_MARKER} at the place of each, "
            "or turns that are texts alone: images are put before the first of the user's then"
        )
    first = turns[asked[0]]
    content = [{"type": "image"}] * count + [{"type": "text", "text": first["content"]}]
    changed = [*turns[: asked[0]], {**first, "content": content}, *turns[asked[0] + 1 :]]
    return {**record, "messages": changed}, True


def _contents(turns: object) -> list[object]:
    """What turns say: those of a list, of one turn, or a text that stands for one."""
    every: Iterable[object] = turns if isinstance(turns, list) else [turns]
    return [turn.get("content") if isinstance(turn, dict) else turn for turn in every]


def _shows(content: object) -> bool:
    """Whether a content has an image, or marks the place of one."""
    if isinstance(content, str):
        return IMAGE_MARKER in content
    parts = content if isinstance(content, list) else ()
    return any(
        part.get("type") in ("image", "image_url") or _shows(part.get("text"))
        for part in parts
        if isinstance(part, dict)
    )
