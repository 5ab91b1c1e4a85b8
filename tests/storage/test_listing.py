"""Globs in a bucket whose keys are odd: S3 takes any bytes, and folders leave marks."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, parse_qsl, quote, urlsplit

import boto3
import pytest
from botocore.config import Config
from support.fault_server import FaultServer
from support.s3_emulator import REGION, s3_server

from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.http import HttpClient
from vlmpack.storage.objects import ObjectTransport, listed
from vlmpack.storage.sources import stamped_shards
from vlmpack.storage.transport import Refused

UNREADABLE = ["x//b.tar", "x/./b.tar", "x/../b.tar", "x/\x01.tar", "x/a\tb.tar", "x/\x7f.tar"]
READABLE = ["x/a b.tar", "x/a+b.tar", "x/a%2Fb.tar", "x/a[1].tar", "x/é.tar", "x/a&b=c<d>.tar"]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket" / "x").mkdir(parents=True)
    (folder / "bucket" / "x" / "a.tar").write_bytes(b"first")
    with s3_server(folder) as found:
        yield found


class Bucket:
    """Keys put into the bucket, taken out again at the end."""

    def __init__(self, endpoint: str) -> None:
        config = Config(proxies={}, retries={"max_attempts": 1})
        self.endpoint = endpoint
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=config,
        )
        self.keys: list[str] = []

    def put(self, *keys: str, body: bytes = b"123") -> None:
        for key in keys:
            self.client.put_object(Bucket="bucket", Key=key, Body=body)
            self.keys.append(key)

    @property
    def section(self) -> StorageSection:
        """How it is reached."""
        return StorageSection(
            endpoint=self.endpoint,
            region=REGION,
            allow_private=True,
            credentials={
                "access_key_id": "${env:TEST_STORE_ID}",
                "secret_access_key": "${env:TEST_STORE_SECRET}",
            },
        )

    def shards(self, *patterns: str) -> list[str]:
        """Keys that the patterns name; each one is looked at and read."""
        fetcher = RoutingFetcher(self.section)
        names = [f"s3://bucket/{pattern}" for pattern in patterns]
        stamps = stamped_shards(names, key="data.train", fetcher=fetcher)
        for stamp in stamps:
            assert stamp == fetcher.head(stamp.path)
            assert len(fetcher.read(stamp, 0, stamp.size)) == stamp.size > 0
        fetcher.close()
        return [stamp.path.removeprefix("s3://bucket/") for stamp in stamps]


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("TEST_STORE_ID", "any")
    monkeypatch.setenv("TEST_STORE_SECRET", "any")
    made = Bucket(endpoint)
    yield made
    for key in made.keys:
        made.client.delete_object(Bucket="bucket", Key=key)


def test_a_key_that_is_not_read_leaves_the_other_globs_as_they_are(bucket: Bucket) -> None:
    bucket.put(*READABLE, "x/deep/b.tar")
    before = bucket.shards("x/*.tar"), bucket.shards("*/deep/*.tar")
    assert len(before[0]) == len(READABLE) + 1 and before[1] == ["x/deep/b.tar"], "vacuous"
    bucket.put("x//odd", "x/./odd", "x/../odd", "x/\x01odd", "x/a\todd", "x/\x7fodd")
    assert (bucket.shards("x/*.tar"), bucket.shards("*/deep/*.tar")) == before


@pytest.mark.parametrize("key", UNREADABLE)
def test_a_key_that_is_not_read_is_named_where_it_is_meant(bucket: Bucket, key: str) -> None:
    bucket.put(key)
    folder, _, name = key.rpartition("/")
    glob = f"{folder}/*.tar" if folder == "x" else f"x/*/{name}"
    for pattern in (glob, key):
        with pytest.raises(RecipeError, match=r"an empty part, a part '\.' or '\.\.'") as caught:
            bucket.shards(pattern)
        assert repr(f"s3://bucket/{key}") in str(caught.value)
    assert bucket.shards("x/*a.tar") == ["x/a.tar"]


def test_marks_of_folders_and_hidden_files_are_no_shards(bucket: Bucket) -> None:
    bucket.put("x/", "x/b.tar/", "x/a.tar/", body=b"")
    bucket.put("x/._a.tar", "x/.hidden/c.tar")
    assert bucket.shards("x/*.tar") == ["x/a.tar"]
    assert bucket.shards("x/.*.tar", "x/.h*/*.tar") == ["x/._a.tar", "x/.hidden/c.tar"]


@pytest.mark.parametrize(
    "name", ["x/a[1].tar", "x/a{1}.tar", "x/a{0..1}.tar", "x/a*.tar", "x/?.tar"]
)
def test_a_shard_that_is_there_wins_over_its_pattern(bucket: Bucket, name: str) -> None:
    bucket.put("x/a1.tar", "x/a0.tar")
    bucket.put(name, body=b"the one with a pattern's characters")
    assert bucket.shards(name) == [name]


def test_a_folder_that_is_there_wins_over_its_pattern(bucket: Bucket) -> None:
    bucket.put("run[1]/x-1.tar", "run1/x-2.tar")
    assert bucket.shards("run[1]/x-*.tar") == ["run[1]/x-1.tar"]
    assert bucket.shards("run?/x-*.tar") == ["run1/x-2.tar"]


def test_another_leading_slash_is_another_key(bucket: Bucket) -> None:
    with pytest.raises(RecipeError, match=r"'s3://bucket//x/a\.tar' has an empty part"):
        bucket.shards("/x/a.tar")
    fetcher = RoutingFetcher(bucket.section)
    for key in ("/x/a.tar", "x//a.tar", "x/./a.tar", "x/y/../a.tar"):
        with pytest.raises(DataError, match="an empty part"):
            fetcher.head(f"s3://bucket/{key}")
    fetcher.close()


def test_an_http_server_has_names_with_braces_too(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("x{0..1}.tar", "x0.tar", "x1.tar", "y0.tar", "y[1].tar"):
        (tmp_path / "b" / name).write_bytes(b"123")
    with FaultServer(tmp_path) as server:
        fetcher = RoutingFetcher(StorageSection(allow_private=True, max_tries=1))
        patterns = [
            f"{server.url}/b/{name}" for name in ("x{0..1}.tar", "y{0..0}.tar", "y%5B1%5D.tar")
        ]
        found = stamped_shards(patterns, key="k", fetcher=fetcher)
        names = [stamp.path.rpartition("/")[2] for stamp in found]
        assert names == ["x{0..1}.tar", "y0.tar", "y%5B1%5D.tar"]
        fetcher.close()


class Pages:
    """A client whose answers are given; keeps the addresses that it was asked for."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)
        self.asked: list[dict[str, list[str]]] = []

    def request(self, method: str, url: str, headers: dict[str, str]) -> Pages:
        self.asked.append(parse_qs(urlsplit(url).query))
        return self

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def chunks(self) -> list[bytes]:
        return [self.bodies.pop(0)]


