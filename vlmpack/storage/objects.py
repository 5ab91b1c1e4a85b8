"""Object stores, by obstore: s3, gs and az.

obstore makes single requests here, since `remote.py` retries whatever fails, a body without a
length included. obstore follows redirects, but cannot leave the endpoint. With TLS it follows only
TLS, which no metadata service speaks. Without TLS every other host is sent to a proxy that does not
exist. Each answer is compared with the stamp, so no redirect brings another object's bytes. One gap
remains: an endpoint without TLS may redirect to another port of its own host.

obstore's errors are reworded, since their text may hold signatures. obstore also gives up a whole
page of a listing for one key with an empty, `.` or control part, which S3 allows. Then our own HTTP
client requests the pages.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode, urlsplit
from xml.etree import ElementTree

from vlmpack.addresses import scheme_of, unreadable_key
from vlmpack.errors import CapabilityError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage.access import endpoint_of, secrets
from vlmpack.storage.fetch import ShardStamp
from vlmpack.storage.guard import allowed_addresses
from vlmpack.storage.http import HttpClient
from vlmpack.storage.transport import Changed, Refused, StoreFault, Transient

NO_LISTING = "the store's listing cannot be read; write the shards out with a brace range"
NO_PROXY_HERE = "127.0.0.1:1"
"""Where requests to any other host than a plain-HTTP endpoint are sent, to fail."""
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED_KEY = re.compile(r'path: "((?:[^"\\]|\\.)*)"')
_KIND = re.compile(r"kind: (Timeout|Connect|Interrupted|Request|Decode)\b")
CHUNK_BYTES = 1 << 20
SIGNED_FOR = timedelta(minutes=15)
CREDENTIAL_TRIES = 3
"""Before anything was answered: on a machine without credentials the next try fails as well."""
_ENDPOINT_KEY = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
_MORE_TRIES = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15)}

# obstore's threads are one set per process, and a store that is made in a forked child waits for
# them for ever. So the process that first used it is remembered for all stores together.
_used_by: list[int] = []


class ObjectTransport:
    """`s3://bucket/key`, `gs://bucket/key`, `az://container/key`.

    Raises:
        CapabilityError: this process was forked from one that had used obstore.
    """

    def __init__(self, config: StorageSection) -> None:
        if _used_by and _used_by[0] != os.getpid():
            raise CapabilityError(
                f"this process ({os.getpid()}) was forked from one ({_used_by[0]}) that had "
                "already read from an object store. Its client does not survive a fork. Start "
                "workers by forkserver or spawn"
            )
        self.config = config
        self._stores: dict[tuple[str, str, bool], Any] = {}
        self._lock = threading.Lock()
        self._answered = False
        self._unsigned = 0

    def head(self, path: str) -> ShardStamp:
        """See Transport."""
        import obstore

        store, key = self._readable(path)
        with self._faults():
            stamp = _stamp(path, obstore.head(store, key))
            self._answered = True
            return stamp

    def body(self, stamp: ShardStamp, start: int, stop: int) -> Iterator[bytes]:
        """See Transport."""
        import obstore

        store, key = self._readable(stamp.path)
        options: dict[str, Any] = {"range": (start, stop)}
        if stamp.version.startswith('"'):
            options["if_match"] = stamp.version
        with self._faults():
            result = obstore.get(store, key, options=options)  # type: ignore[arg-type]
            self._answered = True
            stamped = _stamp(stamp.path, result.meta)
            if stamped != stamp:
                raise Changed(
                    f"the shard changed after it was indexed: {stamped.size} bytes, ETag "
                    f"{stamped.version}; {stamp.size} and {stamp.version} when it was indexed"
                )
            if tuple(result.range) != (start, stop):
                raise Transient("the store answers a range with another range")
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def list_shards(self, prefix: str) -> list[ShardStamp]:
        """See Transport."""
        import obstore
        from obstore.exceptions import InvalidPathError

        store, key = self._store(prefix, retries=self.config.max_tries - 1)
        base = prefix[: len(prefix) - len(key)]
        try:
            return [
                _stamp(f"{base}{item['path']}", item)
                for chunk in obstore.list(store, prefix=key.rstrip("/") or None)
                for item in chunk
            ]
        except InvalidPathError as error:
            if scheme_of(prefix) == "s3":
                with suppress(Refused):
                    return self._listed_whole(base, key)
            raise unreadable_listing(error) from None
        except Exception as error:
            fault = self._fault(error)
            if isinstance(fault, Refused) and "404" in fault.reason:
                bucket = prefix[len(f"{scheme_of(prefix)}://") :].partition("/")[0]
                raise Refused(
                    f"there is no bucket {bucket!r} (404); check its name, data.storage.endpoint "
                    "and data.storage.region"
                ) from None
            raise fault from None

    def close(self) -> None:
        """See Transport."""
        with self._lock:
            self._stores.clear()

    def _listed_whole(self, base: str, prefix: str) -> list[ShardStamp]:
        """A listing of S3 that obstore gives up. obstore still signs the pages. It is
        given an endpoint that ends in a page's query, and appends the '/' of a key."""
        import obstore

        bucket = base.partition("://")[2].rstrip("/")
        regions = (self.config.region, *map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION")))
        region = next(filter(None, regions), "us-east-1")
        place = endpoint_of(self.config, "s3") or f"https://s3.{region}.amazonaws.com"

        def sign(query: str) -> str:
            page = f"{place.rstrip('/')}/{bucket}?{query}&x-id="
            if self.config.anonymous:
                return f"{page}/"
            signer = self._make("s3", bucket, 0, page=page)
            return str(obstore.sign(signer, "GET", "", SIGNED_FOR))

        client = HttpClient(self.config)
        with self._faults():
            return [
                ShardStamp(base + key, size, tag) for key, size, tag in listed(client, sign, prefix)
            ]

    def _readable(self, path: str) -> tuple[Any, str]:
        """As `_store`, for one object."""
        if problem := unreadable_key(path):
            raise Refused(problem)
        return self._store(path)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except StoreFault:
            raise
        except Exception as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> StoreFault:
        """The fault; a machine's role that does not answer now may do so next time."""
        fault = fault_of(error)
        if isinstance(fault, NoCredentials):
            self._unsigned += 1
            if self._answered or self._unsigned < CREDENTIAL_TRIES:
                return Transient(fault.reason)
        return fault

    def _store(self, path: str, *, retries: int = 0) -> tuple[Any, str]:
        """The client of a bucket, and the key in it."""
        scheme, _, rest = path.partition("://")
        bucket, _, key = rest.partition("/")
        with self._lock:
            name = scheme, bucket, bool(retries)
            if name not in self._stores:
                self._stores[name] = self._make(scheme, bucket, retries)
            return self._stores[name], key

    def _make(self, scheme: str, bucket: str, retries: int, page: str | None = None) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        if not _used_by:
            _used_by.append(os.getpid())
        config = self.config
        options: dict[str, Any] = {**secrets(config, scheme)}
        if config.anonymous:
            options["skip_signature"] = True
        endpoint = endpoint_of(config, scheme)  # the environment's too, so that the guard sees it
        if endpoint is not None:
            options[_ENDPOINT_KEY[scheme]] = endpoint
        if page is not None:
            options |= {"endpoint": page, "virtual_hosted_style_request": True}
        if scheme == "s3" and config.region is not None:
            options["region"] = config.region
        client = self._client_options(endpoint)
        retry = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=config.retry_seconds),
            "backoff": {**_MORE_TRIES, "base": 2},
        }
        provider = None
        if scheme == "s3" and "access_key_id" not in options and not config.anonymous:
            provider = _profile()
        make: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
        try:
            return make(
                bucket,
                config=options,
                client_options=client,
                retry_config=retry,
                credential_provider=provider,
            )
        except Exception as error:
            raise invalid_configuration(error) from None

    def _client_options(self, endpoint: str | None) -> dict[str, Any]:
        config = self.config
        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=config.connect_timeout_seconds),
            "read_timeout": timedelta(seconds=config.read_timeout_seconds),
            "timeout": timedelta(seconds=config.total_timeout_seconds),
            "allow_http": False,
        }
        if endpoint is None:
            return options
        parts = urlsplit(endpoint)
        host, plain = parts.hostname or "", parts.scheme == "http"
        if plain and not config.allows_private(host):
            raise Refused(
                "the endpoint has no TLS; use https://, or set data.storage.allow_private: true "
                "if it lies in a private network"
            )
        port = parts.port or (80 if plain else 443)
        allowed_addresses(host, port, allow_private=config.allows_private(host))
        if plain:
            options |= {
                "allow_http": True,
                "proxy_url": f"http://{NO_PROXY_HERE}",
                "proxy_excludes": host,
            }
        return options


