"""obstore's errors in our words. Their own text may hold signatures and is not passed on."""

from __future__ import annotations

import re

from vlmpack.storage.faults import Changed, Refused, StoreFault, Transient

NO_PROXY_HERE = "127.0.0.1:1"
"""Where requests to any other host than a plain-HTTP endpoint are sent, to fail."""

_STATUS = re.compile(r"status code: (\d{3})")
_ODD_KEY = re.compile(r'path: "((?:[^"\\]|\\.)*)"')
_KIND = re.compile(r"kind: (Timeout|Connect|Interrupted|Request|Decode)\b")


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


def odd_listing(error: Exception) -> Refused:
    """Why a folder cannot be listed that has a key which obstore refuses."""
    found = _ODD_KEY.search(str(error))
    named = f"the key '{found[1]}'" if found else "a key"
    return Refused(
        f"its listing holds {named}, which has an empty part, a part '.' or '..', or a control "
        "character; rename that object, or write the shards out with a brace range such as "
        "train-{000..031}.tar"
    )
