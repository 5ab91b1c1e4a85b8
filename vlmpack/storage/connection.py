"""One connection of the HTTP client: to an address that was judged, with every wait bounded."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from typing import cast

from vlmpack.recipe.data import StorageSection
from vlmpack.storage.guard import allowed_addresses

Place = tuple[str, str, int]
"""Scheme, host and port."""


class Connection(http.client.HTTPConnection):
    """To an address that was judged; one timeout to connect, another for each read, and a deadline
    for the whole of an answer, its headers included."""

    def __init__(
        self, place: Place, config: StorageSection, tls: ssl.SSLContext | None, *, is_named: bool
    ) -> None:
        super().__init__(place[1], place[2])
        self.place = place
        self._config = config
        self.is_named = is_named
        self.tls = tls
        self.was_used = False
        self.deadline = 0.0

    def begin(self, deadline: float) -> None:
        """A request starts, which has to end before `deadline` of the monotonic clock."""
        self.was_used = True
        self.deadline = deadline
        if self.sock is not None:
            self.sock.settimeout(self._config.read_timeout_seconds)

    def connect(self) -> None:
        config = self._config
        fault: OSError | None = None
        private = config.allows_private(self.host, is_named=self.is_named)
        for address in allowed_addresses(
            self.host, self.port, allow_private=private, is_named=self.is_named
        ):
            try:
                self.sock = socket.create_connection(
                    (address, self.port), config.connect_timeout_seconds
                )
                break
            except OSError as error:
                fault = error
        else:
            raise fault or OSError("no address")
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(config.read_timeout_seconds)
        if self.tls is not None:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, *, method: str | None = None
    ) -> http.client.HTTPResponse:
        """The answer that a socket will bring; named and called by http.client."""
        timed = _TimedReads(sock, self._config.read_timeout_seconds, self.deadline)
        return http.client.HTTPResponse(cast(socket.socket, timed), method=method)


class _TimedReads(io.RawIOBase):
    """A socket's bytes. No read waits beyond the deadline, however little comes at a time."""

    def __init__(self, sock: socket.socket, longest: float, deadline: float) -> None:
        self._sock = sock
        self._longest = longest
        self._deadline = deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """All that HTTPResponse asks of a socket: the file that it reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(min(left, self._longest))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
