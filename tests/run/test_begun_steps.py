"""The loader's workers are at work while the model is loaded, and end where that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import vlmpack
from vlmpack.data.loading import loader
from vlmpack.run import opening

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


@pytest.mark.slow
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
    with pytest.raises(Stopped):
        vlmpack.finetune(
            "recipes/digits-demo.yaml",
            run_dir=str(tmp_path / "run"),
            data__index_dir=str(tmp_path / "index"),
            data__num_workers=1,
            evaluation__generate=False,
            training__max_steps=1,
        )
    assert seen == [True]
    ((watch, _),) = watches
    assert not any(worker.is_alive() for worker in watch.workers)
