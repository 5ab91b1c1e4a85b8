"""Credentials and settings of stores, and the places of caches. The recipe's `data.storage` gives
them, and the environment adds endpoints and credentials."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from vlmpack.addresses import SCHEMES, resolve_references, scheme_of, takes_endpoint
from vlmpack.errors import RecipeError
from vlmpack.recipe.data import StorageSection

MAX_CONCURRENT_READS = 16
"""Requests of one process at a time."""


def endpoint_of(storage: StorageSection, scheme: str) -> str | None:
    """The address of an object store, as configured or else by the environment. None for the
    cloud's."""
    addresses = (os.environ.get(name) for name in SCHEMES[scheme].endpoint_variables)
    return storage.endpoint or next((value for value in addresses if value), None)


def place_of(storage: StorageSection, path: str) -> str:
    """The server of a shard for messages, without login or query. Empty where the shard's address
    names it."""
    scheme = scheme_of(path)
    if scheme is None or not takes_endpoint(path):
        return ""
    endpoint = endpoint_of(storage, scheme)
    if endpoint is None:
        return f"{scheme}'s own endpoint" + (f" in {storage.region}" if storage.region else "")
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def secrets(storage: StorageSection, scheme: str) -> dict[str, str]:
    """The credentials that a scheme knows, resolved now.

    Raises:
        RecipeError: an environment variable that is not set.
    """
    values = {}
    for name in SCHEMES[scheme].credentials:
        reference = getattr(storage.credentials, name)
        if not reference:
            continue
        try:
            values[name] = resolve_references(reference)
        except KeyError as missing:
            raise RecipeError(
                f"data.storage.credentials.{name}: the environment variable "
                f"{missing.args[0]} is not set"
            ) from None
    return values


def default_cache_dir() -> Path:
    """The index's folder `$VLMPACK_CACHE/index`, or else `~/.cache/vlmpack/index`; other caches lie
    next to it."""
    root = os.environ.get("VLMPACK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "vlmpack") / "index"
