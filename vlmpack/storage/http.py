"""Shards on plain HTTP servers, and the client that asks them.

Every host is judged before it is asked, and every body is bounded in time. The client connects to
the very address that the guard allowed, and sends a login only to its own host. It follows
redirects itself. Proxies from the environment are not used, since the address behind one could not
be judged.
"""

from __future__ import annotations

import base64
import http.client
import io
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Literal, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

from vlmpack.addresses import resolve_address
from vlmpack.errors import refuse_full_table
from vlmpack.recipe.data import StorageSection
from vlmpack.storage.access import MAX_CONCURRENT_READS
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.guard import allowed_addresses
from vlmpack.storage.transport import Changed, Refused, StoreFault, Transient

NO_RANGES = (
    "the server answers a range with the whole shard, so samples cannot be read from it. Use a "
    "server that supports ranges, or copy the shards"
)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_SIZE = re.compile(r"[0-9]{1,18}")
Place = tuple[str, str, int]
"""Scheme, host and port."""
MAX_REDIRECTS = 5
CHUNK_BYTES = 256 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_SAFE = "/%:@!$&'()*+,;=~-._"
_HOST = re.compile(r"[A-Za-z0-9._~-]{1,253}|[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,32})?")
_SECONDS = re.compile(r"[0-9]{1,9}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\xa0-\xff]*")
Method = Literal["GET", "HEAD", "POST"]


class Connection(http.client.HTTPConnection):
    """A connection to a judged address. It has timeouts to connect and to read, and a deadline for
    the whole answer with its headers."""

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

    def start(self, deadline: float) -> None:
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
        """The one method of a socket that HTTPResponse uses: the file that it reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._sock.settimeout(min(remaining, self._longest))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


@dataclass(slots=True)
class Answer:
    """A response whose body is still to be read; as a context it ends what is left of it.

    Args:
        status: 2xx, or a redirect that was not to be followed.
        headers: names in lower case. Never shown, since a redirect's hold a signed address.
        url: that answered, with its secrets, so never shown.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    url: str = field(repr=False)
    _response: http.client.HTTPResponse
    _connection: Connection
    _client: HttpClient
    _deadline: float
    _is_closed: bool = False

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes.

        Raises:
            Transient: it stalls, breaks off, or takes longer than one request may.
        """
        try:
            while chunk := self._response.read1(CHUNK_BYTES):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            refuse_full_table(error)
            raise Transient(_reason(error, self._deadline)) from None
        self.close(reusable=self._response.length in (0, None))

    def close(self, *, reusable: bool = False) -> None:
        """Gives the connection back, or ends it; once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._response.close()
        if reusable and not self._response.will_close:
            self._client.give_back(self._connection)
        else:
            self._connection.close()


class HttpClient:
    """Connections of one process; thread-safe."""

    def __init__(self, config: StorageSection) -> None:
        self.config = config
        self._idle: dict[tuple[Place, bool], list[Connection]] = {}
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def request(
        self,
        method: Method,
        url: str,
        headers: Mapping[str, str],
        *,
        follow: bool = True,
        named: str | None = None,
        body: bytes | None = None,
        check: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """The answer to a request, after its redirects.

        Args:
            url: may hold a login, which is sent as basic authentication.
            headers: `Authorization` goes to the first host only.
            follow: whether redirects to other hosts are followed; those within one always are.
            named: the address that the recipe names, where `url` is a redirect of its server.
            body: sent with a POST.
            check: raises for an answer that is none; by default that of shards.

        Raises:
            Refused: the host, a redirect or the answer does not allow it.
            Changed: the shard is another version.
            Transient: no answer, or one that asks to try again.
        """
        sent = dict(headers)
        host = _place(url if named is None else named)[1]
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._ask(method, url, sent, body, is_named=_place(url)[1] == host)
            try:
                if answer.status not in _REDIRECTS:
                    (check or check_status)(answer)
                    return answer
                target = redirected(url, answer.headers)
                elsewhere = _place(target) != _place(url)
                if elsewhere and not follow:
                    return answer
            except StoreFault:
                answer.close()
                raise
            answer.close()
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
                raise Refused("redirected from https to http, which is not followed")
            if elsewhere:
                sent.pop("Authorization", None)
            url = target
        raise Refused(f"redirected more than {MAX_REDIRECTS} times")

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection whose answer was read to its end."""
        with self._lock:
            idle = self._idle.setdefault((connection.place, connection.is_named), [])
            if len(idle) < MAX_CONCURRENT_READS:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Ends the idle connections."""
        with self._lock:
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            self._idle.clear()

    def __del__(self) -> None:
        self.close()

    def _ask(
        self,
        method: Method,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        is_named: bool,
    ) -> Answer:
        parts = urlsplit(url)
        target = quote(parts.path or "/", safe=_SAFE)
        target += f"?{quote(parts.query, safe=_SAFE + '?')}" if parts.query else ""
        sent = {"Accept-Encoding": "identity", "User-Agent": "vlmpack", **headers}
        if parts.username is not None and "Authorization" not in sent:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        _check_headers(sent)
        deadline = time.monotonic() + self.config.total_timeout_seconds
        while True:
            connection = self._connection(_place(url), is_named)
            was_used = connection.was_used
            try:
                connection.start(deadline)
                connection.request(method, target, body, sent)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if was_used and not isinstance(error, TimeoutError):
                    continue  # the server had ended an idle connection
                refuse_full_table(error)
                raise Transient(_reason(error, deadline)) from None
            except BaseException:
                connection.close()
                raise
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, url, response, connection, self, deadline)

    def _connection(self, place: Place, is_named: bool) -> Connection:
        with self._lock:
            idle = self._idle.get((place, is_named))
            if idle:
                return idle.pop()
            if place[0] == "https" and self._tls is None:
                self._tls = ssl.create_default_context()
        tls = self._tls if place[0] == "https" else None
        return Connection(place, self.config, tls, is_named=is_named)


