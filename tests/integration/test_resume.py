"""A run that is stopped and resumed is the run that never stopped, bit for bit."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import stored_tensors
from support.recipes import changed, copy_samples, rows, run_settings
from support.shards import ROOT
from support.whole_runs import STEPS, run_until

import vlmpack
from vlmpack.api import resolve, run_recipe
from vlmpack.errors import CheckpointError, RunDirError, RunIdentityError
from vlmpack.run import session as session_module
from vlmpack.training.checkpoint import Saver, find_damage, newest_checkpoint
from vlmpack.training.checkpoint import save as save_module

COLUMNS = ("step", "epoch", "loss", "grad_norm", "num_tokens", "num_samples")


def final_weights(run_dir: Path) -> Any:
    """Parameters and moments of the last checkpoint."""
    return stored_tensors(run_dir / "checkpoints" / f"step-{STEPS:08d}")


def assert_same_run(ours: Path, reference: Path) -> None:
    assert rows(ours, *COLUMNS) == rows(reference, *COLUMNS)
    mine, theirs = final_weights(ours), final_weights(reference)
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)


@pytest.fixture
def unbroken(settings: dict[str, Any], tmp_path: Path) -> Path:
    run_dir = tmp_path / "unbroken"
    run_recipe(resolve(changed(settings, training__max_steps=STEPS, run_dir=str(run_dir)), {}))
    found = rows(run_dir, *COLUMNS)
    assert [row[0] for row in found] == list(range(1, STEPS + 1))
    assert {row[5] for row in found} == {2, 4}, "no short batch at an epoch's end"
    assert len({row[2] for row in found}) == STEPS, "losses repeat: nothing is learned"
    return run_dir


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six steps with checkpoints at every other; its own run is unbroken, and read-only."""
    settings = run_settings(
        tmp_path_factory.mktemp("short"), training__max_steps=6, checkpoint__interval_steps=2
    )
    run_recipe(resolve(settings, {}))
    return settings


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal_to_the_unbroken_run(
    settings: dict[str, Any], tmp_path: Path, unbroken: Path, monkeypatch: Any
) -> None:
    # In the middle of an epoch, at its very end, a step later, in the second and the third.
    epochs = dict(rows(unbroken, "step", "epoch"))
    assert [epochs[step] for step in (2, 6, 7, 9, 14)] == [0, 0, 1, 1, 2]
    run_dir = tmp_path / "resumed"
    mine = changed(settings, training__max_steps=STEPS, run_dir=str(run_dir))
    for stop_after in (2, 6, 7, 9, 14, None):
        run_until(mine, stop_after, monkeypatch)
    assert_same_run(run_dir, unbroken)


@pytest.mark.soak
def test_resume_at_any_step_is_bit_equal(
    settings: dict[str, Any], tmp_path: Path, unbroken: Path, monkeypatch: Any
) -> None:
    for stop_after in range(1, STEPS):
        run_dir = tmp_path / f"stop-{stop_after}"
        mine = changed(settings, training__max_steps=STEPS, run_dir=str(run_dir))
        run_until(mine, stop_after, monkeypatch)
        run_until(mine, None, monkeypatch)
        assert_same_run(run_dir, unbroken)


