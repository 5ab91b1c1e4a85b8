"""Addresses of shards: which schemes there are, and how secrets stay out of all that is written.

A secret is never part of an address. `https://${env:USER}:${env:PASSWORD}@host/x.tar` and
`https://host/x.tar?${env:SIGNATURE}` name environment variables. The reference is shown, saved and
compared, and only the request holds the value. Secrets cannot be told from other text, so an HTTP
address has no query but references and a few known parameters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What addresses of a scheme can do, and what reads them.

    Args:
        transport: `module:Class` below `vlmpack.storage`, a `transport.Transport`; loaded when an
            address of the scheme is first asked for.
        lists: whether folders can be listed, so that globs work.
        listing_stamps: whether a listing has the version that a request has, quotes and all.
        endpoint_variables: where an endpoint is taken from that `data.storage.endpoint` does not
            name; empty where addresses name the host themselves.
        credentials: names in `data.storage.credentials` that it knows.
    """

    transport: str
    lists: bool = False
    listing_stamps: bool = False
    endpoint_variables: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()


SCHEMES: Mapping[str, Scheme] = {
    "s3": Scheme(
        transport="objects:ObjectTransport",
        lists=True,
        listing_stamps=True,
        endpoint_variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        credentials=("access_key_id", "secret_access_key", "session_token"),
    ),
    "gs": Scheme(
        transport="objects:ObjectTransport",
        lists=True,
        endpoint_variables=("GOOGLE_BASE_URL",),
        credentials=("service_account_key", "bearer_token"),
    ),
    "az": Scheme(
        transport="objects:ObjectTransport",
        lists=True,
        endpoint_variables=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        credentials=("account_name", "account_key", "sas_token", "bearer_token"),
    ),
    "http": Scheme(transport="http:HttpTransport"),
    "https": Scheme(transport="http:HttpTransport"),
    "hf": Scheme(transport="hub:HubTransport", credentials=("hf_token",)),
}
"""Every scheme of shards; a new one is a line here and its transport."""

HTTP_SCHEMES = ("http", "https")
_NOT_SECRET = ("account_name",)

RECORD_FILES: Mapping[str, tuple[str, ...]] = {
    "JSONL": (".jsonl", ".ndjson"),
    "JSON": (".json",),
    "CSV": (".csv",),
    "TSV": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
"""Files of records that are no shards: what they are called, and how their names end."""
PYTHON = "Python"
"""The kind of records that come from a program instead of a file."""
_COMPRESSED = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".tzst", ".lz4")
_OTHER_FILES = (".txt", ".zip", ".yaml", ".yml", ".idx")
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"})
"""How the names of images end."""

_CONTROL = re.compile("[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(pipe|exec|sh|cmd|file):", re.IGNORECASE)
_REGISTERED = re.compile(r"python:([A-Za-z0-9._-]+)")
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_ADDRESS = re.compile(r"(?P<scheme>[^:/]+://)(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_PLAIN_PARAMETERS = frozenset(
    {"version", "versionid", "generation", "snapshot", "revision", "ref"}
    | {"download", "dl", "raw", "alt", "format", "file", "part", "shard"}
)
# Each of these takes an address whole, whether it holds the part that is looked for or not: a text
# of many addresses would else be read again from each of them.
_HTTP_LOGIN = re.compile(r"(https?://)(\S*)", re.IGNORECASE)
_LOGIN = re.compile(r"://([^/\s]*)@")
_QUERY = re.compile(r"(https?://[^\s?#\"'<>]*)(?:\?([^\s#\"'<>]*))?", re.IGNORECASE)
_FRAGMENT = re.compile(r"((?:https?|hf)://[^\s#\"'<>]*)(#[^\s\"'<>]+)?", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>]+")
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|sk-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
"""What the services of this field give out, by its first letters."""
_SECRET_NAMES = (
    r"(?:access|account|api|auth|bearer|id|private|refresh|sas|session|shared)"
    r"[ _-]?(?:token|key|secret)|(?:client[_-]?)?secret|token|passw(?:or)?d|passphrase|pwd|jwt|hmac"
    r"|sig|signature|auth|authorization|bearer|credentials?"
)
_NAMED_SECRET = re.compile(
    rf"(?<![A-Za-z0-9])((?:{_SECRET_NAMES})(?:=|:|%3[ad]))([^/&;,?#\s\"'<>]+)", re.IGNORECASE
)
"""A value behind the name of a secret, `token=...`, wherever it stands in an address."""
_RANDOM = re.compile(
    r"(?<![A-Za-z0-9])(?=[A-Za-z0-9]*[a-z])(?=[A-Za-z0-9]*[A-Z])(?=(?:[A-Za-z]*[0-9]){3})"
    r"[A-Za-z0-9]{24,}(?![A-Za-z0-9])"
)
"""A long word with both cases and digits, which people do not write. Digests have one case."""
_SAID_SECRET = re.compile(
    rf"(?<![A-Za-z0-9])((?:{_SECRET_NAMES})[\"']?(?:\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?"
    r"|\s+[\"']?(?=[^\s\"',;]*[0-9])))[^\s\"',;]+",
    re.IGNORECASE,
)
"""As above in a sentence: `'api_key': 'x'`, `Authorization: Bearer x`, `token x1`. Without a sign
between them, a word without a digit is an ordinary word."""
_SAID_RANDOM = re.compile(r"(?<![\w-])(?=(?:[A-Za-z_-]*[0-9]){3})[\w-]{20,}(?![\w-])")
SHORTEST_SECRET = 6
"""The fewest characters of a value that is hidden. Shorter ones occur in other words."""
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def scheme_of(address: str) -> str | None:
    """The scheme in lower case, or None for a plain path."""
    match = _SCHEME.match(address)
    return (match[1] or match[2]).lower() if match else None


