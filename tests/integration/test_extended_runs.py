"""Runs with a program's own source, function, objective, metric and callbacks; and their faults, in
one process and in two: named, all ranks stop, nothing half-written."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_ranks
from support.handed_over import FAULTS, Heard, Records, Slow, Vanishes, half
from support.recipes import changed, rows, write_recipe
from support.shards import ROOT
from support.toy_objective import FOCAL, focal
from support.whole_runs import environment

import vlmpack
from vlmpack.errors import DataError, ExtensionError, RunIdentityError
from vlmpack.training.checkpoint import newest_checkpoint
from vlmpack.training.metrics import read_rows

HANDED = ROOT / "tests" / "support" / "handed_over.py"
IN_TWO_PROCESSES = ("callback raises", "metric raises", "source raises")
"""One of each kind."""
FIGURES = ("step", "loss", "grad_norm", "num_label_tokens")


def evaluated(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed(
        settings,
        data__validation=settings["data"]["train"],
        data__test=settings["data"]["train"],
        evaluation__generate=True,
        evaluation__generate_max_samples=2,
        evaluation__max_new_tokens=4,
        evaluation__interval_steps=2,
        checkpoint__interval_steps=2,
        **changes,
    )


@pytest.mark.slow
def test_a_run_tells_its_callbacks_and_goes_on(settings: dict[str, Any]) -> None:
    """Steps, validations and checkpoints once each over a run that is stopped and resumed."""
    values, heard = evaluated(settings), Heard()
    vlmpack.finetune(values, callbacks=[heard], metrics={"half": half}, training__max_steps=3)
    told = [(kind, event.step) for kind, event in heard.events]
    assert told[0] == ("answers", 0) and told[-1] == ("end", 3)
    assert [s for kind, s in told if kind == "step"] == [1, 2, 3]
    assert [s for kind, s in told if kind == "validation"] == [2, 3]
    assert [s for kind, s in told if kind == "checkpoint"] == [2, 3]
    for kind, event in heard.events:
        if kind == "checkpoint":
            assert (event.folder / "COMPLETE").is_file()  # type: ignore[operator]
    losses = [event.figures["loss"] for kind, event in heard.events if kind == "step"]
    assert losses == [loss for (loss,) in rows(values["run_dir"], "loss") if loss is not None]
    assert heard.events[-1][1].figures["metrics_after"]["python:half"] == 0.5
    again = Heard()
    vlmpack.finetune(values, callbacks=[again], metrics={"half": half}, training__max_steps=4)
    assert [event.step for kind, event in again.events if kind == "step"] == [4]


@pytest.mark.soak
def test_an_objective_trains_what_its_formula_says_and_not_another_on_resume(
    settings: dict[str, Any],
) -> None:
    """The function alone is the objective that says the same in full; SFT's losses are others."""
    runs = {}
    for name, objective in (
        ("plain", None),
        ("sum", lambda losses, batch: {"loss_sum": losses.sum()}),
        ("focal", lambda losses, batch: {"loss_sum": focal(losses, batch)["loss_sum"]}),
    ):
        at = changed(settings, run_dir=f"{settings['run_dir']}-{name}")
        vlmpack.finetune(at, objective=objective)
        runs[name] = rows(at["run_dir"], *FIGURES)
    assert runs["plain"] == runs["sum"]
    assert runs["focal"][0][1] < 0.98 * runs["plain"][0][1], "guard: another loss"
    at = changed(settings, run_dir=f"{settings['run_dir']}-focal")
    with pytest.raises(RunIdentityError, match=r"objective\.(name|fingerprint)"):
        vlmpack.finetune(at, objective=FOCAL, training__max_steps=5)
    at = changed(settings, run_dir=f"{settings['run_dir']}-halves")
    vlmpack.finetune(at, objective=FOCAL)
    written = read_rows(Path(at["run_dir"], "metrics.jsonl"))
    assert [row["loss_divisor"] for row in written] == [2 * row["num_samples"] for row in written]
    plain = read_rows(Path(f"{settings['run_dir']}-plain", "metrics.jsonl"))
    assert not any("loss_divisor" in row for row in plain), "num_label_tokens says it"


