"""Where bytes come from: local disks, object stores, HTTP servers, the Hugging Face hub.

    fetch      the interface, and local files
    sources    from patterns to shards
    remote     sends an address to its transport, and makes exact reads of single requests, with
               retries and resumed bodies
    objects, http, hub   the transports
    guard      which hosts may be asked at all
    cache      pieces of remote shards on a local disk

Nothing here knows what a sample is.
"""

from vlmpack.storage.remote import RoutingFetcher

__all__ = ["RoutingFetcher"]
