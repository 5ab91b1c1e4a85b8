"""Members of a tar, grouped into samples; and samples of a shard that its index lacks.

A sample is an unbroken run of members with one key. What breaks that rule is noted as a fault of
the sample, so that it becomes a hole with a reason and never half a sample: a field that occurs
twice, a pickle, a member above the size cap. Keys that come back later in the shard are found by
the index, which sees the whole shard.

    | sample | sample |   ?   | sample | sample |   ?        00 00 |
              of the index, by offset and length                 the archive's end

A sample that is trained is read, and is one sample with the index's checksum. So samples that the
index lacks lie between its samples or behind the last: in most shards at the archive's end alone.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, refusal
from vlmpack.data.shards.tar import TarMember, read_span, read_stretch
from vlmpack.data.shards.turns import Conversation
from vlmpack.errors import DataError, ErrorClass
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.words import counted

REINDEX = "restore the shard, or touch it where it is as it should be, so that it is indexed anew"
"""What to do about a shard that changed behind its index."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """One sample as it lies in the shard.

    Args:
        key: webdataset's key.
        shard: its path.
        offset: of its first byte in the shard.
        length: bytes from `offset` to the end of its last member, padding included.
        crc32: of that span.
        members: in file order.
        fault: why it cannot be used, where that is known before its text is looked at.
        error_class: of the fault.
        row: of a record in the unit of its file that `offset` and `length` are of; a shard's own
            samples have none.
        shown: field -> what a message calls a member, where that is not its name.
        image_stamps: where its images lie in a store, in token order, if they are files there.
        unknown_keys: of its record, beside those of the JSON member.
        said: what the JSON member says, where its reader has just written it from that; it is
            parsed where this is None.
    """

    key: str
    shard: str
    offset: int
    length: int
    crc32: int
    members: tuple[TarMember, ...]
    fault: str | None
    error_class: ErrorClass = "integrity"
    row: int | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    image_stamps: tuple[ShardStamp, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    said: Conversation[str] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The members' fields, in file order."""
        return tuple(member.field for member in self.members)

    def member(self, field: str) -> TarMember | None:
        """The member with this field."""
        return next((member for member in self.members if member.field == field), None)

    def payload(self, field: str) -> bytes:
        """The content of a field that is known to be there."""
        member = self.member(field)
        assert member is not None and member.data is not None, field
        return member.data

    def payloads(self, fields: Iterable[str]) -> tuple[bytes, ...]:
        """The contents of fields that are known to be there."""
        kept = {each.field: each.data for each in self.members if each.data is not None}
        return tuple(kept[field] for field in fields)

    def called(self, name: str) -> str:
        """What a message calls a member: its field, or the file that it came from."""
        return self.shown.get(name, name)

    def check(self) -> None:
        """Raises the fault, if there is one.

        Raises:
            DataError: class `integrity`, or that of a record that cannot be read.
        """
        if self.fault is not None:
            raise DataError(
                self.fault,
                error_class=self.error_class,
                key=self.key,
                shard=self.shard,
                offset=self.offset,
            )


def group_members(
    members: Iterable[TarMember],
    *,
    shard: str,
    caps: SampleCaps,
    documents: tuple[str, ...] = (JSON_FIELD,),
) -> Iterator[RawSample]:
    """Runs of members with the same key, as samples.

    Args:
        documents: fields one of which a sample must have.
    """
    run: list[TarMember] = []
    count = 0
    for member in members:
        if run and member.key != run[0].key:
            yield _sample(run, shard, _fault(run, count, caps, documents))
            run, count = [], 0
        count += 1
        run.append(member)
        if count > caps.max_members or member.end - run[0].offset > caps.max_sample_bytes:
            # Its place is all that is kept, however much of it follows.
            run = [run[0]._replace(data=None), member._replace(data=None)]
    if run:
        yield _sample(run, shard, _fault(run, count, caps, documents))


def parse_span(
    span: bytes,
    *,
    shard: str,
    offset: int,
    caps: SampleCaps,
    verified: int | None = None,
    documents: tuple[str, ...] = (JSON_FIELD,),
) -> RawSample:
    """The one sample of a byte range that the index recorded.

    Args:
        verified: the span's CRC-32, where the caller has found it to be the index's; then no
            checksum is computed here.
        documents: see group_members.

    Raises:
        DataError: class `integrity`, where the span is not one sample.
    """
    members = read_span(
        span,
        shard=shard,
        base=offset,
        max_member_bytes=caps.max_member_bytes,
        verified=verified,
    )
    samples = list(group_members(members, shard=shard, caps=caps, documents=documents))
    if len(samples) != 1:
        raise DataError(
            f"the byte range holds {len(samples)} samples instead of 1; the shard changed after "
            "it was indexed",
            error_class="integrity",
            shard=shard,
            offset=offset,
        )
    return samples[0]


