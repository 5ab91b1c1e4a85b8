"""Which checkpoint is exported; exports with layers of multi-token prediction."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run.played_hub import Hub
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.carded import a_run
from support.exports import export_run
from support.families import tiny_family_folder
from support.recipes import MINIMAL, changed, run_settings
from support.shards import ROOT, TINY_MODEL

from tools.servers.facts import shapes_of
from vlmpack.activity import ACTIVITY
from vlmpack.api import resolve, run_recipe
from vlmpack.errors import CapabilityError, ModelError, RunIdentityError, VlmpackError
from vlmpack.file_format import RESULT
from vlmpack.model_folder.weights import weight_files
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.run import export
from vlmpack.run.export import Chosen, choose_export, write_export
from vlmpack.run.push import check_target
from vlmpack.training.checkpoint import step_folder
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import share_as

PREDICTION = {
    "mtp.fc.weight": torch.linspace(-1, 1, 512).view(4, 128).bfloat16(),
    "mtp.norm.weight": torch.linspace(0, 1, 128),
}


def with_prediction(folder):
    """The committed model, with two tensors more."""
    shutil.copytree(TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    write(folder, PREDICTION)
    return folder


def write(folder, tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(str(path)), **tensors}, str(path), metadata={"format": "pt"})


def kept(folder):
    """Name -> tensor of what lies under mtp."""
    found = {}
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            found |= {n: file.get_tensor(n) for n in file.keys() if n.startswith("mtp")}  # noqa: SIM118
    return found


def umask():
    """What this process takes from a new file's permissions."""
    now = os.umask(0o077)
    os.umask(now)
    return now


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("mask", [0o002, 0o027])
def test_files_of_their_owner_alone_get_what_the_umask_allows(tmp_path, mask):
    before = os.umask(mask)
    try:
        (tmp_path / "config.json").write_text("{}")
        for name in ("a.safetensors", "other"):
            (tmp_path / name).touch()
            (tmp_path / name).chmod(0o600)
        share_as(tmp_path / "config.json", "*.safetensors")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a.safetensors") == 0o666 & ~mask
    assert mode(tmp_path / "other") == 0o600


def a_killed_run(root: Path, monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any]) -> Any:
    """A run with checkpoints of steps 2 and 3, whose best one is that of step 2 by both, and with
    rows of metrics.jsonl; what of it would be exported."""
    run_dir = RunDir(root / "run")
    for step in (2, 3):
        folder = step_folder(run_dir.checkpoints, step)
        folder.mkdir(parents=True)
        best = {"figure": "validation_loss", "value": 4.0, "step": 2, "waited": 0}
        (folder / "state.json").write_text(json.dumps(RESULT.mark({"best": best})))
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in found))
    monkeypatch.setattr("vlmpack.training.checkpoint.folders.find_damage", lambda _: None)
    monkeypatch.setattr(export, "find_damage", lambda _: None)
    recipe = load_recipe(
        changed(
            MINIMAL,
            data__validation="data/val.tar",
            evaluation__interval_steps=1,
            evaluation__best="validation_loss",
            export__weights="best",
        )
    )
    return lambda: export._choose(run_dir, recipe, None)


BEST = "the best by validation_loss, export.weights: best"


@pytest.mark.parametrize(
    ("found", "step"),
    [
        ([{"step": 3, "validation_loss": 1.0}], 3),
        ([{"step": 3, "loss": 2.0}, {"step": 3, "validation_loss": 1.0}], 3),
        ([{"step": 3, "validation_loss": 5.0}], 2),
        ([{"step": 3, "validation_loss": float("nan")}], 2),
        ([{"step": 2, "validation_loss": 4.0}, {"step": 3, "loss": 0.5}], 2),
        ([{"step": 4, "validation_loss": 1.0}], 2),
        ([], 2),
    ],
)
def test_the_best_checkpoint_is_one_that_a_resumed_run_has_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[dict[str, Any]], step: int
) -> None:
    """SIGTERM at step 3, evaluated by the run that was resumed there and then killed: no checkpoint
    knows of it. Of step 4 there is none."""
    checkpoint, why = a_killed_run(tmp_path, monkeypatch, *found)()
    assert checkpoint.name == f"step-{step:08d}" and why == BEST


