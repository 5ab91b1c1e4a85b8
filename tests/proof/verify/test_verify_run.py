"""`vlmpack verify` as a command, before a run, on tiny models and under torchrun."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.families import VISION_FAMILIES, tiny_family_folder
from support.forked import check_ranks
from support.recipes import changed, rows, run_settings, write_recipe
from support.shards import ROOT, TINY_MODEL
from support.verified import recipe_for
from typer.testing import CliRunner

import vlmpack
from vlmpack.cli.app import app
from vlmpack.data.loading.loader import BinDataset
from vlmpack.encode import Encoder
from vlmpack.errors import (
    DataError,
    EmptyDataError,
    ModelError,
    RecipeError,
    RunDirError,
    VerificationError,
    VlmpackError,
)
from vlmpack.packing import IGNORE_INDEX, PackCollator
from vlmpack.proof.verify.recurrent import ALONE, SEGMENTS
from vlmpack.proof.verify.run import write_tiny_model


@pytest.fixture
def recipe(tmp_path):
    """22 small samples, four a step, on the committed model."""
    return write_recipe(tmp_path / "recipe.yaml", run_settings(tmp_path))


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "1 tensor holds values that are no numbers: {}.weight (NaN)"),
        # Whether inf and -inf meet in a sum, as NaN, depends on the order in which a CPU adds.
        (3e38, "The first of them: the output of {} ("),
    ],
    ids=["NaN", "overflow"],
)
def test_a_model_of_no_numbers_is_told_by_its_tensor(recipe, tmp_path, value, said):
    """Not as packing that is wrong: both runs compute NaN, and NaN equals nothing."""
    folder = tmp_path / "odd"
    shutil.copytree(TINY_MODEL, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name].fill_(value)
    save_file(tensors, file, metadata={"format": "pt"})
    result = run(recipe, f"model.path={folder}")
    assert isinstance(result.exception, VlmpackError), result.output
    assert said.format("model.language_model.layers.1.mlp.down_proj") in str(result.exception)
    assert "packed differs" not in result.output


def break_labels(monkeypatch):
    """Every row learns one token that is not its sample's."""
    pack = PackCollator.__call__

    def broken(self, samples):
        row = pack(self, samples)
        labels = row.labels.clone()
        labels[0, row.label_positions[0]] += 1
        return replace(row, labels=labels)

    monkeypatch.setattr(PackCollator, "__call__", broken)