@pytest.mark.slow
def test_a_source_trains_and_a_resume_tells_another_one(
    settings: dict[str, Any], caplog: Any
) -> None:
    values = changed(settings, data__train="python:mine", data__num_workers=1)
    sources = {"mine": Records(12), "spare": Records(3)}
    vlmpack.finetune(values, sources=sources, training__max_steps=2)
    assert "note: sources['spare'] was handed over and is never read" in caplog.text
    assert len(rows(values["run_dir"], "step")) == 2
    vlmpack.finetune(values, sources={"mine": Records(12)}, training__max_steps=3)
    assert len(rows(values["run_dir"], "step")) == 3
    with pytest.raises(RunIdentityError, match="python-mine"):
        vlmpack.finetune(values, sources={"mine": Records(11)}, training__max_steps=4)


@pytest.mark.cases(
    slow=("callback raises-2", "callback exits-1", "metric lies-1", "source raises-2")
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "processes"),
    [*((what, 1) for what in FAULTS), *((what, 2) for what in IN_TWO_PROCESSES)],
)
def test_what_fails_is_named_and_all_ranks_stop(
    settings: dict[str, Any], tmp_path: Path, what: str, processes: int
) -> None:
    values = evaluated(settings, training__micro_batch_size=2)
    if what.startswith("source"):
        values = changed(values, data__train="python:mine", data__on_error={"integrity": "raise"})
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    done = run_ranks([HANDED, recipe, what], processes, timeout=120, environment=environment())
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    for words in FAULTS[what][1]:
        assert words in said
    assert "Traceback" not in done.stderr
    kinds = {"source": "DataError", "objective": "ObjectiveError"}
    kind = kinds.get(what.split()[0], "ExtensionError")
    assert said.count(f"ended by {kind}") == processes, "every rank was told by whom"
    run = Path(values["run_dir"])
    assert not (run / "result.json").exists() and not (run / "run.lock").exists()
    names = {path.name for path in run.rglob("*")}
    assert not [name for name in names if "partial" in name or name.endswith(".tmp")]
    if what == "callback raises":
        folder, damaged = newest_checkpoint(run / "checkpoints")
        assert (
            folder is not None and not damaged and json.loads((folder / "state.json").read_text())
        )


@pytest.mark.cases(slow="2")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_what_ends_its_process_is_named_by_the_next_launch(
    settings: dict[str, Any], tmp_path: Path, caplog: Any, processes: int
) -> None:
    """`os._exit(0)` in a callback; the rank that is left says it too."""
    values = changed(settings, training__micro_batch_size=2)
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    command = [HANDED, recipe, "callback ends"]
    done = run_ranks(command, processes, timeout=120, environment=environment())
    inside = "ended inside callback Ends.on_step (callbacks[0]) at step 2 (process"
    assert done.codes[0] == 0 and "Traceback" not in done.stderr
    if processes == 2:
        assert done.codes[1] == 1 and inside in " ".join(done.said[1].split())
    assert not (Path(values["run_dir"]) / "result.json").exists()
    vlmpack.finetune(values)
    assert inside in caplog.text
    assert not list(Path(values["run_dir"]).glob("calling-*"))


@pytest.mark.cases(slow="2")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_callback_may_end_the_run(
    settings: dict[str, Any], tmp_path: Path, caplog: Any, processes: int
) -> None:
    """Saved, exported and finished; the same call says so, and more steps go on from there."""
    values = changed(settings, training__micro_batch_size=2, training__max_steps=4)
    values = changed(values, export__enabled=True)
    caplog.set_level("INFO", "vlmpack")
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    command = [HANDED, recipe, "stopping callback"]
    at = {"RANK": "0"} if processes == 1 else {}
    done = run_ranks(command, processes, timeout=120, environment=environment() | at)
    assert done.codes == [0] * processes, done.stderr
    run = Path(values["run_dir"])
    asked = "callback Stops.on_step (callbacks[0])"
    figures = json.loads((run / "result.json").read_text())
    assert (figures["steps"], figures["stopped_by"]) == (2, asked)
    assert (run / "export" / "config.json").is_file()
    assert newest_checkpoint(run / "checkpoints")[0].name.endswith("2")  # type: ignore[union-attr]
    assert vlmpack.finetune(values).steps == 2
    assert f"{asked} ended this run at step 2; a higher training.max_steps goes on" in caplog.text
    (run / "result.json").unlink()  # as if it had been killed before that was written
    assert vlmpack.finetune(values).figures["stopped_by"] == asked
    longer = vlmpack.finetune(values, training__max_steps=5)
    assert longer.steps == 5 and "stopped_by" not in longer.figures


