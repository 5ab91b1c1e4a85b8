"""`vlmpack recipe check | show | schema`: output and exit codes."""

from __future__ import annotations

import json

import pytest
from support.engines import make_engine, policy
from support.recipes import run_settings
from support.shards import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli.app import app as whole
from vlmpack.cli.recipe import app
from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.recipe import dump_recipe, load_recipe


def invoke(*arguments: object, env: dict | None = None) -> tuple[int, str]:
    """Exit code and output, with user errors printed as the top-level handler does."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    if isinstance(result.exception, VlmpackError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def test_check_says_ok_and_shows_derived_values(write, good_text):
    path = write(good_text)
    code, output = invoke("check", path)
    assert code == 0
    absent = "2 things not on this machine; a run here will stop:"
    assert output.startswith(f"OK {path}, except for {absent}\n")
    _, *lines = output.splitlines()
    (number,) = (n for n, text in enumerate(good_text.split("\n"), 1) if " path:" in text)
    assert lines[0].startswith(f"{path}:{number}: model.path: 'models/")
    assert (
        output.count("model.path") == 1 and "the model, what its family can do, the data" in output
    )
    assert "gradient accumulation" in output


def test_check_lists_problems_and_fails(write, good_text):
    path = write(good_text.replace("512", "long").replace("lr:", "lrr:"))
    code, output = invoke("check", path, "training.max_stpes=3")
    assert code == 2
    assert output.startswith("3 problems in the recipe:\n")
    assert f"{path}:8: training.seq_length: expected an integer >= 1, found 'long'" in output
    assert "override 'training.max_stpes=3'" in output
    assert "did you mean 'lr'?" in output and "required, but missing" not in output


@pytest.mark.parametrize("how", ["option", "environment"])
def test_check_knows_the_world_size(write, good_text, how):
    def check(size: int) -> tuple[int, str]:
        if how == "option":
            return invoke("check", path, "--world-size", size)
        return invoke("check", path, env={"WORLD_SIZE": str(size)})

    path = write(good_text)
    assert check(4)[0] == 0
    code, output = check(3)
    assert code == 2
    assert "data-parallel size 3 = 12 (world size 3)" in output


MCORE = ("model.backend=mcore", "parallelism.tensor=2", "parallelism.pipeline=2")


def test_without_a_world_size_the_fewest_processes_are_taken(write, good_text):
    path = write(good_text)
    code, output = invoke("check", path, *MCORE)
    assert code == 0
    assert "without --world-size: for 4 processes, the fewest that this layout fits on" in output
    assert "4 / (2 tensor x 2 pipeline x 1 context)" in output
    code, output = invoke("check", path, *MCORE, "--world-size", 8)
    assert code == 0 and "without --world-size" not in output
    assert invoke("check", path, *MCORE, "--world-size", 1)[0] == 2


def test_plan_names_the_line_of_what_does_not_fit(write, good_text):
    path = write(good_text)
    (line,) = (n for n, text in enumerate(good_text.split("\n"), 1) if "global_batch_size" in text)
    found = CliRunner().invoke(whole, ["plan", str(path), "--world-size", "3"])
    assert f"{path}:{line}: training.global_batch_size: 16 is not" in str(found.exception)


def test_check_says_what_it_has_not_looked_at(write, good_text):
    path, lora = write(good_text), ("trainable.language=lora",)
    targets, family = "the layers of trainable.lora.targets. Run vlmpack plan", "family"
    assert family in invoke("check", path)[1]
    assert targets not in invoke("check", path, *lora)[1]
    assert targets in invoke("check", path, *lora, "trainable.lora.targets=[q_prj]")[1]


def test_check_prints_notes(write, good_text):
    code, output = invoke("check", write(good_text), "data.test=t.tar")
    assert code == 0
    assert "note: data.test is read only with evaluation.generate: true" in output


def test_check_names_data_that_is_not_here(write, good_text, tmp_path):
    path, note = write(good_text), ": data.train: "
    (tmp_path / "here-0.tar").touch()
    train = f"data.train={tmp_path}"
    code, output = invoke("check", path, f"{train}/here-{{0..1}}.tar")
    assert code == 0
    assert f"{note}'{tmp_path}/here-{{0..1}}.tar' matches 1 file, but these are missing" in output
    _, output = invoke("check", path, f"{train}/*.json")
    assert f"{note}'{tmp_path}/*.json' matches no file" in output
    assert "\noverride 'data.train=" in output  # which is shortened where it is long
    for found in (f"{train}/here-*.tar", "data.train=s3://bucket/no.tar", "data.train=python:own"):
        assert note not in invoke("check", path, found)[1]


def test_show_prints_the_resolved_recipe(write, good_text):
    path = write(good_text)
    code, output = invoke("show", path, "training.seed=5")
    assert code == 0
    assert output == dump_recipe(load_recipe(path, ["training.seed=5"]))


def test_schema_is_json():
    code, output = invoke("schema")
    assert code == 0
    assert json.loads(output)["properties"]["training"]


def test_missing_file_fails(tmp_path):
    code, output = invoke("check", tmp_path / "none.yaml")
    assert code == 2
    assert "no such file" in output


@pytest.mark.slow
def test_check_opens_the_adapters_that_a_run_would_go_on_with(tmp_path):
    settings = run_settings(tmp_path, model__adapter=str(tmp_path), trainable__language="lora")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(settings))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 4}')
    code, output = invoke("check", recipe)
    assert code == 1 and f"model.adapter: {tmp_path} has no adapter_model.safetensors" in output
    chosen = policy("frozen", "frozen", "lora", targets=("q_proj",))
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), policy=chosen)
    engine.export_adapter(tmp_path, base=str(TINY_MODEL))
    code, output = invoke("check", recipe)
    assert code == 0 and "not checked: the data. Run" in output, "layers of adapters were seen"
    code, output = invoke("check", recipe, "trainable.lora.targets=[q_proj, v_proj]")
    assert code == 1 and "model.adapter: the adapters in" in output
    settings["model"]["adapter"] = None
    recipe.write_text(json.dumps(settings))
    _, output = invoke("check", recipe, "trainable.lora.targets=[q_proj]")
    assert "whether the model has the layers of trainable.lora.targets" in output