@pytest.mark.slow
def test_the_command_says_that_packed_equals_unpacked(recipe, tmp_path):
    done = run(recipe, "-k", 3, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert lines[-1] == "packed equals unpacked"
    assert sum(line.startswith("pass") for line in lines) == 19
    found = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert found["passes"]
    assert [check["status"] for check in found["checks"]] == ["pass"] * 19
    assert [sample["images"] > 0 for sample in found["samples"]].count(False) >= 1
    assert max(sample["images"] for sample in found["samples"]) >= 2
    assert found["dtype"] == "float32"
    assert not found["tiny"]
    assert {"torch", "transformers", "vlmpack"} <= found["versions"].keys()


@pytest.mark.slow
def test_a_difference_ends_with_exit_code_1(recipe, tmp_path, monkeypatch):
    break_labels(monkeypatch)
    done = run(recipe, "-k", 3)
    assert done.exit_code == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("packed differs from unpacked in ")
    assert "labels and loss mask" in last
    settings = json.loads(recipe.read_text())
    found = json.loads((Path(settings["run_dir"]) / "verify" / "verify.json").read_text())
    assert not found["passes"]


def test_a_wrong_recipe_is_named_before_anything_is_loaded(recipe):
    done = run(recipe, "packing.mode=pack")
    assert isinstance(done.exception, RecipeError)
    assert done.exception.exit_code == 2


@pytest.mark.slow
def test_an_output_that_is_a_file_is_named_before_any_work(recipe, tmp_path):
    (tmp_path / "out").write_text("mine")
    done = run(recipe, "-o", tmp_path / "out")
    assert isinstance(done.exception, RunDirError)
    assert "--output" in str(done.exception)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-k", 1), "'-k': found 1, expected 2 or more"),
        (("-k", "few"), "'-k': found few, expected 2 or more"),
        (("--dtype", "bf16"), "'bf16' is not one of 'float32',"),
    ],
)
def test_a_wrong_option_is_one_line(recipe, arguments, said):
    done = run(recipe, *arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named_before_any_data(recipe, tmp_path, monkeypatch, capfd):
    """As a run does it: without transformers' own report in front."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[max(tensors)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("vlmpack.proof.verify.run.build_encoder", pytest.fail)
    done = run(recipe, f"model.path={folder}")
    assert isinstance(done.exception, ModelError)
    assert "LOAD REPORT" not in done.output + capfd.readouterr().err


@pytest.mark.slow
def test_samples_without_any_label_are_named(recipe, monkeypatch):
    encode = Encoder.encode

    def unlabelled(self, *args, **kwargs):
        sample = encode(self, *args, **kwargs)
        return replace(sample, labels=torch.full_like(sample.labels, IGNORE_INDEX))

    monkeypatch.setattr(Encoder, "encode", unlabelled)
    done = run(recipe, "-k", 2)
    assert isinstance(done.exception, EmptyDataError)
    assert "none of the 2 samples" in str(done.exception)


@pytest.mark.slow
def test_a_sample_that_is_left_out_is_named(recipe, monkeypatch, caplog):
    """Errors of an image know its number in the sample alone."""
    encode, bad = BinDataset.encode, []

    def fails_once(self, ref, sample):
        if not bad:
            bad.append(f"{ref.key} ({ref.shard}): decode: image 0 cannot be decoded")
            raise DataError("image 0 cannot be decoded", error_class="decode")
        return encode(self, ref, sample)

    monkeypatch.setattr(BinDataset, "encode", fails_once)
    with caplog.at_level("WARNING", logger="vlmpack"):
        assert run(recipe, "-k", 2).exit_code == 0
    assert f"left out: {bad[0]}" in caplog.messages


# Before the first step of a run


@pytest.mark.soak
def test_a_verified_run_trains_the_same_bits(tmp_path):
    settings = run_settings(tmp_path)
    losses = {}
    for verify in (False, True):
        folder = str(tmp_path / f"run-{verify}")
        vlmpack.finetune(
            changed(settings, run_dir=folder, training__verify=verify, training__max_steps=2)
        )
        losses[verify] = rows(folder, "loss", "grad_norm")
        assert (Path(folder) / "verify" / "verify.json").is_file() == verify
    assert len(losses[True]) == 2
    assert losses[True] == losses[False]


@pytest.mark.soak
def test_a_run_that_fails_to_verify_trains_nothing(tmp_path, monkeypatch):
    break_labels(monkeypatch)
    settings = run_settings(tmp_path, training__verify=True, training__max_steps=3)
    with pytest.raises(VerificationError, match="labels and loss mask"):
        vlmpack.finetune(settings)
    run_dir = Path(settings["run_dir"])
    assert (run_dir / "verify" / "verify.json").is_file()
    assert not (run_dir / "metrics.jsonl").exists()


# Tiny models


def num_layers(folder):
    """Of the decoder; Nemotron-H counts them by their kinds."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return text.get("num_hidden_layers") or len(text["layers_block_type"])


@pytest.mark.cases(slow="qwen3_5")
@pytest.mark.parametrize(
    "name",
    sorted(VISION_FAMILIES),
)
def test_a_tiny_model_of_a_family_verifies(name, tmp_path):
    made = tiny_family_folder(name, tmp_path / "whole")
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)  # its weights are damaged below, and one is the committed model
    tiny = write_tiny_model(folder, tmp_path / "tiny")
    assert num_layers(tiny) <= num_layers(folder)
    recipe = recipe_for(folder, run_dir=str(tmp_path / "run"), packing__mode="none")
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_defaults=True)))
    kept = tmp_path / "run" / "verify" / "scratch"  # a folder of the user's own
    kept.mkdir(parents=True)
    whole = kept.parent / "verify.json"
    whole.write_text("the whole model's")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = run(path, "-k", 2, "--tiny")
    assert done.exit_code == 0, done.output
    assert "TINY MODEL" in done.stdout
    assert "random weights, the folder's weights were not read" in done.stdout
    assert whole.read_text() == "the whole model's"
    assert done.stdout.splitlines()[-1] == "packed equals unpacked (of the tiny model)"
    assert "padded: leak test" in done.stdout
    assert "packed: leak test" in done.stdout
    assert sorted(path.name for path in kept.parent.iterdir()) == [
        *("scratch", "verify-tiny.json", "verify.json"),
    ]


