"""`vlmpack merge`: adapters of one folder after the other inside of the weights."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine, policy
from support.peft_models import peft_model
from support.shards import ROOT
from support.stock import StockProcessor
from typer.testing import CliRunner

from vlmpack.backends.adapter_folder import WEIGHTS
from vlmpack.backends.hf.adapters import merge_adapter
from vlmpack.backends.hf.load import load_model
from vlmpack.cli.app import app
from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError, VlmpackError
from vlmpack.run.result import publish_folder


def drawn_adapter(folder: Path, base: Path, encoder, chosen, seed: int):
    """Adapters that do something, from an engine; its export, with them merged, beside them."""
    engine = make_engine(base, encoder, policy=chosen)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    engine.export_adapter(folder / "adapter", base=str(base))
    engine.export(folder / "export", processor_from=base, dtype=torch.float32)
    return folder / "adapter", folder / "export"


def merge(*arguments: object) -> str:
    ran = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return " ".join(ran.output.split())


@pytest.mark.slow
def test_two_adapters_in_a_row_are_the_model_of_their_runs(tmp_path, tiny_folder, encoder, mixed):
    """The second is trained on what the first one's run exported, the projector in both in full."""
    first, exported = drawn_adapter(
        tmp_path / "1", tiny_folder, encoder, policy("frozen", "full", "lora"), 1
    )
    second, last = drawn_adapter(
        tmp_path / "2", exported, encoder, policy("lora", "full", "lora", rank=8, dora=True), 2
    )
    out = tmp_path / "merged" / "both"
    said = merge(tiny_folder, first, second, "-o", out, "--dtype", "float32")
    assert said == f"{out}, in float32"
    ours, theirs = (load_file(at / "model.safetensors") for at in (out, last))
    before = load_file(exported / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert any((theirs[n] - before[n]).norm() > 0.01 * before[n].norm() for n in theirs)
    for name, value in theirs.items():
        assert (ours[name] - value).norm() <= 2e-6 * value.norm(), name
    assert {path.name for path in tiny_folder.iterdir()} - {
        path.name for path in out.iterdir()
    } <= {"README.md"}
    # One alone, against peft with the adapters beside the weights.
    arguments = StockProcessor(tiny_folder)(mixed[0]).arguments()
    with torch.no_grad():
        mine = merge_adapter(load_model(tiny_folder), first).eval()(**arguments).logits
        reference = peft_model(tiny_folder, first)(**arguments).logits
        base = load_model(tiny_folder).eval()(**arguments).logits
    assert (base - reference).norm() > 0.05 * reference.norm(), "adapters that do nothing"
    assert (mine - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.slow
def test_the_dtype_is_the_models_unless_another_is_asked_for(tmp_path, tiny_folder, encoder):
    adapter, _ = drawn_adapter(
        tmp_path / "1", tiny_folder, encoder, policy("frozen", "frozen", "lora"), 1
    )
    said = merge(tiny_folder, adapter, "-o", tmp_path / "auto")
    assert said.endswith("in bfloat16; merged in float32, which --dtype float32 keeps")
    held = load_file(tmp_path / "auto" / "model.safetensors")
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    with pytest.raises(Exception, match="is there already"):
        merge(tiny_folder, adapter, "-o", tmp_path / "auto")


def without_a_tensor(folder):
    held = load_file(folder / WEIGHTS)
    held.pop(sorted(held)[0])
    save_file(held, folder / WEIGHTS)


def with_another_name(folder):
    held = load_file(folder / WEIGHTS)
    save_file(
        {name.replace("layers.1.", "layers.7."): v for name, v in held.items()}, folder / WEIGHTS
    )


def of_another_width(folder):
    held = load_file(folder / WEIGHTS)
    save_file({name: value[:, :-1].contiguous() for name, value in held.items()}, folder / WEIGHTS)


def without_numbers(folder):
    held = load_file(folder / WEIGHTS)
    held[min(held)][0, 0] = float("nan")
    save_file(held, folder / WEIGHTS)


def too_large(folder):
    held = load_file(folder / WEIGHTS)
    save_file(
        {name: torch.full_like(value, 1e30) for name, value in held.items()}, folder / WEIGHTS
    )


def of_another_kind(folder):
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "peft_type": "IA3"}))


def with_a_new_setting(folder):
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_new_lora": True}))


