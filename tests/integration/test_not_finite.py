"""A run whose weights are no numbers saves and exports nothing of them, on any rank or engine."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import replica_faults as worker
from support.forked import run_ranks
from support.recipes import changed, run_settings, write_recipe
from support.shards import TINY_MODEL

from vlmpack.api import resolve, run_recipe
from vlmpack.errors import CheckpointError, ModelError, NonFiniteError
from vlmpack.model_folder.finite import non_finite_tensors
from vlmpack.run.export import choose_export
from vlmpack.training.checkpoint import find_damage, list_checkpoints, safetensors_file
from vlmpack.training.step import Stepper

NAME = "model.language_model.norm.weight"


def settings_of(root: Path, **changes: Any) -> dict[str, Any]:
    return run_settings(
        root, checkpoint__interval_steps=2, **{"training__max_steps": 3, **changes}
    ) | {"export": {"enabled": True, "dtype": "float32"}}


def spoilt(monkeypatch: pytest.MonkeyPatch, at: int, kind: str = "model") -> None:
    """One value of one tensor, after that step."""
    original = Stepper.train

    def train(self: Any, step: int, *args: Any, **options: Any) -> Any:
        found = original(self, step, *args, **options)
        if step + 1 == at:
            for of, box, value in self.engine.owned_slices():
                if (of, box.name) == (kind, NAME):
                    value.data[3] = math.nan
        return found

    monkeypatch.setattr(Stepper, "train", train)


def names(run_dir: Path) -> list[str]:
    return [path.name for path in sorted((run_dir / "checkpoints").glob("*"))]


def test_a_learning_rate_that_no_weight_survives_ends_the_run(tmp_path: Path) -> None:
    """After its only step, which had a loss."""
    values = settings_of(tmp_path, training__max_steps=1)
    values["optim"] = {"lr": 1e38}
    with pytest.raises(
        NonFiniteError, match=r"^step 1: \d+ tensors hold .*; there is no"
    ) as caught:
        run_recipe(resolve(values, {}))
    assert caught.value.exit_code == 1
    assert names(tmp_path / "run") == []
    assert not (tmp_path / "run" / "export").exists()
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "exp_avg", "exp_avg_sq"])
def test_one_value_ends_a_run_that_then_goes_on_from_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    recipe, run_dir = resolve(settings_of(tmp_path), {}), tmp_path / "run"
    name = NAME if kind == "model" else f"{kind}.{NAME}"
    words = rf"^step 3: 1 tensor holds .* {name} \(NaN\)\. .*step-00000002 stays the newest"
    with monkeypatch.context() as patch:
        spoilt(patch, 3, kind)
        with pytest.raises(NonFiniteError, match=words):
            run_recipe(recipe)
    assert names(run_dir) == ["step-00000002"]
    assert not (run_dir / "export").exists()
    run_recipe(recipe)
    assert names(run_dir) == ["step-00000002", "step-00000003"]
    assert non_finite_tensors(load_file(run_dir / "export/model.safetensors").items()) == {}


@pytest.mark.slow
def test_weights_that_an_earlier_step_spoilt_are_named_where_the_loss_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, 1)
    with pytest.raises(NonFiniteError, match=rf"^step 2: 1 tensor .* {NAME} \(NaN\), since an"):
        run_recipe(resolve(settings_of(tmp_path), {}))


@pytest.mark.slow
def test_a_checkpoint_of_a_version_that_did_not_look_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was the newest for ever: each launch went on from it, and stopped."""
    values, run_dir = settings_of(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        spoilt(patch, 3)
        patch.setattr(safetensors_file, "non_finite_values", lambda *_: set())
        patch.setattr("vlmpack.backends.export.refuse_non_finite_state", lambda *_: None)
        run_recipe(resolve(values, {}))
    assert list(non_finite_tensors(load_file(run_dir / "export/model.safetensors").items())) == [
        "model.norm.weight"
    ]
    [good, bad] = list_checkpoints(run_dir / "checkpoints")
    words = f"1 tensor holds values that are no numbers: {NAME} (NaN)"
    assert (find_damage(good), find_damage(bad)) == (None, words)
    with pytest.raises(CheckpointError, match="holds values that are no numbers"):
        choose_export(run_dir, merge=True, out=tmp_path / "out", step=3)
    caplog.set_level(logging.INFO, "vlmpack")
    run_recipe(resolve(changed(values, training__max_steps=4), {}))
    assert f"checkpoint ignored: {bad}: {words}" in caplog.text
    assert f"resumed from {good}" in caplog.text
    assert names(run_dir)[-1] == "step-00000004"
    assert find_damage(list_checkpoints(run_dir / "checkpoints")[-1]) is None


@pytest.mark.slow
def test_a_base_model_with_such_a_tensor_is_refused_at_launch(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    weights[name][0] = math.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = settings_of(tmp_path, model__path=str(folder))
    for backend in ("hf", "mcore"):
        words = rf"{folder}: 1 tensor .* {NAME if backend == 'hf' else name} \(inf\)\. Expected"
        with pytest.raises(ModelError, match=words):
            run_recipe(resolve(changed(values, model__backend=backend), {}))
    assert names(tmp_path / "run") == []


LAYOUTS = {
    "FSDP2": {"parallelism__sharding": "fsdp"},
    "distributed optimizer": {"model__backend": "mcore"},
    "TP": {"model__backend": "mcore", "parallelism__tensor": 2},
}


@pytest.mark.cases(slow=["FSDP2-not a number-4", "distributed optimizer-moment not a number-3"])
@pytest.mark.parametrize("steps", [worker.STEP, worker.STEP + 1])
@pytest.mark.parametrize("fault", ["not a number", "moment not a number"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_of_one_rank_ends_all_of_them_alike(
    tmp_path: Path, layout: str, fault: str, steps: int
) -> None:
    """Rank 1 alone holds it, behind the last step or before another one."""
    values = settings_of(
        tmp_path, training__max_steps=steps, training__micro_batch_size=2, **LAYOUTS[layout]
    )
    done = run_ranks(
        [worker.__file__, write_recipe(tmp_path / "recipe.json", values)],
        2,
        timeout=90,
        environment={**os.environ, "FAULT": fault, "HIT": "1"},
    )
    assert "killed after" not in done.stderr, done.stderr[-3000:]
    assert done.returncode == 1, done.stderr[-3000:]
    assert {*done.codes} <= {1, -signal.SIGTERM}, "the launcher's, to the others of the first"
    [*said] = re.findall(rf"error: step {steps}: .* values that are no numbers: .*", done.stderr)
    assert said, done.stderr[-3000:]
    assert len({*said}) == 1, "all are told the same"
    assert "Traceback" not in done.stderr
    assert names(tmp_path / "run") == ["step-00000002"]
    assert not (tmp_path / "run" / "export").exists()
