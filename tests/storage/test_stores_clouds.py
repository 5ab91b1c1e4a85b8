"""`gs://` and `az://`.

Azure runs on azurite where that is installed. GCS runs on our own server, which speaks the XML
interface that obstore uses: emulators from PyPI speak the JSON one only.

Azure blob storage on loopback: azurite, from the npm registry (`npm install -g azurite`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import obstore
import pytest
from obstore.store import AzureStore
from support.fault_server import Fault, FaultServer

from vlmpack.errors import DataError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.sources import stamped_shards

ACCOUNT = "devstoreaccount1"
PUBLIC_KEY = (  # azurite's own, in its documentation
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
START_SECONDS = 30.0


def azurite() -> str | None:
    """The program, where it is installed."""
    return shutil.which("azurite-blob")


@contextmanager
def azure_server(folder: Path) -> Iterator[str]:
    """A server with nothing in it; yields the endpoint of its account."""
    program = azurite()
    assert program is not None
    log = folder / "azurite.log"
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *options, "--blobHost", "127.0.0.1", "--blobPort", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        try:
            yield f"{_address(log)}/{ACCOUNT}"
        finally:
            process.terminate()
            process.wait(timeout=10)


def make_container(endpoint: str, name: str) -> None:
    """A container, which obstore cannot make; signed with the account's key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    names = "".join(f"{key}:{value}\n" for key, value in headers.items())
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + "\n" * 12 + names + resource
    key = base64.b64decode(PUBLIC_KEY)
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"{endpoint}/{name}?restype=container"
    headers["Content-Length"] = "0"  # with a body, urllib would add a type that is not signed
    request = urllib.request.Request(url, method="PUT", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        assert answer.status == 201


def put(endpoint: str, container: str, name: str, body: bytes) -> None:
    """A blob; one that exists is replaced."""
    store = AzureStore(
        container,
        config={"account_name": ACCOUNT, "account_key": PUBLIC_KEY, "endpoint": endpoint},
        client_options={"allow_http": True},
    )
    obstore.put(store, name, body)


def _address(log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(rb"listens on (http://[0-9.]+:\d+)", log.read_bytes())
        if found:
            return found[1].decode()
        time.sleep(0.05)
    raise TimeoutError(f"azurite did not start: {log.read_text()}")


CONTENT = bytes(range(256)) * 400


def check_store(fetcher: RoutingFetcher, base: str) -> None:
    """Globs, braces, a stream and ranges; `base` holds x-000.tar, x-001.tar and other.txt."""
    globbed = stamped_shards([f"{base}/x-*.tar"], key="k", fetcher=fetcher)
    braced = stamped_shards([f"{base}/x-{{000..001}}.tar"], key="k", fetcher=fetcher)
    assert [stamp.path for stamp in globbed] == [f"{base}/x-000.tar", f"{base}/x-001.tar"]
    assert globbed == braced, "a glob and a brace range are the same shards, of the same version"
    assert globbed == tuple(fetcher.head(stamp.path) for stamp in globbed)
    stamp = globbed[0]
    assert stamp.size == len(CONTENT)
    assert fetcher.read_ranges(stamp, [(90_000, 7), (5, 3)]) == [
        CONTENT[90_000:90_007],
        CONTENT[5:8],
    ]
    with fetcher.open(stamp) as stream:
        assert stream.read() == CONTENT
    with pytest.raises(DataError, match="no such shard"):
        fetcher.head(f"{base}/y.tar")


def check_changed(fetcher: RoutingFetcher, path: str, change) -> None:
    stamp = fetcher.head(path)
    assert fetcher.read(stamp, 0, 4) == CONTENT[:4]
    change()
    with pytest.raises(DataError, match="changed") as caught:
        fetcher.read(stamp, 0, 4)
    assert caught.value.error_class == "integrity"


def test_gs_on_our_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "bucket" / "deep"
    folder.mkdir(parents=True)
    for name in ("x-000.tar", "x-001.tar", "other.txt"):
        (folder / name).write_bytes(CONTENT)
    with FaultServer(tmp_path) as server:
        config = StorageSection(endpoint=server.url, anonymous=True, allow_private=True)
        fetcher = RoutingFetcher(config)
        check_store(fetcher, "gs://bucket/deep")
        server.fail(Fault("truncate"), Fault("status"), Fault("reset"))
        stamp = fetcher.head("gs://bucket/deep/x-000.tar")
        assert fetcher.read(stamp, 0, len(CONTENT)) == CONTENT
        assert {"truncate", "status", "reset"} <= {request.fault for request in server.requests}

        def change() -> None:
            (folder / "x-001.tar").write_bytes(CONTENT[::-1])
            os.utime(folder / "x-001.tar", ns=(1, 1))

        check_changed(fetcher, "gs://bucket/deep/x-001.tar", change)


@pytest.mark.slow
@pytest.mark.skipif(azurite() is None, reason="needs azurite: npm install -g azurite")
def test_az_on_azurite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TEST_ACCOUNT_KEY", PUBLIC_KEY)
    with azure_server(tmp_path) as endpoint:
        make_container(endpoint, "box")
        for name in ("x-000.tar", "x-001.tar", "other.txt"):
            put(endpoint, "box", f"deep/{name}", CONTENT)
        config = StorageSection(
            endpoint=endpoint,
            allow_private=True,
            credentials={"account_name": ACCOUNT, "account_key": "${env:TEST_ACCOUNT_KEY}"},
        )
        fetcher = RoutingFetcher(config)
        check_store(fetcher, "az://box/deep")
        check_changed(
            fetcher,
            "az://box/deep/x-001.tar",
            lambda: put(endpoint, "box", "deep/x-001.tar", CONTENT[::-1]),
        )
        with pytest.raises(DataError, match="account_name"):
            RoutingFetcher(StorageSection(anonymous=True)).head("az://box/deep/x-000.tar")
        unsigned = StorageSection(
            endpoint=endpoint,
            allow_private=True,
            anonymous=True,
            credentials={"account_name": ACCOUNT},
        )
        with pytest.raises(DataError, match=r"denied|no such") as caught:
            RoutingFetcher(unsigned).head("az://box/deep/x-000.tar")
        assert PUBLIC_KEY not in str(caught.value)