def test_a_run_at_its_end_says_itself_which_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = a_killed_run(tmp_path, monkeypatch, {"step": 3, "validation_loss": 1.0})
    best = {"figure": "validation_loss", "value": 4.0, "step": 2, "waited": 1}
    RunDir(tmp_path / "run").result.write_text(json.dumps(RESULT.mark({"best": best})))
    assert choose()[0].name == "step-00000002"
    (tmp_path / "run" / "result.json").write_text(
        json.dumps(RESULT.mark({"best": {**best, "figure": "anls"}}))
    )
    assert choose() == (
        step_folder(tmp_path / "run" / "checkpoints", 3),
        "the newest, as no validation_loss says yet which is the best",
    )


def test_nothing_is_written_where_the_card_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = a_run(tmp_path, steps=40)
    wrote: list[Path] = []

    def card_of(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(export, "card_of", card_of)
    monkeypatch.setattr(export, "_write", lambda _, folder: wrote.append(folder))
    chosen = Chosen(
        run_dir=run,
        recipe=load_recipe(run.recipe),
        checkpoint=run.checkpoints / "step-00000040",
        why="as asked",
        adapter=False,
        out=tmp_path / "out",
        dtype="auto",
        base=None,
    )
    with pytest.raises(ZeroDivisionError):
        write_export(chosen)
    assert wrote == []


@pytest.mark.slow
def test_what_is_pushed_names_its_base_as_the_hub_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters cannot be loaded by a path of the machine that trained them."""
    chosen = (tmp_path / "step-00000040", "the newest")
    monkeypatch.setattr(export, "_choose", lambda *_: chosen)
    run, (model, _) = a_run(tmp_path, steps=40)
    cached = tmp_path / "hub" / "models--Qwen--Qwen2.5-VL-3B-Instruct" / "snapshots" / "66285546"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(model)

    def base(path: Path, *, lora: bool, **how: Any) -> str | None:
        language = "lora" if lora else "full"
        settings = {"trainable__language": language, "run_dir": str(run.path)}
        recipe = load_recipe(changed(MINIMAL, model__path=str(path), **settings))
        run.recipe.write_text(dump_recipe(recipe))
        return choose_export(run.path, merge=False, **how).base

    for lora in (False, True):
        assert base(cached, lora=lora, pushed=True) == "Qwen/Qwen2.5-VL-3B-Instruct"
        assert base(model, lora=lora, pushed=True, base="o/n") == "o/n"
        assert base(model, lora=lora, base="o/n") == "o/n"
        assert base(cached, lora=lora) is None, "found by its path"
        with pytest.raises(VlmpackError, match="--base n: expected OWNER/NAME"):
            base(model, lora=lora, base="n")
    assert base(model, lora=False, pushed=True) is None
    with pytest.raises(VlmpackError, match=r"by --base OWNER/NAME, or push .* by --merge"):
        base(model, lora=True, pushed=True)


@pytest.mark.slow
def test_a_run_keeps_them_and_refuses_to_take_others(tmp_path, caplog):
    folder = with_prediction(tmp_path / "model")
    lora = {
        "trainable__vision": "frozen",
        "trainable__language": "lora",
        "trainable__lora__rank": 2,
    }
    dtype = {"export__enabled": True, "export__dtype": "bfloat16"}
    settings = run_settings(tmp_path, model__path=str(folder), training__max_steps=1, **lora)
    with caplog.at_level(logging.INFO, "vlmpack"):
        run = run_recipe(resolve(changed(settings, **dtype), {})).run_dir
    said = "mtp.* (2 tensors, 0.0 MB): not trained, in the export as they are"
    assert f"kept           {said}" in caplog.text
    assert json.loads((run / "result.json").read_text())["engine"]["kept"] == said
    again = export_run(run, merge=True, dtype="float32").folder
    assert ACTIVITY.stage == "writing the model"
    for written in (run / "export", again):
        assert json.loads((written / "config.json").read_text())["mtp_num_hidden_layers"] == 1
        assert kept(written).keys() == PREDICTION.keys()
        for name, value in kept(written).items():
            assert value.dtype == PREDICTION[name].dtype
            assert torch.equal(value, PREDICTION[name]), name
    run_id = RunDir(run).run_id()
    for written, is_adapter in ((again, False), (export_run(run, merge=False).folder, True)):
        names = tuple(path.name for path in written.iterdir())
        assert f'vlmpack_run: "{run_id}"' in (written / "README.md").read_text()
        check_target("o/n", run=run_id, adapter=is_adapter, api=Hub(names, run=run_id))
    adapter = load_file(str(run / "adapter" / "adapter_model.safetensors"))
    assert not any("mtp" in name for name in adapter)
    for written in (run / "export", again, run / "adapter"):
        assert any(path.suffix == ".safetensors" for path in written.iterdir())
        assert {oct(mode(path)) for path in written.iterdir()} == {oct(0o666 & ~umask())}

    out = tmp_path / "out"
    write(folder, {"mtp.norm.weight": PREDICTION["mtp.norm.weight"] + 1})
    with pytest.raises(RunIdentityError, match=r"weight mtp\.norm\.weight: "):
        export_run(run, merge=True, out=out)
    shutil.rmtree(folder)
    with pytest.raises(
        ModelError, match="is not a folder; expected a model in transformers format"
    ):
        export_run(run, merge=True, out=out)
    assert not out.exists()


@pytest.mark.slow
def test_adapters_of_a_language_model_alone_are_a_servers_unless_it_scales_otherwise(tmp_path):
    """The recipe leaves out what the model has not: a tower and a projector."""
    settings = run_settings(
        tmp_path,
        model__path=str(tiny_family_folder("qwen3", tmp_path / "model")),
        data__train=str(ROOT / "assets/text/train-000000.tar"),
        training__max_steps=1,
        trainable={"language": "lora", "lora": {"rslora": True}},
    )
    run = run_recipe(resolve(settings, {})).run_dir
    assert choose_export(run, merge=False, server="vllm").adapter
    with pytest.raises(CapabilityError, match=r"SGLang .* with trainable\.lora\.rslora: "):
        choose_export(run, merge=False, server="sglang")
    choose_export(run, merge=True, server="sglang")


@pytest.mark.slow
def test_adapters_for_a_server_have_the_form_that_it_takes_or_are_not_written(tmp_path):
    settings = run_settings(
        tmp_path,
        model__path=str(tiny_family_folder("deepseek_v3", tmp_path / "model")),
        data__train=str(ROOT / "assets/text/train-000000.tar"),
        training__max_steps=1,
        trainable={"language": "lora", "lora": {"rank": 2, "targets": ["o_proj", "experts"]}},
    )
    run = run_recipe(resolve(settings, {})).run_dir
    forms = {
        server: {
            "base_layer" in name
            for name in shapes_of(export_run(run, merge=False, out=tmp_path / server, **how).folder)
            if ".experts." in name
        }
        for server, how in (("none", {}), ("vllm", {"server": "vllm"}))
    }
    assert forms == {"none": {True, False}, "vllm": {False}}
    names = shapes_of(tmp_path / "vllm")
    assert any(".experts.0.gate_proj.lora_A" in name for name in names)
    alone = changed(
        settings, run_dir=str(tmp_path / "alone"), trainable__lora__targets=["kv_b_proj"]
    )
    run = run_recipe(resolve(alone, {})).run_dir
    with pytest.raises(CapabilityError, match=r"vLLM .* of kv_b_proj \(3 layers\): attention"):
        export_run(run, merge=False, out=tmp_path / "out", server="vllm")
    assert not (tmp_path / "out").exists()
    assert export_run(run, merge=False, out=tmp_path / "out", server="sglang").folder.is_dir()


@pytest.mark.slow
def test_an_export_for_a_server_has_the_names_that_it_looks_for(tmp_path):
    folder = tiny_family_folder("gemma3", tmp_path / "model")
    lora = {
        "trainable__vision": "lora",
        "trainable__projector": "frozen",
        "trainable__language": "lora",
    }
    settings = run_settings(
        tmp_path,
        model__path=str(folder),
        model__attention="segments",
        training__max_steps=1,
        **lora,
    )
    run = run_recipe(resolve(settings, {})).run_dir
    with pytest.raises(CapabilityError, match=r"vLLM .* have some of vision; add --merge"):
        choose_export(run, merge=False, server="vllm")
    assert choose_export(run, merge=False).adapter, "as ever"
    names = {
        server: set(
            shapes_of(export_run(run, merge=True, out=tmp_path / f"{server}", **how).folder)
        )
        for server, how in (("none", {}), ("vllm", {"server": "vllm"}))
    }
    assert names["vllm"] - names["none"] == {
        name.replace("vision_tower.", "vision_tower.vision_model.")
        for name in names["none"]
        if name.startswith("vision_tower.")
    }
    assert len(names["vllm"]) == len(names["none"]) > len(names["vllm"] & names["none"]) > 0
