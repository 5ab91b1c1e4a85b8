"""Samples of shards in another layout than turns, read as the samples that the same turns are.

    0001.jpg  0001.json {"question": ..., "answer": ...}   ->   its .json has "messages"
    0001.jpg  0001.txt                                     ->   a .json beside them

A sample keeps its place and the checksum of its bytes; its `.json` alone is another one. A source
whose shards have turns has no form, and nothing here touches its samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from vlmpack.addresses import is_remote, redacted
from vlmpack.data.columns.dropped_images import find_dropped
from vlmpack.data.columns.form import AS_TURNS, RecordForm, find_form
from vlmpack.data.columns.layouts import fitting, has_value
from vlmpack.data.columns.members import TEXT_FIELD, member_document, member_record
from vlmpack.data.files.form import FileForm, FormOptions
from vlmpack.data.files.registered import Function, function_of
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.naming import JSON_FIELD, is_image
from vlmpack.data.shards.raw import RawSample, changed_since_indexed, group_members, parse_span
from vlmpack.data.shards.tar import read_members
from vlmpack.errors import DataError, RecipeError
from vlmpack.storage.fetch import Fetcher, ShardStamp

NUM_LOOKED_AT = 8
"""Samples of a source that say how it is read."""
SEARCHED_BYTES = 64 << 20
"""The most of a shard that is searched for images which nobody would read."""
SPANS_AT_ONCE = 16
"""Samples whose bytes are held together when their texts alone are wanted."""

_DOCUMENTS = (JSON_FIELD, TEXT_FIELD)
_NATIVE = frozenset({"messages", "llava"})
_TURNS = frozenset({"messages", "conversations"})


def shard_samples(fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps) -> Iterator[RawSample]:
    """All samples of a shard, in its order, as its form has them.

    Raises:
        DataError: class `integrity` for a damaged shard, `transport` for one out of reach.
    """
    function = function_of(fetcher, stamp.form)
    for raw in _grouped(fetcher, stamp, caps, _documents_of(stamp)):
        yield as_turns(raw, stamp, function)


def verified_sample(
    span: bytes,
    stamp: ShardStamp,
    offset: int,
    crc32: int,
    caps: SampleCaps,
    function: Function | None = None,
) -> RawSample:
    """The one sample of a byte range that the index recorded, as its shard's form has it.

    Args:
        crc32: of the range, as the index has it.
        function: that the form names.

    Raises:
        DataError: class `integrity`: other bytes, or not one sample.
    """
    found = zlib.crc32(span)
    if found != crc32:
        raise changed_since_indexed(found, crc32)
    raw = parse_span(
        span,
        shard=stamp.path,
        offset=offset,
        caps=caps,
        verified=found,
        documents=_documents_of(stamp),
    )
    return as_turns(raw, stamp, function)


def shard_documents(
    fetcher: Fetcher, stamp: ShardStamp, places: Sequence[tuple[int, int, int]], caps: SampleCaps
) -> list[bytes | DataError]:
    """The JSON of samples of a shard that has a form.

    Args:
        places: offset, length and checksum of each, as the index has them.

    Raises:
        DataError: class `transport` or `integrity`, where the shard cannot be read.
    """
    found: dict[tuple[int, int, int], bytes | DataError] = {}
    wanted, function = list(dict.fromkeys(places)), function_of(fetcher, stamp.form)
    for start in range(0, len(wanted), SPANS_AT_ONCE):
        some = wanted[start : start + SPANS_AT_ONCE]
        spans = fetcher.read_ranges(stamp, [(offset, length) for offset, length, _ in some])
        for place, span in zip(some, spans, strict=True):
            offset, _, crc32 = place
            try:
                raw = verified_sample(span, stamp, offset, crc32, caps, function)
                raw.check()
                found[place] = raw.payload(JSON_FIELD)
            except DataError as error:
                found[place] = error
    return [found[place] for place in places]


def as_turns(raw: RawSample, stamp: ShardStamp, function: Function | None = None) -> RawSample:
    """A sample with the `.json` that the reader of shards takes; what is wrong with it is its
    fault. Of a shard without a form the sample itself.

    Args:
        function: that the form names.
    """
    if not stamp.form or raw.fault is not None:
        return raw
    form = FileForm.from_text(stamp.form).record
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
        unknown_keys=(*raw.unknown_keys, *made.unread),
    )


def find_shard_form(
    stamp: ShardStamp,
    options: FormOptions,
    fetcher: Fetcher,
    caps: SampleCaps,
    function: Function | None = None,
) -> RecordForm | None:
    """How the samples of a source's shards are read; None for turns.

    Where nobody says it, the first samples of a local shard do; a shard in a store is not asked.

    Args:
        stamp: the first shard.
        options: what the recipe says of the source.
        function: that its columns name.

    Raises:
        RecipeError: more than one layout fits, or none of the columns that are named.
        DataError: columns are named, and the shard cannot be read.
    """
    where = f"{options.key} ({redacted(stamp.path)})"
    if options.columns is None and is_remote(stamp.path):
        return None
    form = _found_form(stamp, options, fetcher, caps, function)
    if function is None:
        records = _without_members(fetcher, stamp, caps)
        blank = replace(AS_TURNS, ignored=options.ignored)
        # Shards of turns are read as they are: no other name stands for their images.
        found = find_dropped(
            records, form or blank, unread_alone=form is None, by_identifiers=False
        )
        if found.columns:
            raise RecipeError([found.problem(where)])
    return form


def _found_form(
    stamp: ShardStamp,
    options: FormOptions,
    fetcher: Fetcher,
    caps: SampleCaps,
    function: Function | None,
) -> RecordForm | None:
    """See find_shard_form."""
    columns = options.columns
    where = f"{options.key} ({redacted(stamp.path)})"
    first = islice(shard_records(fetcher, stamp, caps), NUM_LOOKED_AT)
    if columns is not None:
        records = list(first)
        if not records:
            raise RecipeError([f"{where}: it holds no readable sample"])
        if function is not None:
            return _form_behind(function, records, where, options.knob)
        return find_form(records, columns, where, options.knob, options.ignored)
    try:
        records = list(first)
    except DataError:  # the index tells, with its place
        return None
    keys = [{key for key, value in record.items() if has_value(value)} for record in records]
    if {layout.name for each in keys for layout in fitting(each)} <= _NATIVE:
        is_left_out = any(name in each for each in keys for name in options.ignored)
        return replace(AS_TURNS, ignored=options.ignored) if is_left_out else None
    return find_form(records, None, where, options.knob, options.ignored)


def _form_behind(
    function: Function, records: Sequence[dict[str, Any]], where: str, knob: str
) -> RecordForm:
    """The form of what a function makes of the first records, less those that it cannot take.

    Raises:
        RecipeError: it can take none.
    """
    made, faults = [], []
    for record in records:
        try:
            made.append(function(record))
        except DataError as error:
            faults.append(error)
    if not made:
        raise RecipeError([f"{where}: {faults[0].reason}, and so with all that were looked at"])
    return find_form(made, None, where, knob)


def shard_records(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps
) -> Iterator[dict[str, Any]]:
    """The records that a shard's samples are, in its order, without those that cannot be read.

    Raises:
        DataError: as shard_samples.
    """
    for raw in _grouped(fetcher, stamp, caps, _DOCUMENTS):
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


def _without_members(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps
) -> Iterator[dict[str, Any]]:
    """The records of the first samples of a shard. Those with images as members have nothing to
    lose, since each member must be shown; the index tells what is damaged."""
    with suppress(DataError):
        for raw in _grouped(fetcher, stamp, caps, _DOCUMENTS):
            if raw.offset > SEARCHED_BYTES:
                return
            document = raw.member(JSON_FIELD)
            if raw.fault is not None or document is None or any(map(is_image, raw.fields)):
                yield {}
                continue
            with suppress(DataError):
                yield member_record(document.data, None, ())


def _documents_of(stamp: ShardStamp) -> tuple[str, ...]:
    """Members one of which a sample must have."""
    return _DOCUMENTS if stamp.form else (JSON_FIELD,)


def _grouped(
    fetcher: Fetcher, stamp: ShardStamp, caps: SampleCaps, documents: tuple[str, ...]
) -> Iterator[RawSample]:
    with fetcher.open(stamp) as stream:
        members = read_members(
            stream, stamp.size, shard=stamp.path, max_member_bytes=caps.max_member_bytes
        )
        yield from group_members(members, shard=stamp.path, caps=caps, documents=documents)
