"""Doors of the stores: what servers answer, addresses, patterns, storage options."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import PIECES, VALUES, Door, damaged

from vlmpack.addresses import endpoint_problem, redacted, resolve_address, scheme_of, secret_in
from vlmpack.cli.index import open_reading
from vlmpack.cli.options import ReadOptions
from vlmpack.errors import VlmpackError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.guard import allowed_addresses
from vlmpack.storage.http import Connection
from vlmpack.storage.sources import find_shards
from vlmpack.storage.transport import StoreFault
from vlmpack.terminal import printable

Go = Callable[[random.Random], object]

SHARD = b"0123456789" * 20
ANSWERS = [
    b'HTTP/1.1 200 OK\r\nContent-Length: 200\r\nAccept-Ranges: bytes\r\nETag: "a"\r\n\r\n' + SHARD,
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 20-119/200\r\nContent-Length: 100\r\n"
    b'ETag: "a"\r\n\r\n' + SHARD[20:120],
    b"HTTP/1.1 302 Found\r\nLocation: /b/y.tar?x=1#f\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 307 Temporary\r\nLocation: http://8.8.8.8:80/y.tar\r\nContent-Length: 2\r\n\r\nxx",
    b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 429 Many\r\nRetry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n",
    b'HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\nETag: "a"\r\n'
    b"Content-Range: bytes 20-119/200\r\n\r\n64\r\n" + SHARD[20:120] + b"\r\n0\r\n\r\n",
    b'HTTP/1.1 200 OK\r\nX-Linked-Size: 200\r\nX-Linked-Etag: "a"\r\nX-Repo-Commit: abc\r\n'
    b"Content-Length: 200\r\nLocation: http://8.8.8.8/z\r\n\r\n" + SHARD,
    b"HTTP/1.1 416 No\r\nContent-Range: bytes */200\r\nContent-Length: 0\r\n\r\n",
]
LOCATIONS = (
    "http://[::1", "http://a:99999/x", "http://a:x/x", "//", "http://", "http:///x", "https://a/x",
    "HTTP://8.8.8.8/x", "file:///etc/x", "javascript:1", "\u00e9://x", "http://\u00e9.\u2488com/x",
    "http://a\x00b/x", "http://" + "a" * 300 + "/x", "http://xn--/", "?", "#", "http://[v1.x]/",
    "http://%5B%5D/", "http://8.8.8.8/\u00e9 \x1b", "http://user:p@ss@8.8.8.8/", "http://8.8.8.8:/",
    "http://8.8.8.8:\u0662/", "http://[fe80::1%25eth0]/", "//[/", "http://\ud800/",
)  # fmt: skip


class Wire:
    """A socket whose server has spoken already."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str, buffering: int = -1) -> Any:
        return io.BytesIO(self.data)

    def sendall(self, data: bytes) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        pass

    def setsockopt(self, *args: object) -> None:
        pass

    def close(self) -> None:
        pass


def _server(_: Path) -> Go:
    config = StorageSection(allow_private=True, max_tries=1)

    def go(draw: random.Random) -> None:
        def answer() -> bytes:
            data = draw.choice(ANSWERS)
            if draw.random() < 0.3 and b"Location: " in data:
                before, _, after = data.partition(b"Location: ")
                place = draw.choice(LOCATIONS).encode("utf-8", "surrogatepass")
                return before + b"Location: " + place + b"\r\n" + after.partition(b"\r\n")[2]
            return damaged(data, draw, ANSWERS) if draw.random() < 0.8 else data

        def connect(self: Connection) -> None:
            # Names are judged as ever, but none is looked up and nothing is asked.
            private = config.allows_private(self.host, is_named=self.is_named)
            if self.host.replace(".", "").isdecimal():
                allowed_addresses(self.host, self.port, allow_private=private)
            self.sock = Wire(answer())  # type: ignore[assignment]

        hub = draw.random() < 0.3
        path = "hf://datasets/a/b/x.tar" if hub else "http://127.0.0.1/b/x.tar"
        fetcher = RoutingFetcher(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "connect", connect)
            patch.setenv("HF_ENDPOINT", "http://127.0.0.1")
            patch.setenv("HF_TOKEN", "t")
            try:
                stamp = fetcher.head(path) if draw.random() < 0.4 else ShardStamp(path, 200, '"a"')
                if stamp.size >= 120:
                    assert fetcher.read(stamp, 20, 100) is not None
            finally:
                fetcher.close()

    return go


