"""Addresses with logins and queries: what is refused, what is asked for, what is shown."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path

import pytest
from support.fault_server import Fault, FaultServer

from vlmpack.addresses import redacted, resolve_address, secret_in, without_secrets
from vlmpack.cli.index import open_reading
from vlmpack.cli.options import ReadOptions
from vlmpack.errors import DataError, RecipeError
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.http import HttpClient

HOSTILE = "ca/na#ry?%41@:&x"
HF_TOKEN = "hf_" + "canaryCANARY0123456789canary"
NAMED = [
    "token=canary",
    "Token:canary",
    "a/access_token=canary",
    "x;api-key=canary",
    "v1,sig=canary,3",
    "x-amz-signature=canary",
    "accessKey%3Dcanary",
    "my_password=canary",
    "client-secret=${env:NAME}canary",
]
JWT = "eyJcanarycanary" + ".eyJcanarycanary.canary-canary"


@pytest.mark.parametrize(
    "address",
    [
        "https://host/x.tar?canary",
        "https://host/x.tar?canary=",
        "https://host/x.tar?pw=canary",
        "https://host/x.tar?hmac=canary&version=1",
        "https://host/x.tar?version=1;jwt=canary",
        "https://host/x.tar?sig=canary${env:SIGNATURE}",
        "HTTPS://host/x.tar?canary",
        "https://user:ca/nary@host/x.tar",
        "https://user:ca#nary@host/x.tar",
        "https://user:ca?nary@host/x.tar",
        "https://us@er:canary@host/x.tar",
        "https://${env:USER}:canary@host/x.tar",
        "https://[canary:canary@host/x.tar",
        f"https://host/{HF_TOKEN}/x.tar",
        f"https://host/x.tar?ref={HF_TOKEN}",
        f"s3://bucket/{HF_TOKEN}/x.tar",
        f"hf://datasets/a/b@main/{HF_TOKEN}.tar",
        f"https://host/{JWT}/x.tar",
        *(f"https://host/{part}/x.tar" for part in NAMED),
    ],
)
def test_what_may_be_a_secret_is_refused(address: str) -> None:
    reason = secret_in(address)
    assert reason is not None
    assert "${env:NAME}" in reason
    assert "nary" not in reason


@pytest.mark.parametrize(
    "address",
    [
        "https://host/x.tar",
        "https://host/a%40b/x-{000..001}.tar",
        "https://host/x.tar?${env:SIGNATURE}",
        "https://host/x.tar?sig=${env:SIGNATURE}&versionId=3",
        "https://host/x.tar?download",
        "https://host/x.tar?alt=media&generation=17",
        "https://${env:USER}:${env:PASSWORD}@host/x.tar",
        "s3://bucket/what?/x@2.tar",
        "hf://datasets/a/b@main/x.tar",
        "s3://bucket/a#b/x.tar",
        "https://host/${env:TOKEN}/x.tar",
        "https://host/token=${env:TOKEN}/x.tar",
        "https://auth:8080/split=train/tokens=512/tokenizer=qwen/author=me/x.tar",
        "https://host/d41d8cd98f00b204e9800998ecf8427e/LLaVA_Pretrain_595K_images_000.tar",
    ],
)
def test_what_holds_no_secret_passes(address: str) -> None:
    assert secret_in(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "https://u:canary@host/x",
        "https://u:can@ary@host/x",
        "https://u:can/ary@host/x",
        "https://u:can?ary@host/x",
        "s3://u:can@ary@bucket/x",
        "HTTPS://host/x?canary",
        "https://host/x?sig=canary&mail=a@b",
        "https://host/x#canary",
        "https://host/x?ref=1#canary=canary",
        "hf://datasets/a/b@main/x.tar#canary",
        f"https://host/{HF_TOKEN}/x",
        f"s3://bucket/x/{HF_TOKEN}.tar",
        f"https://host/a/{JWT}/x",
        "https://host/canaryCANARY0123456789canary/x",
        "https://host/AKIACANARYCANARY0123/x?canary",
        *(f"{scheme}://host/{part}/x.tar" for part in NAMED for scheme in ("https", "s3", "hf")),
        "s3://bucket/x.tar?token=canary",
        "https://auth:8080/token=canary",
    ],
)
def test_shown_addresses_hide_logins_queries_fragments_and_tokens(address: str) -> None:
    shown = redacted(f"reading {address} failed")
    assert "can" not in shown.lower() and "ary" not in shown.lower()
    assert shown.startswith("reading ")
    assert shown.endswith(" failed")


@pytest.mark.parametrize(
    "address",
    [
        "hf://datasets/a/b@main/x.tar",
        "https://${env:USER}:${env:PASSWORD}@host/x.tar?${env:SIGNATURE}",
        "https://host/x.tar?sig=${env:SIGNATURE}&versionId=3",
        "https://host/d41d8cd98f00b204e9800998ecf8427e/LLaVA_Pretrain_595K_images_000.tar",
        "s3://bucket/what?/a#b@2.tar",
        "https://host/token=${env:TOKEN}/x.tar",
        "https://auth:8080/split=train/tokens=512/tokenizer=qwen/author=me/x.tar",
    ],
)
def test_what_is_no_secret_is_shown(address: str) -> None:
    assert redacted(f"reading {address} failed") == f"reading {address} failed"


def test_a_password_makes_no_other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that is named gets the very password, less the newline of its file."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    monkeypatch.setenv("STORE_USER", "user@host.example/")
    monkeypatch.setenv("STORE_WORD", f"{HOSTILE}\n")
    with FaultServer(tmp_path) as server:
        login = f"http://${{env:STORE_USER}}:${{env:STORE_WORD}}@127.0.0.1:{server.port}"
        fetcher = RoutingFetcher(StorageSection(allow_private=True, max_tries=1))
        stamp = fetcher.head(f"{login}/b/x.tar")
        assert fetcher.read(stamp, 2, 3) == b"234"
        fetcher.close()
        kind, _, encoded = server.requests[-1].headers["authorization"].partition(" ")
    assert kind == "Basic"
    assert base64.b64decode(encoded).decode() == f"user@host.example/:{HOSTILE}"
    assert resolve_address("https://host/x?w=${env:STORE_WORD}") == f"https://host/x?w={HOSTILE}"


def test_answers_show_no_address(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        client = HttpClient(StorageSection(allow_private=True))
        url = f"http://u:canary@127.0.0.1:{server.port}/b/x.tar?canary"
        answer = client.request("GET", url, {})
        server.fail(Fault("redirect", location="http://127.0.0.1:1/?canary"))
        redirect = client.request("GET", url, {}, follow=False)
        assert "canary" in answer.url + redirect.headers["location"], "vacuous"
        assert "canary" not in repr(answer) + repr(redirect)
        answer.close()
        redirect.close()
        client.close()


def test_headers_that_drip_end_with_the_request(tmp_path: Path) -> None:
    """A byte at a time never reaches the read timeout; unbounded, the answer would come at last."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.tar").write_bytes(b"0123456789")
    with FaultServer(tmp_path) as server:
        config = StorageSection(
            allow_private=True, max_tries=1, read_timeout_seconds=0.3, total_timeout_seconds=0.4
        )
        fetcher = RoutingFetcher(config)
        stamp = fetcher.head(f"{server.url}/b/x.tar")
        server.fail(Fault("drip", seconds=0.02))
        with pytest.raises(DataError, match=r"longer than data\.storage\.total_timeout_seconds"):
            fetcher.read(stamp, 2, 3)
        assert server.num_failed == 1
        assert fetcher.read(stamp, 2, 3) == b"234"
        fetcher.close()


