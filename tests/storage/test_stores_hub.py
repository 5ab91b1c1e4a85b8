"""`hf://` against a loopback imitation of the hub: its addresses, redirects, headers and tokens."""

from __future__ import annotations

import http.server
import pickle
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fault_server import Fault, FaultServer

from vlmpack.errors import DataError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.fetch import ShardStamp

TOKEN = "canary-token"
COMMIT = "c" * 40
NEXT = "d" * 40
CONTENT = bytes(range(256)) * 1000
PATH = "hf://datasets/owner/name/data/x.tar"


class Hub(http.server.ThreadingHTTPServer):
    """Files of one repository: large ones lie elsewhere, small ones here.

    Args:
        elsewhere: address of the large ones.
    """

    def __init__(self, elsewhere: str) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.elsewhere = elsewhere
        self.etag = "e" * 64
        self.head = COMMIT
        self.asked: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.server.asked.append((self.command, self.path))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(401, {}, b"canary-body")
            return
        root, _, file = self.path.partition("/resolve/")
        revision, _, name = file.partition("/")
        if root != "/datasets/owner/name" or revision not in ("main", "v1", COMMIT, NEXT):
            self.reply(404, {}, b"")
            return
        commit = revision if len(revision) == 40 else self.server.head
        common = {"X-Repo-Commit": commit}
        if name.endswith(".tar"):
            location = f"{self.server.elsewhere}/bucket/{name}?Signature=canary-signature"
            linked = {
                "X-Linked-Size": str(len(CONTENT)),
                "X-Linked-Etag": f'"{self.server.etag if commit == COMMIT else "n" * 64}"',
                "Location": location,
            }
            self.reply(302, common | linked, b"")
            return
        self.reply(200, common | {"ETag": '"small"'}, b"small file")

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FaultServer]:
    (tmp_path / "bucket" / "data").mkdir(parents=True)
    (tmp_path / "bucket" / "data" / "x.tar").write_bytes(CONTENT)
    with FaultServer(tmp_path) as server:
        yield server


