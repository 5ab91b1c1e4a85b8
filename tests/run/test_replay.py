"""A step that was not finite comes again, or does not, and what began it is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import run_ranks
from support.pairs import raw_pairs, write_pairs
from support.planted import leader_of, planted
from support.recipes import changed, copy_samples, run_settings, write_recipe
from support.shards import ROOT
from torch import Tensor
from typer.testing import CliRunner

import vlmpack
from vlmpack.activity import ACTIVITY
from vlmpack.api import resolve
from vlmpack.backends.hf.engine import HFEngine
from vlmpack.build.extensions import missing
from vlmpack.build.look import open_recipe
from vlmpack.cli.app import app
from vlmpack.errors import VlmpackError
from vlmpack.file_format import DUMP
from vlmpack.recipe import load_recipe
from vlmpack.run import replay as of_replay
from vlmpack.training.metrics import read_rows

PLANTED = ROOT / "tests/support/planted.py"
STEPS = 6
BAD = {2: "pixels", 3: "layer", 5: "objective", 6: "gradient"}
FIRST = {
    "pixels": "the input of model.model.visual (NaN)",
    "layer": "the input of model.model.language_model.layers.2 (NaN)",
    "objective": "the gradient of losses (NaN)",
    "gradient": "the gradient of the output of model.model.language_model.norm (NaN)",
}
"""The first tensor behind the place of the fault. An objective's is the gradient that it gives to
the losses."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("replayed")
    values = run_settings(
        root,
        training__max_steps=STEPS,
        training__micro_batch_size=2,
        training__on_non_finite="skip",
        checkpoint__interval_steps=4,
    )
    copy_samples(ROOT / "assets/digits/train-000000.tar", Path(values["data"]["train"]), 40)
    return values


@pytest.fixture(scope="module")
def plants(settings: dict[str, Any]) -> Mapping[int, str]:
    """Step -> key of the sample with its fault."""
    train, _ = open_recipe(resolve(settings, {}))
    steps = [*train.batches(train.start(), rank=0, dp=1, max_steps=STEPS)]
    return {step: leader_of(steps[step - 1]) for step in BAD}


@pytest.fixture(scope="module")
def run_dir(settings: dict[str, Any], plants: Mapping[int, str]) -> Path:
    by_key = {plants[step]: place for step, place in BAD.items()}
    return vlmpack.finetune(settings, objective=planted(by_key)).run_dir


def dump_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"dumps/step-{step:08d}.json"


def by_key(plants: Mapping[int, str]) -> dict[str, str]:
    return {plants[step]: place for step, place in BAD.items()}