def _place(url: str) -> Place:
    """Scheme, host and port."""
    try:
        url.encode()
        parts = urlsplit(url)
    except ValueError:
        raise Refused("the address is no valid URL") from None
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https") or not parts.hostname:
        raise Refused(f"redirected to the scheme '{scheme}:', which is never followed")
    try:
        port = parts.port
    except ValueError:
        raise Refused("the address has no valid port") from None
    return scheme, _host_name(parts.hostname), port or (443 if scheme == "https" else 80)


def _host_name(host: str) -> str:
    """The host as it is asked for, with other letters in their ASCII form.

    Raises:
        Refused: no host has such a name.
    """
    try:
        name = host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        name = ""
    if _HOST.fullmatch(name) is None:
        raise Refused("the address has no valid host")
    return name


def redirected(url: str, headers: Mapping[str, str]) -> str:
    """Where an answer sends us.

    Raises:
        Refused: to no valid address.
    """
    try:
        return urljoin(url, headers.get("location", ""))
    except ValueError:
        raise Refused("redirected to an address that is no valid URL") from None


def _check_headers(headers: Mapping[str, str]) -> None:
    """Raise Refused for headers that cannot be sent. http.client would quote the value, perhaps a
    secret.

    Raises:
        Refused: they cannot.
    """
    for name, value in headers.items():
        if _HEADER_VALUE.fullmatch(value) is None:
            raise Refused(
                f"the header {name} would hold a line break or another character that no header "
                "may. See the environment variable with its token"
            )


def check_status(answer: Answer) -> None:
    """Whether the answer has the shard's bytes.

    Raises:
        Refused, Changed, Transient: it has not.
    """
    status = answer.status
    if status in (200, 206):
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return
        raise Refused(f"the server sends the shard with the encoding {encoding!r}, unasked")
    if status == 412:
        raise Changed("the shard changed after it was indexed")
    if status == 416:
        raise Changed("the shard is shorter than when it was indexed")
    if status in _TRY_AGAIN:
        raise Transient(f"the server answered {status}", _retry_after(answer.headers))
    if status in (401, 403):
        raise Refused(
            f"the server denied access ({status}); a login is given as "
            "https://${env:USER}:${env:PASSWORD}@host/..., a signed query as ?${env:NAME}"
        )
    if status in (404, 410):
        raise Refused(f"the server has no such shard ({status})")
    raise Refused(f"the server answered {status}")


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a server asks to wait: a number, or a date compared with the server's clock.
    Anything else is ignored."""
    value = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    until = _http_date(value)
    if until is None:
        return 0.0
    now = _http_date(headers.get("date", "")) or time.time()
    return max(0.0, until - now)


def _http_date(value: str) -> float | None:
    """A date of HTTP as seconds since 1970."""
    try:
        date = parsedate_to_datetime(value)
        return date.replace(tzinfo=date.tzinfo or UTC).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _reason(error: Exception, deadline: float) -> str:
    """An error of the connection, without what the server said."""
    if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
        return "the request took longer than data.storage.total_timeout_seconds"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "the server does not answer within the connect or read timeout of data.storage"
    if isinstance(error, OSError):
        return f"the connection failed: {error.strerror or type(error).__name__}"
    return f"the answer is not valid HTTP ({type(error).__name__})"


class HttpTransport:
    """`http://` and `https://`: servers that know ranges."""

    def __init__(self, config: StorageSection) -> None:
        self.client = HttpClient(config)

    def head(self, path: str) -> ShardStamp:
        """See Transport. Servers that refuse HEAD, or do not announce ranges, are asked for the
        first byte."""
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
    remaining = stop - start
    for chunk in answer.chunks():
        yield chunk[:remaining]
        remaining -= len(chunk)
        if remaining < 0:
            return


def _check_range(answer: Answer, start: int, stop: int, size: int) -> None:
    """Whether the body is that of the range."""
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
