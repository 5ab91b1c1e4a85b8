"""One process, one run, in one folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from vlmpack.errors import RunDirError, RunIdentityError
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import write_atomically


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def own(run_dir, pid, host=None):
    """Leave a lock that says so."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    owner = {"pid": pid, "host": host if host is not None else socket.gethostname()}
    run_dir.lock.write_text(json.dumps(owner), encoding="utf-8")


def test_the_lock_lives_as_long_as_the_work(run_dir, one_rank):
    with run_dir.entered(one_rank):
        assert json.loads(run_dir.lock.read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not run_dir.lock.exists()
    with pytest.raises(ZeroDivisionError), run_dir.entered(one_rank):
        _ = 1 / 0
    assert not run_dir.lock.exists()


def test_a_second_live_process_is_refused(run_dir, one_rank):
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        own(run_dir, other.pid)
        with (
            pytest.raises(RunDirError, match=f"in use by process {other.pid} on .*; wait for it"),
            run_dir.entered(one_rank),
        ):
            pytest.fail("entered a folder in use")
        assert json.loads(run_dir.lock.read_text(encoding="utf-8"))["pid"] == other.pid
    finally:
        other.communicate(timeout=30)
    with run_dir.entered(one_rank):  # it is gone: its lock is stale
        assert json.loads(run_dir.lock.read_text(encoding="utf-8"))["pid"] == os.getpid()


def test_a_lock_of_another_machine_is_refused(run_dir, one_rank):
    own(run_dir, 1, host="elsewhere")
    with (
        pytest.raises(
            RunDirError,
            match=r"process 1 on elsewhere, .* that this machine can see. If that process",
        ),
        run_dir.entered(one_rank),
    ):
        pytest.fail("entered a folder in use")
    assert run_dir.lock.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "null"])