@pytest.mark.soak
def test_resume_with_workers_and_another_micro_batch_split(
    short: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Neither changes the global batches; the split changes only the rounding of sums."""
    mine = changed(short, run_dir=str(tmp_path / "mine"))
    run_until(mine, 3, monkeypatch, total=6)
    mine = changed(mine, data__num_workers=1, training__micro_batch_size=2)
    run_recipe(resolve(mine, {}))
    ours = rows(tmp_path / "mine", "step", "num_tokens", "num_samples")
    assert ours == rows(short["run_dir"], "step", "num_tokens", "num_samples")
    for (a, norm_a), (b, norm_b) in zip(
        rows(tmp_path / "mine", "loss", "grad_norm"),
        rows(short["run_dir"], "loss", "grad_norm"),
        strict=True,
    ):
        assert a == pytest.approx(b, rel=1e-5)
        assert norm_a == pytest.approx(norm_b, rel=1e-5)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(
    short: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    mine = changed(short, run_dir=str(tmp_path / "mine"))
    run_until(mine, 5, monkeypatch, total=6)
    folder = Path(mine["run_dir"], "checkpoints", "step-00000005")
    weights = folder / "model-00000-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    run_recipe(resolve(mine, {}))
    assert rows(mine["run_dir"], *COLUMNS) == rows(short["run_dir"], *COLUMNS)


@pytest.mark.soak
def test_the_length_of_a_run_follows_the_checkpoint_that_is_loaded(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Its data changed in the second epoch; then every checkpoint but one of the first is lost."""
    other = tmp_path / "other.tar"
    copy_samples(
        ROOT / "assets/digits/train-000001.tar", other, 10
    )  # 3 steps an epoch instead of 6
    values = changed(
        settings, training__max_steps=None, training__num_epochs=3, checkpoint__interval_steps=2
    )
    run_until(values, 7, monkeypatch, total=18)
    values = changed(values, data__train=str(other), checkpoint__on_data_change="new_era")
    run_until(values, 8, monkeypatch, total=10)  # a new era from step 7 on, in the third epoch
    for folder in sorted(Path(values["run_dir"], "checkpoints").iterdir())[1:]:
        weights = folder / "model-00000-of-00001.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    assert run_recipe(resolve(values, {})).steps == 8
    epochs = rows(values["run_dir"], "step", "epoch")
    assert epochs == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2), (8, 2)]


@pytest.mark.cases(slow="never done")
@pytest.mark.slow
@pytest.mark.parametrize("writing", [False, True], ids=["done at once", "never done"])
def test_background_checkpoints_are_those_of_a_waiting_run(
    short: dict[str, Any], tmp_path: Path, monkeypatch: Any, writing: bool
) -> None:
    """Published at the first step boundary where no rank writes, else before the next save."""
    base = changed(short, run_dir=str(tmp_path / "mine"))
    there: dict[int, list[int]] = {}
    original = session_module.Session.steps

    def looking(self: Any) -> Any:
        for train_step in original(self):
            folders = self.place.run_dir.checkpoints.glob("step-*/COMPLETE")
            there[self.trainer.totals.step + 1] = sorted(int(f.parent.name[5:]) for f in folders)
            yield train_step

    monkeypatch.setattr(session_module.Session, "steps", looking)
    monkeypatch.setattr(Saver, "is_writing", property(lambda _: writing))
    run_recipe(resolve(changed(base, checkpoint__asynchronous=True), {}))
    second = [2, 4] if not writing else [2]
    first = [2] if not writing else []
    assert there == {1: [], 2: [], 3: [], 4: first, 5: [2], 6: second}
    for step in (2, 4, 6):
        mine, theirs = (
            Path(run["run_dir"], "checkpoints", f"step-{step:08d}") for run in (base, short)
        )
        assert find_damage(mine) is None
        for path in theirs.glob("*-of-*.safetensors"):
            assert (mine / path.name).read_bytes() == path.read_bytes(), path
        assert (mine / "random.safetensors").read_bytes() == (
            theirs / "random.safetensors"
        ).read_bytes()
        states = [json.loads((folder / "state.json").read_text()) for folder in (mine, theirs)]
        assert [state["totals"].pop("train_seconds") > 0 for state in states] == [True, True]
        assert states[0] == states[1]


