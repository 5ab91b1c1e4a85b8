"""`hf://datasets/<owner>/<name>[@<revision>]/<path>`: data sets on the Hugging Face hub.

The hub answers with the file or a signed redirect to its bytes. The redirect is kept for a few
minutes so that the hub is asked rarely. The revision is pinned to a commit when the shard is looked
at. The pin travels with the stamp, so every process and rank reads that commit.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

from vlmpack.recipe.data import StorageSection
from vlmpack.storage.access import secrets
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.http import (
    Answer,
    HttpTransport,
    ranged,
    redirected,
    size_of,
    total_size,
    version_of,
)
from vlmpack.storage.transport import Changed, Refused, Transient

LOCATION_SECONDS = 300.0
"""How long a signed address is used."""

_PATH = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")


class HubTransport(HttpTransport):
    """Files of data set repositories."""

    def __init__(self, config: StorageSection) -> None:
        super().__init__(config)
        self.config = config
        self._locations: dict[ShardStamp, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def head(self, path: str) -> ShardStamp:
        """See Transport."""
        answer = self.client.request("HEAD", self.url(path), self._login(), follow=False)
        answer.close(reusable=True)
        size = answer.headers.get("x-linked-size")
        return ShardStamp(
            path,
            size_of(size) if size is not None else total_size(answer.headers),
            _hub_version(answer),
            pin=answer.headers.get("x-repo-commit", ""),
        )

    def body(self, stamp: ShardStamp, start: int, stop: int) -> Iterator[bytes]:
        """See Transport."""
        header = {"Range": f"bytes={start}-{stop - 1}"}
        location = self._location(stamp)
        if location is None:
            url = self.url(stamp.path, stamp.pin)
            headers = {**header, **self._login()}
            with self.client.request("GET", url, headers, follow=False) as answer:
                if _hub_version(answer) != stamp.version:
                    raise Changed("the shard changed after it was indexed: another ETag")
                if answer.status in (200, 206):
                    yield from ranged(answer, start, stop, stamp.size)
                    return
                answer.close(reusable=True)
            location = redirected(answer.url, answer.headers)
            with self._lock:
                self._locations[stamp] = (location, time.monotonic())
        try:
            answer = self.client.request("GET", location, header, named=self.url(stamp.path))
        except Refused as fault:
            with self._lock:
                was_known = self._locations.pop(stamp, None) is not None
            if was_known and "denied" in fault.reason:
                raise Transient("the signed address was refused; it may have expired") from None
            raise
        with answer:
            yield from ranged(answer, start, stop, stamp.size)

    def url(self, path: str, pin: str = "") -> str:
        """The address of a file, at a commit if one is given."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise Refused("expected hf://datasets/<owner>/<name>[@<revision>]/<path>")
        from huggingface_hub import constants, hf_hub_url

        try:
            return hf_hub_url(
                match["repo"],
                match["file"],
                repo_type="dataset",
                revision=pin or quote(match["revision"] or "main", safe=""),
                endpoint=os.environ.get("HF_ENDPOINT") or constants.ENDPOINT,
            )
        except ValueError:
            raise Refused("the address is no valid name of a file on the hub") from None

    def _location(self, stamp: ShardStamp) -> str | None:
        with self._lock:
            location, since = self._locations.get(stamp, ("", 0.0))
            return location if location and time.monotonic() - since < LOCATION_SECONDS else None

    def _login(self) -> dict[str, str]:
        from huggingface_hub import get_token

        token = secrets(self.config, "hf").get("hf_token") or get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}


def _hub_version(answer: Answer) -> str:
    return answer.headers.get("x-linked-etag") or version_of(answer.headers)