@pytest.mark.cases(slow=("without_a_tensor*", "of_another_kind*", "without_numbers*"))
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_a_tensor, "do not fit the model: 1 without a tensor in the folder"),
        (with_another_name, "without a place in the model"),
        (of_another_width, "do not fit the model: Error"),
        (with_a_new_setting, r"Unexpected keyword arguments \['use_new_lora'\]"),
        (of_another_kind, "its peft_type is 'IA3'; expected LORA"),
        (shutil.rmtree, "is not a folder"),
        (without_numbers, r"adapter_model\.safetensors: 1 tensor holds .*lora_A\.weight \(NaN\)"),
        (too_large, r"nothing is written: \d+ tensors hold values that are no numbers: .* \(inf\)"),
    ],
)
def test_adapters_that_do_not_fit_are_named_and_nothing_is_written(
    tmp_path, tiny_folder, encoder, damage, said
):
    folder = tmp_path / "1"
    adapter, _ = drawn_adapter(folder, tiny_folder, encoder, policy("frozen", "frozen", "lora"), 1)
    damage(adapter)
    with pytest.raises(Exception, match=said):
        merge(tiny_folder, adapter, "-o", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.cases(slow=("merge", "generate"))
@pytest.mark.parametrize("command", ["merge", "generate", "verify"])
def test_a_model_that_holds_no_numbers_is_refused_wherever_it_is_read(
    tmp_path, tiny_folder, command
):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    name = next(name for name in held if name.endswith("lm_head.weight") or "embed_tokens" in name)
    held[name][0, 0] = float("nan")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    arguments = {
        "merge": [folder, tmp_path / "adapter", "-o", tmp_path / "out"],
        "generate": ["How many?", "--model", folder],
        "verify": [ROOT / "recipes" / "digits-demo.yaml", f"model.path={folder}"],
    }
    ran = CliRunner().invoke(app, [command, *map(str, arguments[command])])
    assert isinstance(ran.exception, ModelError), ran.output
    assert f"{folder}: 1 tensor holds values that are no numbers: model." in str(ran.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_merge_that_cannot_be_written_leaves_nothing(tmp_path, tiny_folder, encoder, monkeypatch):
    adapter, _ = drawn_adapter(
        tmp_path / "1", tiny_folder, encoder, policy("frozen", "frozen", "lora"), 1
    )

    def save(model, state, folder, **_):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1000))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vlmpack.backends.export.save_model_folder", save)
    with pytest.raises(VlmpackError, match="out cannot be written: No space left on device"):
        merge(tiny_folder, adapter, "-o", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("replace", [True, False])
def test_a_folder_is_published_whole_or_not_at_all(tmp_path, replace):
    """One that came there meanwhile goes only where it is to be replaced."""
    final = tmp_path / "out"

    def write(folder):
        folder.mkdir()
        (folder / "new").touch()
        return 7

    assert publish_folder(final, Ranks(), write, replace=replace) == 7
    if replace:
        (final / "model-00002-of-00003.safetensors").touch()
        assert publish_folder(final, Ranks(), write) == 7
        assert [path.name for path in final.iterdir()] == ["new"]
    else:
        (final / "new").rename(final / "old")
        with pytest.raises(OSError, match="not empty"):
            publish_folder(final, Ranks(), write, replace=False)
        assert [path.name for path in final.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def contents(folder):
    """Everything below a folder, links by where they lead."""
    return {
        path.relative_to(folder).as_posix(): path.readlink()
        if path.is_symlink()
        else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_no_file_of_a_user_goes_when_a_folder_is_published(tmp_path, caplog):
    """Beside it, in it, and behind a link that stands for it."""

    def write(folder):
        folder.mkdir()
        (folder / "config.json").write_text("ours")

    out, far = tmp_path / "out", tmp_path / "far"
    beside = {"out.partial/notes.txt": "mine", "out.old-1": "mine", "far/model.gguf": "mine"}
    for name, text in beside.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    publish_folder(out, Ranks(), write, replace=False)
    assert contents(tmp_path) == beside | {"out/config.json": "ours"}
    (out / "model.gguf").write_text("mine")
    publish_folder(out, Ranks(), write)
    kept = {"out.old-2/model.gguf": "mine", "out.old-2/config.json": "ours"}
    assert contents(tmp_path) == beside | kept | {"out/config.json": "ours"}
    assert "out held what no export writes (model.gguf); it is kept as" in caplog.text
    publish_folder(out, Ranks(), write)
    assert contents(tmp_path) == beside | kept | {"out/config.json": "ours"}
    (out / "config.json").unlink()
    out.rmdir()
    out.symlink_to(far)
    publish_folder(out, Ranks(), write)
    assert contents(tmp_path) == beside | kept | {"out/config.json": "ours", "out.old-3": far}