def state_of(run_dir: Path) -> dict[str, int]:
    """Every file of a run, with when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("step", BAD)
def test_a_fault_comes_again_and_is_named(
    run_dir: Path, plants: Mapping[int, str], step: int
) -> None:
    """By sample, module and direction. The steps before it are trained again, bit for bit, those
    that were skipped left out."""
    before = state_of(run_dir)
    found = vlmpack.replay(dump_of(run_dir, step), objective=planted(by_key(plants)))
    assert found.outcome == "comes again"
    assert [name.split()[0] for name in found.alone] == [plants[step]]
    assert found.first == FIRST[BAD[step]]
    direction = "backward" if "gradient" in found.first else "forward"
    assert f"in the {direction} pass" in "".join(found.words())
    skipped = [one for one in BAD if found.started < one < step]
    assert (found.started, found.trained) == (
        4 if step > 4 else 0,
        step - 1 - found.started - len(skipped),
    )
    assert found.loss_off == 0.0 and found.same_rows
    assert found.words()[0].endswith("losses within 0.0e+00 of the run's"), "skipped ones or not"
    assert state_of(run_dir) == before, "nothing of the run has changed"


@pytest.mark.slow
def test_no_memory_for_float32_keeps_what_was_found(
    run_dir: Path, plants: Mapping[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(spec: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(of_replay, "build_engine", no_room)
    faults, dump = planted(by_key(plants)), dump_of(run_dir, 3)
    found = vlmpack.replay(dump, objective=faults, at_checkpoint=True, model__dtype="bfloat16")
    assert (found.outcome, found.left_out) == ("comes again", 1)
    assert "which are older" in found.words()[0]
    assert found.in_float32 == "not known: out of memory"


@pytest.mark.slow
def test_a_damaged_reference_is_made_again_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = run_settings(
        tmp_path,
        data__train=str(write_pairs(tmp_path / "pairs.tar", raw_pairs(0))),
        objective__name="dpo",
        training__micro_batch_size=1,
        training__global_batch_size=2,
        training__on_non_finite="skip",
    )
    original = HFEngine.finish_gradients

    def finish(self: Any, divisor: Tensor, max_norm: float | None) -> Tensor:
        if ACTIVITY.step == 2:
            for _, parameter in self.parameters():
                parameter.grad.fill_(math.nan)
        return original(self, divisor, max_norm)

    monkeypatch.setattr(HFEngine, "finish_gradients", finish)
    run = vlmpack.finetune(values).run_dir
    [part] = (run / "reference/train").glob("*.part")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    before = state_of(run)
    with caplog.at_level("WARNING", "vlmpack"):
        found = vlmpack.replay(dump_of(run, 2))
    assert found.trained == 1 and found.loss_off == 0.0 and found.same_rows
    assert "is damaged; its samples are computed again" in caplog.text
    assert state_of(run) == before, "nothing of the run has changed"


def test_a_replay_has_no_sentinel(tmp_path: Path) -> None:
    """It could end the replay of the run that it was on in."""
    settings = run_settings(tmp_path, training__sentinel_interval=1)
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    assert load_recipe(recipe).training.sentinel_interval == 1, "guard"
    assert of_replay.recipe_of(dump_of(tmp_path, 3)).training.sentinel_interval is None


@pytest.mark.slow
def test_what_needs_company_is_said(run_dir: Path, plants: Mapping[int, str]) -> None:
    """The row of a fault that no sample has alone; and the same in float32."""
    lonely = planted({plants[6]: "company"})
    dump = dump_of(run_dir, 6)
    found = vlmpack.replay(dump, objective=lonely, at_checkpoint=True, model__dtype="bfloat16")
    assert (found.outcome, found.alone) == ("comes again packed", [])
    [row] = found.rows
    assert row[0].split()[0] == plants[6]
    assert found.in_float32 is True and found.left_out == 0, "step 5 was skipped"


@pytest.mark.slow
def test_processes_replay_together(run_dir: Path, plants: Mapping[int, str]) -> None:
    words = [str(PLANTED), str(dump_of(run_dir, 5)), json.dumps(by_key(plants))]
    done = run_ranks(words, 2, timeout=300)
    assert done.codes == [0, 0], done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["outcome"], found["same_rows"]) == ("comes again", True)
    assert [name.split()[0] for name in found["alone"]] == [plants[5]]


@pytest.mark.slow
def test_a_fault_that_is_gone_is_no_cause(run_dir: Path) -> None:
    found = vlmpack.replay(dump_of(run_dir, 6), objective=planted({}), at_checkpoint=True)
    assert found.outcome == "does not come again"
    assert (found.trained, found.alone, found.first) == (0, [], None)
    assert "that device may be at fault" in found.words()[1]


@pytest.mark.slow
def test_the_command_says_it(settings: dict[str, Any], run_dir: Path, tmp_path: Path) -> None:
    """Of a run without code of its own, whose step was finite after all."""
    plain = changed(settings, run_dir=str(tmp_path / "run"), training__max_steps=3)
    vlmpack.finetune(plain)
    (tmp_path / "run/dumps").mkdir()
    shutil.copy(dump_of(run_dir, 3), dump_of(tmp_path / "run", 3))
    said = CliRunner().invoke(app, ["replay", str(dump_of(tmp_path / "run", 3)), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["outcome"] == "does not come again" and found["trained"] == 2
    assert found["loss_off"] == 0.0 and found["same_rows"] is True
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    rows[1]["num_tokens"] += 1
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run/metrics.jsonl").write_text(text)
    with pytest.raises(VlmpackError, match=r"step 2 has 4 samples .* the data changed since"):
        vlmpack.replay(dump_of(tmp_path / "run", 3))


def test_what_is_no_dump_is_named(tmp_path: Path) -> None:
    with pytest.raises(VlmpackError, match=r"no such file; expected a dump in the dumps/"):
        vlmpack.replay(tmp_path / "dumps/step-00000001.json")
    moved = tmp_path / "moved.json"
    moved.write_text("{}")
    with pytest.raises(VlmpackError, match=r"holds no recipe.yaml; expected a dump in the dumps/"):
        vlmpack.replay(moved)
    (tmp_path / "recipe.yaml").write_text("a: 1")
    with pytest.raises(VlmpackError):
        vlmpack.replay(tmp_path / "dumps/step-00000001.json")
    dump = tmp_path / "dump.json"
    dump.write_text(json.dumps(DUMP.mark({"step": 3, "micro_batches": []})))
    with pytest.raises(VlmpackError, match=r"no dump of a step, it lacks device, repeats"):
        of_replay.read_dump(dump)


def test_a_replay_writes_elsewhere_where_it_is_told_to(tmp_path: Path) -> None:
    """Into a folder of its own there, since it is cleared and removed."""
    write_recipe(tmp_path / "recipe.yaml", run_settings(tmp_path))
    dump = dump_of(tmp_path, 3)
    own = of_replay.recipe_of(dump).run_dir
    assert own == str(tmp_path / "dumps/step-00000003.replay")
    other = of_replay.recipe_of(dump, {"run_dir": "/elsewhere"}).run_dir
    assert other == "/elsewhere/step-00000003.replay"


def test_a_replay_needs_no_metrics_of_the_program(tmp_path: Path) -> None:
    """It answers no questions, so it cannot be handed any."""
    settings = changed(
        run_settings(tmp_path),
        data__test=[str(ROOT / "assets/digits/test-*.tar")],
        evaluation__generate=True,
        evaluation__generate_interval_steps=2,
        evaluation__metrics=["python:mine"],
        evaluation__best="python:mine",
        evaluation__patience=2,
        export__weights="best",
    )
    write_recipe(tmp_path / "recipe.yaml", settings)
    assert "python:mine" in missing(load_recipe(tmp_path / "recipe.yaml"))[0]
    assert missing(of_replay.recipe_of(dump_of(tmp_path, 3))) == []