def _stamp(path: str, meta: Any) -> ShardStamp:
    version = meta["e_tag"] or meta["last_modified"].isoformat()
    return ShardStamp(path, int(meta["size"]), str(version))


def _profile() -> Any:
    """Credentials from ~/.aws, which obstore does not read; None where its own chain has some.
    Raises Refused for a named profile without boto3.

    Raises:
        Refused: a profile is asked for by name, and boto3 is not installed.
    """
    chain = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    named = os.environ.get("AWS_PROFILE")
    files = [
        Path(os.environ.get(variable) or Path.home() / ".aws" / name)
        for variable, name in (
            ("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            ("AWS_CONFIG_FILE", "config"),
        )
    ]
    if not named:
        if any(os.environ.get(name) for name in chain):
            return None
        if not any(file.is_file() for file in files):
            return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if named:
            raise Refused(
                f"AWS_PROFILE is {named}, and profiles are read by boto3, which is not "
                "installed: pip install boto3"
            ) from None
        return None
    session = boto3.Session()
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


def page_query(prefix: str, token: str) -> str:
    """The query of one page; `token` is the end of the page before. Keys are quoted, since XML has
    no control characters."""
    query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
    if token:
        query["continuation-token"] = token
    return urlencode(query, quote_via=quote, safe="")


def listed(
    client: HttpClient, sign: Callable[[str], str], prefix: str
) -> Iterator[tuple[str, int, str]]:
    """Key, size and ETag below a prefix, without keys that end with '/', which mark folders.

    Args:
        sign: the address of a page, from its query.

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


class NoCredentials(Refused):
    """Neither the configuration nor the usual places have credentials, or they do not answer."""


def fault_of(error: Exception) -> StoreFault:
    """What went wrong, from what obstore raised."""
    from obstore import exceptions

    text = str(error)
    match = _STATUS.search(text)
    status = int(match[1]) if match else None
    if isinstance(error, FileNotFoundError):
        return Refused("the store has no such shard (404); check bucket, key and endpoint")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Refused(
            f"the store denied access ({status or 403}); see data.storage.credentials, or set "
            "data.storage.anonymous: true for a public bucket"
        )
    if isinstance(error, exceptions.PreconditionError):
        return Changed("the shard changed after it was indexed: another ETag")
    if not isinstance(error, exceptions.GenericError):
        return Refused(f"the store's client refused the request ({type(error).__name__})")
    if "169.254." in text or "metadata.google" in text:
        return NoCredentials(
            "no credentials were found; see data.storage.credentials, or set "
            "data.storage.anonymous: true for a public bucket"
        )
    if NO_PROXY_HERE in text:
        return Refused("the store redirected to another host, which is not followed")
    return _generic(text, status)


def _generic(text: str, status: int | None) -> StoreFault:
    if status == 416:
        return Changed("the shard is shorter than when it was indexed")
    if status is not None and 300 <= status < 400:
        return Refused(
            f"the store redirected ({status}), which is not followed; a bucket of another region "
            "needs data.storage.region"
        )
    if status in (408, 425, 429) or (status is not None and status >= 500):
        return Transient(f"the store answered {status}")
    if status is not None:
        return Refused(f"the store answered {status}")
    if "Content-Length Header missing" in text:
        return Transient("the store's answer has no length, so its end cannot be checked")
    if "without LOCATION" in text:
        return Refused(
            "the store redirected without an address; the bucket is in another region, see "
            "data.storage.region"
        )
    if "builder error" in text or "URL scheme is not allowed" in text:
        return Refused("the endpoint, or a redirect, has no TLS, which is not followed")
    kind = _KIND.search(text)
    reasons = {
        "Timeout": "the store does not answer within the connect or read timeout of data.storage",
        "Connect": "the store cannot be reached",
        "Interrupted": "the connection broke off",
    }
    return Transient(reasons.get(kind[1] if kind else "", "the request failed"))


def invalid_configuration(error: Exception) -> Refused:
    """Why obstore makes no client."""
    if "Account must be specified" in str(error):
        return Refused(
            "Azure needs the storage account: set data.storage.credentials.account_name, or "
            "AZURE_STORAGE_ACCOUNT_NAME"
        )
    return Refused(
        f"the store's client cannot be made ({type(error).__name__}); see endpoint, region and "
        "credentials of data.storage"
    )


def unreadable_listing(error: Exception) -> Refused:
    """Why a folder cannot be listed that has a key which obstore refuses."""
    match = _REFUSED_KEY.search(str(error))
    named = f"the key '{match[1]}'" if match else "a key"
    return Refused(
        f"its listing holds {named}, which has an empty part, a part '.' or '..', or a control "
        "character. Rename that object, or list the shards with a brace range like "
        "train-{000..031}.tar"
    )
