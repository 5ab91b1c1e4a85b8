"""Checkpoints are whole or not there; a damaged one is seen and the one before it is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import pickletools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.checkpoints import MemoryEngine, save_engine, stored_tensors
from support.engines import make_engine, make_stepper, single_rank
from support.runs import pack

from vlmpack.errors import CheckpointError
from vlmpack.training.checkpoint import (
    COMPLETE,
    CheckpointReader,
    find_damage,
    folders,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    restore_random_state,
    safetensors_file,
    step_folder,
)
from vlmpack.training.checkpoint import (
    save as save_module,
)
from vlmpack.training.checkpoint.safetensors_file import FileDigest

MODEL, OPTIMIZER = (f"{kind}-00000-of-00001.safetensors" for kind in ("model", "optimizer"))
FILES = (MODEL, OPTIMIZER, "random.safetensors", "index.json", "state.json")
TESTS = Path(__file__).resolve().parents[2]


def engine(step=0):
    """Two parameters; their values tell the step."""
    wholes = {"w": torch.arange(6.0).view(2, 3) + step, "b": torch.ones(3)}
    return MemoryEngine(wholes, optimizer_steps=step)


def save(root, step, keep=3):
    return save_engine(root, step, engine(step), keep=keep, state={"note": "x"})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    folder = save(tmp_path, 7)
    assert folder == step_folder(tmp_path, 7) == tmp_path / "step-00000007"
    again = engine()
    state, random = load_checkpoint(folder, again, single_rank())
    assert again.optimizer_steps == 7
    for kind, tensors in engine(7).tensors.items():
        for name, theirs in tensors.items():
            assert torch.equal(again.tensors[kind][name], theirs), (kind, name)
    assert torch.equal(random["cpu"], torch.get_rng_state())
    assert state == {"step": 7, "optimizer_steps": 7, "note": "x"}
    assert find_damage(folder) is None
    assert sorted(p.name for p in folder.iterdir()) == sorted([*FILES, "manifest.json", COMPLETE])


def test_the_safetensors_library_reads_the_files(tmp_path):
    stored = stored_tensors(save(tmp_path, 2))
    expected = {
        f"{kind}.{name}": tensor
        for kind, tensors in engine(2).tensors.items()
        for name, tensor in tensors.items()
    }
    assert len(expected) == 6
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


def test_there_are_no_moments_before_the_first_optimizer_step(tmp_path):
    folder = save(tmp_path, 0)
    assert not (folder / OPTIMIZER).exists()
    again = engine(3)
    load_checkpoint(folder, again, single_rank())
    assert again.optimizer_steps == 0
    assert again.read_as_none == {("exp_avg", "w"), ("exp_avg", "b")} | {
        ("exp_avg_sq", "w"),
        ("exp_avg_sq", "b"),
    }


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - max(1, len(data) // 10)])


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip_bit, truncate, remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [*FILES, "manifest.json", COMPLETE])
def test_damage_is_detected_and_the_previous_one_is_used(tmp_path, name, damage):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    assert newest_checkpoint(tmp_path) == (newer, [])
    damage(newer / name)
    problem = find_damage(newer)
    assert problem is not None and name in problem
    if name in ("state.json", "manifest.json", COMPLETE):
        with pytest.raises((ValueError, OSError)):
            folders.read_verified(newer, "state.json")
    found, lines = newest_checkpoint(tmp_path)
    assert found == older
    assert lines == [f"{newer}: {problem}"]


def complete_again(folder):
    """Let COMPLETE name the manifest as it is now."""
    data = (folder / "manifest.json").read_bytes()
    digest = FileDigest(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / COMPLETE).write_text(folders.complete_text(1, digest))
    return folder


def test_another_manifest_and_its_files_are_no_part_of_a_checkpoint(tmp_path):
    """Every file fits the manifest; the manifest is that of another save."""
    folder, other = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    for name in (*FILES, "manifest.json"):
        (folder / name).write_bytes((other / name).read_bytes())
    assert "manifest.json does not match its SHA-256 in COMPLETE" in find_damage(folder)
    (folder / COMPLETE).write_bytes((other / COMPLETE).read_bytes())
    assert find_damage(folder) is None, "else something else is wrong with it"


@pytest.mark.parametrize("text", ["", "step 1", "step 1 \n", "step 1 manifest.json 00\n"])
def test_an_emptied_or_cut_complete_is_damage(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / COMPLETE).write_text(text)
    assert "COMPLETE is damaged" in find_damage(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"files": 3}', '{"files": {}}', '{"files": {"state.json": 1}}', "\xff"],
)
def test_a_manifest_of_another_shape_is_damage(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    complete_again(folder)
    assert "manifest.json" in find_damage(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_that_lists_less_than_a_checkpoint_needs_is_damage(tmp_path, name):
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (folder / name).unlink()
    complete_again(folder)
    assert find_damage(folder) == f"manifest.json does not list {name}"


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    folder = save(tmp_path / "checkpoints", 1)
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": "0"}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    complete_again(folder)
    assert "is missing" in find_damage(folder)


def test_an_intact_checkpoint_of_another_format_is_refused(tmp_path):
    """Other files, listed with their hashes."""
    folder = step_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    files = {"model.safetensors": "x", "state.json": json.dumps({"vlmpack_format": 3})}
    digests = {name: folders.write_synced(folder / name, text) for name, text in files.items()}
    listed = {n: {"bytes": d.num_bytes, "sha256": d.sha256} for n, d in digests.items()}
    folders.write_synced(folder / "manifest.json", json.dumps({"files": listed}))
    complete_again(folder)
    assert newest_checkpoint(tmp_path) == (folder, []), "it is not damaged"
    with pytest.raises(CheckpointError, match="vlmpack_format 3, and this vlmpack reads 1"):
        load_checkpoint(folder, engine(), single_rank())


@pytest.mark.parametrize("keep", [1, 2, 4, 7])
def test_only_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
        last = [f"step-{one:08d}" for one in range(max(1, step - keep + 1), step + 1)]
        assert [p.name for p in list_checkpoints(tmp_path)] == last


def test_the_checkpoint_before_a_dump_is_kept_and_none_before_that(tmp_path):
    """Also where it is the newest: after a resume, a dump may be of a step that comes again."""
    for step in range(1, 6):
        save(tmp_path, step, keep=5)
    newest = step_folder(tmp_path, 5)
    folders.prune(tmp_path, 1, newest=newest, before=("step-00000003", "step-00000009"))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000005"]


def test_pruning_counts_complete_checkpoints_alone(tmp_path):
    save(tmp_path, 1, keep=2)
    damaged = save(tmp_path, 2, keep=2)
    (damaged / COMPLETE).unlink()
    save(tmp_path, 3, keep=2)
    assert newest_checkpoint(tmp_path)[0].name == "step-00000003"
    assert (tmp_path / "step-00000001" / COMPLETE).is_file(), "a whole one was removed too early"


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_checkpoint_survives_pruning_beside_later_damaged_ones(tmp_path, keep):
    """A resume passed over damaged ones, so the next save has a smaller step number."""
    save(tmp_path, 3, keep=5)
    for step in (7, 8):
        weights = save(tmp_path, step, keep=5) / MODEL
        weights.write_bytes(weights.read_bytes()[:-1])
    newest = save(tmp_path, 4, keep=keep)
    assert newest_checkpoint(tmp_path) == (newest, [])
    assert len(list_checkpoints(tmp_path)) == keep


def test_leftovers_of_a_killed_save_are_no_checkpoints_and_are_removed(tmp_path):
    leftover = tmp_path / ".tmp-step-00000009-123"
    leftover.mkdir(parents=True)
    (leftover / COMPLETE).touch()
    assert list_checkpoints(tmp_path) == []
    assert newest_checkpoint(tmp_path) == (None, [])
    save(tmp_path, 1)
    assert not leftover.exists()


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = save(tmp_path, 5)
    flip_bit(folder / MODEL)
    save(tmp_path, 5)
    assert find_damage(folder) is None


def test_no_folder_is_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path / "missing") == (None, [])


class Kill(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def operations(monkeypatch):
    """Every system call wrapper that a save goes through, counted; call n raises `failure`."""
    state = {"count": 0, "fail_at": None, "failure": None}

    def guard(target, name):
        original = getattr(target, name)

        def wrapped(*args, **kwargs):
            state["count"] += 1
            if state["count"] == state["fail_at"]:
                raise state["failure"]
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, wrapped)

    guard(safetensors_file.TensorWriter, "write")
    guard(safetensors_file.TensorWriter, "finish")
    for name in ("write_tensors", "write_synced", "sync_folder", "sha256"):
        if hasattr(save_module, name):
            guard(save_module, name)
    guard(Path, "rename")
    guard(Path, "mkdir")
    return state


@pytest.mark.parametrize("failure", ["killed", "disk full"])
def test_a_save_that_fails_anywhere_leaves_the_previous_one(tmp_path, monkeypatch, failure):
    older = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        state = operations(patch)
        save(tmp_path / "dry", 2)
        points = state["count"]
    assert points > 15
    for point in range(1, points + 1):
        with monkeypatch.context() as patch:
            state = operations(patch)
            state["fail_at"] = point
            full = OSError(errno.ENOSPC, "No space left on device")
            state["failure"] = Kill() if failure == "killed" else full
            expected = Kill if failure == "killed" else CheckpointError
            with pytest.raises(expected) as caught:
                save(tmp_path, 2, keep=1)
        if failure == "disk full":
            assert "step 2 cannot be written" in str(caught.value)
            assert "No space left" in str(caught.value)
            assert not list(tmp_path.glob(".tmp-*"))
        found, _ = newest_checkpoint(tmp_path)
        if found != older:  # failed after COMPLETE: the new one must then be whole
            assert find_damage(found) is None
            assert point == points
        assert find_damage(older) is None, f"point {point}"
        for path in tmp_path.glob("step-00000002*"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    assert save(tmp_path, 2).is_dir()


def test_a_file_that_does_not_read_back_is_no_checkpoint(tmp_path, monkeypatch):
    """As a disk that drops a write without saying so."""
    older = save(tmp_path, 1)
    finish = safetensors_file.TensorWriter.finish

    def lossy(writer):
        digest = finish(writer)
        flip_bit(Path(writer._file.name))
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.TensorWriter, "finish", lossy)
        with pytest.raises(CheckpointError, match="does not read back as it was written"):
            save(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == (older, [])


@pytest.mark.slow
def test_a_file_size_limit_is_an_error_and_leaves_the_previous_one(tmp_path):
    """The kernel's own refusal to write, in a process of its own."""
    save(tmp_path, 1)
    script = f"""
        import resource, signal, torch
        from pathlib import Path
        from vlmpack.errors import CheckpointError
        from support.checkpoints import MemoryEngine, save_engine
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        big = MemoryEngine({{"w": torch.zeros(1_000_000)}})
        try:
            save_engine(Path({str(tmp_path)!r}), 2, big, keep=1)
        except CheckpointError as error:
            print("refused:", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused: checkpoint of step 2 cannot be written" in done.stdout
    found, damaged = newest_checkpoint(tmp_path)
    assert (found, damaged) == (step_folder(tmp_path, 1), [])
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(tmp_path, 2)
    finally:
        tmp_path.chmod(0o700)
    assert newest_checkpoint(tmp_path)[0] == step_folder(tmp_path, 1)


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="step 1 cannot be written"):
        save(tmp_path / "checkpoints", 1)


def is_pickle(data):
    try:
        return bool(list(pickletools.genops(data)))
    except Exception:  # each wrong byte has an error of its own
        return False


def test_nothing_is_pickled(tmp_path):
    assert is_pickle(pickle.dumps([1]))
    folder = save(tmp_path, 1)
    for path in folder.iterdir():
        assert path.suffix in (".safetensors", ".json", ""), path
        data = path.read_bytes()
        assert not data.startswith(b"PK"), "a zip of pickles, as torch.save writes"
        assert not is_pickle(data), path


def test_random_state_goes_on_where_it_was(tmp_path):
    torch.manual_seed(3)
    torch.rand(5)
    folder = save(tmp_path, 1)
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_random_state(CheckpointReader(folder).random())
    assert torch.equal(torch.rand(4), expected)


@pytest.fixture(scope="module")
def trained(tiny_folder, encoder, encoded, tmp_path_factory):
    """A stepper after two steps, and its checkpoint."""
    stepper = make_stepper(make_engine(tiny_folder, encoder))
    for step in range(2):
        stepper.train(step, [pack(encoded, alignment=8)], num_skipped=0, stop=False)
    return stepper, save_engine(tmp_path_factory.mktemp("trained"), 2, stepper.engine, keep=1)


def test_weights_and_moments_resume_bit_for_bit(tiny_folder, encoder, encoded, trained):
    stepper, folder = trained
    stored = stored_tensors(folder)
    names = {name for name, _ in stepper.engine.parameters()}
    assert stored.keys() == {
        f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq") for name in names
    }
    again = make_stepper(make_engine(tiny_folder, encoder))
    load_checkpoint(folder, again.engine, single_rank())
    for step in (2, 3):
        batches = [pack(encoded, alignment=8)]
        ours, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        theirs, _ = again.train(step, batches, num_skipped=0, stop=False)
        assert ours == theirs
    for (name, mine), (_, other) in zip(
        stepper.engine.parameters(), again.engine.parameters(), strict=True
    ):
        assert torch.equal(mine, other), name
        assert torch.equal(
            stepper.engine.optimizer.state[mine]["step"],
            again.engine.optimizer.state[other]["step"],
        )


def test_a_checkpoint_from_before_the_first_step_drops_moments(
    tmp_path, tiny_folder, encoder, encoded
):
    fresh = make_stepper(make_engine(tiny_folder, encoder))
    folder = save_engine(tmp_path, 0, fresh.engine, keep=1)
    stepper = make_stepper(make_engine(tiny_folder, encoder))
    batches = [pack(encoded, alignment=8)]
    first, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    load_checkpoint(folder, stepper.engine, single_rank())
    assert stepper.engine.optimizer_steps == 0
    assert not stepper.engine.optimizer.state
    again, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    assert first == again


def test_owned_slices_are_views(trained):
    stepper, _ = trained
    addresses = {p.data_ptr() for _, p in stepper.engine.parameters()}
    for state in stepper.engine.optimizer.state.values():
        addresses |= {state[kind].data_ptr() for kind in ("exp_avg", "exp_avg_sq")}
    owned = list(stepper.engine.owned_slices())
    assert {value.data_ptr() for _, _, value in owned} == addresses
    assert len(owned) == len(addresses) > 150


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 1)

    def refused(wholes):
        other = MemoryEngine(wholes)
        before = {name: value.clone() for name, value in other.tensors["model"].items()}
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder, other, single_rank())
        assert all(torch.equal(other.tensors["model"][n], value) for n, value in before.items())
        return str(caught.value)

    w, b = torch.zeros(2, 3), torch.zeros(3)
    assert "2 model tensors, expected 1 (not in the model: b)" in refused({"w": w})
    assert "2 model tensors, expected 3 (missing: c)" in refused({"w": w, "b": b, "c": b})
    message = refused({"w": w.T.contiguous(), "b": b})
    assert "model w: shape (2, 3) in the checkpoint, (3, 2) in the model" in message