def page(*keys: str, kind: str = "url", token: str = "") -> bytes:
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    rows = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;e&quot;</ETag></Contents>"
        for size, key in enumerate(keys)
    )
    coding = f"<EncodingType>{kind}</EncodingType>" if kind else ""
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f"<ListBucketResult xmlns='{space}'>{coding}{more if token else ''}{rows}"
    return f"{text}</ListBucketResult>".encode()


def test_a_listing_has_every_page_and_every_key_as_it_is() -> None:
    client = Pages(page("x/a%20b", "x/a+b", token="t/1="), page("x/%01", "x/%2B", "x/mark/"))
    found = list(listed(client, lambda query: f"https://host/b?{query}", "x/"))
    assert [key for key, _, _ in found] == ["x/a b", "x/a b", "x/\x01", "x/+"]
    assert found[1][1:] == (1, '"e"')
    assert [asked.get("continuation-token") for asked in client.asked] == [None, ["t/1="]]
    assert all(asked["prefix"] == ["x/"] for asked in client.asked)
    plain = listed(Pages(page("x/a+b%20", kind="")), lambda query: f"https://host/b?{query}", "x/")
    assert [key for key, _, _ in plain] == ["x/a+b%20"], "keys that are not quoted stay"


@pytest.mark.parametrize("body", [b"", b"<a", b"no listing", page("x/%ff"), b"\x00"])
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="cannot be read; write the shards out"):
        list(listed(Pages(body), lambda query: f"https://host/b?{query}", "x/"))


