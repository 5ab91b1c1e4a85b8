"""A listing of an S3 bucket with every key as it is.

obstore gives up a whole page for one key with an empty, `.` or control part. Keys of that kind are
legal, so where it does, the pages are asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree

from vlmpack.storage.faults import Refused
from vlmpack.storage.http import HttpClient

NO_LISTING = "the store's listing cannot be read; write the shards out with a brace range"


def page_query(prefix: str, token: str) -> str:
    """The query of one page. Keys come quoted, since XML has no control characters.

    Args:
        prefix: of the keys.
        token: where the page before ended; empty for the first.
    """
    asked = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if token:
        asked["continuation-token"] = token
    return urlencode(asked, quote_via=quote, safe="")


def listed(
    client: HttpClient, sign: Callable[[str], str], prefix: str
) -> Iterator[tuple[str, int, str]]:
    """Key, size and ETag of what lies below a prefix; no key that ends with '/', which is the mark
    of a folder.

    Args:
        sign: the address of a page, from its query.
        prefix: of the keys.

    Raises:
        StoreFault: as the client's requests; Refused for an answer that is no listing.
    """
    token = ""
    while True:
        with client.request("GET", sign(page_query(prefix, token)), {}) as answer:
            body = b"".join(answer.chunks())
        try:
            page = ElementTree.fromstring(body)
            is_quoted = page.findtext("{*}EncodingType") == "url"
            for item in page.iterfind("{*}Contents"):
                key = item.findtext("{*}Key") or ""
                key = unquote_plus(key, errors="strict") if is_quoted else key
                if not key.endswith("/"):
                    size, tag = item.findtext("{*}Size"), item.findtext("{*}ETag")
                    yield key, int(size or ""), tag or item.findtext("{*}LastModified") or ""
        except (ElementTree.ParseError, ValueError):
            raise Refused(NO_LISTING) from None
        token = page.findtext("{*}NextContinuationToken") or ""
        if page.findtext("{*}IsTruncated") != "true" or not token:
            return
