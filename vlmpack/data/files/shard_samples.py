"""Samples of shards in other layouts than turns: any `.json`, or a `.txt` next to images.

    0001.jpg  0001.txt                    a caption
    0001.jpg  0001.json {"question": ..., "answer": ...}

The members become a record whose images are the image members' names. The source's form reads it
like any other record. It is written as the `.json` that the reader of shards takes. Samples of a
shard without a form are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmpack.data.columns.form import RecordForm, read_turns
from vlmpack.data.columns.layouts import CHAT, fitting, has_value
from vlmpack.data.files.form import FileForm
from vlmpack.data.files.registered import function_of
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, is_image, names_no_image
from vlmpack.data.shards.samples import (
    RawSample,
    group_members,
    in_order,
    parse_document,
    parse_span,
    refuse_changed,
)
from vlmpack.data.shards.tar import read_members
from vlmpack.errors import DataError, or_error, schema_error
from vlmpack.storage.fetch import Fetcher, ShardStamp

SPANS_AT_ONCE = 16
"""Samples whose bytes are held together when their texts alone are wanted."""
TEXT_FIELD = "txt"
"""The member that is a caption, where no `.json` says more."""
DOCUMENTS = (JSON_FIELD, TEXT_FIELD)
_AS_IT_IS = (CHAT, "messages", "llava", "sharegpt")
_TURNS = frozenset({"messages", "conversations"})


def shard_samples(fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps) -> Iterator[RawSample]:
    """All samples of a shard, in its order, as its form has them.

    Raises:
        DataError: class `integrity` for a damaged shard, `transport` for one out of reach.
    """
    for raw in read_samples(fetcher, stamp, caps, _documents_of(stamp)):
        yield as_turns(raw, stamp, fetcher)


def verified_sample(
    fetcher: Fetcher, span: bytes, stamp: ShardStamp, offset: int, crc32: int, caps: SampleCaps
) -> RawSample:
    """One sample of a byte range of the index, read by its shard's form.

    Raises:
        DataError: class `integrity`: other bytes, or not one sample.
    """
    refuse_changed(span, crc32)
    raw = parse_span(
        span,
        shard=stamp.path,
        offset=offset,
        caps=caps,
        verified=crc32,
        documents=_documents_of(stamp),
    )
    return as_turns(raw, stamp, fetcher)


def shard_documents(
    fetcher: Fetcher, stamp: ShardStamp, places: Sequence[tuple[int, int, int]], caps: SampleCaps
) -> list[bytes | DataError]:
    """The JSON of samples of a shard that has a form.

    Args:
        places: offset, length and checksum of each, as the index has them.

    Raises:
        DataError: class `transport` or `integrity`, where the shard cannot be read.
    """

    def document(place: tuple[int, int, int], span: bytes) -> bytes:
        raw = verified_sample(fetcher, span, stamp, place[0], place[2], caps)
        raw.check()
        return raw.payload(JSON_FIELD)

    documents: dict[tuple[int, int, int], bytes | DataError] = {}
    ranges = list(dict.fromkeys(places))
    for start in range(0, len(ranges), SPANS_AT_ONCE):
        some = ranges[start : start + SPANS_AT_ONCE]
        spans = fetcher.read_ranges(stamp, [(offset, length) for offset, length, _ in some])
        for place, span in zip(some, spans, strict=True):
            documents[place] = or_error(document, place, span)
    return [documents[place] for place in places]


def as_turns(raw: RawSample, stamp: ShardStamp, fetcher: Fetcher) -> RawSample:
    """A sample with the `.json` that the reader of shards takes, unchanged for a shard without a
    form."""
    if not stamp.form or raw.fault is not None:
        return raw
    form = FileForm.from_text(stamp.form).record
    function = function_of(fetcher, stamp.form)
    document, text = raw.member(JSON_FIELD), raw.member(TEXT_FIELD)
    try:
        made = member_document(
            document and document.data, text and text.data, raw.fields, form, function
        )
    except DataError as fault:
        return replace(raw, fault=fault.reason, error_class=fault.error_class)
    stands_for = document or text
    assert stands_for is not None, "one of them is there, or the sample has a fault"
    new = stands_for._replace(field=JSON_FIELD, data=made.data, size=len(made.data))
    members = tuple(new if member is document else member for member in raw.members)
    return replace(
        raw,
        members=members if document is not None else (*members, new),
        unknown_keys=(*raw.unknown_keys, *made.unused),
    )


def shard_records(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps
) -> Iterator[dict[str, Any]]:
    """The records that a shard's samples are, in its order, without those that cannot be read.

    Raises:
        DataError: as shard_samples.
    """
    for raw in read_samples(fetcher, stamp, caps, DOCUMENTS):
        if raw.fault is not None:
            continue
        document, text = raw.member(JSON_FIELD), raw.member(TEXT_FIELD)
        try:
            record = {} if document is None else member_record(document.data, None, ())
            if _TURNS.isdisjoint(record):  # else its own keys alone say what it is
                record = member_record(document and document.data, text and text.data, raw.fields)
        except DataError:  # a hole, or an error when it is indexed
            continue
        yield record


@dataclass(frozen=True, slots=True)
class MemberDocument:
    """The member in place of a sample's `.json`."""

    data: bytes
    unused: tuple[str, ...] = ()
    put_first: bool = False


def member_record(
    document: bytes | None, text: bytes | None, fields: Sequence[str]
) -> dict[str, Any]:
    """The record that a sample's members are.

    Args:
        text: its `.txt` member; it is looked at where the `.json` is of no layout, or not there.

    Raises:
        DataError: (schema) neither a `.json` nor a `.txt`, or one that cannot be read.
    """
    if document is None and text is None:
        shown = ", ".join(repr(f".{field}") for field in fields) or "nothing"
        raise schema_error(f"the sample has no '.json' and no '.txt' member; found {shown}")
    record = {} if document is None else parse_document(document)
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
        function: makes the record that the form reads of the one that is there.

    Raises:
        DataError: (schema) a record that the form cannot read, or images that are no members.
    """
    is_given = bool(form.columns or form.ignored) or form.is_chosen or function is not None
    if document is not None and form.layout in _AS_IT_IS and not is_given:
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
    return MemberDocument(data, turns.unknown_keys, turns.put_first)


def _documents_of(stamp: ShardStamp) -> tuple[str, ...]:
    """Members one of which a sample must have."""
    return DOCUMENTS if stamp.form else (JSON_FIELD,)


def read_samples(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps, documents: tuple[str, ...]
) -> Iterator[RawSample]:
    """All samples of a shard, in its order; see group_members."""
    with fetcher.open(stamp) as stream:
        members = read_members(
            stream, stamp.size, shard=stamp.path, max_member_bytes=caps.max_member_bytes
        )
        yield from group_members(members, shard=stamp.path, caps=caps, documents=documents)