@pytest.mark.slow
def test_a_fork_that_comes_back_is_no_second_trainer(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    done = run_ranks([HANDED, recipe, "callback forks"], 1, timeout=120, environment=environment())
    assert done.codes == [0], done.stderr
    assert "callback Forks.on_step (callbacks[0]): process" in done.stderr
    assert "came back. The child is ended here" in " ".join(done.stderr.split())
    assert [step for (step,) in rows(settings["run_dir"], "step")] == [1, 2, 3], "once each"


@pytest.mark.slow
def test_a_source_that_ends_its_loader_process_is_named(settings: dict[str, Any]) -> None:
    values = changed(settings, data__train="python:mine", data__num_workers=1)
    with pytest.raises(DataError, match=r"exit code 0 \(waiting for .* of python:mine\)\. Code"):
        vlmpack.finetune(values, sources={"mine": Vanishes(12)})


@pytest.mark.soak
@pytest.mark.parametrize(
    "hook",
    [
        "on_step",
        pytest.param("on_validation", marks=pytest.mark.soak),
        pytest.param("on_answers", marks=pytest.mark.soak),
        pytest.param("on_checkpoint", marks=pytest.mark.soak),
    ],
)
def test_what_a_callback_ends_goes_on_as_if_it_had_not(
    settings: dict[str, Any], tmp_path: Path, hook: str
) -> None:
    """No checkpoint was due, and no step is lost: losses, evaluations and the best step are those
    of a run that nobody ended."""

    def fails(event: vlmpack.Event) -> None:
        if event.step == 2:
            raise ZeroDivisionError("of my own")

    callback = vlmpack.Callback()
    setattr(callback, hook, fails)
    found = {}
    for name, callbacks in (("whole", []), ("ended", [callback])):
        values = evaluated(
            settings,
            run_dir=str(tmp_path / name),
            training__max_steps=4,
            evaluation__generate_interval_steps=2,
            evaluation__best="validation_loss",
        )
        due = 2 if hook == "on_checkpoint" else None
        values = changed(values, checkpoint__interval_steps=due)
        if callbacks:
            with pytest.raises(ExtensionError, match=f"{hook} .* at step 2.*same call goes on"):
                vlmpack.finetune(values, callbacks=callbacks)
            folder, damaged = newest_checkpoint(tmp_path / name / "checkpoints")
            assert folder is not None and not damaged and folder.name.endswith("2")
        result = vlmpack.finetune(values)
        seen = [
            {key: value for key, value in row.items() if "second" not in key and "wait" not in key}
            for row in read_rows(tmp_path / name / "metrics.jsonl")
        ]
        found[name] = (seen, result.figures["best"], result.metrics_after)
    assert found["whole"] == found["ended"]


@pytest.mark.cases(slow="True")
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_objective_that_fails_on_one_rank_ends_both(
    settings: dict[str, Any], tmp_path: Path, asynchronous: bool
) -> None:
    """While a checkpoint is being written too, which the other rank would have to publish with it:
    one waited in its step, the other for the checkpoint, and neither said a word."""
    values = changed(
        settings,
        training__micro_batch_size=2,
        training__max_steps=8,
        checkpoint__interval_steps=1,
        checkpoint__asynchronous=asynchronous,
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    command = [HANDED, recipe, "objective raises"]
    done = run_ranks(command, 2, timeout=120, environment=environment())
    # The launcher ends the later one, as torchrun does: the rank that lost the other, or this one.
    assert 1 in done.codes and set(done.codes) <= {1, -signal.SIGTERM}, done.stderr
    named = "ended by ObjectiveError: objective OnOneRank raised ZeroDivisionError: of one rank's"
    assert named in " ".join(done.said[1].split())
    folder, damaged = newest_checkpoint(Path(values["run_dir"]) / "checkpoints")
    assert folder is not None and not damaged and int(folder.name[-1]) in (2, 3)


@pytest.mark.slow
def test_an_objective_that_fails_alone_leaves_the_checkpoint_that_was_being_written(
    settings: dict[str, Any],
) -> None:
    """No other rank has to publish it with this one: the steps since the one before were lost."""
    asked: list[int] = []

    def fails(losses: Any, batch: Any) -> Any:
        asked.append(len(losses))
        if len(asked) == 4:  # the third step: about the first row it is asked twice
            raise ZeroDivisionError("of my own")
        return {"loss_sum": losses.sum()}

    values = changed(settings, checkpoint__interval_steps=1, checkpoint__asynchronous=True)
    with pytest.raises(ExtensionError, match="objective fails raised ZeroDivisionError: of my own"):
        vlmpack.finetune(values, objective=fails)
    folder, damaged = newest_checkpoint(Path(values["run_dir"]) / "checkpoints")
    assert folder is not None and not damaged and folder.name.endswith("2")


@pytest.mark.soak
@pytest.mark.parametrize("what", ["callbacks alone", "objective alone", "typo alone"])
def test_what_the_main_rank_alone_has(settings: dict[str, Any], tmp_path: Path, what: str) -> None:
    """Callbacks are told; with an objective the other rank would train something else; and what is
    wrong with one of them is everybody's end."""
    recipe = write_recipe(tmp_path / "recipe.yaml", changed(settings, training__micro_batch_size=2))
    done = run_ranks([HANDED, recipe, what], 2, timeout=120, environment=environment())
    if what == "callbacks alone":
        assert done.codes == [0, 0], done.stderr
        told = [line for line in done.stdout.splitlines() if line.startswith("told of")]
        assert told == ["told of step 1", "told of step 2", "told of step 3", "told of the end"]
        return
    assert done.returncode == 1
    said = {
        "objective alone": "rank 1 has none as objective, and rank 0",
        "typo alone": "rank 0: callbacks[0] (Typo) has on_stpe",
    }
    head = "ended by RecipeError: 1 problem in the recipe: "
    assert head + said[what] in " ".join(done.stderr.split()), "by the rank that ended first"
    assert not (Path(settings["run_dir"]) / "recipe.yaml").exists()


@pytest.mark.soak
def test_a_callback_may_take_longer_than_any_timeout(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The other rank waits, and says for what."""
    seconds = 6
    assert seconds < Slow.seconds
    values = changed(
        settings,
        training__micro_batch_size=2,
        parallelism={"timeout_seconds": seconds, "step_timeout_seconds": seconds},
        logging__watch_seconds=4,
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    done = run_ranks([HANDED, recipe, "slow callback"], 2, timeout=120, environment=environment())
    assert done.codes == [0, 0], done.stderr
    assert len(rows(values["run_dir"], "step")) == 3
    assert "step 2, callbacks: on_step" in done.stderr


@pytest.mark.slow
def test_the_notebook_runs_to_a_generated_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, cell after cell."""
    import nbformat
    from nbclient import NotebookClient

    bin_folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join((bin_folder, os.environ["PATH"])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = ROOT / "docs" / "examples" / "own_notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": path.parent}})
    client.execute()
    said = [
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("loss " in text and " -> " in text for text in said)
    assert any("python:is_number" in text for text in said)
    assert said[-1].strip() and "rror" not in said[-1], "an answer"


@pytest.mark.cases(slow="own_data")
@pytest.mark.slow
@pytest.mark.parametrize("example", ["own_data", "own_code"])
def test_the_documented_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, example: str
) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "docs" / "examples" / f"{example}.py"
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "run"), "2"])
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert ("32 samples" if example == "own_data" else "similarity") in said
