"""Addresses of shards: which schemes there are, and how secrets stay out of everything written.

A secret is never part of an address. `https://${env:USER}:${env:PASSWORD}@host/x.tar` and
`https://host/x.tar?${env:SIGNATURE}` name environment variables; the reference is what is shown,
saved and compared, and only the request itself holds the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

OBJECT_SCHEMES = ("s3", "gs", "az")
HTTP_SCHEMES = ("http", "https")
REMOTE_SCHEMES = (*OBJECT_SCHEMES, *HTTP_SCHEMES, "hf")

CREDENTIALS: Mapping[str, tuple[str, ...]] = {
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "gs": ("service_account_key", "bearer_token"),
    "az": ("account_name", "account_key", "sas_token", "bearer_token"),
    "hf": ("hf_token",),
}
"""The names in `data.storage.credentials` that a scheme knows."""
CREDENTIAL_NAMES = tuple(dict.fromkeys(name for names in CREDENTIALS.values() for name in names))
_NOT_SECRET = ("account_name",)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(pipe|exec|sh|cmd|file):", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_NAME = re.compile(r"sig|token|secret|passw|credential|key|auth", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/\s@]*@")
_QUERY = re.compile(r"(https?://[^\s?\"'<>]*)\?[^\s\"'<>]*")


def scheme_of(address: str) -> str | None:
    """The scheme in lower case, or None for a plain path."""
    match = _SCHEME.match(address)
    return (match[1] or match[2]).lower() if match else None


def is_remote(address: str) -> bool:
    """Whether the bytes lie in a store or on a server."""
    return scheme_of(address) in REMOTE_SCHEMES


def is_reference(text: str) -> bool:
    """Whether a text is `${env:NAME}` and nothing else."""
    return _REFERENCE.fullmatch(text) is not None


def without_references(text: str) -> str:
    """The text without its `${env:NAME}`."""
    return _REFERENCE.sub("", text)


def secret_in(address: str) -> str | None:
    """What is wrong with an address that holds a literal secret; it is not quoted. Else None."""
    bare = without_references(address)
    parts = urlsplit(bare)
    if "@" in parts.netloc and parts.netloc.rpartition("@")[0].strip(":"):
        return (
            "holds a user name or password; put them into environment variables and write "
            "'${env:NAME}' in their place"
        )
    if parts.scheme.lower() in HTTP_SCHEMES:
        for name, value in parse_qsl(parts.query):
            if value and _SECRET_NAME.search(name):
                return (
                    f"holds a secret in its query ({name}); put the query into an environment "
                    "variable and write '?${env:NAME}' in its place"
                )
    return None


def credential_problem(name: str, value: str) -> str | None:
    """What is wrong with an entry of `data.storage.credentials`; its value is not quoted."""
    if name not in CREDENTIAL_NAMES:
        return f"unknown name; expected one of {', '.join(CREDENTIAL_NAMES)}"
    if name in _NOT_SECRET or is_reference(value):
        return None
    return "must name an environment variable, as '${env:NAME}'; a recipe holds no secret"


def endpoint_problem(endpoint: str, *, allow_private: bool) -> str | None:
    """What is wrong with `data.storage.endpoint`; a secret in it is not quoted."""
    parts = urlsplit(endpoint)
    if parts.scheme not in HTTP_SCHEMES or not parts.hostname:
        return "expected an address such as https://minio.example.org"
    if "@" in parts.netloc or parts.query:
        return "takes no user and no query; see data.storage.credentials"
    if parts.scheme == "http" and not allow_private:
        return (
            "http:// is for stores in a private network; use https://, or set "
            "data.storage.allow_private: true"
        )
    return None


def resolve_references(text: str) -> str:
    """The text with each `${env:NAME}` replaced by the variable's value.

    Raises:
        KeyError: the name of a variable that is not set.
    """
    return _REFERENCE.sub(lambda match: os.environ[match[1]], text)


def redacted(text: str) -> str:
    """A text without the user names, passwords and queries of the addresses in it."""
    return _QUERY.sub(r"\1?***", _LOGIN.sub("://***@", text))
