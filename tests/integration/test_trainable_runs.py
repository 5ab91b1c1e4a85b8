"""Whole runs with frozen components and adapters: what they print, write, resume and export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.exports import export_run
from support.recipes import changed, rows, run_settings
from support.shards import TINY_MODEL
from support.stock import load_stock
from typer.testing import CliRunner

from vlmpack.api import resolve, run_recipe
from vlmpack.cli.app import app
from vlmpack.errors import CapabilityError, ModelError, Preempted, RunIdentityError, VlmpackError
from vlmpack.recipe import load_recipe
from vlmpack.run import session as session_module
from vlmpack.run import splits
from vlmpack.run.card import CARD


def lora_settings(tmp_path: Path) -> dict:
    """Adapters on the language model, the projector in full at a rate of its own."""
    return changed(
        run_settings(tmp_path),
        training__max_steps=4,
        trainable__vision="frozen",
        trainable__language="lora",
        trainable__lora__rank=4,
        trainable__lora__dropout=0.1,
        optim__projector_lr=1e-3,
        checkpoint__interval_steps=2,
        checkpoint__keep=3,
        export__enabled=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps."""
    settings = lora_settings(tmp_path_factory.mktemp("lora"))
    run_recipe(resolve(settings, {}))
    return settings, Path(settings["run_dir"])


@pytest.mark.slow
def test_a_run_leaves_the_merged_model_the_adapters_and_the_table(finished):
    settings, run = finished
    table = {row["component"]: row for row in json.loads((run / "trainable.json").read_text())}
    assert {name: row["mode"] for name, row in table.items()} == {
        "vision": "frozen",
        "projector": "full",
        "language": "lora",
    }
    assert table["projector"]["peak_lr"] == 1e-3
    assert table["language"]["peak_lr"] == settings["optim"]["lr"]
    assert table["vision"]["peak_lr"] is None
    figures = json.loads((run / "result.json").read_text())
    assert figures["engine"]["trained"].startswith("vision frozen, projector full, language lora;")
    base, export = (
        load_file(str(folder / "model.safetensors")) for folder in (TINY_MODEL, run / "export")
    )
    assert base.keys() == export.keys()
    changed_ = {name for name in base if not torch.equal(base[name], export[name])}
    assert changed_ and not any(name.startswith("visual.blocks") for name in changed_)
    frozen = {n for n in base if "visual" in n and "merger" not in n}
    assert frozen and not frozen & changed_
    assert any("q_proj" in name for name in changed_)
    assert any("merger" in name for name in changed_)
    held = load_file(str(run / "adapter" / "adapter_model.safetensors"))
    assert sum(value.numel() for value in held.values()) == sum(
        row["trained"] for row in table.values()
    )


