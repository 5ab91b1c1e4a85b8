"""The loader's workers are at work while the model is loaded, and end where that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import vlmpack
from vlmpack.data.loading import loader
from vlmpack.run import launch, opening

ROOT = Path(__file__).resolve().parents[2]


class Stopped(Exception):
    """In place of a model."""


@pytest.fixture
def watches(monkeypatch):
    """Those of all loaders."""
    made = []

    class Kept(loader.WorkerWatch):
        def __init__(self, batches, num_workers):
            super().__init__(batches, num_workers)
            made.append((self, batches))

    monkeypatch.setattr(loader, "WorkerWatch", Kept)
    return made


def finetune_until_it_stops(folder):
    """What the run raises, with its traceback, in which all that it had is still alive."""
    with pytest.raises(Stopped) as raised:
        vlmpack.finetune(
            "recipes/digits-demo.yaml",
            run_dir=str(folder / "run"),
            data__index_dir=str(folder / "index"),
            data__num_workers=1,
            evaluation__generate=False,
            training__max_steps=1,
        )
    return raised


@pytest.mark.soak
def test_workers_read_before_the_model_is_loaded_and_end_with_the_launch(
    watches, monkeypatch, tmp_path
):
    seen = []

    def build(*_):
        ((watch, batches),) = watches
        deadline = time.monotonic() + 60
        while not batches._worker_result_queue._reader.poll(0.05):
            assert time.monotonic() < deadline, "no batch was read"
        seen.extend(worker.is_alive() for worker in watch.workers)
        raise Stopped

    monkeypatch.setattr(opening, "build_engine", build)
    monkeypatch.chdir(ROOT)
    finetune_until_it_stops(tmp_path)
    assert seen == [True]
    ((watch, _),) = watches
    assert not any(worker.is_alive() for worker in watch.workers)


@pytest.mark.soak
def test_workers_end_where_the_launch_fails_between_the_model_and_the_training(
    watches, monkeypatch, tmp_path
):
    """In a metric of the answers before training, say; a notebook keeps the traceback for ever."""

    def fail(*_):
        ((watch, _batches),) = watches
        assert all(worker.is_alive() for worker in watch.workers)
        raise Stopped

    monkeypatch.setattr(launch, "answer_before", fail)
    monkeypatch.chdir(ROOT)
    raised = finetune_until_it_stops(tmp_path)
    ((watch, _),) = watches
    assert raised.traceback and watch.workers
    assert not any(worker.is_alive() for worker in watch.workers)
