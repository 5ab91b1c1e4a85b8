"""A strict reader for WebDataset tars: every fault that `tarfile` passes over is an error here.

Members come in file order. Every header's checksum is verified, and every member must lie inside
the shard. The archive must end with two zero blocks, so a shard that is cut anywhere is noticed.
Only regular files are read (folders are passed over). Names are ustar, GNU long names or pax paths.
Links, sparse files, devices, absolute names and names with `..` are refused.

The same code reads a whole shard (to index it) and the span of one sample (to train on it). A span
that matched the index's checksum is not summed again, since its bytes were checked when the shard
was indexed.

Functions over bytes read one header or its pax records. They raise ValueErrors, to which the
scanner adds the shard and the offset.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from vlmpack.data.shards.naming import split_name
from vlmpack.errors import DataError, integrity_error
from vlmpack.limits import (
    MAX_EXTENSION_BYTES,
    MAX_EXTENSIONS,
    MAX_FOREIGN_BYTES,
    MAX_NAME_BYTES,
    MAX_PAX_RECORDS,
)

BLOCK_BYTES = 512
REGULAR_KINDS = (b"0", b"\0", b"7")
FOLDER_KIND = b"5"
EXTENSION_KINDS = (b"x", b"g", b"L", b"K")
_OTHER_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"M": "a part of several volumes",
    b"V": "a volume label",
}
_VISIBLE = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
"""What "backslashreplace" gives, in a third of the time."""
_ADLER_MODULUS = 65521
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]*)=").match
_LINE_END = ord("\n")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_FIELDS = struct.Struct("100s24x12s12x8s1s100x6s82x155s12x").unpack
"""Name, size, checksum, kind, magic, prefix."""
_COPY_BYTES = 1 << 20


class TarMember(NamedTuple):
    """One regular file of a tar that belongs to a sample.

    Args:
        key: of its sample, by webdataset's rule.
        field: its name within the sample, lower case.
        offset: of its first header block (a long name's own header included), from the shard's
            first byte.
        end: the byte after its last, padded block.
        data: the content; None where `size` is above the reader's cap.
        crc32: of all bytes from the first member of a run with this key to `end`, headers and
            padding included. So the last member has the sample's checksum. In a verified span every
            member has the span's.
    """

    key: str
    field: str
    offset: int
    end: int
    data_offset: int
    size: int
    data: bytes | None
    crc32: int


def read_members(
    stream: BinaryIO, size: int, *, shard: str, max_member_bytes: int
) -> Iterator[TarMember]:
    """All members of a whole shard. Content above `max_member_bytes` is checked but not kept.

    Raises:
        DataError: class `integrity`, with the offset of the fault.
    """
    scanner = _Scanner(stream, size, shard, 0, max_member_bytes)
    yield from scanner.members()
    scanner.check_end()


def read_span(
    span: bytes, *, shard: str, base: int, max_member_bytes: int, verified: int | None = None
) -> Iterator[TarMember]:
    """The members of a span that holds whole members only, without an archive's end. Offsets count
    from the shard's start, where the span begins at `base`. `verified` is the span's CRC-32 if it
    was compared already."""
    stream, size = io.BytesIO(span), len(span)
    scanner = _Scanner(stream, size, shard, base, max_member_bytes, verified)
    yield from scanner.members()
    if scanner.position != size:
        raise scanner.fault("a zero block inside the sample", at=scanner.position - BLOCK_BYTES)


def read_part_headers(
    stream: BinaryIO, size: int, *, shard: str, base: int, is_end: bool
) -> Iterator[TarMember]:
    """The members, without their content, of a part of a shard that begins with a header at `base`.

    Raises:
        DataError: class `integrity`, where it does not hold whole members and nothing else.
    """
    scanner = _Scanner(stream, size, shard, base, max_member_bytes=-1)
    yield from scanner.members()
    if is_end:
        scanner.check_end()
    elif scanner.position != size:
        raise scanner.fault("a zero block before the end", at=scanner.position - BLOCK_BYTES)


@dataclass(slots=True)
class _Extended:
    """What extension headers before a member's header say. They are bounded, so that no chain of
    them is costly."""

    start: int
    blocks: list[bytes]
    num_headers: int = 0
    num_bytes: int = 0
    num_records: int = 0
    name: bytes | None = None
    size: int | None = None


@dataclass(slots=True)
class _Scanner:
    """Reads forward through one stream; `position` counts from the stream's start."""

    stream: BinaryIO
    size: int
    shard: str
    base: int
    max_member_bytes: int
    verified: int | None = None
    position: int = 0
    # The running checksum of the current sample. What belongs to no sample (folders, `._1.jpg`)
    # is carried along: between two members of a sample it is part of the span.
    _key: str | None = None
    _end: int = 0
    _crc32: int = 0

    def sum_up(self, data: bytes, start: int = 0) -> int:
        """The checksum of `data` that continues from the checksum `start`."""
        return zlib.crc32(data, start) if self.verified is None else self.verified

    def fault(self, reason: str, *, at: int) -> DataError:
        """A structural error at a position of the stream."""
        return integrity_error(reason, shard=self.shard, offset=self.base + at)

    def members(self) -> Iterator[TarMember]:
        """Members up to the first zero block or the end of the stream."""
        pending: _Extended | None = None
        while self.position < self.size:
            start = self.position
            block = self.read(BLOCK_BYTES, what="a header")
            if not any(block):
                break
            header = self.parse(block, at=start)
            extended = pending or _Extended(start, [])
            extended.blocks.append(block)
            if header.kind in EXTENSION_KINDS:
                self.read_extension(header, extended, at=start)
                pending = extended
                continue
            pending = None
            if header.kind == FOLDER_KIND:
                self._crc32 = self.sum_up(_joined(extended), self._crc32)
                self._end = self.position
                continue
            member = self.finish(header, extended, at=start)
            if member is not None:
                yield member
        if pending is not None:
            raise self.fault("an extended header without its member", at=pending.start)

    def parse(self, block: bytes, *, at: int) -> Header:
        """The header, with its place in the message where it is damaged."""
        try:
            return parse_header(block, verified=self.verified is not None)
        except ValueError as error:
            hint = _what_else(block) if self.base + at == 0 else ""
            raise self.fault(f"{error}{hint}", at=at) from None

    def finish(self, header: Header, extended: _Extended, *, at: int) -> TarMember | None:
        """The member whose own header was just read; None where it belongs to no sample."""
        name = header.name
        if extended.name is not None:
            try:
                name = long_name(extended.name)
            except ValueError as error:
                raise self.fault(str(error), at=extended.start) from None
        if header.kind not in REGULAR_KINDS:
            raise self.fault(
                f"member {name!r} is {header.refusal}; only regular files are read", at=at
            )
        if unsafe_name(name):
            raise self.fault(
                f"member {name!r} has an unsafe name (absolute, '..', or a control character)",
                at=at,
            )
        size = extended.size if extended.size is not None else header.size
        place = split_name(name)
        if place is None or (place.key == self._key and extended.start == self._end):
            crc32 = self.sum_up(_joined(extended), self._crc32)
        else:
            crc32 = self.sum_up(_joined(extended))
        data_at = self.position
        data, crc32 = self.payload(size, crc32, name=name, start=extended.start)
        self._end, self._crc32 = self.position, crc32
        if place is None:
            return None
        self._key = place.key
        return TarMember(
            key=place.key,
            field=place.field,
            offset=self.base + extended.start,
            end=self.base + self.position,
            data_offset=self.base + data_at,
            size=size,
            data=data,
            crc32=crc32,
        )

    def payload(self, size: int, crc32: int, *, name: str, start: int) -> tuple[bytes | None, int]:
        """`size` data bytes (None above the cap), and the running checksum past their padding."""
        padded = padded_size(size)
        remaining = self.size - self.position
        if padded > remaining:
            raise self.fault(
                f"the shard ends inside member {name!r}: its data needs {padded} bytes and "
                f"{remaining} are left. The shard is cut short or damaged",
                at=start,
            )
        if size <= self.max_member_bytes:
            block = self.read(padded, what=f"member {name!r}")
            return block[:size], self.sum_up(block, crc32)
        while padded:
            block = self.read(min(padded, _COPY_BYTES), what=f"member {name!r}")
            crc32 = self.sum_up(block, crc32)
            padded -= len(block)
        return None, crc32

    def read_extension(self, header: Header, extended: _Extended, *, at: int) -> None:
        """A GNU long name or a pax header: notes the name and size it gives to the next member."""
        extended.num_headers += 1
        extended.num_bytes += header.size
        if extended.num_headers > MAX_EXTENSIONS:
            raise self.fault(
                f"more than {MAX_EXTENSIONS} extended headers before one member", at=extended.start
            )
        if extended.num_bytes > MAX_EXTENSION_BYTES:
            raise self.fault(
                f"extended headers of {extended.num_bytes} bytes before one member; at most "
                f"{MAX_EXTENSION_BYTES} are read",
                at=at,
            )
        block = self.read(padded_size(header.size), what="an extended header")
        extended.blocks.append(block)
        data = block[: header.size]
        if header.kind == b"L":
            extended.name = data.rstrip(b"\0")
        if header.kind not in (b"x", b"g"):
            return
        try:
            said = pax_said(data, MAX_PAX_RECORDS - extended.num_records)
        except ValueError as error:
            raise self.fault(str(error), at=at) from None
        extended.num_records += said.num_records
        if said.is_sparse:
            raise self.fault("a sparse file; only regular files are read", at=at)
        if header.kind == b"g":
            if said.path is not None or said.size is not None:
                raise self.fault("a global header that sets every member's path or size", at=at)
            return
        extended.name = extended.name if said.path is None else said.path
        extended.size = extended.size if said.size is None else said.size

    def read(self, count: int, *, what: str) -> bytes:
        """Read exactly `count` bytes."""
        data = self.stream.read(count)
        if len(data) < count:
            raise self.fault(
                f"the shard ends inside {what}: {len(data)} of {count} bytes found; it is cut "
                "short or damaged",
                at=self.position,
            )
        self.position += count
        return data

    def check_end(self) -> None:
        """The archive's end: two zero blocks, then nothing but zeros."""
        if self.size == 0:
            raise self.fault("the shard is empty (0 bytes)", at=0)
        first = self.position - BLOCK_BYTES
        rest = self.size - self.position
        if rest < BLOCK_BYTES:
            raise self.fault(
                "the shard does not end with two zero blocks; it is cut short, and how many "
                "samples are missing is unknown",
                at=self.position,
            )
        while rest:
            block = self.read(min(rest, _COPY_BYTES), what="the archive's end")
            if any(block):
                raise self.fault(
                    "data after the archive's end (a zeroed header, or two tars in one file); "
                    "what follows would be lost",
                    at=first,
                )
            rest -= len(block)


def _joined(extended: _Extended) -> bytes:
    """The header blocks up to the member's own, usually only that."""
    blocks = extended.blocks
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _what_else(block: bytes) -> str:
    """The kind of a file that begins with this block and is no tar."""
    text = block.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return (
            "; this is an HTML page, no tar file: a login or error page, or the address of a page "
            "about the file"
        )
    if text.startswith(b"version https://git-lfs"):
        return "; this is a Git LFS pointer, no tar file"
    if block.startswith(b"\x1f\x8b"):
        return "; this is gzip, and compressed shards are not read: decompress them"
    named = ", no tar file: it is read under a name that ends in"
    if block.startswith(b"PAR1"):
        return f"; this is a parquet file{named} .parquet"
    if text.startswith((b"{", b"[")):
        return f"; this is a JSON file{named} .jsonl, or .json for a list"
    return "; this is no tar file"


class Header(NamedTuple):
    """The name (ustar prefix included), data bytes and type flag of one header. Extensions before
    it may replace name and size."""

    name: str
    size: int
    kind: bytes

    @property
    def refusal(self) -> str | None:
        """Why a member of this kind is not read; None for regular files."""
        if self.kind in REGULAR_KINDS:
            return None
        return _OTHER_KINDS.get(self.kind, f"of the unknown type {self.kind!r}")


def parse_header(block: bytes, *, verified: bool = False) -> Header:
    """A header; its checksum is compared unless the whole span's was.

    Raises:
        ValueError: the checksum does not fit, or the size is no number.
    """
    name, size, written, kind, magic, prefix = _FIELDS(block)
    if not verified:
        checksum = _OCTAL.fullmatch(written)
        if checksum is None or int(checksum[1], 8) % _ADLER_MODULUS != _byte_sum(block, written):
            raise ValueError("a tar header with a wrong checksum")
    name = name.partition(b"\0")[0]
    if prefix[0] and magic == b"ustar\0":
        name = prefix.partition(b"\0")[0] + b"/" + name
    return Header(decode_name(name), _size(size), kind)


def _byte_sum(block: bytes, written: bytes) -> int:
    """The sum of a header's bytes, its checksum read as eight spaces, modulo 65521.

    Adler-32's lower half is that sum plus 1, at C's speed. A header whose sum is off by a multiple
    of 65521 has at least 257 wrong bytes.
    """
    return ((zlib.adler32(block) & 0xFFFF) - 1 - sum(written) + 8 * 32) % _ADLER_MODULUS


def _size(field: bytes) -> int:
    if field[0] == 0x80:  # GNU's base-256, for files above 8 GiB
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise ValueError(f"a tar header whose size is {field!r}")
    return int(match[1], 8)


def unsafe_name(name: str) -> bool:
    """Absolute, empty, with `..`, or with a control character, which a terminal would obey."""
    if not name or name[0] == "/" or (".." in name and ".." in name.split("/")):
        return True
    return _CONTROL.search(name) is not None


class PaxSaid(NamedTuple):
    """What the records of a pax header say of the member's path (not decoded) and size."""

    path: bytes | None
    size: int | None
    is_sparse: bool
    num_records: int


def pax_said(data: bytes, at_most: int = MAX_PAX_RECORDS) -> PaxSaid:
    """The `length key=value` lines of a pax header; the last of a key counts.

    Raises:
        ValueError: they cannot be parsed, they are too many, or the size is no number.
    """
    path: bytes | None = None
    size: bytes | None = None
    is_sparse, place, count, length = False, 0, 0, len(data)
    while place < length:
        count += 1
        if count > at_most:
            raise ValueError(f"more than {MAX_PAX_RECORDS} pax records before one member")
        match = _RECORD(data, place)
        start = match.end() if match is not None else 0
        end = place + int(match[1]) if match is not None else 0
        if not start < end <= length or data[end - 1] != _LINE_END:
            raise ValueError("a pax header that cannot be parsed")
        key = match[2] if match is not None else b""
        if key == b"path":
            path = data[start : end - 1]
        elif key == b"size":
            size = data[start : end - 1]
        elif key.startswith(b"GNU.sparse"):
            is_sparse = True
        place = end
    return PaxSaid(path, None if size is None else _pax_size(size), is_sparse, count)


def _pax_size(value: bytes) -> int:
    if _DECIMAL.fullmatch(value) is None:
        raise ValueError(f"a pax size of {decode_name(value[:40])!r}")
    return int(value)


def long_name(raw: bytes) -> str:
    """A name that an extended header gives.

    Raises:
        ValueError: it is longer than a file system's, or long and not UTF-8.
    """
    if len(raw) > MAX_NAME_BYTES:
        raise ValueError(f"a name of {len(raw)} bytes; at most {MAX_NAME_BYTES} are read")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        if len(raw) > MAX_FOREIGN_BYTES:
            raise ValueError(
                f"a name of {len(raw)} bytes that is not UTF-8; at most {MAX_FOREIGN_BYTES} of "
                "such a name are read"
            ) from None
        return decode_name(raw)


def decode_name(raw: bytes) -> str:
    """A name as text; bytes that are no UTF-8 stay visible."""
    return raw.decode("utf-8", errors="surrogateescape").translate(_VISIBLE)


def padded_size(size: int) -> int:
    """Bytes that `size` data bytes take up in the archive."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
