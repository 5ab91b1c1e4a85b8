"""How remote shards are reached, and what is kept of them: `data.storage` and `data.cache`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from vlmpack.addresses import credential_problem, endpoint_problem, same_host
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.sources import Section, as_tuple

Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(same_host)]
"""A name or an address, without scheme and port."""


class CacheSection(Section):
    """Pieces of remote shards, kept on a local disk once they were fetched; checked on every use.
    Local shards are never copied."""

    directory: str | None = Field(default=None, min_length=1)
    """Folder on a local disk; runs may share it. Null: `blocks` in `$VLMPACK_CACHE`, or in
    `~/.cache/vlmpack`."""

    max_bytes: int = Field(default=16 << 30, ge=0)
    """The most it may hold, in bytes; what was used longest ago goes first. 0: no cache, so that
    a shard is fetched once for its index and again for its samples."""


class CredentialsSection(Section):
    """Names of environment variables, as `${env:NAME}`; never a secret itself. Null: the cloud's
    usual places."""

    access_key_id: str | None = Field(default=None, examples=["${env:MINIO_USER}"])
    """S3: the name of a key."""

    secret_access_key: str | None = Field(default=None, examples=["${env:MINIO_PASSWORD}"])
    """S3: the key itself."""

    session_token: str | None = Field(default=None, examples=["${env:MY_SESSION_TOKEN}"])
    """S3, for temporary credentials."""

    service_account_key: str | None = Field(default=None, examples=["${env:MY_SERVICE_ACCOUNT}"])
    """GCS: the JSON text of the key."""

    bearer_token: str | None = Field(default=None, examples=["${env:MY_TOKEN}"])
    """GCS and Azure."""

    account_name: str | None = Field(default=None, examples=["myaccount"])
    """Azure: the storage account; no secret, so it may be written out."""

    account_key: str | None = Field(default=None, examples=["${env:MY_AZURE_KEY}"])
    """Azure: a key of the account."""

    sas_token: str | None = Field(default=None, examples=["${env:MY_SAS_TOKEN}"])
    """Azure: a shared access signature."""

    hf_token: str | None = Field(default=None, examples=["${env:MY_HF_TOKEN}"])
    """hf:// data sets. Null: HF_TOKEN, or the token of `hf auth login`."""


class StorageSection(Section):
    """How stores and servers are reached. Credentials come from the cloud's usual places: the
    environment, ~/.aws (with boto3 installed), the machine's role."""

    endpoint: str | None = Field(default=None, examples=["https://minio.example.org:9000"])
    """Address of an S3-compatible server, or another address of GCS or Azure. Null: the cloud's."""

    region: str | None = Field(default=None, examples=["eu-central-1"])
    """Region of S3 buckets. Null: AWS_REGION, else us-east-1."""

    anonymous: bool = False
    """Do not sign requests: for public buckets."""

    allow_private: Annotated[bool | tuple[Host, ...], BeforeValidator(as_tuple)] = False
    """Private and loopback addresses may be asked, and endpoints without TLS: a MinIO of your own.
    True: the hosts that the recipe names, but none that a server redirects to. A list of hosts:
    these, redirected to or not. Link-local addresses never are."""

    credentials: CredentialsSection = CredentialsSection()
    """Credentials from other environment variables than the usual ones."""

    connect_timeout_seconds: float = Field(default=5.0, gt=0, le=3600)
    """The longest wait for a connection."""

    read_timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """The longest wait for the next bytes."""

    total_timeout_seconds: float = Field(default=600.0, gt=0, le=86400)
    """The longest time of one request; what is missing then is asked for again."""

    max_tries: int = Field(default=10, ge=1)
    """Tries of one request, the first included."""

    retry_seconds: float = Field(default=180.0, gt=0, le=86400)
    """Without progress: no new try begins so long after the first fault since bytes came."""

    def allows_private(self, host: str, *, is_named: bool = True) -> bool:
        """Whether a host may have a private address.

        Args:
            is_named: the endpoint or a shard's own address names it; a redirect does not.
        """
        if isinstance(self.allow_private, bool):
            return self.allow_private and is_named
        return same_host(host) in self.allow_private


def unsafe_storage(storage: StorageSection) -> list[Problem]:
    """An endpoint that is none or has no TLS, and credentials that are written out."""
    problems = []
    if storage.endpoint is not None:
        problem = endpoint_problem(storage.endpoint, allow_private=storage.allows_private)
        problems += [Problem(("data", "storage", "endpoint"), problem)] if problem else []
    problems += [
        Problem(("data", "storage", "credentials", name), problem)
        for name, value in storage.credentials
        if value is not None and (problem := credential_problem(name, value))
    ]
    return problems
