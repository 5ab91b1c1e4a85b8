"""Repetitions, run before a release (`make soak`); ten seeded rows are in `make test-all`."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.runs import find_differences, pack, run_batch
from support.shards import ROOT, read_shard, with_answer
from support.stock import StockProcessor, run_one_by_one

from vlmpack.api import resolve, run_recipe

COLUMNS = ("step", "loss", "grad_norm", "num_tokens", "num_samples")


def compare_random_rows(vlm: Any, encoder: Any, stock_model: Any, rounds: int) -> None:
    """Random samples, order, alignment and tail, each against the stock model."""
    draw = random.Random(5)
    # Answers that nobody can know: near a loss of 0 a relative error measures rounding alone.
    samples = [
        with_answer(sample, "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 20))))
        for sample in read_shard(limit=80)
    ]
    processor = StockProcessor(encoder.folder, loss_on="assistant")
    for _ in range(rounds):
        chosen = draw.sample(samples, draw.randint(2, 9))
        batch = pack(
            [encoder.encode(sample.cooked()) for sample in chosen],
            alignment=draw.choice((1, 2, 4, 8, 16)),
            total=draw.choice((1, 64, 128)) if draw.random() < 0.5 else 1,
        )
        reference = run_one_by_one(stock_model, {s.key: processor(s) for s in chosen})
        found = find_differences(run_batch(vlm, batch), reference)
        assert found == [], [sample.key for sample in chosen]


def kill_and_resume(settings: dict[str, Any], tmp_path: Path, rounds: int, steps: int) -> None:
    """kill -9 at random moments, also while a checkpoint is written; then finish and compare."""
    base = changed(
        settings, training__max_steps=steps, checkpoint__interval_steps=2, checkpoint__keep=2
    )
    run_recipe(resolve(changed(base, run_dir=str(tmp_path / "reference")), {}))
    command = [sys.executable, "-m", "vlmpack", "finetune"]
    recipe = write_recipe(tmp_path / "recipe.yaml", base)
    metrics = Path(base["run_dir"], "metrics.jsonl")
    draw, at_work = random.Random(9), 0
    for _ in range(rounds):
        before = len(rows(base["run_dir"], "step")) if metrics.is_file() else 0
        process = subprocess.Popen(
            [*command, str(recipe)], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        while process.poll() is None:
            taken = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
            if taken > before:
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 1.5)
        process.send_signal(signal.SIGKILL)
        at_work += process.wait() == -signal.SIGKILL
    assert at_work > 0, "every launch was done before it was to be killed"
    run_recipe(resolve(base, {}))
    assert rows(base["run_dir"], *COLUMNS) == rows(tmp_path / "reference", *COLUMNS)


@pytest.mark.slow
def test_ten_random_rows_equal_unpacked(vlm: Any, encoder: Any, stock_model: Any) -> None:
    compare_random_rows(vlm, encoder, stock_model, 10)


@pytest.mark.soak
def test_two_hundred_random_rows_equal_unpacked(vlm: Any, encoder: Any, stock_model: Any) -> None:
    compare_random_rows(vlm, encoder, stock_model, 200)


@pytest.mark.soak
def test_a_killed_run_ends_as_the_unbroken_run(settings: dict[str, Any], tmp_path: Path) -> None:
    kill_and_resume(settings, tmp_path, 1, steps=30)


@pytest.mark.soak
def test_a_run_killed_twenty_times_ends_as_the_unbroken_run(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    kill_and_resume(settings, tmp_path, 20, steps=60)