def test_pages_are_signed_as_amazon_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature of version 4, worked out here from its description."""
    monkeypatch.setenv("TEST_STORE_ID", "AKID")
    monkeypatch.setenv("TEST_STORE_SECRET", "the/secret")
    credentials = {
        "access_key_id": "${env:TEST_STORE_ID}",
        "secret_access_key": "${env:TEST_STORE_SECRET}",
    }
    asked: list[str] = []

    def request(self: HttpClient, method: str, url: str, headers: dict[str, str]) -> Pages:
        asked.append(url)
        return Pages(page("x/a.tar"))

    monkeypatch.setattr(HttpClient, "request", request)
    section = StorageSection(credentials=credentials, region="eu-west-1")
    (stamp,) = ObjectTransport(section)._listed_whole("s3://bucket/", "x y/")
    assert stamp.path == "s3://bucket/x/a.tar"
    parts = urlsplit(asked[0])
    assert (parts.netloc, parts.path) == ("s3.eu-west-1.amazonaws.com", "/bucket")
    values = dict(parse_qsl(parts.query, strict_parsing=True))
    assert values["prefix"] == "x y/" and values["list-type"] == "2"
    signature = values.pop("X-Amz-Signature")
    query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(values.items()))
    canonical = f"GET\n/bucket\n{query}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    moment, scope = values["X-Amz-Date"], values["X-Amz-Credential"].removeprefix("AKID/")
    assert scope == f"{moment[:8]}/eu-west-1/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = b"AWS4the/secret"
    for word in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"):
        key = hmac.digest(key, word.encode(), "sha256")
    assert key.hex() == signature


def test_elsewhere_the_odd_key_is_named_with_the_way_round_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Google's store, and on an S3 whose own listing cannot be read here."""
    (tmp_path / "bucket" / "x").mkdir(parents=True)
    (tmp_path / "bucket" / "x" / "a\tb.tar").write_bytes(b"1")
    with FaultServer(tmp_path) as server:
        section = StorageSection(
            endpoint=server.url, anonymous=True, allow_private=True, max_tries=1
        )
        fetcher = RoutingFetcher(section)
        with pytest.raises(DataError, match=r"the key 'x/a\\tb.tar'.*a brace range"):
            stamped_shards(["gs://bucket/x/*.tar"], key="k", fetcher=fetcher)
        with pytest.raises(RecipeError, match=r"'s3://bucket/x/a\\tb.tar' has an empty part"):
            stamped_shards(["s3://bucket/x/*.tar"], key="k", fetcher=fetcher)
        monkeypatch.setattr("vlmpack.storage.objects.listed", unreadable)
        with pytest.raises(DataError, match=r"the key 'x/a\\tb.tar'.*a brace range"):
            stamped_shards(["s3://bucket/x/*.tar"], key="k", fetcher=fetcher)
        fetcher.close()


def unreadable(*_: object) -> list[object]:
    raise Refused("no listing")


class ManyKeys(BaseHTTPRequestHandler):
    """ListObjectsV2 of many keys, 1,000 a page, as S3 answers it; every other request is a 404."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    num_keys = 0
    asked: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        first = int(query.get("continuation-token", ["0"])[0])
        self.asked.append(first)
        end = min(first + 1000, self.num_keys)
        token = f"<NextContinuationToken>{end}</NextContinuationToken>"
        rows = "".join(
            f"<Contents><Key>x/train-{n:06d}.tar</Key><Size>{n + 1}</Size><ETag>&quot;{n:032x}"
            "&quot;</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for n in range(first, end)
        )
        more = end < self.num_keys
        body = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token if more else ''}{rows}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.asked.append(-1)
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("count", [1000, 1001, 50_000])
def test_a_listing_costs_a_request_for_a_thousand_keys(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none for a shard, whose size and version the listing has."""
    monkeypatch.setattr(ManyKeys, "num_keys", count)
    monkeypatch.setattr(ManyKeys, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), ManyKeys) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        section = StorageSection(
            endpoint=endpoint, region=REGION, allow_private=True, anonymous=True
        )
        fetcher = RoutingFetcher(section)
        stamps = stamped_shards(["s3://bucket/x/*.tar"], key="data.train", fetcher=fetcher)
        fetcher.close()
        server.shutdown()
        thread.join()
    assert [stamp.size for stamp in stamps] == list(range(1, count + 1))
    assert stamps[-1].path == f"s3://bucket/x/train-{count - 1:06d}.tar"
    assert stamps[-1].version == f'"{count - 1:032x}"'
    assert ManyKeys.asked == list(range(0, count, 1000))