def _sample(run: list[TarMember], shard: str, fault: str | None) -> RawSample:
    return RawSample(
        key=run[0].key,
        shard=shard,
        offset=run[0].offset,
        length=run[-1].end - run[0].offset,
        crc32=run[-1].crc32,
        members=tuple(run),
        fault=fault,
    )


def _fault(
    run: list[TarMember], count: int, caps: SampleCaps, documents: tuple[str, ...]
) -> str | None:
    length = run[-1].end - run[0].offset
    if count > caps.max_members or length > caps.max_sample_bytes:
        return (
            f"the sample has {counted(count, 'member')} and {length} bytes; at most "
            f"{caps.max_members} and {caps.max_sample_bytes} are read"
        )
    seen: set[str] = set()
    for member in run:
        if member.field in seen:
            return f"the member {member.field!r} occurs twice; keys must be unique in a shard"
        seen.add(member.field)
        if member.data is None:
            return (
                f"the member {member.field!r} has {member.size} bytes; at most "
                f"{caps.max_member_bytes} are read"
            )
        if member.field in documents and member.size > caps.max_json_bytes:
            return (
                f"the '.{member.field}' member has {member.size} bytes; at most "
                f"{caps.max_json_bytes} are parsed"
            )
        refused = refusal(member.field, member.data)
        if refused is not None:
            return f"{member.field!r}: {refused}; it is refused"
    if not any(member.field in documents for member in run):
        shown = ", ".join(repr(member.field) for member in run[:6])
        return (
            f"no '.json' member, only {shown} (a key ends at the first dot of the file name, so "
            "a dot inside a name splits it there)"
        )
    return None


def refuse_changed(span: bytes, crc32: int) -> None:
    """Raise DataError (integrity) where a sample's checksum is not the one in the index."""
    found = zlib.crc32(span)
    if found != crc32:
        raise changed_since_indexed(found, crc32)


def changed_since_indexed(found: int, indexed: int, remedy: str = REINDEX) -> DataError:
    """The fault of a sample whose bytes are not those that its index row was made from.

    Args:
        found: the checksum of its bytes.
        indexed: the row's.
        remedy: what to do about it.
    """
    return DataError(
        f"the sample's checksum is {found:08x}, the index has {indexed:08x}: its bytes changed "
        f"after they were indexed; {remedy}",
        error_class="integrity",
    )


READ_BYTES = 256 << 10

Int64s = npt.NDArray[np.int64]


def unlisted_samples(
    fetcher: Fetcher, stamp: ShardStamp, offsets: Int64s, lengths: Int64s
) -> list[str]:
    """Keys of the samples outside of those that an index lists, in file order.

    Args:
        fetcher: reads the shard.
        stamp: the shard.
        offsets, lengths: (n,) the spans of the index's samples, in file order.

    Raises:
        DataError: the shard cannot be read; or it is not made of these spans and whole members, so
            that the index is not of this shard.
    """
    begins = np.concatenate((offsets, [stamp.size]))
    ends = np.concatenate(([0], offsets + lengths))
    if (wrong := np.flatnonzero(begins < ends)).size:
        raise DataError(
            f"the index has samples that overlap, or lie behind the shard's {stamp.size} bytes; it "
            "is not of this shard",
            error_class="integrity",
            shard=stamp.path,
            offset=int(begins[wrong[0]]),
        )
    found: list[str] = []
    last = offsets.shape[0]
    for place in np.flatnonzero((begins > ends) | (np.arange(last + 1) == last)).tolist():
        begin, end = int(ends[place]), int(begins[place])
        stream = io.BufferedReader(_Stretch(fetcher, stamp, begin, end), READ_BYTES)
        members = read_stretch(
            stream,
            end - begin,
            shard=stamp.path,
            base=begin,
            is_end=place == last,
        )
        found += [key for key, _ in groupby(members, attrgetter("key"))]
    return found


class _Stretch(io.RawIOBase):
    """Bytes `begin` to `end` of a shard as a stream."""

    def __init__(self, fetcher: Fetcher, stamp: ShardStamp, begin: int, end: int) -> None:
        self._fetcher = fetcher
        self._stamp = stamp
        self._position = begin
        self._end = end

    def readable(self) -> bool:
        """See io.RawIOBase: always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer; 0 at the end."""
        count = min(len(buffer), self._end - self._position)
        if count:
            buffer[:count] = self._fetcher.read(self._stamp, self._position, count)
        self._position += count
        return count
