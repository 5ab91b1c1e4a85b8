"""A scheme is a line in addresses.SCHEMES and a transport: here shards that lie in memory."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest
from support.recipes import MINIMAL
from support.shards import SHARD

from vlmpack.addresses import SCHEMES, Scheme, is_remote
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe import load_recipe
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.http import HttpTransport
from vlmpack.storage.hub import HubTransport
from vlmpack.storage.objects import ObjectTransport
from vlmpack.storage.remote import RoutingFetcher, make_transport
from vlmpack.storage.sources import expand_shards
from vlmpack.storage.transport import Changed

ADDRESS = "mem://shelf/val-000000.tar"


class MemoryTransport:
    """The whole of a new store: single requests, exact bytes, a listing."""

    def __init__(self, config):
        self.shards = {ADDRESS: SHARD.read_bytes()}

    def head(self, path):
        return ShardStamp(path, len(self.shards[path]), "1")

    def body(self, stamp, start, stop):
        if self.head(stamp.path) != stamp:
            raise Changed("other bytes than before")
        yield self.shards[stamp.path][start:stop]

    def list_shards(self, prefix):
        return [self.head(path) for path in self.shards if path.startswith(prefix)]

    def close(self):
        pass


@pytest.fixture
def mem(monkeypatch):
    module = ModuleType("vlmpack.storage.mem")
    module.MemoryTransport = MemoryTransport
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SCHEMES, "mem", Scheme(transport="mem:MemoryTransport", lists=True))


def test_its_shards_are_found_looked_at_and_read(mem):
    fetcher = pickle.loads(pickle.dumps(RoutingFetcher()))
    (found,) = expand_shards(["mem://shelf/val-*.tar"], key="data.train", fetcher=fetcher)
    assert found == ADDRESS and is_remote(ADDRESS)
    stamp, data = fetcher.head(ADDRESS), SHARD.read_bytes()
    assert stamp.size == len(data)
    assert fetcher.read(stamp, 512, 100) == data[512:612]
    assert fetcher.read_ranges(stamp, [(0, 3), (10**5, 7)]) == [data[:3], data[10**5 : 10**5 + 7]]


def test_a_recipe_may_name_it_and_a_program_still_may_not(mem):
    recipe = load_recipe(MINIMAL, {"data.train": ADDRESS})
    assert recipe.data.train[0].path == ADDRESS
    with pytest.raises(RecipeError, match="'pipe:' is not allowed"):
        load_recipe(MINIMAL, {"data.train": "pipe:cat x.tar"})


def test_without_its_line_it_is_not_read():
    with pytest.raises(
        DataError, match=r"'mem:' is not read; expected a path or one of s3, gs, az"
    ):
        RoutingFetcher().head(ADDRESS)


OURS = {
    **dict.fromkeys(("s3", "gs", "az"), ObjectTransport),
    **dict.fromkeys(("http", "https"), HttpTransport),
    "hf": HubTransport,
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_line_names_a_transport_that_can_be_made(scheme):
    from vlmpack.recipe.data import CredentialsSection, StorageSection

    transport = make_transport(StorageSection(), named=SCHEMES[scheme].transport)
    if scheme in OURS:  # what somebody adds is named in the table alone
        assert type(transport) is OURS[scheme]
    for name in ("head", "body", "list_shards", "close"):
        assert callable(getattr(transport, name))
    transport.close()
    assert set(SCHEMES[scheme].credentials) <= CredentialsSection.model_fields.keys()