ADDRESSES = [
    b"https://${env:USER}:${env:WORD}@host.example/a/x-{000..003}.tar?${env:SIG}",
    b"s3://bucket/a/x-*.tar",
    b"hf://datasets/owner/name@main/x{a,b}.tar",
    b"http://127.0.0.1:9000/x.tar?versionId=3#part",
    b"file:///tmp/x-{0..2}.tar",
    b"/tmp/nowhere/x-[0-9].tar",
]


def text_of(draw: random.Random) -> str:
    """An address, damaged, or with one piece of another kind in it."""
    text = damaged(draw.choice(ADDRESSES), draw, ADDRESSES).decode("utf-8", "surrogateescape")
    if draw.random() < 0.2:
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(LOCATIONS) + text[at:]
    return text


def _address(_: Path) -> Go:
    fetcher = RoutingFetcher(StorageSection(max_tries=1))

    def go(draw: random.Random) -> None:
        text = text_of(draw)
        scheme_of(text)
        secret_in(text)
        redacted(text)
        printable(f"{text} {draw.choice(PIECES)!r}")
        endpoint_problem(text, allow_private=lambda host: True)
        with contextlib.suppress(KeyError):  # a variable that is not set; its callers name it
            resolve_address(text)
        if not text.lower().startswith(("s3:", "gs:", "az:")):
            find_shards([text], key="data.train", fetcher=fetcher)
        if not text.lower().startswith(("http", "hf", "s3", "gs", "az")):
            fetcher.head(text)

    return go


def _url(_: Path) -> Go:
    """Addresses that are asked, up to the connection."""

    fetcher = RoutingFetcher(StorageSection(max_tries=1, allow_private=True))

    def refuse(self: Connection) -> None:
        allowed = allowed_addresses
        if self.host.replace(".", "").isdecimal():
            allowed(self.host, self.port, allow_private=False)
        raise ConnectionRefusedError(111, "refused")

    def go(draw: random.Random) -> None:
        text = text_of(draw)
        if not text.lower().startswith(("http", "hf")):
            text = "http://" + text
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "connect", refuse)
            for name in ("USER", "WORD", "SIG"):
                patch.setenv(name, draw.choice(LOCATIONS).replace("\x00", "").replace("\ud800", ""))
            fetcher.head(text)

    return go


def _option(folder: Path) -> Go:
    (folder / "x.tar").write_bytes(b"")
    good = [
        b"endpoint=http://10.0.0.5:9000", b"allow_private=[a, b]", b"max_tries=3",
        b"credentials.hf_token=${env:T}", b"retry_seconds=1e3", b"region=eu", b"credentials={}",
    ]  # fmt: skip

    def go(draw: random.Random) -> None:
        items = [
            damaged(draw.choice(good), draw, good).decode("utf-8", "replace") for _ in range(2)
        ]
        if draw.random() < 0.3:
            items[0] = f"{items[0].partition('=')[0]}={draw.choice(VALUES)!r}"
        open_reading([str(folder / "x.tar")], None, ReadOptions(storage=items))

    return go


def _host(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        number = draw.getrandbits(draw.choice((8, 32, 64, 128)))
        text = draw.choice((f"{number}", f"{number:x}::", f"0x{number:x}", f"{number}.1", "::%1"))
        try:
            allowed_addresses(text, draw.choice((0, 80, 65535)), allow_private=False)
        except StoreFault:
            raise VlmpackError("refused") from None

    return go


DOORS = [
    Door("server", 6, _server),
    Door("address", 9, _address),
    Door("asked address", 3, _url),
    Door("storage option", 0.5, _option),
    Door("host", 0.1, _host),
]
