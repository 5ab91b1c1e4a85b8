"""Hosts are judged by the address they mean, before and on every hop."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.fault_server import Fault, FaultServer

from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.data import StorageSection, unsafe_storage
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.guard import allowed_addresses
from vlmpack.storage.transport import Refused, Transient

PRIVATE = [
    "127.0.0.1",
    "localhost",
    "127.1",
    "2130706433",
    "0x7f000001",
    "017700000001",
    "10.0.0.1",
    "172.16.9.9",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "::ffff:127.0.0.1",
    "fd12:3456::1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
]
NEVER = [
    "169.254.169.254",
    "0xA9FEA9FE",
    "2852039166",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "fe80::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "168.63.129.16",
    "::ffff:168.63.129.16",
    "64:ff9b::a83f:8110",
    "0.0.0.0",
    "::",
    "224.0.0.1",
]
PUBLIC = ["8.8.8.8", "134744072", "2606:4700::1111"]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_need_the_switch(host: str) -> None:
    with pytest.raises(Refused, match=r"data\.storage\.allow_private"):
        allowed_addresses(host, 80, allow_private=False)
    assert allowed_addresses(host, 80, allow_private=True)


@pytest.mark.parametrize("host", NEVER)
@pytest.mark.parametrize("allow_private", [False, True])
def test_metadata_and_unusable_addresses_are_never_asked(host: str, allow_private: bool) -> None:
    with pytest.raises(Refused):
        allowed_addresses(host, 80, allow_private=allow_private)


@pytest.mark.parametrize("host", PUBLIC)
def test_public_addresses_are_allowed(host: str) -> None:
    assert allowed_addresses(host, 80, allow_private=False)


def resolver(*answers: list[str]):
    """Stands in for getaddrinfo; one list of addresses per call, the last one for ever."""
    left = list(answers)

    def resolve(host, port, *args, **options):
        found = left.pop(0) if len(left) > 1 else left[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    return resolve


def test_a_name_is_judged_by_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolver(["8.8.8.8", "10.1.1.1"]))
    with pytest.raises(Refused, match=r"shards\.example\.org \(10\.1\.1\.1\)"):
        allowed_addresses("shards.example.org", 443, allow_private=False)


def test_a_name_that_cannot_be_resolved_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **options):
        raise socket.gaierror(-3, "canary")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Transient, match="cannot be resolved"):
        allowed_addresses("shards.example.org", 443, allow_private=False)


def test_the_connection_goes_to_the_address_that_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that answers otherwise the second time changes nothing."""
    monkeypatch.setattr(socket, "getaddrinfo", resolver(["8.8.8.8"], ["127.0.0.1"]))
    asked: list[tuple[str, int]] = []

    def connect(address, timeout):
        asked.append(address)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    fetcher = RoutingFetcher(StorageSection(max_tries=1))
    with pytest.raises(DataError, match="the connection failed"):
        fetcher.head("http://shards.example.org:81/x.tar")
    assert asked[0] == ("8.8.8.8", 81)


def test_loopback_servers_and_endpoints_need_the_switch(tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        with pytest.raises(DataError, match="allow_private") as caught:
            RoutingFetcher().head(f"{server.url}/b/x.tar")
        assert caught.value.error_class == "transport"
        plain = StorageSection(endpoint=server.url)
        with pytest.raises(RecipeError, match="allow_private"):
            RoutingFetcher(plain)
        https = StorageSection(endpoint=f"https://127.0.0.1:{server.port}")
        with pytest.raises(DataError, match="allow_private"):
            RoutingFetcher(https).head("s3://b/x.tar")
        assert server.num_requests == 0


def test_an_endpoint_from_the_environment_is_judged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(DataError, match="allow_private"):
            RoutingFetcher(StorageSection(anonymous=True)).head("s3://b/x.tar")
        assert server.num_requests == 0


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/hostname", "redirected"),
        ("http://169.254.169.254/latest", "metadata|another host"),
        ("http://2852039166/latest", "metadata|another host"),
        ("http://[fe80::1]/x", "metadata|another host"),
        ("pipe:cat", "redirect"),
    ],
)
def test_redirects_are_judged(tmp_path: Path, scheme: str, location: str, reason: str) -> None:
    """Even where private addresses are allowed, and whatever is asked for."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        config = StorageSection(
            endpoint=server.url, anonymous=True, allow_private=True, max_tries=2, retry_seconds=1
        )
        fetcher = RoutingFetcher(config)
        path = "s3://b/x.tar" if scheme == "s3" else f"{server.url}/b/x.tar"
        stamp = fetcher.head(path)
        assert fetcher.read(stamp, 2, 3) == b"234"
        server.fail(Fault("redirect", times=None, location=location, methods=("GET", "HEAD")))
        for call in (
            lambda: fetcher.head(path),
            lambda: fetcher.read(stamp, 0, 4),
            lambda: fetcher.open(stamp).read(),
        ):
            with pytest.raises(DataError, match=reason) as caught:
                call()
            assert caught.value.error_class == "transport"
        fetcher.close()


def test_redirects_to_private_addresses_need_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public server that sends us inside."""
    from vlmpack.storage.http import HttpClient

    client = HttpClient(StorageSection())
    asked: list[str] = []

    class Public:
        status, headers, url = 302, {"location": "http://127.0.0.1:1/x"}, "http://8.8.8.8/x"

        def close(self, *, reusable: bool = False) -> None:
            pass

    real = HttpClient._ask

    def ask(self, method, url, headers, body, *, is_named):
        asked.append(url)
        if len(asked) == 1:
            return Public()
        return real(self, method, url, headers, body, is_named=is_named)

    monkeypatch.setattr(HttpClient, "_ask", ask)
    with pytest.raises(Refused, match="allow_private"):
        client.request("GET", "http://8.8.8.8/x", {})
    assert asked == ["http://8.8.8.8/x", "http://127.0.0.1:1/x"]


