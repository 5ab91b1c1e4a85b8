"""The record of trained samples, the ledger and checkpoints: no flipped bit and no cut is silent.

Exhaustive over the last 2,000 bytes in the soak, a share of a hundredth elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import MemoryEngine, save_engine
from support.damage import SHARE, Noticed, try_damage
from support.recorded import count_steps, launch, open_split

from vlmpack.data.loading.ledger import Ledger
from vlmpack.errors import RunDirError
from vlmpack.model_folder.digests import RememberedDigests, SeenFile
from vlmpack.proof.audit import audit_run
from vlmpack.training.checkpoint import find_damage, newest_checkpoint
from vlmpack.training.model_watch import ModelRecord
from vlmpack.training.record import read_launches, read_steps, take_back, warn_of_damage
from vlmpack.training.run_dir import RunDir


@pytest.fixture(
    params=[pytest.param(SHARE, id="share"), pytest.param(1.0, id="all", marks=pytest.mark.soak)]
)
def share(request: pytest.FixtureRequest) -> float:
    found: float = request.param
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run of 10 steps on two replicas, proven."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    data = open_split(tmp_path, Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=10, dp=2)
    assert count_steps(run_dir) == 10
    return run_dir


@pytest.mark.cases(slow="*launches.jsonl")
@pytest.mark.parametrize("name", ["rank-0001.jsonl", "launches.jsonl"])
def test_the_record(run_dir: RunDir, tmp_path: Path, name: str, share: float) -> None:
    """What the file itself does not tell (its last lines are gone) the audit finds."""
    train = open_split(tmp_path, Ledger(None))
    truth = _record(run_dir)
    by_audit = 0

    def read() -> Any:
        nonlocal by_audit
        found = _record(run_dir)
        if found == truth:
            return found
        audit = audit_run(run_dir, train)
        by_audit += 1
        return Noticed if audit.num_problems else found

    assert audit_run(run_dir, train).problems == []
    found = try_damage(run_dir.samples / name, read, share=share)
    assert found["noticed"] > 4 * found["harmless"] and by_audit
    if share == 1:
        assert not found["harmless"], "not even in the spelling of a checksum's own name"


def test_a_launch_names_damage_in_its_own_record_once(
    run_dir: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not refused: training needs none of it. The audit would be the first to tell."""
    warn_of_damage(run_dir.samples)
    assert caplog.text == "", "a whole record is not spoken of"
    for name, line in (("rank-0000.jsonl", 3), ("rank-0001.jsonl", 4), ("rank-0001.jsonl", 6)):
        lines = (run_dir.samples / name).read_bytes().splitlines(keepends=True)
        lines[line - 1] = lines[line - 1].replace(b'"batch":', b'"catch":')
        (run_dir.samples / name).write_bytes(b"".join(lines))
    with pytest.raises(RunDirError, match="line 3: damaged"):
        audit_run(run_dir, open_split(tmp_path, Ledger(None)))
    with (run_dir.samples / "rank-0001.jsonl").open("ab") as stream:
        stream.write(b'{"launch": 1, "ba')  # cut by a kill, and taken back by the next line
    warn_of_damage(run_dir.samples)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"{run_dir.samples / 'rank-0000.jsonl'}, line 3: damaged (its checksum is not that of its "
        "text), and 2 more lines of the record. Training goes on"
    )
    assert "`vlmpack data audit` cannot prove what this run trained" in said
    assert "Restore" in said


def _record(run_dir: RunDir) -> Any:
    steps = [list(read_steps(run_dir.samples, rank)) for rank in range(2)]
    return steps, read_launches(run_dir.samples)


def test_the_ledger(run_dir: RunDir, tmp_path: Path, share: float) -> None:
    train = open_split(tmp_path, Ledger(None))
    ledger = Ledger(run_dir.data_errors)
    truth = [_plain(line) for line in ledger.lines()]
    assert len(truth) > 3

    def read() -> Any:
        found = [_plain(line) for line in ledger.lines()]
        if ledger.damaged_lines() or found == truth:
            return found if found == truth else Noticed
        return Noticed if audit_run(run_dir, train).num_problems else found

    found = try_damage(run_dir.data_errors, read, share=share)
    assert found["noticed"] > 4 * found["harmless"]


def _plain(line: dict[str, Any]) -> list[Any]:
    """A stray entry, as a flip in the name of the checksum makes it, means nothing."""
    names = ("class", "key", "shard", "offset", "reason", "epoch", "batch", "sample")
    return [line[name] for name in names]


@pytest.mark.cases(slow="share-result.json")
@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_what_the_loop_counted(run_dir: RunDir, tmp_path: Path, name: str, share: float) -> None:
    """The audit compares it, and a launch that goes on takes it back: neither ends in an error."""
    train = open_split(tmp_path, Ledger(None))
    path = run_dir.path / name

    def read() -> Any:
        problems = audit_run(run_dir, train).problems
        kept = path.read_bytes()
        take_back(run_dir, 10)
        path.write_bytes(kept)
        return Noticed if problems else problems

    found = try_damage(path, read, share=min(share, 0.1))
    assert found["noticed"]


def test_what_a_run_knows_of_its_model(tmp_path: Path, share: float) -> None:
    path = tmp_path / "model.json"
    weights = {f"layer.{n}": f"{n:016x}" for n in range(60)}
    record = ModelRecord(weights=weights, config={"eps": 1e-6}, processor={"size": [1, 2]})
    path.write_text(record.to_json())
    found = try_damage(path, lambda: ModelRecord.read(path), share=share)
    assert found["noticed"] > 10 * found["harmless"]


def test_digests_of_weights_that_are_remembered(tmp_path: Path, share: float) -> None:
    seen, store = SeenFile("1-2-3-4-5", is_young=False), RememberedDigests(tmp_path)
    store.put(seen, {f"layer.{n}": f"{n:016x}" for n in range(60)})
    (path,) = tmp_path.glob("*.json")
    found = try_damage(path, lambda: store.get(seen) or Noticed, share=share)
    assert found["noticed"] > 100 * found["harmless"]


FILES = (
    "COMPLETE",
    "manifest.json",
    "state.json",
    "index.json",
    "random.safetensors",
    "model-00000-of-00001.safetensors",
    "optimizer-00000-of-00001.safetensors",
)


@pytest.mark.parametrize("name", FILES)
def test_checkpoints(tmp_path: Path, name: str, share: float) -> None:
    """Every file but COMPLETE: all damage is found, and the checkpoint before is used."""
    folders = []
    for step in (1, 2):
        wholes = {"w": torch.arange(200.0) + step, "b": torch.ones(3)}
        engine = MemoryEngine(wholes, optimizer_steps=step)
        state = {"totals": {"step": step, "data_state": json.dumps({"x": step})}}
        folders.append(save_engine(tmp_path, step, engine, keep=2, state=state))
    older, newer = folders
    assert sorted(path.name for path in newer.iterdir()) == sorted(FILES)

    def read() -> Any:
        problem = find_damage(newer)
        if problem is not None:
            assert name in problem
            return Noticed
        return problem

    found = try_damage(newer / name, read, share=share)
    assert found["noticed"] and (not found["harmless"] or name == "COMPLETE")
    (newer / name).write_bytes(b"")
    assert newest_checkpoint(tmp_path)[0] == older
