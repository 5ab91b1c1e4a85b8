"""The command line as users start it: torchrun, SIGTERM, the API, the exported model."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import stored_tensors
from support.recipes import changed, rows, write_recipe
from support.shards import ROOT
from support.whole_runs import TIMEOUT, assert_same_steps, environment, finetune_in_ranks, launch

from vlmpack.api import resolve, run_recipe


@pytest.mark.parametrize(
    ("micro", "sharding"),
    [
        pytest.param(2, "none", id="ddp-2", marks=pytest.mark.slow),
        pytest.param(4, "none", id="ddp-4", marks=pytest.mark.soak),
        pytest.param(4, "fsdp", id="fsdp-4", marks=pytest.mark.soak),
    ],
)
def test_two_processes_take_the_steps_of_one(
    settings: dict[str, Any], tmp_path: Path, micro: int, sharding: str
) -> None:
    """Epochs of 22 samples in batches of 8 end with a rank without a bin, or with a bin short."""
    base = changed(
        settings,
        training__global_batch_size=8,
        training__micro_batch_size=8,
        training__max_steps=7,
    )
    run_recipe(resolve(changed(base, run_dir=str(tmp_path / "one")), {}))
    mine = changed(
        base,
        run_dir=str(tmp_path / "two"),
        training__micro_batch_size=micro,
        parallelism__sharding=sharding,
    )
    done = launch(write_recipe(tmp_path / "two.yaml", mine), processes=2)
    assert done.returncode == 0, done.stderr
    assert_same_steps(tmp_path / "two", tmp_path / "one", 7)


@pytest.mark.soak
def test_resume_on_another_number_of_processes(settings: dict[str, Any], tmp_path: Path) -> None:
    """With bins of 4, of which every third batch has one short, replicated and sharded."""
    base = changed(
        settings,
        training__global_batch_size=8,
        training__micro_batch_size=4,
        training__max_steps=9,
        optim__schedule="constant",
    )
    run_recipe(resolve(changed(base, run_dir=str(tmp_path / "one")), {}))
    mixed = changed(base, run_dir=str(tmp_path / "mixed"))
    file = write_recipe(tmp_path / "mixed.yaml", mixed)
    for steps, sharding in ((3, "none"), (5, None), (7, "fsdp"), (9, None)):
        if sharding is None:  # one process: this one
            run_recipe(resolve(changed(mixed, training__max_steps=steps), {}))
            continue
        length, kind = f"training.max_steps={steps}", f"parallelism.sharding={sharding}"
        done = finetune_in_ranks(file, length, kind, processes=2)
        assert done.returncode == 0, done.stderr
    assert_same_steps(tmp_path / "mixed", tmp_path / "one", 9)


@pytest.mark.slow
def test_four_processes_resume_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    """DDP orders its buckets anew after the first step of a launch. A ring of more than two adds
    their parts in an order that depends on that, which two processes could not show."""
    base = changed(
        settings,
        training__global_batch_size=8,
        training__micro_batch_size=2,
        training__max_steps=4,
        optim__schedule="constant",
    )
    found = []
    for name, lengths in (("unbroken", (4,)), ("resumed", (2, 4))):
        mine = changed(base, run_dir=str(tmp_path / name))
        recipe = write_recipe(tmp_path / f"{name}.json", mine)
        for steps in lengths:
            done = finetune_in_ranks(recipe, f"training.max_steps={steps}", processes=4)
            assert done.returncode == 0, done.stderr[-3000:]
        folder = tmp_path / name / "checkpoints/step-00000004"
        found.append((rows(tmp_path / name, "step", "loss", "grad_norm"), stored_tensors(folder)))
    (steps, tensors), (others, again) = found
    assert steps == others and len({loss for _, loss, _ in steps}) == 4
    assert [key for key in tensors if not bool((tensors[key] == again[key]).all())] == []


@pytest.mark.slow
def test_a_recipe_error_under_torchrun_ends_all_ranks(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "bad.yaml", settings)  # 4 samples a batch: 4 a rank do not fit
    done = launch(recipe, processes=2)
    assert done.returncode != 0
    assert "global_batch_size" in done.stderr


@pytest.mark.slow
def test_sigterm_saves_at_a_step_boundary_and_exits_with_75(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """As launchers do it: to the whole process group, so to the loader's processes too."""
    settings = changed(settings, training__max_steps=2000, data__num_workers=1)
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmpack", "finetune", str(recipe)],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = Path(settings["run_dir"], "metrics.jsonl")
    deadline = time.monotonic() + TIMEOUT
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)  # the second one changes nothing
    _, message = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, message
    taken = len(rows(settings["run_dir"], "step"))
    assert (
        f"stopped at step {taken} of 2000 on SIGTERM; saved checkpoint step {taken} in" in message
    )
    assert "error" not in message.rpartition("stopped at")[0].splitlines()[-1]
    assert not Path(settings["run_dir"], "run.lock").exists()
    # A checkpoint of the last step is there, and nothing half-written beside it.
    folders = list(Path(settings["run_dir"], "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"step-{taken:08d}"]
    assert (folders[0] / "COMPLETE").is_file()


@pytest.mark.soak
def test_the_documented_example_runs_and_its_model_answers(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """docs/examples/finetune_digits.py, then the exported folder in stock transformers."""
    monkeypatch.chdir(ROOT)
    example = ROOT / "docs" / "examples" / "finetune_digits.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path / "run"), "3"])
    runpy.run_path(str(example), run_name="__main__")
    assert "3 steps" in capsys.readouterr().out
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert result["real_tokens"] < result["padded_tokens"]
    assert result["computed_tokens"] == result["real_tokens"], "alignment 1: a row has no slack"
    for name in ("loss.png", "lengths.png", "index.html"):
        assert (run / "report" / name).stat().st_size > 1000

    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    export = run / "export"
    model = AutoModelForImageTextToText.from_pretrained(export)
    assert AutoTokenizer.from_pretrained(export).chat_template
    assert AutoImageProcessor.from_pretrained(export) is not None
    assert sum(p.numel() for p in model.parameters()) > 1e6

    from support.shards import read_shard
    from typer.testing import CliRunner

    from vlmpack.cli.app import app

    image = tmp_path / "digits.jpg"
    image.write_bytes(next(s.images[0] for s in read_shard() if s.images))
    asked = CliRunner().invoke(
        app, ["generate", "--model", str(export), "--image", str(image), "Read the digits."]
    )
    assert asked.exit_code == 0, asked.output