@pytest.fixture
def hub(files: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(files.url)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def fetcher(hub: Hub) -> Iterator[RoutingFetcher]:
    fetcher = RoutingFetcher(
        StorageSection(allow_private=True, max_tries=3, retry_seconds=2, read_timeout_seconds=0.5)
    )
    yield fetcher
    fetcher.close()


def test_reads_are_exact_and_the_token_stays_with_the_hub(
    fetcher: RoutingFetcher, hub: Hub, files: FaultServer
) -> None:
    stamp = fetcher.head(PATH)
    assert stamp == ShardStamp(PATH, len(CONTENT), f'"{hub.etag}"')
    assert fetcher.read_ranges(stamp, [(200_000, 50), (3, 9)]) == [
        CONTENT[200_000:200_050],
        CONTENT[3:12],
    ]
    with fetcher.open(stamp) as stream:
        assert stream.read() == CONTENT
    assert files.requests, "vacuous"
    assert all("authorization" not in request.headers for request in files.requests)
    assert all(request.query == "Signature=canary-signature" for request in files.requests)


def test_the_hub_is_asked_rarely_and_at_one_commit(fetcher: RoutingFetcher, hub: Hub) -> None:
    stamp = fetcher.head(PATH)
    for at in range(20):
        assert fetcher.read(stamp, at, 5) == CONTENT[at : at + 5]
    base = "/datasets/owner/name/resolve"
    assert hub.asked == [
        ("HEAD", f"{base}/main/data/x.tar"),
        ("GET", f"{base}/{COMMIT}/data/x.tar"),
    ]


def test_a_revision_is_asked_for(fetcher: RoutingFetcher, hub: Hub) -> None:
    assert fetcher.head("hf://datasets/owner/name@v1/data/x.tar").size == len(CONTENT)
    assert hub.asked == [("HEAD", "/datasets/owner/name/resolve/v1/data/x.tar")]
    with pytest.raises(DataError, match="no such shard"):
        fetcher.head("hf://datasets/owner/name@v2/data/x.tar")


def test_small_files_come_from_the_hub_itself(fetcher: RoutingFetcher) -> None:
    stamp = fetcher.head("hf://datasets/owner/name/README.md")
    assert (stamp.size, stamp.version) == (10, '"small"')
    with fetcher.open(stamp) as stream:
        assert stream.read() == b"small file"
    with pytest.raises(DataError, match="whole shard"):
        fetcher.read(stamp, 3, 4)


def test_an_expired_address_is_asked_for_again(
    fetcher: RoutingFetcher, hub: Hub, files: FaultServer
) -> None:
    stamp = fetcher.head(PATH)
    assert fetcher.read(stamp, 0, 4) == CONTENT[:4]
    files.fail(Fault("status", status=403, times=1))
    assert fetcher.read(stamp, 4, 4) == CONTENT[4:8]
    assert [method for method, _ in hub.asked] == ["HEAD", "GET", "GET"]


def test_a_changed_file_is_an_integrity_error(fetcher: RoutingFetcher, hub: Hub) -> None:
    stamp = fetcher.head(PATH)
    hub.etag = "f" * 64
    with pytest.raises(DataError, match="changed") as caught:
        fetcher.read(stamp, 0, 4)
    assert caught.value.error_class == "integrity"


def test_a_push_does_not_reach_other_ranks(fetcher: RoutingFetcher, hub: Hub) -> None:
    """One rank looks at the shards and sends the stamps; all read the commit it saw."""
    stamp = fetcher.head(PATH)
    hub.head = NEXT
    other = RoutingFetcher(StorageSection(allow_private=True, max_tries=1))
    received = pickle.loads(pickle.dumps(stamp))
    assert other.read(received, 3, 9) == CONTENT[3:12]
    assert hub.asked[-1] == ("GET", f"/datasets/owner/name/resolve/{COMMIT}/data/x.tar")
    assert other.head(PATH).version != stamp.version, "vacuous"
    assert other.read(received, 4, 9) == CONTENT[4:13]
    other.close()


def test_a_commit_that_leaves_a_shard_alone_is_no_other_version(
    fetcher: RoutingFetcher, hub: Hub
) -> None:
    """So index, cache and a resumed run stay good."""
    one = fetcher.head("hf://datasets/owner/name/README.md")
    hub.head = NEXT
    two = fetcher.head("hf://datasets/owner/name/README.md")
    assert (one.pin, two.pin) == (COMMIT, NEXT)
    assert one == two


@pytest.mark.parametrize("name", ["MY_TOKEN", "HF_TOKEN"])
def test_white_space_around_a_token_is_removed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, f" {TOKEN}\r\n")
    credentials = {"hf_token": "${env:MY_TOKEN}"} if name == "MY_TOKEN" else {}
    fetcher = RoutingFetcher(StorageSection(allow_private=True, credentials=credentials))
    assert fetcher.head(PATH).size == len(CONTENT)
    fetcher.close()


@pytest.mark.parametrize("token", ["canary\nX-Other: 1", "canary\x7f", "canary\u20ac"])
def test_a_token_that_no_header_may_hold_is_refused_unseen(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("MY_TOKEN", token)
    fetcher = RoutingFetcher(
        StorageSection(allow_private=True, credentials={"hf_token": "${env:MY_TOKEN}"})
    )
    with pytest.raises(DataError, match="header Authorization") as caught:
        fetcher.head(PATH)
    assert "canary" not in "".join(traceback.format_exception(caught.value))
    assert hub.asked == []


def test_denial_shows_no_secret(fetcher: RoutingFetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-wrong")
    with pytest.raises(DataError, match="denied access") as caught:
        fetcher.head(PATH)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["hf://datasets/owner/x.tar", "hf://owner/name/x.tar", "hf://datasets/a/b/"]
)
def test_other_addresses_are_refused(fetcher: RoutingFetcher, hub: Hub, path: str) -> None:
    with pytest.raises(DataError, match="expected hf://datasets/"):
        fetcher.head(path)
    assert hub.asked == []
