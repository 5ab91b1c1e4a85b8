"""One fetcher for every address: local files, object stores, HTTP servers, the hub."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import BinaryIO

from vlmpack.addresses import SCHEMES, scheme_of
from vlmpack.errors import RecipeError, transport_error
from vlmpack.recipe.data import StorageSection, unsafe_storage
from vlmpack.recipe.problems import key_name
from vlmpack.storage.fetch import LocalFetcher, ShardStamp
from vlmpack.storage.remote import RemoteFetcher
from vlmpack.storage.transport import Transport


def make_transport(config: StorageSection, *, named: str) -> Transport:
    """The transport that a line of `addresses.SCHEMES` names, `module:Class`."""
    module, _, name = named.partition(":")
    made: Transport = getattr(import_module(f"vlmpack.storage.{module}"), name)(config)
    return made


class RoutingFetcher:
    """Sends each shard to the fetcher of its scheme; picklable.

    Raises:
        RecipeError: an endpoint without TLS that is not allowed, or a secret that is written out.
    """

    def __init__(self, config: StorageSection | None = None) -> None:
        config = StorageSection() if config is None else config
        if problems := unsafe_storage(config):
            raise RecipeError([f"{key_name(one.path)}: {one.message}" for one in problems])
        self.local = LocalFetcher()
        kinds = {scheme.transport for scheme in SCHEMES.values()}
        made = {n: RemoteFetcher(partial(make_transport, named=n), config) for n in kinds}
        self.remotes = {name: made[scheme.transport] for name, scheme in SCHEMES.items()}

    def head(self, path: str) -> ShardStamp:
        """See Fetcher."""
        return self._of(path).head(path)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Fetcher."""
        return self._of(prefix).list_shards(prefix)

    def open(self, stamp: ShardStamp) -> BinaryIO:
        """See Fetcher."""
        return self._of(stamp.path).open(stamp)

    def read(self, stamp: ShardStamp, offset: int, length: int) -> bytes:
        """See Fetcher."""
        return self._of(stamp.path).read(stamp, offset, length)

    def read_ranges(self, stamp: ShardStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See Fetcher."""
        return self._of(stamp.path).read_ranges(stamp, ranges)

    def close(self) -> None:
        """Closes files and forgets clients; the next read opens again."""
        self.local.close()
        for remote in self.remotes.values():
            remote.close()

    def _of(self, path: str) -> LocalFetcher | RemoteFetcher:
        scheme = scheme_of(path)
        if scheme is None:
            return self.local
        if scheme not in self.remotes:
            raise transport_error(
                f"'{scheme}:' is not read; expected a path or one of {', '.join(self.remotes)}",
                shard=path,
            )
        return self.remotes[scheme]
