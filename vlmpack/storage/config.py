"""How stores are reached; a recipe's `data.storage` is mapped onto this."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from vlmpack.addresses import (
    CREDENTIALS,
    credential_problem,
    endpoint_problem,
    resolve_references,
    same_host,
    scheme_of,
)
from vlmpack.errors import RecipeError

ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Where object stores take an endpoint from that the recipe does not name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """How stores are reached. Holds references to secrets, never a secret."""

    endpoint: str | None = None
    """Of an S3-compatible server, or of another address for GCS or Azure. None: the cloud's own."""
    region: str | None = None
    """Of S3 buckets. None: AWS_REGION, else us-east-1."""
    anonymous: bool = False
    """Requests to s3, gs and az are not signed."""
    allow_private: bool | tuple[str, ...] = False
    """Whether private and loopback addresses, and endpoints without TLS, may be asked. True: the
    hosts of the endpoint and of the shards' own addresses, but none that a server redirects to.
    A list: these hosts, whoever names them."""
    credentials: Mapping[str, str] = field(default_factory=dict)
    """Name -> `${env:NAME}`. Empty: the cloud's usual chain."""
    connect_timeout_seconds: float = 5.0
    """The longest wait for a connection."""
    read_timeout_seconds: float = 30.0
    """The longest wait for the next bytes."""
    total_timeout_seconds: float = 600.0
    """The longest time of one request, its body included; what is left is then asked for again."""
    max_tries: int = 10
    """Tries of one request, the first included; a body that goes on starts the count again."""
    retry_seconds: float = 180.0
    """Without progress: no new try is begun so long after the first fault since bytes came."""
    max_concurrent_reads: int = 16
    """Requests of one process at a time."""

    def __post_init__(self) -> None:
        problems = []
        if self.endpoint is not None:
            problem = endpoint_problem(self.endpoint, allow_private=self.allows_private)
            problems += [f"data.storage.endpoint: {problem}"] if problem else []
        for name, value in self.credentials.items():
            if problem := credential_problem(name, value):
                problems.append(f"data.storage.credentials.{name}: {problem}")
        problems += [
            f"data.storage.{name}: {getattr(self, name)}; must be above 0"
            for name in (
                "connect_timeout_seconds",
                "read_timeout_seconds",
                "total_timeout_seconds",
                "retry_seconds",
            )
            if not 0 < getattr(self, name) < 1e7
        ]
        problems += [
            f"data.storage.{name}: {getattr(self, name)}; must be at least 1"
            for name in ("max_tries", "max_concurrent_reads")
            if getattr(self, name) < 1
        ]
        if problems:
            raise RecipeError(problems)

    def allows_private(self, host: str, *, is_named: bool = True) -> bool:
        """Whether a host may have a private address.

        Args:
            is_named: the endpoint or a shard's own address names it; a redirect does not.
        """
        if isinstance(self.allow_private, bool):
            return self.allow_private and is_named
        return same_host(host) in map(same_host, self.allow_private)

    def endpoint_of(self, scheme: str) -> str | None:
        """The address of an object store: the configured one, else the environment's, as the
        store's own client would take it; None for the cloud's."""
        found = (os.environ.get(name) for name in ENDPOINT_VARIABLES.get(scheme, ()))
        return self.endpoint or next((value for value in found if value), None)

    def place_of(self, path: str) -> str:
        """Whom a request for a shard goes to, for messages; no login, no query. Empty where the
        shard's address says it."""
        scheme = scheme_of(path)
        if scheme not in ENDPOINT_VARIABLES:
            return ""
        endpoint = self.endpoint_of(scheme)
        if endpoint is None:
            return f"{scheme}'s own endpoint" + (f" in {self.region}" if self.region else "")
        parts = urlsplit(endpoint)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def secrets(self, scheme: str) -> dict[str, str]:
        """The credentials that a scheme knows, resolved now.

        Raises:
            RecipeError: an environment variable that is not set.
        """
        found = {}
        for name in CREDENTIALS.get(scheme, ()):
            if name in self.credentials:
                try:
                    found[name] = resolve_references(self.credentials[name])
                except KeyError as missing:
                    raise RecipeError(
                        [
                            f"data.storage.credentials.{name}: the environment variable "
                            f"{missing.args[0]} is not set"
                        ]
                    ) from None
        return found