@pytest.mark.parametrize(
    "items",
    [
        ("credentials=canary", "credentials.hf_token=${env:T}"),
        ("credentials=", "credentials.hf_token=${env:T}"),
        ("credentials.hf_token=${env:T}", "credentials=canary"),
        ("region=canary", "region.x=1"),
    ],
)
def test_storage_options_that_collide_are_refused(items: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=r"--storage (credentials|region)") as caught:
        open_reading(["x.tar"], None, ReadOptions(storage=items))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "unit", ["http://a/_token=", "http://", "http://a?", "http://#", "https://user:http://"]
)
def test_a_text_of_many_addresses_is_read_once(unit: str) -> None:
    started = time.process_time()
    shown = redacted(unit * 4000)
    assert time.process_time() - started < 0.5, "1 to 17 s where each address reads on to the end"
    assert shown.startswith("http")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("endpoint=http://stores.example.org", "data.storage.endpoint: http:// is for stores in"),
        ("credentials.hf_token=canary", "credentials.hf_token: must name an environment variable"),
    ],
)
def test_storage_options_are_held_to_the_recipes_rules(item: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        open_reading(["x.tar"], None, ReadOptions(storage=[item]))
    assert "canary" not in str(caught.value)


def test_stores_are_safe_whoever_asks_for_them():
    """Not through recipes alone: from Python, too."""
    section = StorageSection(
        endpoint="http://10.0.0.1:9000", credentials={"secret_access_key": "plain-text"}
    )
    with pytest.raises(RecipeError) as found:
        RoutingFetcher(section)
    problems = str(found.value)
    assert "data.storage.endpoint" in problems and "secret_access_key" in problems
    assert "plain-text" not in problems


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("api_key: planted", "api_key: ***"),
        ("{'X-Api-Key': 'planted'}", "{'X-Api-Key': '***'}"),
        ("Authorization: Bearer planted, again", "Authorization: Bearer ***, again"),
        ("token planted1 is unknown", "token *** is unknown"),
        ("token 'planted1' is unknown", "token '***' is unknown"),
        ("Invalid API key: planted", "Invalid API key: ***"),
        ("Incorrect API key planted1", "Incorrect API key ***"),
        ("WANDB_API_KEY=planted", "WANDB_API_KEY=***"),
        (f"key {40 * 'a1'} is refused", "key *** is refused"),
        ("see https://bob:planted@host/a?token=planted", "see https://***@host/a?***"),
        ("is planted-by-name right?", "is *** right?"),
    ],
)
def test_what_others_say_is_without_secrets(monkeypatch, said, shown):
    monkeypatch.setenv("SOME_TOKEN", "planted-by-name")
    assert without_secrets(said) == shown


@pytest.mark.parametrize(
    "said",
    [
        "the token is missing; run `wandb login`",
        "401 Client Error: Unauthorized",
        "no space left on /home/bob/run-2026/tracking",
        "HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded",
    ],
)
def test_sentences_without_a_secret_stay(said):
    assert without_secrets(said) == said
