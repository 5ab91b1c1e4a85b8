"""Samples of shards in other layouts than turns: any `.json`, or a `.txt` beside images.

    0001.jpg  0001.txt                    a caption
    0001.jpg  0001.json {"question": ..., "answer": ...}

The members become a record whose images are the image members' names; it is read by the source's
form as any other record is, and written as the `.json` that the reader of shards takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.data.columns.layouts import CHAT, fitting, has_value
from vlmpack.data.shards.json_text import parse_json
from vlmpack.data.shards.keys import names_no_image, refuse_many_keys
from vlmpack.data.shards.naming import is_image
from vlmpack.data.shards.schemas import in_order
from vlmpack.errors import schema_error
from vlmpack.words import kind_of

TEXT_FIELD = "txt"
"""The member that is a caption, where no `.json` says more."""

_AS_IT_IS = (CHAT, "messages", "llava", "sharegpt")


@dataclass(frozen=True, slots=True)
class MemberDocument:
    """What stands for a sample's `.json`.

    Args:
        data: the JSON, with `messages`.
        unread: keys of the record that nobody reads; they are not in `data`.
        placed: whether its images had no place.
    """

    data: bytes
    unread: tuple[str, ...] = ()
    placed: bool = False


def member_record(
    document: bytes | None, text: bytes | None, fields: Sequence[str]
) -> dict[str, Any]:
    """The record that a sample's members are.

    Args:
        document: its `.json` member; None where it has none.
        text: its `.txt` member; it is looked at where the `.json` is of no layout, or not there.
        fields: all its members, in file order.

    Raises:
        DataError: (schema) neither a `.json` nor a `.txt`, or one that cannot be read.
    """
    if document is None and text is None:
        shown = ", ".join(repr(f".{field}") for field in fields) or "nothing"
        raise schema_error(f"the sample has no '.json' and no '.txt' member; found {shown}")
    record = {} if document is None else _parsed(document)
    images = in_order([field for field in fields if is_image(field)])
    if images and all(names_no_image(record.get(name)) for name in ("image", "images")):
        record = {**record, "images": images}
    if text is None or fitting({key for key, value in record.items() if has_value(value)}):
        return record
    try:
        return {**record, "text": text.decode("utf-8-sig").strip()}
    except UnicodeDecodeError as error:
        raise schema_error(f"the '.txt' member is no UTF-8: {error}") from None


def member_document(
    document: bytes | None,
    text: bytes | None,
    fields: Sequence[str],
    form: RecordForm,
    function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> MemberDocument:
    """The `.json` as the reader of shards takes it, whatever the sample's layout.

    Args:
        document: its `.json` member; None where it has none.
        text: its `.txt` member.
        fields: all its members, in file order.
        form: of its source.
        function: makes the record that the form reads of the one that is there.

    Raises:
        DataError: (schema) a record that the form cannot read, or images that are no members.
    """
    is_settled = bool(form.columns or form.ignored) or form.is_chosen or function is not None
    if document is not None and form.layout in _AS_IT_IS and not is_settled:
        return MemberDocument(document)
    record: Mapping[str, Any] = member_record(document, text, fields)
    if function is not None:
        record = function(dict(record))
    turns = read_turns(record, form)
    names = [source for source in turns.images if isinstance(source, str)]
    if len(names) < len(turns.images):
        raise schema_error(
            "the record holds an image in its own text; expected the images of a shard as members"
        )
    written = turns.document(names)
    for key in ("id", "task"):
        if record.get(key) is not None:
            written[key] = record[key]
    data = json.dumps(written, ensure_ascii=True, separators=(",", ":")).encode()
    return MemberDocument(data, turns.unknown_keys, turns.placed)


def _parsed(document: bytes) -> dict[str, Any]:
    try:
        value = parse_json(document.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise schema_error(f"the '.json' member cannot be parsed: {error}") from None
    if not isinstance(value, dict):
        raise schema_error(f"the '.json' member is {kind_of(value)}; expected an object")
    refuse_many_keys(value)
    return value
