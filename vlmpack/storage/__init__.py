"""Where bytes come from: local disks, object stores, HTTP servers, the Hugging Face hub.

`fetch.py` is the interface and local files; `sources.py` turns patterns into shards; `route.py`
sends an address to its transport; `remote.py` turns a transport's requests into exact reads, with
retries and resumed bodies; `objects.py`, `http.py` and `hub.py` are the transports; `guard.py` says
which hosts may be asked at all; `cache` keeps pieces of remote shards on a local disk. Nothing here
knows what a sample is.
"""

from vlmpack.storage.route import RoutingFetcher

__all__ = ["RoutingFetcher"]
