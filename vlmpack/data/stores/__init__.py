"""Shards in object stores, on HTTP servers and on the Hugging Face hub.

`route.py` sends an address to its transport; `remote.py` turns a transport's requests into exact
reads, with retries and resumed bodies; `objects.py`, `http.py` and `hub.py` are the transports;
`guard.py` says which hosts may be asked at all.
"""

from vlmpack.data.stores.config import StorageConfig
from vlmpack.data.stores.route import RoutingFetcher

__all__ = ["RoutingFetcher", "StorageConfig"]