def takes_endpoint(address: str) -> bool:
    """Whether the address is one of an object store, whose host `data.storage.endpoint` names."""
    scheme = SCHEMES.get(scheme_of(address) or "")
    return scheme is not None and bool(scheme.endpoint_variables)


def registered_name(text: str) -> str | None:
    """The NAME of `python:NAME`, a value that a program passes to `vlmpack.finetune`; None for
    other text."""
    match = _REGISTERED.fullmatch(text)
    return match[1] if match else None


def is_remote(address: str) -> bool:
    """Whether the bytes lie in a store or on a server."""
    return scheme_of(address) in SCHEMES


def no_shard(address: str) -> str | None:
    """Why a file with this ending is not read, to complete "'x' ..."; None for others."""
    name = _file_name(address)
    if name.endswith(_COMPRESSED):
        return "is compressed, and compressed shards are not read: decompress it"
    ends = ", ".join(end for ends in RECORD_FILES.values() for end in ends)
    if name.rpartition(".")[2] in IMAGE_SUFFIXES:
        return f"is an image; name the file of records ({ends}) that names it, or a tar shard"
    if name.endswith(_OTHER_FILES):
        return f"is no tar shard, and no file of records ({ends}); docs/data.md says what is read"
    return None


def unreadable_key(address: str) -> str | None:
    """Why an object store's key cannot be read, to complete "'x' ..."; None for others."""
    if not takes_endpoint(address):
        return None
    parts = address.partition("://")[2].split("/")[1:]
    if not _CONTROL.search(address) and not {"", ".", ".."} & set(parts):
        return None
    return (
        "has an empty part, a part '.' or '..', or a control character in its key, which is not "
        "read. Rename the object"
    )


@lru_cache(maxsize=4096)  # asked for each sample that is read
def record_kind(address: str) -> str | None:
    """Which of RECORD_FILES an address is by its name's end, or PYTHON; None for a shard."""
    if registered_name(address) is not None:
        return PYTHON
    name = _file_name(address)
    return next((kind for kind, ends in RECORD_FILES.items() if name.endswith(ends)), None)


def _file_name(address: str) -> str:
    name = address.partition("?")[0] if is_remote(address) else address
    return name.rpartition("/")[2].lower()


def is_reference(text: str) -> bool:
    """Whether a text is `${env:NAME}` and nothing else."""
    return _REFERENCE.fullmatch(text) is not None


def unset_references(text: str) -> list[str]:
    """The variables that a text refers to and that are not set here."""
    return [name for name in _REFERENCE.findall(text) if name not in os.environ]


def without_references(text: str) -> str:
    """The text without its `${env:NAME}`."""
    return _REFERENCE.sub("", text)


def secret_in(address: str) -> str | None:
    """The problem of an address with a literal secret, which is not quoted. Else None."""
    match = _ADDRESS.match(address)
    if match is None:
        return None
    if without_references(match["authority"].rpartition("@")[0]).strip(":"):
        if takes_endpoint(address):
            return (
                "holds a user name or password; write the address without them, and '${env:NAME}' "
                "in place of each in data.storage.credentials"
            )
        return (
            "holds a user name or password; put each into an environment variable and write "
            "'${env:NAME}' in its place"
        )
    if _TOKEN.search(without_references(match["rest"])):
        return (
            "has what looks like a token; put it into an environment variable and write "
            "'${env:NAME}' in its place"
        )
    if scheme_of(address) not in HTTP_SCHEMES:
        return None
    before, _, query = match["rest"].partition("?")
    if _without_named(before) != before:
        return (
            "has the name of a secret and a value in its path. Put the value into an environment "
            "variable and write '${env:NAME}' in its place"
        )
    if "@" in before:
        return (
            "holds '@' after its host, as a login with '/' or '#' does. Write a login as "
            "'${env:USER}:${env:NAME}@' before the host, and '%40' for '@' in a path"
        )
    if "#" in match["rest"]:
        return "has a fragment ('#...'), which is never sent; write '%23' for '#' in a path"
    if any(_may_be_secret(item) for item in re.split("[&;]", query)):
        return (
            "has a query that may hold a secret. Put the query into an environment variable and "
            "write '?${env:NAME}' in its place, or '${env:NAME}' in place of each value. Plain "
            f"values may have {', '.join(sorted(_PLAIN_PARAMETERS))}"
        )
    return None


