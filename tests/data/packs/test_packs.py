"""Saved packs: what was planned comes back, whole or refused, however it was made."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
from support.packed_splits import BUDGET, SIZES, PackEncoder, online, pack
from support.recorded import launch
from support.shard_fakes import (
    COUNT,
    assert_same_tensors,
    key_of,
    loading,
    open_data,
    write_shards,
)

from vlmpack.alignment import Alignment
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.packs import write
from vlmpack.data.packs.manifest import read_manifest, sealed
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.errors import DataError, PacksError
from vlmpack.proof.audit import audit_run
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.sources import Source
from vlmpack.training.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("few_rows")
KINDS: dict[str, dict[str, Any]] = {
    "plan": {"kind": "plan"},
    "tokens": {"kind": "tokens"},
    "shards": {"kind": "shards"},
}


def offline(folder: Path, saved: Path, index_dir: Path, **changes: Any) -> TrainData:
    wanted: dict[str, Any] = {"path": str(saved), "max_tokens": 64}
    values = {"mode": "offline", **wanted, "encoder": PackEncoder(), **SIZES}
    return open_data(str(folder / "s-*.tar"), index_dir, **(values | changes))


def micro_batches(data: TrainData, epochs: int = 1) -> dict[int, list[list[MicroBatch]]]:
    """epoch -> micro-batches of each of its steps."""
    start = data.start()
    found: dict[int, list[list[MicroBatch]]] = {epoch: [] for epoch in range(epochs)}
    for step in data.batches(start, rank=0, dp=1, max_steps=data.steps_until(epochs, start)):
        found[step.epoch].append(list(step.micro_batches))
    return found


def flat(steps: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(steps))


def rows_of(steps: list[list[MicroBatch]]) -> list[list[tuple[str, ...]]]:
    """keys[step][row]."""
    return [[tuple(s.key for s in m.samples) for m in step] for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shuffle"), list(product(KINDS, ("global", "window"))))
def test_the_first_epoch_is_the_online_one_and_later_ones_permute_its_packs(
    folder: Path, tmp_path: Path, kind: str, shuffle: str
) -> None:
    data = online(folder, tmp_path / "i", shuffle=shuffle)
    manifest = pack(data, tmp_path / "packs", **KINDS[kind])
    assert manifest.shuffle == shuffle
    expected = micro_batches(data)[0]
    found = micro_batches(saved := offline(folder, tmp_path / "packs", tmp_path / "i"), 3)
    assert rows_of(found[0]) == rows_of(expected)
    assert len(expected) > 4 and any(len(step) < 3 for step in expected[:-1]), "one window only"
    assert any(m.num_images for step in expected for m in step)
    for ours, theirs in zip(flat(found[0]), flat(expected), strict=True):
        assert [s.key for s in ours.samples] == [s.key for s in theirs.samples]
        if shuffle == "global":  # a streamed plan numbers its samples by shard
            assert_same_tensors(ours, theirs)
    packs = [sorted(row for step in rows_of(found[epoch]) for row in step) for epoch in range(3)]
    assert packs[0] == packs[1] == packs[2], "membership changed"
    assert len({str(rows_of(found[epoch])) for epoch in range(3)}) == 3, "the order stayed"
    keys = Counter(key for row in packs[0] for key in row)
    assert keys == Counter(map(key_of, range(COUNT)))
    assert saved.summary().epoch_samples == COUNT and saved.epoch_length().exact
    assert saved.epoch_length().num_steps == len(expected)


@pytest.mark.slow
def test_bfd_packs_every_sample_once_and_no_pack_is_over_budget(
    folder: Path, tmp_path: Path
) -> None:
    data = online(folder, tmp_path / "i", budget=replace(BUDGET, max_sequences=4))
    stream = pack(data, tmp_path / "stream")
    manifest = pack(data, tmp_path / "bfd", planner="bfd", kind="tokens")
    assert manifest.num_packs <= stream.num_packs and manifest.num_samples == COUNT
    found = micro_batches(offline(folder, tmp_path / "bfd", tmp_path / "i"), 2)
    for epoch in (0, 1):
        rows = [m for step in found[epoch] for m in step]
        assert Counter(s.key for m in rows for s in m.samples) == Counter(map(key_of, range(COUNT)))
        assert max(sum(-(-n // 4) * 4 for n in m.batch.lengths) for m in rows) <= 64
        assert 1 < max(len(m.samples) for m in rows) <= 4
    assert rows_of(found[0]) != rows_of(found[1])
    seeded = offline(folder, tmp_path / "bfd", tmp_path / "i", seed=8)
    assert rows_of(micro_batches(seeded)[0]) != rows_of(found[0])


@pytest.mark.slow
def test_another_seed_or_batch_size_permutes_the_first_epoch_too(
    folder: Path, tmp_path: Path
) -> None:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs")
    same = rows_of(micro_batches(offline(folder, tmp_path / "packs", tmp_path / "i"))[0])
    for change in ({"seed": 8}, {"global_batch_size": 4}):
        data = offline(folder, tmp_path / "packs", tmp_path / "i", **change)
        rows = rows_of(micro_batches(data)[0])
        assert rows != same
        assert sorted(flat(rows)) == sorted(flat(same))
        assert len(rows) == data.steps_per_epoch()


@pytest.mark.slow
def test_a_state_goes_on_from_any_batch_on_any_number_of_ranks(
    folder: Path, tmp_path: Path
) -> None:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs", kind="shards")
    data = offline(folder, tmp_path / "packs", tmp_path / "i")
    total = data.steps_until(2, data.start())
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=total))
    whole = [sorted(s.number for m in step.micro_batches for s in m.samples) for step in steps]
    for stop in range(0, total, 3):
        state = DataState.from_json((steps[stop - 1].state if stop else data.start()).to_json())
        assert data.steps_until(2, state) == total - stop
        for dp in (2, 3):
            ranks = [list(data.batches(state, rank=r, dp=dp, max_steps=total)) for r in range(dp)]
            assert [
                sorted(s.number for share in shares for m in share.micro_batches for s in m.samples)
                for shares in zip(*ranks, strict=True)
            ] == whole[stop:]


@pytest.mark.cases(slow="shards")
@pytest.mark.parametrize("kind", ["tokens", "shards"])
def test_shrunk_images_and_dropped_samples_come_back_as_planned(tmp_path: Path, kind: str) -> None:
    write_shards(tmp_path, 30, per_shard=9)
    for policy in ("shrink_images", "drop"):
        changes: dict[str, Any] = {"seq_length": 14, "over_long": policy, "budget": BUDGET}
        data = online(tmp_path, tmp_path / "i", **changes)
        assert data.fitted.table.shrunk if policy == "shrink_images" else data.fitted.dropped
        pack(data, tmp_path / policy, kind=kind)
        expected = micro_batches(data)[0]
        del changes["budget"]
        ledger = Ledger(tmp_path / f"{policy}.jsonl")
        saved = offline(tmp_path, tmp_path / policy, tmp_path / "i", ledger=ledger, **changes)
        for ours, theirs in zip(flat(micro_batches(saved)[0]), flat(expected), strict=True):
            assert_same_tensors(ours, theirs)
        lines = [line["key"] for line in ledger.lines()]
        assert lines == [data.fitted.table.key(item.number) for item in data.fitted.dropped]


def test_with_weights_a_bin_is_read_from_its_own_pack(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 5, per_shard=5)
    write_shards(tmp_path / "b", 20, per_shard=10, start=100)
    sources = tuple(
        Source(name=n, path=str(tmp_path / n / "s-*.tar"), weight=1.0) for n in ("a", "b")
    )
    data = online(tmp_path, tmp_path / "i", sources=sources)
    manifest = pack(data, tmp_path / "packs", kind="shards")
    assert manifest.num_samples == 25 and data.epoch_length().num_samples == 25
    saved = offline(tmp_path, tmp_path / "packs", tmp_path / "i", sources=sources)
    expected = micro_batches(data)[0]
    repeated = Counter(s.key for step in expected for m in step for s in m.samples)
    assert max(repeated.values()) > 2, "no sample is in several packs"
    for ours, theirs in zip(flat(micro_batches(saved)[0]), flat(expected), strict=True):
        assert_same_tensors(ours, theirs)
    for batch in saved.planned(saved.start(), saved.steps_per_epoch()):
        for samples in batch.bins:
            places = [ref.pack for ref in saved.request(samples).samples]
            assert len({place.offset for place in places if place is not None}) == 1
            assert [place.place for place in places if place is not None] == list(
                range(len(samples))
            )


def test_the_audit_counts_weighted_packs_epoch_by_epoch(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 5, per_shard=5)
    write_shards(tmp_path / "b", 20, per_shard=10, start=100)
    sources = tuple(
        Source(name=n, path=str(tmp_path / n / "s-*.tar"), weight=w)
        for n, w in (("a", 2.0), ("b", 3.0))
    )
    pack(online(tmp_path, tmp_path / "i", sources=sources), tmp_path / "packs")
    ledger = Ledger(tmp_path / "run/data-errors.jsonl")
    data = offline(tmp_path, tmp_path / "packs", tmp_path / "i", sources=sources, ledger=ledger)
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    launch(run_dir, data, data.start(), stop=data.steps_until(3, data.start()), dp=1)
    found = audit_run(run_dir, data)
    assert found.problems == [] and len(found.epochs) == 3
    draws = Counter(
        s
        for batch in data.planned(data.start(), data.steps_per_epoch())
        for samples in batch.bins
        for s in samples
    )
    assert {n: draws[n] for n in range(25)} != dict.fromkeys(range(25), 1), "nothing drawn twice"
    numbers = data.split.plan.arrays.numbers
    numbers[0] = next(n for n in range(25) if draws[n] == 2)
    assert audit_run(run_dir, data).problems != []


def test_a_sample_that_cannot_be_encoded_is_the_same_hole_every_time(
    folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    shard = data / "s-0001.tar"
    content = shard.read_bytes()
    at = content.index(b"IDAT") + 30
    shard.write_bytes(content[:at] + bytes(40) + content[at + 40 :])
    lines = []
    for kind in KINDS:
        opened = online(data, tmp_path / "i")
        manifest = pack(opened, tmp_path / kind, kind=kind)
        ledger = Ledger(tmp_path / f"{kind}.jsonl")
        saved = offline(data, tmp_path / kind, tmp_path / "i", ledger=ledger)
        found = micro_batches(saved)[0]
        assert sum(len(m.samples) for step in found for m in step) == COUNT - 1
        assert manifest.num_holes == (kind != "plan")
        lines.append([(n["key"], n["class"], n["reason"], n["batch"]) for n in ledger.lines()])
    assert lines[0] == lines[1] == lines[2] and len(lines[0]) == 1
    strict = online(data, tmp_path / "i", on_error=OnErrorSection(decode="raise"))
    with pytest.raises(DataError, match="cannot decode") as error:
        pack(strict, tmp_path / "strict", kind="tokens")
    assert error.value.key == lines[0][0][0]
    assert not (tmp_path / "strict/pack.json").exists()


def test_images_that_would_give_other_pixels_are_not_kept_resized(
    folder: Path, tmp_path: Path
) -> None:
    data = online(folder, tmp_path / "i")
    manifest = pack(data, tmp_path / "packs", kind="shards", media="resized")
    with_images = sum(number % 3 > 0 for number in range(COUNT))
    assert manifest.num_kept_original == with_images
    saved = offline(folder, tmp_path / "packs", tmp_path / "i")
    for ours, theirs in zip(
        flat(micro_batches(saved)[0]), flat(micro_batches(data)[0]), strict=True
    ):
        assert_same_tensors(ours, theirs)


class Stopped(Exception):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_stopped_packing_looks_unfinished_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = online(folder, tmp_path / "i")
    pack(data, tmp_path / "whole", kind="shards")
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".tar") for name in expected) > 3

    def stop(done: int, total: int, num_bytes: int) -> None:
        if len(list((tmp_path / "packs").glob("*.tar"))) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        pack(data, tmp_path / "packs", kind="shards", on_packs=stop)
    with pytest.raises(PacksError, match=r"no finished packs: packing was stopped"):
        read_manifest(tmp_path / "packs")
    with pytest.raises(PacksError) as error:
        pack(data, tmp_path / "packs", kind="tokens")
    assert "started with other settings" in str(error.value)
    assert "kind: started with shards, now tokens" in str(error.value)
    (tmp_path / "packs/.packs-000002.tar.77.tmp").write_bytes(b"half")
    kept = (tmp_path / "packs/packs-000000.tar").stat().st_mtime_ns
    torn = tmp_path / "packs/packs-000001.tar"
    torn.write_bytes(torn.read_bytes()[:-600])
    pack(data, tmp_path / "packs", kind="shards")
    assert contents(tmp_path / "packs") == expected
    assert (tmp_path / "packs/packs-000000.tar").stat().st_mtime_ns == kept


@pytest.mark.parametrize("name", [".notes.tmp", ".pack.json.tmp", ".packs-1.tar.77.tmp"])
def test_a_hidden_file_of_others_is_no_scrap(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(PacksError, match="is not empty"), write._claimed(tmp_path):
        pass
    (tmp_path / name).rename(tmp_path / ".pack.json.host-7-8.tmp")
    with write._claimed(tmp_path):
        pass


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "held"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield folder
    os.close(descriptor)


def test_a_full_disk_is_named_and_the_packing_goes_on_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = online(folder, tmp_path / "i")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("vlmpack.data.packs.spans.write_atomically", full)
        with pytest.raises(PacksError, match=r"cannot be written: .*No space left.*packs-000000"):
            pack(data, tmp_path / "packs", kind="tokens")
    with pytest.raises(PacksError, match="was stopped before its end"):
        read_manifest(tmp_path / "packs")
    assert pack(data, tmp_path / "packs", kind="tokens").num_samples == COUNT


def test_a_folder_in_use_is_refused(folder: Path, tmp_path: Path, held: Path) -> None:
    data = online(folder, tmp_path / "i")
    pack(data, tmp_path / "packs")
    with pytest.raises(PacksError, match=r"holds finished packs \(pack.json\); choose another"):
        pack(data, tmp_path / "packs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("x")
    with pytest.raises(PacksError, match=r"is not empty \(thesis.txt\)"):
        pack(data, tmp_path / "other")
    with pytest.raises(PacksError, match="another process packs into it"):
        pack(data, held)
    with pytest.raises(PacksError, match=r"File exists|Not a directory"):
        pack(data, tmp_path / "other/thesis.txt")


def test_a_folder_that_is_not_as_it_was_written_is_refused(folder: Path, tmp_path: Path) -> None:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs", kind="shards")
    whole = contents(tmp_path / "packs")

    def refusal(**files: bytes | None) -> str:
        shutil.rmtree(tmp_path / "packs")
        (tmp_path / "packs").mkdir()
        for name, data in (whole | files).items():
            if data is not None:
                (tmp_path / "packs" / name).write_bytes(data)
        with pytest.raises(PacksError) as error:
            offline(folder, tmp_path / "packs", tmp_path / "i")
        return str(error.value)

    text = json.loads(whole["pack.json"])
    assert "has vlmpack_format 9, and this vlmpack reads 1" in refusal(
        **{"pack.json": json.dumps(text | {"vlmpack_format": 9}).encode()}
    )
    assert "pack.json cannot be read" in refusal(**{"pack.json": b"{"})
    assert "pack.json cannot be read" in refusal(**{"pack.json": b'{"vlmpack_format": 1}'})
    for name, value in (("num_samples", 57), ("seed", 8), ("digest", "0"), ("more", 1)):
        edited = json.dumps(text | {name: value}).encode()
        assert "not those that were written" in refusal(**{"pack.json": edited}), name
    unsealed = {name: value for name, value in text.items() if name != "digest"}
    edited = json.dumps(unsealed).encode()
    assert "not those that were written" in refusal(**{"pack.json": edited})
    other = {name: value for name, value in text["files"].items() if name != "holes.json"}
    edited = json.dumps(sealed(unsealed | {"files": other})).encode()
    assert "holes.json: not listed" in refusal(**{"pack.json": edited})
    edited = json.dumps(sealed(unsealed | {"plan": "0"})).encode()
    assert "other packs than fingerprints.plan says" in refusal(**{"pack.json": edited})
    assert "it has no pack.json" in refusal(**{"pack.json": None})
    tar = whole["packs-000001.tar"]
    message = refusal(**{"packs-000001.tar": tar[:-512], "packs-000000.tar": None})
    assert f"packs-000001.tar: {len(tar) - 512} bytes, {len(tar)} were written" in message
    assert "packs-000000.tar: missing" in message
    for name in ("packs.safetensors", "samples.parquet", "holes.json"):
        assert f"{name}: not what was written" in refusal(**{name: whole[name] + b" "})
    shutil.rmtree(tmp_path / "packs")
    with pytest.raises(PacksError, match="no such folder"):
        offline(folder, tmp_path / "packs", tmp_path / "i")


def test_a_damaged_pack_is_a_hole_for_each_of_its_samples(folder: Path, tmp_path: Path) -> None:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs", kind="tokens")
    tar = tmp_path / "packs/packs-000001.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    saved = offline(folder, tmp_path / "packs", tmp_path / "i")
    rows = flat(micro_batches(saved)[0])
    holes = [hole for m in rows for hole in m.skipped]
    assert holes and len(holes) + sum(len(m.samples) for m in rows) == COUNT
    assert len([m for m in rows if m.skipped]) == 1 and all(
        not m.samples for m in rows if m.skipped
    )
    assert all("packs-000001.tar is damaged: its checksum is" in hole.reason for hole in holes)
    assert {hole.file for hole in holes} == {str(tar)} and str(tar) not in {h.shard for h in holes}
    strict = offline(
        folder, tmp_path / "packs", tmp_path / "i", on_error=OnErrorSection(integrity="raise")
    )
    with pytest.raises(DataError, match="is damaged"):
        micro_batches(strict)


def test_other_processors_lengths_and_sources_are_refused(folder: Path, tmp_path: Path) -> None:
    pack(online(folder, tmp_path / "i"), tmp_path / "packs")
    arguments = (folder, tmp_path / "packs", tmp_path / "i")
    with pytest.raises(PacksError, match=r"the tokenizer in model.path: bytes in the packs, other"):
        offline(*arguments, encoder=PackEncoder(tokenizer="other"))
    with pytest.raises(PacksError, match=r"how this version encodes: fake-1 in the packs, other n"):
        offline(*arguments, encoder=PackEncoder(fingerprint="other"))
    with pytest.raises(PacksError, match=r"training.seq_length: 64 in the packs, 60 in the recipe"):
        offline(*arguments, seq_length=60)
    context: dict[str, Any] = {"multiples": Alignment(sequence=16, row=16)}
    with pytest.raises(PacksError, match=r"packing.alignment: 4 in the packs, but parallelism"):
        offline(*arguments, **context)
    both = {"max_sequences": 3, "alignment": 8}
    with pytest.raises(
        PacksError, match=r"max_sequences: \d+ in the packs, 3 in the recipe\n.*: 4"
    ):
        offline(*arguments, **both)
    with pytest.raises(PacksError, match=r"data.shuffle: global in the packs, window in the rec"):
        offline(*arguments, shuffle="window")
    with pytest.raises(PacksError, match=r"data.over_long: error in the packs, drop in the recipe"):
        offline(*arguments, over_long="drop")
    weighed = (Source(name="one", path=str(folder / "s-*.tar"), weight=2.0),)
    with pytest.raises(
        PacksError, match=r"data.train.one.weight: missing in the packs, 2.0 in the"
    ):
        offline(*arguments, sources=weighed)
    with pytest.raises(PacksError, match=r"sources of data.train: 1 in the packs, 2 in the recipe"):
        offline(*arguments, sources=(*weighed, weighed[0].model_copy(update={"name": "two"})))
    fewer = (Source(name="one", path=str(folder / "s-000[0-3].tar")),)
    with pytest.raises(PacksError, match=r"'9 shards, 61 samples, .*' in the packs, '4 shards, 28"):
        offline(*arguments, sources=fewer)
    offline(*arguments)


@pytest.mark.parametrize("kind", ["plan", "shards"])
def test_weights_of_another_kind_are_refused(folder: Path, tmp_path: Path, kind: Any) -> None:
    weighed = (Source(name="one", path=str(folder / "s-*.tar"), weight=1.0),)
    pack(online(folder, tmp_path / "i", sources=weighed), tmp_path / "packs", kind=kind)
    arguments = (folder, tmp_path / "packs", tmp_path / "i")
    offline(*arguments, sources=weighed)
    with pytest.raises(PacksError, match=r"data.weights: samples in the packs, tokens in the rec"):
        offline(*arguments, sources=weighed, weights="tokens")


@pytest.mark.soak
def test_any_number_of_processes_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    loader = loading(1)
    data = online(folder, tmp_path / "i", **loader)
    for processes in (1, 2, 3):
        pack(data, tmp_path / str(processes), kind="shards", processes=processes)
    one, two, three = (contents(tmp_path / str(processes)) for processes in (1, 2, 3))
    assert one == two == three and len(one) > 6
    assert sum(map(len, one.values())) < write.PART_BYTES, "parts are cut by packs here"
    expected = micro_batches(online(folder, tmp_path / "i"))[0]
    saved = offline(folder, tmp_path / "3", tmp_path / "i", **loader)
    for ours, theirs in zip(flat(micro_batches(saved)[0]), flat(expected), strict=True):
        assert_same_tensors(ours, theirs)
