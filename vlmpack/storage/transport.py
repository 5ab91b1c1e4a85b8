"""What a transport does, and shards on plain HTTP servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from vlmpack.addresses import resolve_address
from vlmpack.recipe.data import StorageSection
from vlmpack.storage.faults import Changed, Refused
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.http import Answer, HttpClient

NO_RANGES = (
    "the server answers a range with the whole shard, so samples cannot be read from it; use a "
    "server that supports ranges, or copy the shards"
)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_SIZE = re.compile(r"[0-9]{1,18}")


class Transport(Protocol):
    """Single requests to one kind of store, from several threads; raises StoreFaults.

    It lives in one process and is never pickled.
    """

    def head(self, path: str) -> ShardStamp:
        """The shard's size and version."""

    def body(self, stamp: ShardStamp, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop` of this version, as they come. They may end
        early; the caller counts."""

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """What lies below a prefix that ends with '/', at any depth."""

    def close(self) -> None:
        """End idle connections."""


class HttpTransport:
    """`http://` and `https://`: servers that know ranges.

    Args:
        config: timeouts, and which hosts.
    """

    def __init__(self, config: StorageSection) -> None:
        self.client = HttpClient(config)

    def head(self, path: str) -> ShardStamp:
        """See Transport. Servers that refuse HEAD, or do not say that they know ranges, are asked
        for the first byte instead."""
        url = self.url(path)
        try:
            answer = self.client.request("HEAD", url, {})
            size = answer.headers.get("content-length", "")
            ranges = answer.headers.get("accept-ranges", "").strip().lower() == "bytes"
            answer.close(reusable=True)
            if size == "0" or (_SIZE.fullmatch(size) and ranges):
                return ShardStamp(path, int(size), version_of(answer.headers))
        except Refused:
            pass  # a signed address is often good for GET alone; GET says what is wrong
        answer = self.client.request("GET", url, {"Range": "bytes=0-0"})
        answer.close()
        if answer.status == 200 and total_size(answer.headers) > 1:
            raise Refused(NO_RANGES)
        return ShardStamp(path, total_size(answer.headers), version_of(answer.headers))

    def body(self, stamp: ShardStamp, start: int, stop: int) -> Iterator[bytes]:
        """See Transport."""
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if stamp.version.startswith('"'):  # a weak ETag never matches
            headers["If-Match"] = stamp.version
        with self.client.request("GET", self.url(stamp.path), headers) as answer:
            if version_of(answer.headers) != stamp.version:
                raise Changed("the shard changed after it was indexed: another ETag")
            yield from ranged(answer, start, stop, stamp.size)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Transport: refused, whatever the prefix."""
        raise Refused(
            "its server does not list files; write the shards out with a brace range such as "
            "train-{000..031}.tar"
        )

    def close(self) -> None:
        """See Transport."""
        self.client.close()

    def url(self, path: str) -> str:
        """The address to ask, with its secrets.

        Raises:
            Refused: an environment variable is not set.
        """
        try:
            return resolve_address(path)
        except KeyError as missing:
            raise Refused(f"the environment variable {missing.args[0]} is not set") from None
        except UnicodeEncodeError:
            raise Refused("the address is not UTF-8") from None


def version_of(headers: Mapping[str, str]) -> str:
    """The ETag; where a server has none, the time of the last change."""
    return headers.get("etag") or headers.get("last-modified", "")


def total_size(headers: Mapping[str, str]) -> int:
    """The size of the whole shard.

    Raises:
        Refused: the server does not say.
    """
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    size = match[3] if match else headers.get("content-length", "")
    return size_of(size)


def size_of(text: str) -> int:
    """A size that a header gives.

    Raises:
        Refused: it is no number.
    """
    if _SIZE.fullmatch(text) is None:
        raise Refused("the server does not say how large the shard is")
    return int(text)


def ranged(answer: Answer, start: int, stop: int, size: int) -> Iterator[bytes]:
    """The bytes of a range, and none that the server sends beyond it.

    Raises:
        Refused, Changed: see `_check_range`.
    """
    _check_range(answer, start, stop, size)
    left = stop - start
    for chunk in answer.chunks():
        yield chunk[:left]
        left -= len(chunk)
        if left < 0:
            return


def _check_range(answer: Answer, start: int, stop: int, size: int) -> None:
    """Whether the body is that of the range.

    Raises:
        Refused: the server does not serve ranges.
        Changed: the shard has another size.
    """
    if answer.status == 200:
        if start:
            raise Refused(NO_RANGES)
        length = answer.headers.get("content-length")
        if length is not None and length != str(size):
            raise Changed(f"the shard has {length} bytes, {size} when it was indexed")
        return
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or int(match[1]) != start or int(match[2]) >= stop:
        raise Refused("the server answers a range with another range")
    if match[3] not in ("*", str(size)):
        raise Changed(f"the shard has {match[3]} bytes, {size} when it was indexed")
