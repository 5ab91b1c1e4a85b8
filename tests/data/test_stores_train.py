"""Training data from stores: the same batches as from local files, and no secret anywhere."""

from __future__ import annotations

import os
import tarfile
import threading
import traceback
from pathlib import Path

import pytest
import torch
from support.fault_server import Fault, FaultServer, SeededFaults
from support.shard_fakes import FakeEncoder, config_for, loading, open_data, write_shards
from support.shards import SHARD

from vlmpack.data.config import DataConfig
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError, RecipeError, VlmpackError
from vlmpack.recipe.data import CacheSection, OnErrorSection, StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import BlockUse, CachedFetcher

CANARIES = {
    "STORE_KEY": "canary-access-key",
    "STORE_SECRET": "canary-secret-key",
    "STORE_USER": "canary-user",
    "STORE_WORD": "canary-word",
    "STORE_QUERY": "X-Amz-Signature=canary-signature",
}
os.environ.update(CANARIES)
"""For good and before any test: workers see the environment of when the first of them started."""


@pytest.fixture(autouse=True)
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


def storage(endpoint: str, **changes) -> StorageSection:
    values = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "allow_private": True,
        "credentials": {
            "access_key_id": "${env:STORE_KEY}",
            "secret_access_key": "${env:STORE_SECRET}",
        },
        "read_timeout_seconds": 5.0,
        "retry_seconds": 20.0,
    }
    return StorageSection(**(values | changes))


def first_epoch(data: TrainData) -> list[MicroBatch]:
    steps = data.steps_per_epoch()
    found = data.batches(data.start(), rank=0, dp=1, max_steps=steps)
    return [micro for step in found for micro in step.micro_batches]


def assert_same(one: list[MicroBatch], two: list[MicroBatch]) -> None:
    """Samples, order and every tensor; the shards' paths differ."""
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert [(s.number, s.key) for s in left.samples] == [
            (s.number, s.key) for s in right.samples
        ]
        assert left.skipped == right.skipped == ()
        assert torch.equal(left.batch.input_ids, right.batch.input_ids)
        assert torch.equal(left.batch.labels, right.batch.labels)
        assert (left.batch.media is None) == (right.batch.media is None)
        if left.batch.media is not None:
            assert torch.equal(left.batch.media.pixel_values, right.batch.media.pixel_values)


def opened(config: DataConfig, fetcher: RoutingFetcher | None, ledger: Path) -> TrainData:
    return TrainData.open(config, FakeEncoder(), fetcher=fetcher, ledger=Ledger(ledger))


def first_samples(source: Path, target: Path, count: int) -> None:
    """A shard's first samples, as a shard."""
    keys: set[str] = set()
    with tarfile.open(source) as whole, tarfile.open(target, "w") as part:
        for member in whole:
            keys.add(member.name.partition(".")[0])
            if len(keys) > count:
                return
            part.addfile(member, whole.extractfile(member))