@pytest.mark.slow
def test_exports_of_checkpoints(finished, tmp_path):
    _, run = finished
    runner = CliRunner()
    result = runner.invoke(app, ["export", str(run), "--merge", "-o", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    assert "step-00000004" in result.output
    said = " ".join(result.output.split())
    assert "it was trained in float32, and --dtype float32 keeps all of it" in said
    assert same(tmp_path / "merged", run / "export", "model.safetensors")
    kept = tmp_path / "kept"
    command = ["export", str(run), "--merge", "--dtype", "float32", "-o", str(kept)]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "in float32, as it was trained" in " ".join(result.output.split())
    whole, short = (load_file(str(at / "model.safetensors")) for at in (kept, run / "export"))
    assert all(torch.equal(short[name], whole[name].bfloat16()) for name in whole)
    assert any(not torch.equal(short[name].float(), whole[name]) for name in whole)
    assert json.loads((kept / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(VlmpackError, match="adapters are written as trained, in float32"):
        export_run(run, merge=False, dtype="float32")
    given = {"out": tmp_path / "adapter", "base": "owner/base"}
    adapter, checkpoint, dtype, why = export_run(run, merge=False, **given)
    assert why == "the newest" and checkpoint.name == "step-00000004"
    assert dtype is None
    assert same(adapter, run / "adapter", "adapter_model.safetensors")
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "owner/base" and 'base_model: "owner/base"' in (adapter / CARD).read_text()
    earlier = export_run(run, merge=True, out=tmp_path / "two", step=2).folder
    assert not same(earlier, run / "export", "model.safetensors")
    with pytest.raises(VlmpackError, match=r"no checkpoint of step 3; it has 2, 4"):
        export_run(run, merge=True, step=3)
    with pytest.raises(VlmpackError, match="is there already"):
        export_run(run, merge=True, out=tmp_path / "two")
    with pytest.raises(VlmpackError, match="expected a run folder"):
        export_run(tmp_path / "nowhere", merge=True)


def same(ours, theirs, name):
    mine, reference = load_file(str(ours / name)), load_file(str(theirs / name))
    assert mine.keys() == reference.keys()
    return all(torch.equal(mine[key], reference[key]) for key in mine)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_bit_by_bit(finished, tmp_path, monkeypatch):
    settings, run = finished
    settings = changed(settings, run_dir=str(tmp_path / "run"))
    original = session_module.Session.steps

    def stopping(self):
        for train_step in original(self):
            if self.trainer.totals.step + 1 == 2:
                self.trainer.stop.set()
            yield train_step

    with monkeypatch.context() as patch:
        patch.setattr(session_module.Session, "steps", stopping)
        with pytest.raises(Preempted):
            run_recipe(resolve(settings, {}))
    other = changed(settings, trainable__lora__rank=8, optim__projector_lr=2e-3)
    with pytest.raises(RunIdentityError, match=r"(?s)optim\.projector_lr.*trainable\.lora\.rank"):
        run_recipe(resolve(other, {}))
    run_recipe(resolve(settings, {}))
    columns = ("step", "loss", "grad_norm", "num_tokens")
    assert rows(settings["run_dir"], *columns) == rows(run, *columns)
    assert same(Path(settings["run_dir"]) / "export", run / "export", "model.safetensors")


def test_targets_are_looked_for_before_any_data_is_read(tmp_path, monkeypatch):
    settings = changed(lora_settings(tmp_path), trainable__lora__targets=["q_poj"])
    monkeypatch.setattr(
        splits, "open_split", lambda *args, **options: pytest.fail("data were read")
    )
    with pytest.raises(CapabilityError, match=r"'q_poj'; there are .*q_proj"):
        run_recipe(resolve(settings, {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_goes_on_with_adapters_that_its_recipe_does_not_describe(tmp_path):
    """It is resumed, and exported without them."""
    torch.manual_seed(0)
    model = get_peft_model(
        load_stock(TINY_MODEL),
        LoraConfig(
            r=4,
            target_modules=["q_proj", "down_proj"],
            layers_to_transform=[1, 3],
            layers_pattern="layers",
            rank_pattern={"layers.3.self_attn.q_proj": 2},
            alpha_pattern={"down_proj": 3},
            modules_to_save=["input_layernorm"],
            init_lora_weights=False,
        ),
    )
    adapter = tmp_path / "adapter"
    model.save_pretrained(str(adapter))
    settings = changed(
        run_settings(tmp_path),
        model__adapter=str(adapter),
        training__max_steps=2,
        trainable={"vision": "frozen", "projector": "frozen", "language": "lora"},
        checkpoint__interval_steps=1,
        export__enabled=True,
    )
    run_recipe(resolve(settings, {}))
    run = Path(settings["run_dir"])
    lora = load_recipe(run / "recipe.yaml").trainable.lora
    ends = ("layers.1.mlp.down_proj", "layers.1.self_attn.q_proj")
    assert lora.targets == (*ends, *(end.replace("1", "3") for end in ends))
    assert (lora.rank, lora.alpha, len(lora.modules_to_save)) == (4, 8, 4)
    assert {*lora.rank_pattern.values()} == {2} and {*lora.alpha_pattern.values()} == {3}
    run_recipe(resolve(changed(settings, training__max_steps=3), {}))
    assert [step for (step,) in rows(run, "step")] == [1, 2, 3]
    held = load_file(str(run / "adapter" / "adapter_model.safetensors"))
    begun = load_file(str(adapter / "adapter_model.safetensors"))
    assert held.keys() == begun.keys()
    assert all(held[name].shape == value.shape for name, value in begun.items())
    assert all(not torch.equal(held[name], value) for name, value in begun.items())
    shutil.rmtree(adapter)
    exported = export_run(run, merge=True, out=tmp_path / "out").folder
    assert same(exported, run / "export", "model.safetensors")


@pytest.mark.soak
def test_a_run_goes_on_with_the_adapters_of_another(finished, tmp_path):
    """It begins where the other ended, is told apart by them, and needs them no more to export."""
    settings, first = finished
    adapter = tmp_path / "adapter"
    shutil.copytree(first / "adapter", adapter)
    settings = changed(
        settings,
        model__adapter=str(adapter),
        trainable__lora__dropout=0.0,
        run_dir=str(tmp_path / "second"),
    )
    fresh = changed(settings, model__adapter=None, run_dir=str(tmp_path / "fresh"))
    merged = changed(
        fresh,
        model__path=str(first / "export"),
        export__dtype="float32",
        run_dir=str(tmp_path / "m"),
    )
    for one in (settings, fresh):
        run_recipe(resolve(one, {}))
    # The model with the first run's adapters merged computes the same first loss, up to rounding.
    export_run(first, merge=True, dtype="float32", out=tmp_path / "merged")
    run_recipe(resolve(changed(merged, model__path=str(tmp_path / "merged")), {}))
    losses = {name: rows(tmp_path / name, "loss")[0][0] for name in ("second", "fresh", "m")}
    assert losses["second"] == pytest.approx(losses["m"], rel=1e-5)
    assert abs(losses["second"] - losses["fresh"]) > 1e-4
    record = json.loads((tmp_path / "second" / "model.json").read_text())
    assert list(record["adapter"]) == ["adapter_model.safetensors"]
    longer = {"training__max_steps": 5}
    with pytest.raises(RunIdentityError, match=r"model\.adapter: .* missing in the recipe"):
        run_recipe(resolve(changed(settings, model__adapter=None, **longer), {}))
    held = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(held))
    save_file({**held, name: held[name] + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(RunIdentityError, match=r"(?s)trained from another.*adapter_model"):
        run_recipe(resolve(changed(settings, **longer), {}))
    shutil.rmtree(adapter)
    exported = export_run(tmp_path / "second", merge=True, out=tmp_path / "out").folder
    assert same(exported, tmp_path / "second" / "export", "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.adapter: .* is not a folder"):
        run_recipe(resolve(changed(settings, **longer), {}))