@pytest.mark.parametrize(
    ("allow_private", "first", "goes_on"),
    [
        (True, "127.0.0.1", False),
        (["127.0.0.1"], "127.0.0.1", False),
        (["127.0.0.1", "LOCALHOST."], "127.0.0.1", True),
        (["localhost"], "127.0.0.1", False),
        (["localhost"], "localhost", True),
        (True, "localhost", True),
    ],
)
def test_private_hosts_are_allowed_one_by_one(
    tmp_path: Path, allow_private: bool | list[str], first: str, goes_on: bool
) -> None:
    """A server sends us to `localhost`; a connection that is open to it changes nothing."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        allowed = allow_private if isinstance(allow_private, bool) else tuple(allow_private)
        fetcher = RoutingFetcher(StorageSection(allow_private=allowed, max_tries=1))
        inside = f"http://localhost:{server.port}/b/x.tar"
        if allow_private is True:
            fetcher.head(inside)  # the recipe names it here, and the connection is kept
        server.fail(
            Fault("redirect", location=inside, times=1, methods=("GET", "HEAD")),
            Fault("redirect", location=inside, times=1, methods=("GET", "HEAD")),
        )
        path = f"http://{first}:{server.port}/b/x.tar"
        if goes_on:
            assert fetcher.head(path).size == 10
        else:
            with pytest.raises(DataError, match=r"allow_private") as caught:
                fetcher.head(path)
            if allow_private is True or first in allow_private:
                assert "redirected to localhost" in str(caught.value)
                assert "allow_private: [localhost]" in str(caught.value)
        fetcher.close()


def test_an_endpoint_without_tls_is_allowed_by_its_name(tmp_path: Path) -> None:
    for endpoint, hosts, is_safe in (
        ("http://10.0.0.5:9000", ("10.0.0.5",), True),
        ("http://[fd00::1]:9000", ("fd00::1",), True),
        ("http://10.0.0.5:9000", ("10.0.0.6",), False),
        ("http://10.0.0.5:9000", (), False),
    ):
        problems = unsafe_storage(StorageSection(endpoint=endpoint, allow_private=hosts))
        assert is_safe == (not problems)
        assert is_safe or "allow_private" in problems[0].message


def test_a_redirect_brings_no_other_object(tmp_path: Path) -> None:
    """Within the host it is followed; the ETag says that it is another shard."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    (tmp_path / "b" / "y.tar").write_bytes(b"abcdefghij")
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(
            StorageSection(endpoint=server.url, anonymous=True, allow_private=True)
        )
        for path in ("s3://b/x.tar", f"{server.url}/b/x.tar"):
            stamp = fetcher.head(path)
            server.fail(Fault("redirect", times=1, location="/b/y.tar", match="x.tar"))
            with pytest.raises(DataError, match="changed") as caught:
                fetcher.read(stamp, 0, 4)
            assert caught.value.error_class == "integrity"
        fetcher.close()


def test_a_login_stays_with_its_host(tmp_path: Path) -> None:
    from vlmpack.storage.http import HttpClient

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    with FaultServer(tmp_path) as first, FaultServer(tmp_path) as other:
        client = HttpClient(StorageSection(allow_private=True))
        first.fail(Fault("redirect", location=f"{other.url}/b/x.tar"))
        answer = client.request("GET", f"{first.url}/b/x.tar", {"Authorization": "Bearer canary"})
        assert b"".join(answer.chunks()) == b"0123456789"
        login = f"http://user:canary@127.0.0.1:{first.port}/b/x.tar"
        first.fail(Fault("redirect", location=f"{other.url}/b/x.tar"))
        answer = client.request("GET", login, {})
        assert b"".join(answer.chunks()) == b"0123456789"
        client.close()
        assert all("authorization" in request.headers for request in first.requests)
        assert len(other.requests) == 2
        assert all("authorization" not in request.headers for request in other.requests)