class Kill(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.slow
def test_a_run_killed_before_its_checkpoint_is_published_resumes_from_the_one_before(
    short: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    mine = changed(short, checkpoint__asynchronous=True, run_dir=str(tmp_path / "mine"))
    publish = Saver._publish

    def killed(self: Any, folder: Path, content: Any, share: Any) -> None:
        if content.step == 4:
            raise Kill
        publish(self, folder, content, share)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_publish", killed)
        with pytest.raises(Kill):
            run_recipe(resolve(mine, {}))
    checkpoints = Path(mine["run_dir"], "checkpoints")
    assert len(list(checkpoints.glob(".tmp-step-00000004-*"))) == 1
    assert newest_checkpoint(checkpoints) == (checkpoints / "step-00000002", [])
    run_recipe(resolve(mine, {}))
    assert rows(mine["run_dir"], *COLUMNS) == rows(short["run_dir"], *COLUMNS)
    assert not list(checkpoints.glob(".tmp-*"))


@pytest.mark.slow
def test_a_failure_in_the_background_ends_the_run(
    settings: dict[str, Any], monkeypatch: Any
) -> None:
    mine = changed(settings, training__max_steps=6, checkpoint__interval_steps=2)
    write = save_module.write_rank_part

    def failing(folder: Path, *arguments: Any, **options: Any) -> Any:
        if "step-00000004" in folder.name:
            raise OSError(28, "No space left on device")
        return write(folder, *arguments, **options)

    monkeypatch.setattr(save_module, "write_rank_part", failing)
    with pytest.raises(CheckpointError, match=r"step 4 cannot be written: .*No space left"):
        run_recipe(resolve(changed(mine, checkpoint__asynchronous=True), {}))
    checkpoints = Path(mine["run_dir"], "checkpoints")
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = run_recipe(resolve(settings, {}))
    before = Path(settings["run_dir"], "metrics.jsonl").read_text()
    with caplog.at_level("INFO", "vlmpack"):
        assert run_recipe(resolve(settings, {})) == first
    assert "this run is finished; a higher training.max_steps goes on with it, or" in caplog.text
    assert Path(settings["run_dir"], "metrics.jsonl").read_text() == before


@pytest.mark.soak
def test_a_finished_run_can_be_made_longer(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And says on the way that its own record of what it trained is damaged."""
    run_recipe(resolve(settings, {}))
    record = Path(settings["run_dir"], "samples", "rank-0000.jsonl")
    assert "samples/rank-0000.jsonl" not in caplog.text
    record.write_bytes(record.read_bytes().replace(b'"batch":2', b'"batch":7'))
    longer = run_recipe(resolve(changed(settings, training__max_steps=5), {}))
    assert f"{record}, line 3: damaged" in caplog.text
    assert longer.steps == 5
    assert [row[0] for row in rows(settings["run_dir"], "step")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_resolved_recipe_in_the_run_folder_resumes_alone(
    settings: dict[str, Any], monkeypatch: Any
) -> None:
    run_until(settings, 1, monkeypatch, total=3)
    result = run_recipe(resolve(Path(settings["run_dir"]) / "recipe.yaml", {}))
    assert result.steps == 3


@pytest.mark.slow
def test_another_identity_is_refused_with_every_difference(settings: dict[str, Any]) -> None:
    run_recipe(resolve(settings, {}))
    other = changed(settings, training__seed=4, optim__lr=0.5)
    with pytest.raises(RunIdentityError) as caught:
        run_recipe(resolve(other, {}))
    assert "training.seed: 3 in the run folder, 4 in the recipe" in str(caught.value)
    assert "optim.lr" in str(caught.value)


@pytest.mark.soak
def test_a_run_that_saved_nothing_begins_again_with_another_lr(
    settings: dict[str, Any], monkeypatch: Any, caplog: Any
) -> None:
    """Also from a clone that is not installed: no package of that name is known to Python."""
    settings = changed(settings, training__max_steps=2)
    original, known = session_module.Session.steps, metadata.distribution

    def ending(self: Any) -> Any:
        steps = original(self)
        yield next(steps)
        raise KeyboardInterrupt

    def unknown(name: str) -> metadata.Distribution:
        if name == "vlmpack":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    with monkeypatch.context() as patch:
        patch.setattr(session_module.Session, "steps", ending)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(resolve(settings, {}))
    assert len(rows(settings["run_dir"], "step")) == 1
    assert "no checkpoint is saved yet" in caplog.text
    caplog.clear()
    other = changed(settings, optim__lr=0.005)
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "distribution", unknown)
        result = run_recipe(resolve(other, {}))
    assert "ended before its first checkpoint. Nothing of its 1 step was saved" in caplog.text
    assert "optim.lr" in caplog.text
    assert rows(settings["run_dir"], "step", "learning_rate") == [(1, 0.0025), (2, 0.005)]
    assert (result.run_dir / "metrics.jsonl.old").is_file()
    assert result.figures["versions"]["vlmpack"] == vlmpack.__version__
    with pytest.raises(RunIdentityError, match=r"optim\.lr"):  # now there is something to lose
        run_recipe(resolve(settings, {}))


@pytest.mark.slow
def test_resume_never_wants_an_empty_folder(settings: dict[str, Any]) -> None:
    run_recipe(resolve(settings, {}))
    again = changed(settings, checkpoint__resume="never", training__max_steps=4)
    with pytest.raises(RunDirError, match="resume is never"):
        run_recipe(resolve(again, {}))


@pytest.mark.slow
def test_resume_required_wants_a_checkpoint(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="required"):
        run_recipe(resolve(changed(settings, checkpoint__resume="required"), {}))
