"""A model folder that changes between launches, or while one goes on."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.drifts import DRIFTS, reshard
from support.exports import export_run
from support.recipes import changed, rows, run_settings
from support.shards import TINY_MODEL

from vlmpack.api import resolve, run_recipe
from vlmpack.errors import RunIdentityError, VlmpackError
from vlmpack.run.session import Session

pytestmark = pytest.mark.slow


def settings_of(place: Path, **values: Any) -> dict[str, Any]:
    """A run of one step on a copy of the tiny model, its tower frozen."""
    folder = shutil.copytree(TINY_MODEL, place / "model")
    frozen = {"trainable__vision": "frozen", "training__max_steps": 1}
    settings = run_settings(place, model__path=str(folder), **frozen)
    return changed(settings, **values)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of one step, to copy from."""
    place = tmp_path_factory.mktemp("began")
    settings = settings_of(place, trainable__language="lora", trainable__lora__rank=2)
    run_recipe(resolve(settings, {}))
    return place, settings


Resume = Callable[[], None]


@pytest.fixture
def begun(started: tuple[Path, dict[str, Any]]) -> Any:
    """(model folder, run folder, how to go on to step 2); both folders are put back afterwards."""
    place, settings = started
    folder, run = place / "model", place / "run"
    kept = place / "kept"
    for path in (folder, run):
        shutil.copytree(path, kept / path.name)

    def resume() -> None:
        run_recipe(resolve(changed(settings, training__max_steps=2), {}))

    yield folder, run, resume
    for path in (folder, run):
        shutil.rmtree(path)
        shutil.move(kept / path.name, path)
    shutil.rmtree(kept)


@pytest.mark.cases(slow="another tower")
@pytest.mark.parametrize("name", DRIFTS)
def test_a_resume_beside_a_changed_model_is_refused(
    begun: tuple[Path, Path, Resume], name: str
) -> None:
    folder, run, resume = begun
    drift, named = DRIFTS[name]
    drift(folder)
    with pytest.raises(VlmpackError) as caught:
        resume()
    if name != "a tensor left out":  # which no longer fits its config
        assert isinstance(caught.value, RunIdentityError)
        assert named in str(caught.value)
    for merge in (False, True):
        with pytest.raises(VlmpackError) as caught:
            export_run(run, merge=merge)
        if name != "a tensor left out":
            assert named in str(caught.value)
    assert [step for (step,) in rows(run, "step")] == [1]
    assert not list(run.glob("export-*"))
    assert not list(run.glob("adapter-*"))


@pytest.mark.soak
def test_a_resume_beside_the_same_tensors_in_other_files_goes_on(
    begun: tuple[Path, Path, Resume],
) -> None:
    folder, run, resume = begun
    reshard(folder)
    resume()
    assert [step for (step,) in rows(run, "step")] == [1, 2]
    assert export_run(run, merge=True).folder.is_dir()


def test_a_checkpoint_knows_its_model_where_the_record_is_lost(
    begun: tuple[Path, Path, Resume],
) -> None:
    folder, run, resume = begun
    (run / "model.json").unlink()
    DRIFTS["another tower"][0](folder)
    with pytest.raises(RunIdentityError, match=r"was trained from another model .* weights differ"):
        resume()
    assert not (run / "model.json").exists()
    with pytest.raises(RunIdentityError, match="was trained from another model"):
        export_run(run, merge=True)


@pytest.mark.slow
def test_an_export_beside_a_model_that_changed_while_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, export__enabled=True)
    train = Session.run

    def run(session: Session) -> None:
        train(session)
        DRIFTS["the chat template"][0](tmp_path / "model")

    monkeypatch.setattr(Session, "run", run)
    with pytest.raises(RunIdentityError, match=r"chat_template\.jinja: "):
        run_recipe(resolve(settings, {}))
    assert not (tmp_path / "run" / "export").exists()
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.slow
def test_a_run_whose_record_is_lost_goes_on_with_a_line(
    begun: tuple[Path, Path, Resume], caplog: pytest.LogCaptureFixture
) -> None:
    _, run, resume = begun
    (run / "model.json").unlink()
    caplog.set_level(logging.INFO, "vlmpack")
    resume()
    assert "earlier launches of this run recorded no fingerprint of its model" in caplog.text
    assert (run / "model.json").is_file()
