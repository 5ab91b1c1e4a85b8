"""What a user reads where a store is wrong: who was asked, for how long, and which knob to turn."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from support.fault_server import Fault, FaultServer
from support.shard_fakes import write_shards
from typer.testing import CliRunner

from vlmpack.addresses import secret_in
from vlmpack.cli.app import app
from vlmpack.errors import DataError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher, remote, transport
from vlmpack.storage.access import place_of
from vlmpack.storage.sources import find_shards


def storage(endpoint: str, **changes: Any) -> StorageSection:
    values: dict[str, Any] = {"anonymous": True, "allow_private": True, "max_tries": 4}
    return StorageSection(endpoint=endpoint, **(values | changes))


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["head", "list"])
def test_an_unreachable_endpoint_is_named_soon_and_once(
    nobody: str, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(remote, "NOTICE_SECONDS", 0.1)
    fetcher = RoutingFetcher(storage(nobody, retry_seconds=1.5))
    with pytest.raises(DataError) as caught, caplog.at_level(logging.WARNING, logger="vlmpack"):
        if call == "head":
            fetcher.head("s3://bucket/x.tar")
        else:
            find_shards(["s3://bucket/x-*.tar"], key="data.train", fetcher=fetcher)
    assert f"(asked {nobody})" in str(caught.value)
    assert "data.storage.max_tries 4" in str(caught.value)
    (line,) = [record.getMessage() for record in caplog.records if "waiting" in record.message]
    assert f"asked at {nobody}" in line and "s3://bucket/" in line
    if call == "head":
        assert "of 4 follows in " in line and "for up to 1.5 s without progress" in line


def test_the_environments_endpoint_is_named_without_its_login(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://canary:word@minio.example.org:9000/a?canary=1")
    config = StorageSection(region="eu-west-9")
    assert place_of(config, "s3://b/x.tar") == "https://minio.example.org:9000"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert place_of(config, "s3://b/x.tar") == "s3's own endpoint in eu-west-9"
    assert place_of(config, "https://host/x.tar") == place_of(config, "/a/x.tar") == ""


def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        server.fail(Fault("status", times=None, status=404))
        with pytest.raises(DataError, match=r"no bucket 'wrong' \(404\); check its name") as caught:
            find_shards(
                ["s3://wrong/x-*.tar"], key="t", fetcher=RoutingFetcher(storage(server.url))
            )
        assert f"(asked {server.url})" in str(caught.value)
        assert "data.storage.endpoint" in str(caught.value)


def test_a_server_without_ranges_is_refused_when_it_is_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import fault_server

    original = fault_server.answer_for

    def rangeless(*arguments: Any) -> Any:
        answer = original(*arguments[:4], {}, *arguments[5:])  # the request's headers are not read
        answer.headers.pop("Accept-Ranges", None)
        return answer

    write_shards(tmp_path / "b", 6, per_shard=6)
    with FaultServer(tmp_path) as server:
        command = ["index", f"{server.url}/b/s-0000.tar", "--index-dir", str(tmp_path / "i")]
        command += ["--storage", "allow_private=true", "--processes", "1"]
        assert CliRunner().invoke(app, command).exit_code == 0
        monkeypatch.setattr(fault_server, "answer_for", rangeless)
        command[3] = str(tmp_path / "j")
        told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    assert "Use a server that supports ranges" in " ".join(told.output.split())


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"\n<!DOCTYPE html><title>Sign in</title>", "this is an HTML page, no tar file: a login"),
        (b"version https://git-lfs.github.com/spec/v1", "this is a Git LFS pointer"),
        (b"\x1f\x8b\x08", "this is gzip"),
        (b"PAR1\x15\x04", "this is a parquet file, no tar file: it is read under a name"),
        (b'\n {"messages": []}', "this is a JSON file, no tar file: it is read under a name"),
        (b"nothing that anyone knows", "this is no tar file"),
    ],
)
def test_what_is_no_tar_is_said(tmp_path: Path, content: bytes, hint: str) -> None:
    (tmp_path / "x.tar").write_bytes(content.ljust(2048, b"."))
    command = ["index", str(tmp_path / "x.tar"), "--index-dir", str(tmp_path / "i")]
    told = CliRunner().invoke(app, [*command, "--processes", "1"])
    assert told.exit_code == 1 and hint in " ".join(told.output.split())


def test_a_login_in_a_store_address_names_the_credentials() -> None:
    assert "data.storage.credentials" in str(secret_in("s3://user:word@bucket/x.tar"))
    assert "'${env:NAME}' in its place" in str(secret_in("https://user:word@host/x.tar"))
