"""Azure blob storage on loopback: azurite, from the npm registry (`npm install -g azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
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
from obstore.store import AzureStore

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
