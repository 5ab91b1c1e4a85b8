"""One 512-byte tar header, checked and parsed; and the pax records that may precede it.

Pure functions over bytes. Faults are ValueErrors; the reader adds the shard and the offset.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

from vlmpack.limits import MAX_FOREIGN_BYTES, MAX_NAME_BYTES, MAX_PAX_RECORDS

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


class Header(NamedTuple):
    """What one header says.

    Args:
        name: with the ustar prefix; extensions before the header may replace it.
        size: data bytes that follow; extensions may replace it.
        kind: the type flag.
    """

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
    """A header whose checksum fits.

    Args:
        verified: a checksum of the whole span was good, so this one is not looked at.

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


def unsafe_name(name: str) -> bool:
    """Absolute, empty, with `..`, or with a control character, which a terminal would obey."""
    if not name or name[0] == "/" or (".." in name and ".." in name.split("/")):
        return True
    return _CONTROL.search(name) is not None


class PaxSaid(NamedTuple):
    """What the records of a pax header say that a reader has to know.

    Args:
        path: the member's name, not yet decoded.
        size: its data bytes.
        is_sparse: it is a sparse file.
        num_records: lines.
    """

    path: bytes | None
    size: int | None
    is_sparse: bool
    num_records: int


def pax_said(data: bytes, at_most: int = MAX_PAX_RECORDS) -> PaxSaid:
    """The `length key=value` lines of a pax header; of a key that comes twice the last counts.

    Args:
        at_most: so many records are read.

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
        found = _RECORD(data, place)
        begin = found.end() if found is not None else 0
        end = place + int(found[1]) if found is not None else 0
        if not begin < end <= length or data[end - 1] != _LINE_END:
            raise ValueError("a pax header that cannot be parsed")
        key = found[2] if found is not None else b""
        if key == b"path":
            path = data[begin : end - 1]
        elif key == b"size":
            size = data[begin : end - 1]
        elif key.startswith(b"GNU.sparse"):
            is_sparse = True
        place = end
    return PaxSaid(
        path,
        None if size is None else _pax_size(size),
        is_sparse,
        count,
    )


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


def _size(field: bytes) -> int:
    if field[0] == 0x80:  # GNU's base-256, for files above 8 GiB
        return int.from_bytes(field[1:], "big")
    found = _OCTAL.fullmatch(field)
    if found is None:
        raise ValueError(f"a tar header whose size is {field!r}")
    return int(found[1], 8)
