"""`vlmpack recipe new my-folder-...`: from a folder of images and conversations to a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.families import tiny_family_folder
from support.published_folder import published_folder
from support.published_names import PUBLISHED_CONFIGS, published_names
from support.shard_fakes import image_bytes
from typer.testing import CliRunner

from vlmpack.api import resolve, run_recipe
from vlmpack.cli.app import app
from vlmpack.recipe import load_recipe
from vlmpack.training.metrics import read_rows, validations

RECORDS = 150
FAMILIES = {"qwen3_5": "Qwen3.5-0.8B", "gemma4": "Gemma-4-E4B"}
SMALL = {
    "model.dtype": "float32",
    "packing.max_tokens": 768,
    "packing.max_vision_patches": None,
    "training.seq_length": 512,
    "training.max_steps": 3,
    "training.num_epochs": None,
    "training.global_batch_size": 4,
    "optim.warmup_steps": 1,
    "data.num_workers": 0,
    "logging.progress": "none",
}


def question(number: int) -> dict[str, Any]:
    return {"image": f"photos/{number}.png", "question": "what?", "answer": str(number)}


def conversation(number: int) -> dict[str, Any]:
    turns = [
        ("user", "<image>\nwhat?"),
        ("assistant", str(number)),
        ("user", "so?"),
        ("assistant", "yes"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "images": [f"photos/{number}.png"]}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The recipe as it is written, beside the folder that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-folder/photos").mkdir(parents=True)
    make = {"qwen3_5": question, "gemma4": conversation}[request.param]
    for number in range(RECORDS):
        image = image_bytes(56, 56 + 28 * (number % 2), seed=number)
        (tmp_path / f"my-folder/photos/{number}.png").write_bytes(image)
    records = [json.dumps(make(number)) + "\n" for number in range(RECORDS)]
    (tmp_path / "my-folder/conversations.jsonl").write_text("".join(records))
    told = CliRunner().invoke(app, ["recipe", "new", f"my-folder-{request.param}-lora"])
    assert told.exit_code == 0 and "my-folder (data.train)" not in told.output
    return tmp_path / f"my-folder-{request.param}-lora.yaml"


@pytest.mark.cases(quick=[], slow=["qwen3_5"])
@pytest.mark.parametrize("recipe", FAMILIES, indirect=True)
def test_a_folder_becomes_a_model(recipe: Path, tmp_path: Path) -> None:
    family = recipe.stem.split("-")[2]
    model = tiny_family_folder(family, tmp_path / "model")
    run_recipe(resolve(str(recipe), {"model.path": str(model), "run_dir": "run", **SMALL}))
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps)
    assert [row["num_samples"] for row in steps] == [4, 4, 4]
    assert math.isfinite(validations(rows)[-1]["loss"])
    assert list((tmp_path / "run/export").glob("*.safetensors"))
    trained = (tmp_path / "run/samples/rank-0000.jsonl").read_text()
    assert trained.count("conversations.jsonl") == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FAMILIES, indirect=True)
def test_it_is_planned_for_one_gpu(recipe: Path, tmp_path: Path) -> None:
    name = FAMILIES[recipe.stem.split("-")[2]]
    (tmp_path / "m").mkdir()
    model = published_folder(tmp_path / "m", name, PUBLISHED_CONFIGS[name], published_names()[name])
    given = [str(recipe), f"model.path={model}", "data.index_dir=index"]
    assert "OK" in CliRunner().invoke(app, ["recipe", "check", *given, "--world-size", "1"]).output
    given.append("model.activation_checkpointing=full")
    plan = ["plan", *given, "--full-rows", "--json", "plan.json", "--world-size", "1"]
    told = CliRunner().invoke(app, plan)
    assert told.exit_code == 0, (told.output, told.exception)
    found = json.loads(Path("plan.json").read_text())
    memory = found["memory"]["total"] / 2**30
    assert f"counts {memory:.1f} GiB." in recipe.read_text()
    held = RECORDS - found["total"]["num_samples"]
    assert 0 < held < 0.06 * RECORDS
    assert any(f"{held} of {RECORDS} samples are held back" in note for note in found["notes"])
    assert load_recipe(recipe).data.validation == "2%"
