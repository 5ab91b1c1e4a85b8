"""A checkpoint that is written while training goes on is the one that was asked for."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from support.checkpoints import MemoryEngine, content_of, save_engine, stored_tensors
from support.engines import single_rank

from vlmpack.errors import CheckpointError, NonFiniteError
from vlmpack.training.checkpoint import (
    Saver,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    step_folder,
)
from vlmpack.training.checkpoint import save as module


def engine(value=1.0):
    return MemoryEngine({"w": torch.full((4, 3), value).T, "b": torch.ones(3)}, optimizer_steps=1)


@pytest.fixture
def gate(monkeypatch):
    """Holds every writer back until it is set."""
    opened = threading.Event()
    write = module.write_rank_part

    def held(*arguments, **options):
        assert opened.wait(timeout=60)
        return write(*arguments, **options)

    monkeypatch.setattr(module, "write_rank_part", held)
    yield opened
    opened.set()


def begin(saver, step, made):
    saver.save_in_background(content_of(made, step), made.owned_slices)


def test_it_holds_the_values_of_the_step_it_was_begun_at(tmp_path, gate):
    made = engine()
    saver = Saver(tmp_path, single_rank(), keep=2)
    begin(saver, 1, made)
    assert saver.is_writing
    saver.wait_for_copy()
    for tensors in made.tensors.values():
        for value in tensors.values():
            value.add_(5)  # training goes on
    gate.set()
    saver.finish()
    assert not saver.is_writing
    folder = step_folder(tmp_path, 1)
    assert find_damage(folder) is None
    other = save_engine(tmp_path / "waited", 1, engine(), keep=1)
    names = sorted(path.name for path in other.glob("*-of-*"))
    assert len(names) == 2
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_training_goes_on_until_weights_change(tmp_path, monkeypatch):
    """The thread copies during the next forward and backward pass, and the update waits for it."""
    copied, copy = threading.Event(), module.HostCopies.copy

    def held(*arguments):
        assert copied.wait(timeout=60)
        return copy(*arguments)

    monkeypatch.setattr(module.HostCopies, "copy", held)
    made = engine()
    saver = Saver(tmp_path, single_rank(), keep=1)
    begin(saver, 1, made)  # does not wait

    def update():
        saver.wait_for_copy()
        made.tensors["model"]["w"].add_(5)

    thread = threading.Thread(target=update)
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive() and float(made.tensors["model"]["w"][0, 0]) == 1
    copied.set()
    thread.join(timeout=60)
    assert not thread.is_alive() and float(made.tensors["model"]["w"][0, 0]) == 6
    saver.finish()
    saved = stored_tensors(step_folder(tmp_path, 1))
    assert torch.equal(saved["model.w"], torch.ones(3, 4))
    saver.wait_for_copy()  # nothing is left to do


def test_until_it_is_published_the_older_one_is_the_newest(tmp_path, gate):
    gate.set()
    older = save_engine(tmp_path, 1, engine(), keep=1)
    gate.clear()
    saver = Saver(tmp_path, single_rank(), keep=1)
    begin(saver, 2, engine(2.0))
    assert newest_checkpoint(tmp_path) == (older, [])
    gate.set()
    saver.abandon()  # as a process that ends for another reason
    assert newest_checkpoint(tmp_path) == (older, [])
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    save_engine(tmp_path, 3, engine(), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_next_save_publishes_it_first(tmp_path, in_background):
    saver = Saver(tmp_path, single_rank(), keep=5)
    begin(saver, 1, engine(1.0))
    if in_background:
        begin(saver, 2, engine(2.0))
        saver.finish()
    else:
        saver.save(content_of(engine(), 2), engine(2.0).owned_slices)
    saver.finish()  # nothing is left to do
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    for step, folder in enumerate(list_checkpoints(tmp_path), start=1):
        assert float(stored_tensors(folder)["model.w"][0, 0]) == step


@pytest.mark.parametrize("where", ["writing", "copying"])
def test_a_failure_is_raised_when_it_is_published(tmp_path, monkeypatch, where):
    older = save_engine(tmp_path, 1, engine(), keep=1)

    def failing(*_, **__):
        raise OSError(28, "No space left on device")

    if where == "writing":
        monkeypatch.setattr(module, "write_rank_part", failing)
    else:
        monkeypatch.setattr(module.HostCopies, "copy", failing)
    saver = Saver(tmp_path, single_rank(), keep=1)
    begin(saver, 2, engine())
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .*No space left"):
        saver.finish()
    assert list(tmp_path.iterdir()) == [older]
    assert find_damage(older) is None
    saver.finish()


@pytest.mark.parametrize("kind", ["model", "exp_avg_sq"])
@pytest.mark.parametrize("in_background", [False, True])
def test_values_that_are_no_numbers_are_not_published(tmp_path, kind, in_background):
    older = save_engine(tmp_path, 1, engine(), keep=1)
    spoilt = engine()
    spoilt.tensors[kind]["w"][2, 1] = float("inf")
    saver = Saver(tmp_path, single_rank(), keep=1)
    name = "w" if kind == "model" else f"{kind}.w"
    words = rf"^step 2: 1 tensor holds .*: {name} \(inf\)\. .*{older.name} stays the newest"
    with pytest.raises(NonFiniteError, match=words):
        if in_background:
            begin(saver, 2, spoilt)
            saver.finish()
        else:
            saver.save(content_of(spoilt, 2), spoilt.owned_slices)
    assert list(tmp_path.iterdir()) == [older]
    saver.finish()


def test_the_best_step_that_a_checkpoint_knows_of_outlives_it(tmp_path):
    """Step 3 is found to be the best while the save of step 2 is pending: until step 3 is published
    a run goes on from step 2, whose best is step 1."""
    saver = Saver(tmp_path, single_rank(), keep=1)

    def saved(step, best):
        content = replace(content_of(engine(), step), spared=best)
        saver.save_in_background(content, engine().owned_slices)

    def there():
        return [int(path.name[-1]) for path in list_checkpoints(tmp_path)]

    saved(1, best=1)
    saved(2, best=1)
    saved(3, best=3)  # publishes step 2
    assert there() == [1, 2]
    saver.abandon()  # as a process that is killed before step 3 is published
    assert newest_checkpoint(tmp_path)[0] == step_folder(tmp_path, 2)
    saved(3, best=3)
    saver.finish()
    assert there() == [3]