@pytest.mark.slow
def test_adapters_of_one_layer_have_a_place_in_a_tiny_model(tmp_path):
    """A folder of adapters names layers that the tiny model has not."""
    lora = {
        "targets": ["layers.3.self_attn.q_proj"],
        "rank_pattern": {"layers.3.self_attn.q_proj": 4},
        "modules_to_save": ["layers.3.mlp"],
    }
    recipe = recipe_for(
        tiny_family_folder("qwen3_vl", tmp_path / "whole"),
        run_dir=str(tmp_path / "run"),
        trainable={"vision": "frozen", "projector": "frozen", "language": "lora", "lora": lora},
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_defaults=True)))
    done = run(path, "-k", 2, "--tiny")
    assert done.exit_code == 0, done.output
    assert "gradients: adapters" in done.stdout


# Parallel layouts


@pytest.mark.megatron
@pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(("cp2",), marks=pytest.mark.slow),
        pytest.param(("tp2", "pp2", "cp2-over-the-row"), marks=pytest.mark.soak),
    ],
)
def test_parallel_layouts_are_compared_with_the_stock_model(recipe, tmp_path, jobs):
    script = layouts.TESTS / "support" / "verify_layouts.py"
    check_ranks([script, recipe, tmp_path, *jobs], 2)
    found = {job: json.loads((tmp_path / job / "verify.json").read_text()) for job in jobs}
    for job, said in found.items():
        failing = {check["name"] for check in said["checks"] if check["status"] == "fail"}
        names = {check["name"] for check in said["checks"]}
        assert names >= {"loss of each sample", "gradients: tower", "leak test", "positions"}
        assert job[:3].upper().replace("2", " 2") in said["engine"]["processes"]
        if job == "cp2-over-the-row":
            assert failing >= {"loss of each sample", "gradients: language model"}
        else:
            assert failing == set()


@pytest.mark.megatron
@pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
@pytest.mark.parametrize(
    ("family", "jobs"),
    [
        pytest.param("qwen3_5", ("cp2", "cp2-state-runs-on"), marks=pytest.mark.slow),
        pytest.param("qwen3_5", ("tp2", "pp2", "cp2-told-no-boundary"), marks=pytest.mark.soak),
        pytest.param("nemotron_h", ("tp2", "cp2"), marks=pytest.mark.soak),
    ],
)
def test_recurrent_layers_are_looked_at_in_parallel_layouts(tmp_path, family, jobs):
    """All heads and all layers, each where it is; what was not looked for is said."""
    folder = tiny_family_folder(family, tmp_path)
    settings = run_settings(tmp_path, model__path=str(folder))
    if family == "nemotron_h":  # a language model
        settings["data"]["train"] = str(ROOT / "assets/text/train-000000.tar")
    recipe = write_recipe(tmp_path / "r.json", settings)
    script = layouts.TESTS / "support" / "verify_layouts.py"
    check_ranks([script, recipe, tmp_path, *jobs], 2)
    for job in jobs:
        said = json.loads((tmp_path / job / "verify.json").read_text())
        checks = {check["name"]: check for check in said["checks"]}
        failing = {name for name, check in checks.items() if check["status"] == "fail"}
        segments, alone = checks[SEGMENTS], checks[ALONE]
        assert checks["leak test of gradients"]["status"] == "shown"
        assert "model.backend: hf looks" in checks["leak test of gradients"]["detail"]
        where = "of model.language_model.layers.0.linear_attn"
        if job == "cp2-state-runs-on":
            assert failing >= {ALONE, "loss of each sample", "leak test"}
            assert f"first differs: delta rule {where}" in alone["detail"]
            assert segments["status"] == "pass"
        elif job == "cp2-told-no-boundary":
            assert failing >= {SEGMENTS, ALONE, "loss of each sample", "leak test"}
            assert f"the convolution {where} was told no boundary at slot" in segments["detail"]
        else:
            assert failing == set()
            # Two calls of each layer, which TP and CP run with shared heads.
            layers = 3 if family == "qwen3_5" else 2
            calls = 2 * layers * (1 if job == "pp2" else 2)
            assert segments["detail"] == f"those of the row in {calls} calls of {layers} layers"
            assert 0 < alone["measured"] < alone["bound"]