def _may_be_secret(item: str) -> bool:
    """Whether a parameter of a query is neither made of references nor one of the known ones."""
    name, _, value = item.partition("=")
    if name.lower() in _PLAIN_PARAMETERS or not without_references(item):
        return False
    return not value or without_references(value) != ""


def credential_problem(name: str, value: str) -> str | None:
    """The problem of an entry of `data.storage.credentials`. Its value is not quoted."""
    if name in _NOT_SECRET or is_reference(value):
        return None
    return "must name an environment variable, as '${env:NAME}'; a recipe holds no secret"


def same_host(host: str) -> str:
    """A host as it is compared: in lower case, without brackets or a last dot."""
    return host.strip().strip("[]").rstrip(".").lower()


def endpoint_problem(endpoint: str, *, allow_private: Callable[[str], bool]) -> str | None:
    """The problem of `data.storage.endpoint`, without quoting a secret in it. `allow_private` says
    whether a host may have a private address."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        return "expected an address such as https://minio.example.org"
    if parts.scheme not in HTTP_SCHEMES or not parts.hostname:
        return "expected an address such as https://minio.example.org"
    if "@" in parts.netloc or parts.query:
        return "takes no user and no query; see data.storage.credentials"
    if parts.scheme == "http" and not allow_private(parts.hostname):
        return (
            "http:// is for stores in a private network; use https://, or set "
            "data.storage.allow_private: true"
        )
    return None


def resolve_references(text: str) -> str:
    """The text with each `${env:NAME}` replaced by the variable's value, stripped of white space,
    since tokens from files end in a newline.

    Raises:
        KeyError: the name of a variable that is not set.
    """
    return _REFERENCE.sub(lambda match: os.environ[match[1]].strip(), text)


def resolve_address(address: str) -> str:
    """An address to ask, with its secrets. Values before the host's '@' are quoted, so that a '/'
    or '@' in a password does not change the host.

    Raises:
        KeyError: the name of a variable that is not set.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return resolve_references(address)
    login, at, host = match["authority"].rpartition("@")
    login = _REFERENCE.sub(
        lambda reference: quote(os.environ[reference[1]].strip(), safe=""), login
    )
    return f"{match['scheme']}{login}{at}{resolve_references(host + match['rest'])}"


def redacted(text: str) -> str:
    """A text without user names, passwords, queries, fragments and tokens of its addresses.
    `${env:NAME}` is no secret and stays."""
    text = _HTTP_LOGIN.sub(_without_login, text)
    text = _LOGIN.sub(lambda match: f"://{_hidden_login(match[1])}@", text)
    text = _QUERY.sub(_without_query, text)
    text = _FRAGMENT.sub(lambda match: f"{match[1]}#***" if match[2] else match[1], text)
    return _IN_ADDRESS.sub(_without_words, text)


def without_secrets(text: str) -> str:
    """Foreign text without anything that may be a secret: `redacted`, without values after names of
    secrets, long words with digits (digests too), and values of secret environment variables."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    text = _SAID_SECRET.sub(r"\1***", redacted(text))
    return _SAID_RANDOM.sub("***", _TOKEN.sub("***", text))


def _without_words(match: re.Match[str]) -> str:
    host, slash, path = match[0].partition("/")
    text = host + slash + _without_named(path)
    return _RANDOM.sub("***", _TOKEN.sub("***", text))


def _without_named(path: str) -> str:
    """A path without the values of secrets that it names."""
    return _NAMED_SECRET.sub(
        lambda match: f"{match[1]}***" if without_references(match[2]) else match[0], path
    )


def _without_login(match: re.Match[str]) -> str:
    login, at, rest = match[2].rpartition("@")
    return f"{match[1]}{_hidden_login(login)}@{rest}" if at else match[0]


def _without_query(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f"{match[1]}?{_hidden_query(match[2])}"


def _hidden_login(login: str) -> str:
    return "***" if without_references(login).strip(":") else login


def _hidden_query(query: str) -> str:
    return "***" if any(map(_may_be_secret, re.split("[&;]", query))) else query
