"""What a run records of its model folder, and every way in which the folder may differ later."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.drifts import DRIFTS, reshard, said, touch
from support.engines import single_rank
from support.payloads import say
from support.shards import TINY_MODEL

from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError, RunDirError, RunIdentityError
from vlmpack.model_folder import content, digests
from vlmpack.model_folder.digests import RememberedDigests, hashing_weights
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.training.model_watch import (
    MAX_LINES,
    ModelRecord,
    check_model_again,
    check_small_files,
    check_trained_from,
    watched_model,
)
from vlmpack.training.run_dir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return shutil.copytree(TINY_MODEL, tmp_path / "model")


@pytest.fixture(autouse=True)
def always_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that have just been written are remembered too, so that what is remembered counts."""
    monkeypatch.setenv("VLMPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "YOUNG_SECONDS", 0.0)


@pytest.fixture
def run_dir(tmp_path: Path, folder: Path) -> RunDir:
    """A run that has recorded the folder, and has saved something."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    assert launch(folder, run_dir)[1] > 1e6  # bytes hashed
    run_dir.result.write_text("{}")
    assert run_dir.has_saved()
    return run_dir


def launch(folder: Path, run_dir: RunDir) -> tuple[dict[str, str], int]:
    """What a launch does: digests of the parts, and how many bytes were hashed."""
    check_small_files(folder, single_rank(), run_dir)
    with watched_model(folder, single_rank(), run_dir) as watch:
        parts = watch.compare_all()
        watch.keep()
        return parts, watch.hashing.num_bytes


def test_the_same_folder_is_hashed_once(folder: Path, run_dir: RunDir) -> None:
    first = ModelRecord.read(run_dir.model)
    assert first is not None
    assert len(first.weights) == len(load_file(str(folder / "model.safetensors")))
    parts, hashed = launch(folder, run_dir)
    assert (parts, hashed) == (first.digests(), 0)
    assert ModelRecord.read(run_dir.model) == first
    assert check_model_again(folder, run_dir) == parts


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize("name", DRIFTS)
def test_a_drift_is_refused_and_named(folder: Path, run_dir: RunDir, name: str) -> None:
    drift, named = DRIFTS[name]
    before = run_dir.model.read_bytes()
    drift(folder)
    for look in (launch, check_model_again):
        with pytest.raises(RunIdentityError) as caught:
            look(folder, run_dir)
        message = str(caught.value)
        assert f"{run_dir.path} was trained from another model than lies in {folder}" in message
        (line,) = [line for line in message.splitlines() if line.strip().startswith(named)][:1]
        assert "now" in line
        assert "in the run" in line
    assert run_dir.model.read_bytes() == before


def test_old_and_new_values_are_given(folder: Path, run_dir: RunDir) -> None:
    DRIFTS["rms_norm_eps"][0](folder)
    with pytest.raises(RunIdentityError) as caught:
        launch(folder, run_dir)
    wanted = "  config.json: text_config.rms_norm_eps: 1e-06 in the run, 0.01 now"
    assert wanted in str(caught.value).splitlines()


def test_a_long_list_is_cut(folder: Path, run_dir: RunDir) -> None:
    DRIFTS["another tower"][0](folder)
    with pytest.raises(RunIdentityError) as caught:
        launch(folder, run_dir)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  weight ")]
    assert len(lines) == MAX_LINES + 1
    assert lines[-1].startswith("  weight ... and ")


@pytest.mark.parametrize("change", [reshard, touch])
def test_the_same_tensors_in_other_files_are_no_drift(
    folder: Path, run_dir: RunDir, change: Any
) -> None:
    """They are hashed again, since the files are others."""
    recorded = ModelRecord.read(run_dir.model)
    assert recorded is not None
    change(folder)
    parts, hashed = launch(folder, run_dir)
    assert parts == recorded.digests()
    assert hashed > 1e6


def test_the_same_values_written_otherwise_are_no_drift(folder: Path, run_dir: RunDir) -> None:
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        path = folder / name
        values = dict(reversed(json.loads(path.read_text()).items()))
        if name == "config.json":
            values["text_config"] |= {"_name_or_path": "/where/it/lay"}
        path.write_text(json.dumps(values | {"transformers_version": "5.99"}, indent=7))
    before = ModelRecord.read(run_dir.model)
    assert before is not None
    parts, _ = launch(folder, run_dir)
    assert parts == before.digests()


def test_files_that_are_the_same_are_not_taken_apart_again(
    folder: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    whole = content._content

    def note(path: Path) -> dict[str, Any]:
        taken.append(path.name)
        return whole(path)

    monkeypatch.setattr(content, "_content", note)
    recorded = ModelRecord.read(run_dir.model)
    assert recorded is not None
    parts, _ = launch(folder, run_dir)
    assert parts == recorded.digests()
    assert set(taken) == {"config.json", "generation_config.json"}
    assert ModelRecord.of_files(folder, recorded.weights) == recorded
    assert "tokenizer.json" in taken


def test_numbers_and_texts_of_every_kind_are_compared(folder: Path, run_dir: RunDir) -> None:
    """NaN equals nothing, 10000.0 is 10000 and true is not 1, half a surrogate pair is a text."""
    odd = {"a": float("nan"), "b": 10000, "c": [2, 0.5], "d": "\ud800" * 200, "e": True}
    say(folder, "config.json", **odd)
    run_dir.result.unlink()
    parts, _ = launch(folder, run_dir)
    run_dir.result.write_text("{}")
    say(folder, "config.json", b=10000.0, c=[2.0, 0.5])
    assert launch(folder, run_dir)[0] == parts
    check_trained_from(run_dir.path, parts, check_model_again(folder, run_dir))
    for name, other in {"a": 1.0, "c": [2, 0.25], "d": "\ud801" * 200, "e": 1}.items():
        say(folder, "config.json", **{name: other})
        with pytest.raises(RunIdentityError, match=rf"config\.json: {name}: .* in the run"):
            launch(folder, run_dir)
        say(folder, "config.json", **{name: odd[name]})


def test_a_record_of_a_later_version_is_named_as_such(folder: Path, run_dir: RunDir) -> None:
    later = json.loads(run_dir.model.read_text()) | {"vlmpack_format": 2, "more": {}}
    run_dir.model.write_text(json.dumps(later))
    with pytest.raises(RunDirError, match="has vlmpack_format 2, and this vlmpack reads 1"):
        launch(folder, run_dir)


def test_generation_settings_are_said_once(
    folder: Path, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    said("generation_config.json", "do_sample", value=True)(folder)
    caplog.set_level(logging.INFO, "vlmpack")
    launch(folder, run_dir)
    line = "generation_config.json: do_sample: false in the run, true now"
    assert line in caplog.text
    caplog.clear()
    launch(folder, run_dir)
    assert line not in caplog.text


def test_another_transformers_is_said_and_another_backend_refused(
    folder: Path,
    run_dir: RunDir,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "vlmpack")
    recorded = ModelRecord.read(run_dir.model)
    assert recorded is not None
    run_dir.model.write_text(replace(recorded, versions={"transformers": "5.1.0"}).to_json())
    launch(folder, run_dir)
    assert 'transformers: "5.1.0" in the run, "5.' in caplog.text
    assert "lengths are made anew" in caplog.text
    monkeypatch.setattr("vlmpack.training.model_watch.IMAGE_BACKEND", "torchvision")
    with pytest.raises(RunIdentityError, match='backend: "pil" in the run, "torchvision" now'):
        launch(folder, run_dir)


def test_a_run_that_saved_nothing_takes_what_there_is(folder: Path, run_dir: RunDir) -> None:
    DRIFTS["rope_theta"][0](folder)
    run_dir.result.unlink()
    launch(folder, run_dir)
    recorded = ModelRecord.read(run_dir.model)
    assert recorded is not None
    assert 123.0 in recorded.config.values()


def test_a_run_whose_record_is_lost_is_recorded_with_a_line(
    folder: Path, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.model.unlink()
    caplog.set_level(logging.INFO, "vlmpack")
    now = check_model_again(folder, run_dir)
    assert "recorded no fingerprint of its model" in caplog.text
    caplog.clear()
    parts, _ = launch(folder, run_dir)
    assert "recorded no fingerprint of its model" in caplog.text
    assert check_model_again(folder, run_dir) == parts == now


@pytest.mark.parametrize("flip", [10, 100, -20])
def test_a_damaged_record_is_refused(folder: Path, run_dir: RunDir, flip: int) -> None:
    data = bytearray(run_dir.model.read_bytes())
    data[flip] ^= 1
    run_dir.model.write_bytes(bytes(data))
    with pytest.raises(RunDirError, match=r"model\.json (is damaged|has |was written by)"):
        launch(folder, run_dir)


def test_a_checkpoint_names_the_model_that_it_was_trained_from(
    folder: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    now = check_model_again(folder, run_dir)
    check_trained_from(tmp_path, now, now)
    with pytest.raises(RunIdentityError, match="config and processor differ"):
        check_trained_from(tmp_path, now | {"config": "0", "processor": "1"}, now)


def test_weights_that_change_while_they_load_are_refused(folder: Path, run_dir: RunDir) -> None:
    with watched_model(folder, single_rank(), run_dir) as watch:
        touch(folder)
        with pytest.raises(ModelError, match="was changed while the model was loaded"):
            watch.compare_all()


def test_a_digest_is_that_of_the_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against safetensors' own reading, in pieces of a size that divides nothing."""
    monkeypatch.setattr(digests, "PIECE_BYTES", 1006)
    monkeypatch.setattr(digests, "_READ_BYTES", 74)
    path = folder / "model.safetensors"
    tensors = tensors_of(path)
    hashed = {piece: digests.hash_piece(piece) for piece in digests.pieces_of(tensors)}
    found = digests.tensor_digests(tensors, hashed)
    with safe_open(str(path), "pt") as file:
        assert set(found) == set(file.keys())
        for name, told in found.items():
            value = file.get_tensor(name)
            data = value.flatten().view(torch.uint8).numpy().tobytes()
            parts = [hashlib.sha256(data[i : i + 1006]).digest() for i in range(0, len(data), 1006)]
            digest = hashlib.sha256(b"".join(parts)).hexdigest()[:32]
            assert told == f"BF16 {tuple(value.shape)} {digest}"


def test_weights_that_are_no_numbers_are_refused_at_every_launch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never remembered: a launch that knew the digests would not look."""
    monkeypatch.setattr(digests, "PIECE_BYTES", 1 << 12)
    path, name = folder / "model.safetensors", "model.norm.weight"
    weights = load_file(str(path))
    weights[name][-1] = float("-inf")
    save_file(weights, str(path), {"format": "pt"})
    for number in (1, 2):
        run_dir = RunDir(tmp_path / f"run-{number}")
        run_dir.prepare()
        with pytest.raises(ModelError, match=rf"{folder}: 1 tensor .*: {name} \(-inf\)\. Expected"):
            launch(folder, run_dir)
        with pytest.raises(ModelError, match=rf"{name} \(-inf\)"):
            check_model_again(folder, run_dir)
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter.parent.mkdir()
    save_file({"lora_A": torch.tensor([1.0, float("nan")])}, str(adapter))
    with (
        watched_model(TINY_MODEL, single_rank(), run_dir, str(adapter.parent)) as watch,
        pytest.raises(ModelError, match=rf"model\.adapter: {adapter}: .* lora_A \(NaN\)"),
    ):
        watch.compare_all()


def test_what_is_remembered_is_verified(folder: Path, run_dir: RunDir, tmp_path: Path) -> None:
    (kept,) = (tmp_path / "cache" / "weights").glob("*.json")
    text = kept.read_text()
    digest = next(iter(json.loads(text)["tensors"].values()))
    kept.write_text(text.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))
    _, hashed = launch(folder, run_dir)
    assert hashed > 1e6


def test_a_file_that_has_just_changed_is_not_remembered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    monkeypatch.setattr(digests, "YOUNG_SECONDS", 3.0)
    store = RememberedDigests(tmp_path / "kept")
    seen = digests.look_at(path)
    store.put(seen, {"w": "1"})
    assert store.get(seen) is None
    os.utime(path, (0, 0))  # its ctime is still now
    assert digests.look_at(path).is_young
    monkeypatch.setattr(time, "time", lambda: path.stat().st_ctime + 4)
    seen = digests.look_at(path)
    store.put(seen, {"w": "1"})
    assert store.get(seen) == {"w": "1"}


@dataclass
class _Room:
    """Where threads that play ranks meet."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass
class _Threads:
    """What `hashing_weights` asks of ranks."""

    rank: int
    room: _Room

    @property
    def world_size(self) -> int:
        return self.room.size

    def gather_objects(self, value: Any) -> list[Any]:
        self.room.values[self.rank] = value
        self.room.barrier.wait()
        gathered = [self.room.values[rank] for rank in range(self.room.size)]
        self.room.barrier.wait()
        return gathered

    raised_by_all = Ranks.raised_by_all

    def on_main(self, work: Any) -> Any:
        return self.gather_objects(work() if self.rank == 0 else None)[0]


def test_ranks_share_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 5000)
    nothing = RememberedDigests(tmp_path / "file" / "nowhere")
    (tmp_path / "file").write_text("cannot hold a folder")
    with hashing_weights(folder, single_rank(), nothing) as hashing:
        alone, total = hashing.finish(), hashing.num_bytes
    room, found, shares = _Room(3), {}, {}

    def work(rank: int) -> None:
        ranks: Any = _Threads(rank, room)
        with hashing_weights(folder, ranks, nothing) as hashing:
            found[rank] = hashing.finish()
            shares[rank] = sum(p.stop - p.start for p in hashing._parts[rank])
            assert len(hashing._mine) == len(hashing._parts[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), alone)
    assert sum(shares.values()) == total
    assert max(shares.values()) < 0.35 * total