def test_a_damaged_lock_is_stale(run_dir, one_rank, text):
    run_dir.path.mkdir(parents=True)
    run_dir.lock.write_text(text, encoding="utf-8")
    with run_dir.entered(one_rank):
        assert run_dir.lock.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, one_rank):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with (
        pytest.raises(RunDirError, match=r"cannot be written.*choose another run_dir"),
        RunDir(tmp_path / "file" / "run").entered(one_rank),
    ):
        pytest.fail("entered a folder under a file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(run_dir, one_rank):
    run_dir.path.mkdir(parents=True)
    run_dir.path.chmod(0o500)
    try:
        with (
            pytest.raises(RunDirError, match="cannot be written"),
            run_dir.entered(one_rank),
        ):
            pytest.fail("entered a read-only folder")
    finally:
        run_dir.path.chmod(0o700)


def test_preparing_leaves_no_trace(run_dir):
    run_dir.prepare()
    assert list(run_dir.path.iterdir()) == []


def differences(recorded, current):
    keys = sorted(recorded.keys() | current.keys())
    return [
        f"{key}: {recorded.get(key)} -> {current.get(key)}"
        for key in keys
        if recorded.get(key) != current.get(key)
    ]


def test_another_identity_is_refused_with_every_difference(run_dir):
    run_dir.prepare()
    first = {"training.seed": 1, "optim.lr": 0.1, "model.path": "a"}
    run_dir.check_identity(first, differences)
    run_dir.check_identity(first, differences)
    (run_dir.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(RunIdentityError) as caught:
        run_dir.check_identity({**first, "training.seed": 2, "optim.lr": 0.2}, differences)
    message = str(caught.value)
    assert "training.seed: 1 -> 2" in message
    assert "optim.lr: 0.1 -> 0.2" in message
    assert "model.path" not in message
    assert "Choose another run_dir, or restore these values" in message
    assert run_dir.recorded_identity() == first, "left as it was"


def test_a_start_that_failed_before_its_first_step_claims_nothing(run_dir):
    run_dir.prepare()
    run_dir.check_identity({"model.path": "a typo"}, differences)
    run_dir.check_identity({"model.path": "a"}, differences)
    assert run_dir.recorded_identity() == {"model.path": "a"}


def test_a_run_without_a_checkpoint_begins_again_with_other_values(run_dir, caplog):
    """It saved nothing: there is nothing that the new values could harm, and a line says so."""
    run_dir.prepare()
    run_dir.check_identity({"optim.lr": 0.1}, differences)
    run_dir.metrics.write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
    run_dir.check_identity({"optim.lr": 0.1}, differences)
    assert caplog.text == ""
    run_dir.check_identity({"optim.lr": 0.2}, differences)
    assert "Nothing of its 2 steps was saved" in caplog.text
    assert "optim.lr: 0.1 -> 0.2" in caplog.text
    assert "begins at step 0" in caplog.text
    assert run_dir.recorded_identity() == {"optim.lr": 0.2}
    assert not run_dir.metrics.exists()
    assert (run_dir.path / "metrics.jsonl.old").read_text(encoding="utf-8").count("step") == 2


def leave_found(run_dir):
    """What a launch finds before its first step."""
    (run_dir.path / "predictions-before.jsonl").write_text("{}\n", encoding="utf-8")
    run_dir.verify.mkdir()
    (run_dir.verify / "verify.json").write_text("{}", encoding="utf-8")
    run_dir.audit.write_text("{}", encoding="utf-8")


def test_what_a_run_found_that_saved_nothing_is_no_other_ones(run_dir, caplog):
    """Not even where it took no step; and the same run's stays."""
    run_dir.prepare()
    run_dir.check_identity({"model.path": "a"}, differences)
    found = {"predictions-before.jsonl", "verify", "audit.json"}
    for path in ("b", "c"):  # the second time in the place of what was put aside
        leave_found(run_dir)
        caplog.clear()
        run_dir.check_identity(run_dir.recorded_identity(), differences)
        assert found <= {path.name for path in run_dir.path.iterdir()} and caplog.text == ""
        run_dir.check_identity({"model.path": path}, differences)
        left = {path.name for path in run_dir.path.iterdir()}
        assert left == {"identity.json"} | {f"{name}.old" for name in found}
        assert "Nothing of it was saved" in caplog.text
        assert "kept as predictions-before.jsonl.old, verify.old, audit.json.old" in caplog.text
    assert (run_dir.path / "verify.old" / "verify.json").is_file()


def test_a_run_has_one_id_from_its_first_launch_on(run_dir, monkeypatch):
    run_dir.prepare()
    run_dir.new_id()
    first = run_dir.run_id()
    assert len(first) == 32 and RunDir(run_dir.path).run_id() == first
    run_dir.new_id()
    second = run_dir.run_id()
    assert second != first, "nothing was saved: it begins once more"
    (run_dir.checkpoints / "step-00000001").mkdir(parents=True)
    run_dir.new_id()
    assert run_dir.run_id() == second
    for damage in ("", "x" * 32, f"{first}\n{first}"):
        run_dir.id.write_text(damage, encoding="utf-8")
        drawn = run_dir.run_id()
        assert drawn not in (first, second) and run_dir.run_id() == drawn
    run_dir.id.unlink()

    def fail(*_):
        raise OSError("read-only")

    monkeypatch.setattr("vlmpack.training.run_dir.write_atomically", fail)
    assert len(run_dir.run_id()) == 32 and not run_dir.id.exists()


@pytest.mark.parametrize("left", ["checkpoints/step-00000001/state.json", "result.json"])
def test_what_was_saved_is_defended(run_dir, left):
    """A checkpoint, be it damaged, or the result of a finished run."""
    run_dir.prepare()
    run_dir.check_identity({"optim.lr": 0.1}, differences)
    run_dir.metrics.write_text('{"step": 1}\n', encoding="utf-8")
    (run_dir.path / left).parent.mkdir(parents=True, exist_ok=True)
    (run_dir.path / left).write_text("{", encoding="utf-8")
    with pytest.raises(RunIdentityError, match=r"optim\.lr: 0\.1 -> 0\.2"):
        run_dir.check_identity({"optim.lr": 0.2}, differences)
    assert run_dir.metrics.exists()


def test_fields_that_may_change_are_recorded_anew(run_dir):
    run_dir.prepare()
    run_dir.check_identity({"max_steps": 10}, lambda *_: [])
    run_dir.check_identity({"max_steps": 20}, lambda *_: [])
    assert run_dir.recorded_identity() == {"max_steps": 20}


def test_a_damaged_identity_is_an_error(run_dir):
    run_dir.prepare()
    run_dir.identity.write_text("{", encoding="utf-8")
    with pytest.raises(RunDirError, match="is damaged"):
        run_dir.check_identity({}, differences)


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert [p for p in tmp_path.iterdir() if p.name.endswith(str(os.getpid()))] == []