@pytest.mark.slow
def test_digits_from_s3_are_the_digits_from_disk(encoder, tmp_path: Path) -> None:
    """moto, the real encoder, without a worker and with one."""
    from support.s3_emulator import s3_server

    folder = tmp_path / "served" / "digits" / "v1"
    folder.mkdir(parents=True)
    for file in sorted(SHARD.parent.glob("train-00000[01].tar")):
        first_samples(file, folder / file.name, 40)

    def batches(pattern: str, fetcher: RoutingFetcher | None, workers: int) -> list[MicroBatch]:
        config = config_for(
            pattern,
            tmp_path / f"index-{fetcher is not None}",
            micro_batch_size=8,
            global_batch_size=16,
            shuffle="global",
            **loading(workers, timeout_seconds=60),
        )
        data = TrainData.open(config, encoder, fetcher=fetcher)
        assert data.steps_per_epoch() > 3
        found = data.batches(data.start(), rank=0, dp=1, max_steps=2)
        return [micro for step in found for micro in step.micro_batches]

    expected = batches(str(folder / "train-*.tar"), None, 0)
    assert len({sample.shard for micro in expected for sample in micro.samples}) > 1, (
        "one shard proves little"
    )
    with s3_server(tmp_path / "served") as endpoint:
        fetcher = RoutingFetcher(storage(endpoint))
        assert_same(batches("s3://digits/v1/train-*.tar", fetcher, 0), expected)
        fetcher.close()
        braces = "s3://digits/v1/train-{000000..000001}.tar"
        assert_same(batches(braces, RoutingFetcher(storage(endpoint)), 1), expected)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_epochs_are_the_same_through_a_cache_of_a_tenth(tmp_path: Path, shuffle: str) -> None:
    """Samples, order and tensors of three epochs, while blocks come and go."""
    write_shards(tmp_path / "served" / "b", 60, per_shard=6)
    with FaultServer(tmp_path / "served") as server:
        stores, found = RoutingFetcher(storage(server.url)), []
        size = sum(s.size for s in stores.list_shards("s3://b/"))
        section = CacheSection(directory=str(tmp_path / "cache"), max_bytes=size // 10)
        cached = CachedFetcher(stores, section, BlockUse(block_bytes=4096))
        for place, fetcher in (("plain", stores), ("small", cached)):
            config = config_for("s3://b/s-*.tar", tmp_path / place, shuffle=shuffle)
            data = opened(config, fetcher, tmp_path / "l")
            steps = data.batches(data.start(), rank=0, dp=1, max_steps=3 * data.steps_per_epoch())
            found.append([micro for step in steps for micro in step.micro_batches])
            held = sum(p.stat().st_size for p in tmp_path.glob("cache/blocks/*/*"))
            assert held <= section.max_bytes
        cached.stop_prefetch()
        stores.close()
    assert_same(*found)
    assert len({sample.key for micro in found[0] for sample in micro.samples}) == 60
    assert cached.counters.fetched_bytes > size > 10 * 4096, "nothing had to go"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))]
)
def test_batches_are_the_same_under_faults(tmp_path: Path, scheme: str, seed: int) -> None:
    pattern = write_shards(tmp_path / "served" / "b", 37, per_shard=10)
    kinds = ("truncate", "short", "reset", "stall", "slow")
    faults = [Fault(kind, seconds=1.0, bytes_per_second=20_000_000) for kind in kinds]
    faults += [Fault("status", status=status) for status in (429, 503)]
    expected = first_epoch(open_data(pattern, tmp_path / "i"))
    with FaultServer(
        tmp_path / "served", seeded=SeededFaults(seed, share=0.3, faults=tuple(faults), attempts=2)
    ) as server:
        base = "s3://b" if scheme == "s3" else f"{server.url}/b"
        fetcher = RoutingFetcher(storage(server.url, read_timeout_seconds=0.2))
        config = config_for(f"{base}/s-{{0000..0003}}.tar", tmp_path / "j", shuffle="global")
        assert_same(first_epoch(opened(config, fetcher, tmp_path / "l")), expected)
        fetcher.close()
        server.close()
        assert sum(bool(request.fault) for request in server.requests) > 3, "vacuous"


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_secrets_are_sent_and_never_shown(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In no message, no file and no repr; the server does get them."""
    write_shards(tmp_path / "served" / "b", 20, per_shard=10)
    messages: list[str] = []
    with FaultServer(tmp_path / "served") as server, caplog.at_level("DEBUG"):
        host = server.url.removeprefix("http://")
        pattern = (
            "s3://b/s-*.tar"
            if scheme == "s3"
            else f"http://${{env:STORE_USER}}:${{env:STORE_WORD}}@{host}/b/s-{{0000..0001}}.tar"
            "?${env:STORE_QUERY}"
        )
        policy = OnErrorSection(transport="skip")
        config = config_for(pattern, tmp_path / "written" / "i", shuffle="global", on_error=policy)
        fetcher = RoutingFetcher(storage(server.url, max_tries=2))
        data = opened(config, fetcher, tmp_path / "written" / "ledger.jsonl")
        seen = [(request.headers, request.query) for request in server.requests]
        server.fail(Fault("status", times=None, status=403))
        skipped = [hole for micro in first_epoch(data) for hole in micro.skipped]
        assert len(skipped) == 20
        messages += [str(hole) for hole in skipped]
        for status in (400, 404, 500):
            server.reset()
            server.fail(Fault("status", times=None, status=status, methods=("GET", "HEAD")))
            for call in (
                lambda: fetcher.head(skipped[0].shard),
                lambda: fetcher.read(data.request((0,)).samples[0].stamp, 0, 10),
            ):
                with pytest.raises(DataError) as caught:
                    call()
                messages += traceback.format_exception(caught.value)
        messages += [repr(fetcher.remotes["s3"].config), repr(fetcher), repr(data.request((0,)))]
        fetcher.close()
    sent = repr(seen)
    if scheme == "s3":
        assert "canary-access-key" in sent
        assert "AWS4-HMAC-SHA256" in sent
    else:
        assert "canary-signature" in sent
        assert "Basic " in sent
    files = [file for file in (tmp_path / "written").rglob("*") if file.is_file()]
    assert any(file.name == "ledger.jsonl" and file.stat().st_size for file in files)
    everything = "\n".join([*messages, caplog.text]).encode()
    everything += b"".join(file.read_bytes() + file.name.encode() for file in files)
    assert b"canary" not in everything


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        config = StorageSection(
            endpoint=server.url,
            allow_private=True,
            credentials={"access_key_id": "${env:NOT_SET_HERE}"},
        )
        for path, kind in (
            ("s3://b/x.tar", RecipeError),
            (f"{server.url}/x.tar?${{env:NOT_SET_HERE}}", DataError),
        ):
            with pytest.raises(kind, match="NOT_SET_HERE is not set") as caught:
                RoutingFetcher(config).head(path)
            assert isinstance(caught.value, VlmpackError)
        assert server.num_requests == 0


def test_profiles_in_the_home_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By boto3, since obstore does not read ~/.aws."""
    pytest.importorskip("boto3")
    (tmp_path / "served" / "b").mkdir(parents=True)
    (tmp_path / "served" / "b" / "x.tar").write_bytes(b"0123456789")
    profile = tmp_path / "credentials"
    profile.write_text(
        "[special]\naws_access_key_id = profile-key\naws_secret_access_key = profile-secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "special")
    with FaultServer(tmp_path / "served") as server:
        fetcher = RoutingFetcher(
            StorageSection(endpoint=server.url, allow_private=True, region="eu-west-9")
        )
        fetcher.head("s3://b/x.tar")
        sent = server.requests[0].headers["authorization"]
        assert "Credential=profile-key/" in sent
        assert "/eu-west-9/" in sent


def test_an_unreachable_shard_fails_its_own_samples_only(tmp_path: Path) -> None:
    """In a bin over several shards, whose order stays."""
    write_shards(tmp_path / "served" / "b", 24, per_shard=3)
    with FaultServer(tmp_path / "served") as server:
        fetcher = RoutingFetcher(storage(server.url, max_tries=2))
        config = config_for(
            "s3://b/s-*.tar",
            tmp_path / "i",
            shuffle="global",
            on_error=OnErrorSection(transport="skip"),
        )
        data = opened(config, fetcher, tmp_path / "l")
        numbers = (23, 0, 4, 11, 5, 7, 3, 20, 12)
        server.fail(Fault("status", status=404, times=None, match="s-0001"))
        micro = data.dataset[data.request(numbers)]
        assert isinstance(micro, MicroBatch)
        assert [s.number for s in micro.samples] == [23, 0, 11, 7, 20, 12]
        assert [hole.number for hole in micro.skipped] == [4, 5, 3]
        assert {hole.error_class for hole in micro.skipped} == {"transport"}


def test_the_shards_of_a_bin_are_asked_at_the_same_time(tmp_path: Path) -> None:
    write_shards(tmp_path / "served" / "b", 24, per_shard=3)
    with FaultServer(tmp_path / "served") as server:
        fetcher = RoutingFetcher(storage(server.url))
        config = config_for("s3://b/s-*.tar", tmp_path / "i", shuffle="global")
        data = opened(config, fetcher, tmp_path / "l")
        server.reset()
        server.together = threading.Barrier(8, timeout=10)
        refs = data.request(tuple(range(24))).samples
        found = data.dataset.reader.read_all(refs)
        assert not server.together.broken, "fewer than 8 requests in flight at once"
        assert [sample.key for sample in found] == [ref.key for ref in refs]
        assert server.stats()["requests"] == 8, "the ranges of a shard are one request"