def hash_on_machines(folders: list[Path], nothing: RememberedDigests) -> list[Any]:
    """What each of some ranks finds, or raises, that see a folder each; and the bytes it hashed."""
    room, found = _Room(len(folders)), {}

    def work(rank: int) -> None:
        ranks: Any = _Threads(rank, room)
        try:
            with hashing_weights(folders[rank], ranks, nothing) as hashing:
                mine = sum(piece.stop - piece.start for piece in hashing._parts[rank])
                found[rank] = hashing.finish(), mine
        except ModelError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(folders))]


def test_a_machine_with_a_copy_of_its_own_hashes_that(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    nothing = RememberedDigests(tmp_path / "no" / "where")
    found = hash_on_machines([folder, folder, copy, copy], nothing)
    assert len({str(whole) for whole, _ in found}) == 1
    hashed = [mine for _, mine in found]
    assert sum(hashed[:2]) == sum(hashed[2:]) > 1e6
    assert min(hashed) > 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("other bytes, size and mtime the same", "weights: "),
        ("rms_norm_eps", "config.json"),
        ("a missing file", "has no weights"),
    ],
)
def test_a_copy_that_is_another_is_refused_by_all(
    folder: Path, tmp_path: Path, name: str, what: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    if name == "a missing file":
        (copy / "model.safetensors").unlink()
    else:
        DRIFTS[name][0](copy)
    told = hash_on_machines([folder, folder, copy], RememberedDigests(tmp_path / "kept"))
    assert len(set(told)) == 1
    assert what in told[0]
    if name != "a missing file":
        assert "the folder of rank 2 on" in told[0]


def test_every_part_counts() -> None:
    record = ModelRecord(weights={"w": "1"}, config={"c": 1}, processor={"p": 1})
    for part in ("weights", "config", "processor"):
        other = replace(record, **{part: {}})
        assert record.differences(other)
        assert other.differences(record)
        assert record.digests()[part] != other.digests()[part]
    assert record.differences(replace(record, generation={"t": 1})) == []
    assert replace(record, config={"c": None}).differences(replace(record, config={}))
